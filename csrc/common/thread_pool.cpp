#include "common/thread_pool.hpp"

#include <chrono>

#include "common/start_thread.hpp"

namespace moecomm {
namespace {

/// Does what condition.wait(lock, until) does. In GCC 12 that method calls a function of the C++ library
/// which RHEL 9 lacks (GLIBCXX_3.4.30), and a wheel would need it. wait_until() is compiled in.
template <class Until>
void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Until until) {
  condition.wait_until(lock, std::chrono::steady_clock::time_point::max(), until);
}

}  // namespace

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  state_->workers.reserve(threads);
  try {
    std::lock_guard lock(state_->mutex);  // a worker reads the number of workers, which must be final by then
    for (int index = 1; index < threads; ++index)
      state_->workers.push_back(
          start_thread([this, index] { run(index); }, "copies and sums", "threads (num_sms)"));
  } catch (...) {
    end();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != owner_) {
    // The threads are the parent's: joining them here, or destroying what they wait on, would never return.
    static_cast<void>(state_.release());
    return;
  }
  end();
}

void ThreadPool::end() {
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
  state_->start.notify_all();
  for (auto& worker : state_->workers) worker.join();
}

void ThreadPool::parallel(int64_t count, bool worthwhile, const std::function<void(int64_t, int64_t)>& body) {
  State& state = *state_;
  if (state.workers.empty() || !worthwhile || count < 2) {
    if (count > 0) body(0, count);
    return;
  }
  {
    std::lock_guard lock(state.mutex);
    state.body = &body;
    state.count = count;
    state.running = static_cast<int>(state.workers.size());
    ++state.generation;
  }
  state.start.notify_all();
  body(0, count / threads());
  std::unique_lock lock(state.mutex);
  wait(state.finished, lock, [&] { return state.running == 0; });
}

void ThreadPool::run(int index) {
  State& state = *state_;
  uint64_t seen = 0;
  std::unique_lock lock(state.mutex);
  while (true) {
    wait(state.start, lock, [&] { return state.stop || state.generation != seen; });
    if (state.stop) return;
    seen = state.generation;
    const auto* body = state.body;
    const int64_t begin = state.count * index / threads(), end = state.count * (index + 1) / threads();
    lock.unlock();
    if (begin < end) (*body)(begin, end);
    lock.lock();
    if (--state.running == 0) state.finished.notify_one();
  }
}

}  // namespace moecomm
