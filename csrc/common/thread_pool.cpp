#include "common/thread_pool.hpp"

namespace moecomm {

ThreadPool::ThreadPool(int threads) {
  for (int index = 1; index < threads; ++index) workers_.emplace_back([this, index] { run(index); });
}

ThreadPool::~ThreadPool() {
  if (getpid() != owner_) {
    for (auto& worker : workers_) worker.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::parallel(int64_t count, bool worthwhile, const std::function<void(int64_t, int64_t)>& body) {
  if (workers_.empty() || !worthwhile || count < 2) {
    if (count > 0) body(0, count);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    body_ = &body;
    count_ = count;
    running_ = static_cast<int>(workers_.size());
    ++generation_;
  }
  start_.notify_all();
  body(0, count / threads());
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return running_ == 0; });
}

void ThreadPool::run(int index) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || generation_ != seen; });
    if (stop_) return;
    seen = generation_;
    const auto* body = body_;
    const int64_t begin = count_ * index / threads(), end = count_ * (index + 1) / threads();
    lock.unlock();
    if (begin < end) (*body)(begin, end);
    lock.lock();
    if (--running_ == 0) finished_.notify_one();
  }
}

}  // namespace moecomm
