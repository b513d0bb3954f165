// A file descriptor that one process owns. A forked child (a data loader's worker) closes its copies at once.
// Otherwise the copies would keep the memory of a closed window, and the connections of an ended process, so
// that no peer would notice the end of that process.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace moecomm {

class Descriptor {
 public:
  Descriptor() = default;
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(generation_, other.generation_);
    return *this;
  }

  /// Calls `create`, for example socket(), and owns the descriptor. fork() waits until it is registered, so
  /// that children close it: `create` must not block. If `create` returns < 0, the result is empty (errno).
  template <class Create>
  static Descriptor open(const Create& create) {
    Descriptor made;
    const std::unique_lock<std::mutex> lock = hold();
    made.fd_ = create();
    made.generation_ = current_generation();
    made.note();
    return made;
  }

  /// The descriptor; -1 if there is none, or if it was opened by the parent, before this process was forked.
  int get() const { return fd_ >= 0 && generation_ == current_generation() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }
  void reset() noexcept;

  /// How many times fork() was called between the process that loaded the library and this one.
  static uint32_t current_generation();

 private:
  static std::unique_lock<std::mutex> hold();
  void note();

  int fd_ = -1;
  uint32_t generation_ = 0;
};

}  // namespace moecomm
