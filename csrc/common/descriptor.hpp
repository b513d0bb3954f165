// A file descriptor that one process owns. A forked child (a data loader's worker) closes its copies at
// once: else they would keep the connections of a process that has ended open, so that no peer would notice
// the loss, and the memory of a window that was closed.
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

  /// Holds what `create`, a call like socket(), returns. No fork comes between the call and the note that
  /// the child has to close it, so it must not block. Empty, with errno, if it returns less than 0.
  template <class Create>
  static Descriptor open(const Create& create) {
    Descriptor made;
    const std::unique_lock<std::mutex> lock = hold();
    made.fd_ = create();
    made.generation_ = current_generation();
    made.note();
    return made;
  }

  /// -1 if it is empty, or was another process's before fork().
  int get() const { return fd_ >= 0 && generation_ == current_generation() ? fd_ : -1; }
  explicit operator bool() const { return get() >= 0; }
  void reset() noexcept;

  /// Forks between the process that loaded the library and this one.
  static uint32_t current_generation();

 private:
  static std::unique_lock<std::mutex> hold();
  void note();

  int fd_ = -1;
  uint32_t generation_ = 0;
};

}  // namespace moecomm
