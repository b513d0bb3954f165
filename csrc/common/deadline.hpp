// The deadline that every wait has, and a stopwatch.
#pragma once

#include <chrono>

namespace moecomm {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  explicit Deadline(std::chrono::duration<double> span)
      : at_(Clock::now() + std::chrono::duration_cast<Clock::duration>(span)) {}
  bool passed() const { return Clock::now() >= at_; }

 private:
  Clock::time_point at_;
};

/// Adds the seconds from its construction to its destruction to a counter.
class ScopedSeconds {
 public:
  explicit ScopedSeconds(double& total) : total_(total), start_(Clock::now()) {}
  ~ScopedSeconds() { total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  ScopedSeconds(const ScopedSeconds&) = delete;
  ScopedSeconds& operator=(const ScopedSeconds&) = delete;

 private:
  double& total_;
  Clock::time_point start_;
};

}  // namespace moecomm
