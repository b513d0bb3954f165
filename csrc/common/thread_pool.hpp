// The threads with which a communicator copies and sums: the CPU's counterpart of an SM budget.
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
  /// `threads` includes the caller: 1 starts no thread and runs everything inline. Throws
  /// Error(out_of_memory) where the system has no threads left.
  explicit ThreadPool(int threads);
  ~ThreadPool();

  int threads() const { return static_cast<int>(state_->workers.size()) + 1; }

  /// Splits [0, count) into one contiguous range per thread, calls `body` for each range, and returns when
  /// all calls have ended. If not `worthwhile`, the caller does all alone. Ranges, and so results, do not
  /// depend on the timing of threads. One caller at a time.
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
