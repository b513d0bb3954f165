// The thread pool covers every index once, also when it is used thousands of times.
#include <vector>

#include "check.hpp"
#include "common/thread_pool.hpp"

int main() {
  using namespace moecomm;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (int round = 0; round < 2000; ++round) {
      const int64_t count = round % 23;
      std::vector<int> touched(static_cast<size_t>(count), 0);
      pool.parallel(count, round % 5 != 0, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++touched[static_cast<size_t>(i)];
      });
      bool once = true;
      for (int times : touched) once = once && times == 1;
      CHECK(once);
    }
  }
  return test::finish();
}
