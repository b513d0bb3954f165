#include "common/backoff.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <thread>

namespace moecomm {
namespace {

constexpr int kYields = 32;            // so many turns without work yield; later ones sleep
constexpr int kAwakeYields = 1 << 20;  // with `stay_awake`, so many turns yield
constexpr int kTurns = 4096;           // after so many turns without work, sleeps get long
constexpr std::chrono::microseconds kShort(20);
constexpr int kPart = 16;  // if crowded, a sleep lasts 1/16 of the time without work so far
constexpr unsigned long kTimerSlackNanoseconds = 1000;

}  // namespace

void Backoff::turn(bool busy, bool stay_awake) {
  idle_ = busy ? 0 : std::min(idle_ + 1, kAwakeYields + 1);
  if (idle_ == 0) return;
  if (idle_ == 1) since_ = Clock::now();
  if (idle_ <= kYields || (stay_awake && idle_ <= kAwakeYields)) {
    std::this_thread::yield();
    return;
  }
  std::chrono::microseconds span = idle_ <= kTurns ? kShort : longest_;
  if (crowded_) {
    const auto waited = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since_);
    span = std::clamp(waited / kPart, kShort, longest_);
  }
  if (span == kShort) {
    std::this_thread::sleep_for(kShort);
    return;
  }
  const timespec limit{0, std::chrono::nanoseconds(span).count()};
  asleep_ = 1;
  syscall(SYS_futex, &asleep_, FUTEX_WAIT_PRIVATE, 1, &limit, nullptr, 0);
  asleep_ = 0;
}

void Backoff::wake() {
  if (asleep_.load(std::memory_order_relaxed) == 0) return;
  asleep_ = 0;
  syscall(SYS_futex, &asleep_, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

void begin_polling(const char* name, const std::vector<int>& cores) {
  pthread_setname_np(pthread_self(), name);
  prctl(PR_SET_TIMERSLACK, kTimerSlackNanoseconds, 0UL, 0UL, 0UL);
  cpu_set_t allowed, chosen;
  CPU_ZERO(&chosen);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  for (const int core : cores)
    if (core < CPU_SETSIZE && CPU_ISSET(core, &allowed)) CPU_SET(core, &chosen);
  if (CPU_COUNT(&chosen) > 0) sched_setaffinity(0, sizeof(chosen), &chosen);
}

}  // namespace moecomm
