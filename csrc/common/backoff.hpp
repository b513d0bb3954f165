// Backoff of a polling thread while there is nothing to do.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "common/deadline.hpp"

namespace moecomm {

/// The backoff of one thread, which says after each turn of its loop whether it had work. With none it gives
/// up its core at once, and soon sleeps: those that compute need it more.
class Backoff {
 public:
  /// `longest`: of a sleep, after a while without work; wake() ends it. `crowded`: threads that want a core
  /// are more than the cores. Then sleeps grow from the first on, with the time without work: what comes is
  /// late by a small part of the wait for it, and those that compute have the core.
  explicit Backoff(std::chrono::microseconds longest, bool crowded = false)
      : longest_(longest), crowded_(crowded) {}

  /// `stay_awake`: there is something to come that moves only as somebody looks. It keeps the thread from
  /// sleeping, but not for ever: a peer may have stopped.
  void turn(bool busy, bool stay_awake);
  /// Ends a long sleep. Any thread.
  void wake();

 private:
  const std::chrono::microseconds longest_;
  const bool crowded_;
  int idle_ = 0;
  Clock::time_point since_{};  // of the first turn without work
  // A futex: a forked child may drop its copy while the parent's thread sleeps, unlike a condition variable.
  std::atomic<uint32_t> asleep_{0};
};

/// Makes the calling thread one that polls: its name (15 letters at most), short sleeps that are short, and
/// those of `cores` that it may use, if there are any.
void begin_polling(const char* name, const std::vector<int>& cores);

}  // namespace moecomm
