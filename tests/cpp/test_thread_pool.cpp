// The thread pool covers every index once, also when it is used thousands of times; a system that has no more
// threads to give is a typed error.
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "check.hpp"
#include "common/error.hpp"
#include "common/start_thread.hpp"
#include "common/thread_pool.hpp"

using namespace moecomm;
using test::has;

namespace {

/// New threads get stacks of this size until the end of the scope.
class StackBytes {
 public:
  explicit StackBytes(size_t bytes) : usual_(get()) { set(bytes); }
  ~StackBytes() { set(usual_); }

 private:
  static size_t get() {
    size_t bytes = 0;
    pthread_attr_t attributes;
    CHECK(pthread_getattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_getstacksize(&attributes, &bytes) == 0);
    pthread_attr_destroy(&attributes);
    return bytes;
  }
  static void set(size_t bytes) {
    pthread_attr_t attributes;
    CHECK(pthread_getattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, bytes) == 0);
    CHECK(pthread_setattr_default_np(&attributes) == 0);
    pthread_attr_destroy(&attributes);
  }
  const size_t usual_;
};

/// The text of the error that `start` ends in for lack of threads.
template <class Start>
std::string refused(const Start& start) {
  const Error error = test::error_of(start);
  CHECK(error.kind() == ErrorKind::out_of_memory);
  return error.what();
}

TEST(every_index_once) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (int round = 0; round < 2000; ++round) {
      std::vector<int> touched(round % 23, 0);
      pool.parallel(round % 23, round % 5 != 0, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++touched[i];
      });
      CHECK(std::count(touched.begin(), touched.end(), 1) == round % 23);
    }
  }
}

TEST(no_threads_left) {
  {
    const StackBytes more_than_there_are_addresses(size_t{1} << 47);
    for (int round = 0; round < 3; ++round) {
      const std::string text = refused([] { ThreadPool pool(3); });
      CHECK(has(text, "copies and sums") && has(text, "num_sms"));
    }
    ThreadPool alone(1);
    CHECK(alone.threads() == 1);
    const std::string text = refused([] { start_thread([] {}, "a test").join(); });
    CHECK(text.find("no thread to be had for a test") == 0 && !has(text, "fewer"));
  }
  std::atomic<bool> ran = false;
  start_thread([&] { ran = true; }, "a test").join();
  CHECK(ran);
}

/// Some threads of the pool have started when the others can't.
TEST(too_few_threads_left) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // these need addresses themselves
  constexpr int64_t kStack = int64_t{512} << 20;
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  CHECK(pages > 0);
  rlimit before;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  rlimit little = before;
  little.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + kStack * 5 / 2);
  const StackBytes stack(kStack);
  CHECK(setrlimit(RLIMIT_AS, &little) == 0);
  std::atomic<int> ran = 0;
  start_thread([&] { ++ran; }, "a test").join();
  const std::string text = refused([] { ThreadPool pool(6); });
  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(ran == 1 && has(text, "copies and sums"));
#endif
}

}  // namespace

int main() { return moecomm::test::run(); }
