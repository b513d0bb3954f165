#include "transport/shm/window.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "common/error.hpp"
#include "common/random.hpp"

namespace moecomm::shm {
namespace {

constexpr const char* kShmFolder = "/dev/shm";

std::string random_name() {
  std::string name = "/moecomm-";
  for (int word = 0; word < 2; ++word) name += random_digits("a shared memory name");
  return name;
}

std::byte* map(int fd, int64_t bytes) {
  void* base = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    ErrorDetails details;
    details.needed = bytes;
    throw Error(ErrorKind::out_of_memory, errno_text("mapping a window"), details);
  }
  madvise(base, static_cast<size_t>(bytes),
          MADV_HUGEPAGE);  // advice only: many systems refuse it for shared memory
  return static_cast<std::byte*>(base);
}

}  // namespace

int64_t available_bytes() {
  struct statvfs info;
  if (statvfs(kShmFolder, &info) != 0) throw Error(ErrorKind::unsupported, errno_text("statvfs /dev/shm"));
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

Window Window::create(int64_t bytes, int64_t committed) {
  Window window;
  window.fd_ = ::open(kShmFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (window.fd_ < 0) throw Error(ErrorKind::unsupported, errno_text("creating a window in /dev/shm"));
  if (ftruncate(window.fd_, bytes) != 0)
    throw Error(ErrorKind::unsupported, errno_text("ftruncate of a window"));
  window.bytes_ = bytes;
  window.commit(0, committed);
  window.base_ = map(window.fd_, bytes);
  return window;
}

Window Window::open(const std::string& name, int64_t bytes) {
  Window window;
  window.name_ = name;
  window.fd_ = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0);
  if (window.fd_ < 0) throw Error(ErrorKind::unsupported, errno_text("shm_open of a peer's window"));
  struct stat info;
  if (fstat(window.fd_, &info) != 0 || info.st_size != bytes)
    throw Error(ErrorKind::invalid_argument, "a peer's window has " + std::to_string(info.st_size) +
                                                 " bytes, expected " + std::to_string(bytes));
  window.bytes_ = bytes;
  window.base_ = map(window.fd_, bytes);
  close(std::exchange(window.fd_, -1));
  return window;
}

void Window::commit(int64_t offset, int64_t bytes) {
  int error;
  do error = posix_fallocate(fd_, offset, bytes);
  while (error == EINTR);
  if (error == 0) return;
  errno = error;
  ErrorDetails details;
  details.needed = bytes;
  details.available = available_bytes();
  throw Error(ErrorKind::out_of_memory,
              "no room for " + std::to_string(bytes) + " bytes of a window in " + kShmFolder + ", " +
                  std::to_string(details.available) + " bytes are free (" + errno_text("posix_fallocate") +
                  "); give /dev/shm more room (docker: --shm-size) or lower max_tokens",
              details);
}

void Window::link() {
  name_ = random_name();
  const auto descriptor = "/proc/self/fd/" + std::to_string(fd_);
  if (linkat(AT_FDCWD, descriptor.c_str(), AT_FDCWD, (kShmFolder + name_).c_str(), AT_SYMLINK_FOLLOW) != 0)
    throw Error(ErrorKind::unsupported, errno_text("naming a window in /dev/shm"));
  linked_ = true;
}

void Window::unlink() noexcept {
  if (std::exchange(linked_, false)) shm_unlink(name_.c_str());
}

Window::Window(Window&& other) noexcept { *this = std::move(other); }

Window& Window::operator=(Window&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  std::swap(linked_, other.linked_);
  std::swap(name_, other.name_);
  return *this;
}

Window::~Window() {
  unlink();
  if (base_ != nullptr) munmap(base_, static_cast<size_t>(bytes_));
  if (fd_ >= 0) close(fd_);
}

}  // namespace moecomm::shm
