#include "transport/shm/window.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <system_error>
#include <utility>

#include "common/error.hpp"
#include "common/random.hpp"

namespace moecomm::shm {
namespace {

constexpr const char* kShmFolder = "/dev/shm";
constexpr const char* kPrefix = "moecomm-window-";

/// Removes windows whose owner was killed while they had a name. Nobody holds the lock of such a window.
void remove_left_behind() {
  std::error_code ignored;
  std::filesystem::directory_iterator entry(kShmFolder, ignored);
  for (; entry != std::filesystem::directory_iterator(); entry.increment(ignored)) {
    const std::filesystem::path& path = entry->path();
    if (!path.filename().string().starts_with(kPrefix)) continue;
    const Descriptor fd =
        Descriptor::open([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); });
    if (fd && flock(fd.get(), LOCK_EX | LOCK_NB) == 0) ::unlink(path.c_str());
  }
}

}  // namespace

int64_t available_bytes() {
  struct statvfs info;
  if (statvfs(kShmFolder, &info) != 0) throw Error(ErrorKind::unsupported, errno_text("statvfs /dev/shm"));
  if (info.f_blocks == 0) {  // mounted without a limit (size=0): the limit is memory
    info.f_bavail = static_cast<fsblkcnt_t>(sysconf(_SC_PHYS_PAGES));
    info.f_frsize = static_cast<unsigned long>(sysconf(_SC_PAGE_SIZE));
  }
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

Window Window::create(int64_t bytes, int64_t committed) {
  remove_left_behind();
  Window window;
  window.fd_ = Descriptor::open([] { return ::open(kShmFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600); });
  if (!window.fd_) throw system_error("creating a window in /dev/shm");
  if (ftruncate(window.fd_.get(), bytes) != 0) throw system_error("ftruncate of a window");
  window.bytes_ = bytes;
  window.commit(0, committed);
  window.map();
  return window;
}

Window Window::open(const std::string& name, int64_t bytes) {
  Window window;
  window.name_ = name;
  window.fd_ = Descriptor::open([&] { return shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0); });
  if (!window.fd_) {
    const int error = errno;
    std::string advice;
    struct stat info{};
    stat((kShmFolder + name).c_str(), &info);
    if (error == EACCES)
      advice =
          text_of("it belongs to user ", info.st_uid, ", and this rank runs as user ", geteuid(),
                  ": the ranks of a host have to be of one user, or each of several is a node of its own, "
                  "with ranks_per_node");
    if (error == ENOENT)
      advice =
          "both were taken for ranks of one host, but have another /dev/shm: machines that were cloned from "
          "one snapshot may have one boot id; pass the ranks of a machine or container as ranks_per_node";
    errno = error;
    throw system_error("shm_open of a peer's window", advice);
  }
  struct stat info;
  if (fstat(window.fd_.get(), &info) != 0 || info.st_size != bytes)
    throw Error(ErrorKind::invalid_argument,
                text_of("a peer's window has ", info.st_size, " bytes, expected ", bytes));
  window.bytes_ = bytes;
  window.map();
  window.fd_.reset();
  return window;
}

void Window::map() {
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED)
    throw Error(ErrorKind::out_of_memory, errno_text("mapping a window"), {.needed = bytes_});
  base_ = static_cast<std::byte*>(base);
  generation_ = Descriptor::current_generation();
  madvise(base, bytes_, MADV_HUGEPAGE);  // only advice: many systems refuse it for shared memory
  if (madvise(base, bytes_, MADV_DONTFORK) != 0) throw system_error("madvise(MADV_DONTFORK) of a window");
}

void Window::commit(int64_t offset, int64_t bytes) {
  // Signals are blocked: each would end the call, which then begins anew, and a steady stream of signals
  // would never let it finish.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error;
  do error = posix_fallocate(fd_.get(), offset, bytes);
  while (error == EINTR);  // after the process was stopped
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error == 0) return;
  errno = error;
  if (error != ENOSPC && error != ENOMEM && error != EDQUOT && error != EFBIG)
    throw system_error(
        "posix_fallocate of a window in /dev/shm",
        "without it a full /dev/shm would end the process later; a container's seccomp profile has to allow "
        "fallocate");
  const int64_t available = available_bytes();
  throw Error(ErrorKind::out_of_memory,
              text_of("no room for ", bytes, " bytes of a window in ", kShmFolder, ", ", available,
                      " bytes are free (", errno_text("posix_fallocate"),
                      "); give /dev/shm more room (docker: --shm-size) or lower max_tokens"),
              {.needed = bytes, .available = available});
}

const std::string& Window::link() {
  constexpr const char* kWanted = "a shared memory name";
  name_ = text_of("/", kPrefix, random_digits(kWanted), random_digits(kWanted));
  if (flock(fd_.get(), LOCK_SH) != 0) throw system_error("flock of a window");  // held until the process ends
  const auto descriptor = "/proc/self/fd/" + std::to_string(fd_.get());
  if (linkat(AT_FDCWD, descriptor.c_str(), AT_FDCWD, (kShmFolder + name_).c_str(), AT_SYMLINK_FOLLOW) != 0)
    throw system_error("naming a window in /dev/shm");
  linked_ = true;
  return name_;
}

void Window::unlink() noexcept {
  if (std::exchange(linked_, false) && own_process()) shm_unlink(name_.c_str());
}

Window::Window(Window&& other) noexcept { *this = std::move(other); }

Window& Window::operator=(Window&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  std::swap(generation_, other.generation_);
  std::swap(linked_, other.linked_);
  std::swap(name_, other.name_);
  return *this;
}

Window::~Window() {
  unlink();
  // A forked child has no such mapping, but something else may be at this address.
  if (base_ != nullptr && own_process()) munmap(base_, bytes_);
}

}  // namespace moecomm::shm
