// Threads that one communicator uses for its copies and sums: the CPU's counterpart of an SM budget.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moecomm {

class ThreadPool {
 public:
  /// `threads` counts the caller: 1 starts nothing and runs everything inline. Throws Error(out_of_memory)
  /// where there are none to be had.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(state_->workers.size()) + 1; }

  /// Splits [0, count) into one contiguous range a thread and returns when all have run. One caller at a
  /// time. Runs inline if it is not `worthwhile`. A range does not depend on what other threads do, so
  /// results cannot depend on timing.
  void parallel(int64_t count, bool worthwhile, const std::function<void(int64_t begin, int64_t end)>& body);

 private:
  struct State {
    std::vector<std::thread> workers;
    std::mutex mutex;
    std::condition_variable start, finished;
    const std::function<void(int64_t, int64_t)>* body = nullptr;
    int64_t count = 0;
    uint64_t generation = 0;
    int running = 0;
    bool stop = false;
  };
  void run(int index);
  void end();

  std::unique_ptr<State> state_;
  const int owner_ = getpid();  // a forked child has a copy of the pool, but none of its threads
};

}  // namespace moecomm
