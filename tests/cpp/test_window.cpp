// Windows in shared memory, where the system does not do at once what they ask of it. The functions of the C
// library that say so are this program's own.
#include <dirent.h>
#include <fcntl.h>

#include <cerrno>
#include <csignal>

#include "check.hpp"
#include "transport/shm/window.hpp"

using namespace moecomm;

static std::atomic<int> signals = 0;
static bool storm = false;
static int entries_left = 1 << 30;  // of a folder, before it can't be read any more

/// As older kernels do it: a signal ends the call, and nothing is allocated.
extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  const int before = signals;
  if (storm) raise(SIGUSR1);
  if (signals != before && signals < 1000) return EINTR;
  return fallocate(fd, 0, offset, bytes) == 0 ? 0 : errno;
}

extern "C" [[gnu::visibility("default")]] dirent* readdir(DIR* folder) {
  if (--entries_left >= 0) return reinterpret_cast<dirent*>(readdir64(folder));
  errno = EIO;
  return nullptr;
}

namespace {

TEST(signals_without_end) {
  signal(SIGUSR1, [](int) { ++signals; });
  storm = true;
  shm::Window::create(1 << 20, 1 << 20);
  storm = false;
  CHECK(signals == 1);  // once the memory was there
}

TEST(folder_that_cannot_be_read) {
  shm::Window named = shm::Window::create(4096, 4096);
  named.link();
  entries_left = 3;  // two are the folder itself and its parent
  CHECK(shm::Window::create(4096, 4096).base() != nullptr);
  CHECK(entries_left < 0);
}

}  // namespace

int main() { return moecomm::test::run(); }
