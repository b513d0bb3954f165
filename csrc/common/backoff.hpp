// Backoff of a polling thread while there is nothing to do.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "common/deadline.hpp"

namespace moecomm {

/// The backoff of one thread, which calls turn() after each turn of its loop and says whether it had work. If
/// not, turn() yields the core, and after some such turns sleeps: computing threads need the core more.
class Backoff {
 public:
  /// `longest`: the longest sleep after a while without work; wake() ends it. `crowded`: more threads want a
  /// core than there are cores. Then every sleep lasts a fixed fraction of the time without work so far:
  /// an arrival is noticed late by that fraction of its wait, and meanwhile computing threads have the core.
  explicit Backoff(std::chrono::microseconds longest, bool crowded = false)
      : longest_(longest), crowded_(crowded) {}

  /// Yields or sleeps unless the turn was `busy`. `stay_awake`: something pending makes progress only while
  /// it is polled. The thread then yields and does not sleep, up to a limit: a peer may have stopped.
  void turn(bool busy, bool stay_awake);
  /// Ends the sleep if it is a long one. Any thread may call it.
  void wake();

 private:
  const std::chrono::microseconds longest_;
  const bool crowded_;
  int idle_ = 0;
  Clock::time_point since_{};  // when the first turn without work began
  // A futex: unlike a condition variable, a forked child may drop it while the parent's thread sleeps on it.
  std::atomic<uint32_t> asleep_{0};
};

/// Prepares the calling thread for polling: sets its name (15 letters at most), makes its short sleeps
/// precise, and pins it to those of `cores` that it may use, if there are any.
void begin_polling(const char* name, const std::vector<int>& cores);

}  // namespace moecomm
