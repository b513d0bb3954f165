#include "common/descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "common/error.hpp"

namespace moecomm {
namespace {

struct Registry {
  std::mutex mutex;       // held during fork(), so that a child finds `open` consistent
  std::vector<int> open;  // all descriptors that this process holds
  std::atomic<uint32_t> generation{0};
  bool watches_forks = false;
};

Registry& registry() {
  static Registry* const one = new Registry;  // never destroyed: static Descriptors may outlive other statics
  return *one;
}

// Neither allocates nor frees memory: after fork() in a process with threads that is not safe.
void after_fork_in_child() {
  Registry& all = registry();
  for (const int fd : all.open) close(fd);
  all.open.clear();
  all.generation.fetch_add(1);
  all.mutex.unlock();
}

}  // namespace

std::unique_lock<std::mutex> Descriptor::hold() {
  Registry& all = registry();
  std::unique_lock lock(all.mutex);
  if (!all.watches_forks) {
    const int failed = pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                                      after_fork_in_child);
    if (failed != 0) {
      errno = failed;
      throw Error(ErrorKind::out_of_memory, errno_text("pthread_atfork"));
    }
    all.watches_forks = true;
  }
  all.open.reserve(all.open.size() + 1);  // so that note() can't fail
  return lock;
}

void Descriptor::note() {
  if (fd_ >= 0) registry().open.push_back(fd_);
}

uint32_t Descriptor::current_generation() { return registry().generation.load(std::memory_order_relaxed); }

void Descriptor::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || generation_ != current_generation()) return;
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = std::find(all.open.begin(), all.open.end(), fd);
  if (found != all.open.end()) {
    *found = all.open.back();
    all.open.pop_back();
  }
  close(fd);
}

}  // namespace moecomm
