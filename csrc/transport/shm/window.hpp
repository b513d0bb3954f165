// A window in POSIX shared memory: created by its owner without a name, named for the moment in which the
// ranks of the node map it, then unlinked again, so that the kernel frees it with the last process whatever
// way that ends. A forked child has neither the memory nor the descriptor, so that close() gives the memory
// back also while one lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/descriptor.hpp"

namespace moecomm::shm {

class Window {
 public:
  /// A new window without a name. The first `committed` bytes get memory at once, so that a full /dev/shm is
  /// an Error(out_of_memory) here and not a SIGBUS later. Before, what ranks that were killed while they had
  /// names have left in /dev/shm is removed.
  static Window create(int64_t bytes, int64_t committed);
  /// A peer's window. Error(invalid_argument) if it has another size.
  static Window open(const std::string& name, int64_t bytes);

  Window() = default;
  Window(Window&& other) noexcept;
  Window& operator=(Window&& other) noexcept;
  ~Window();

  std::byte* base() const { return base_; }
  int64_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

  /// Gives the window a random name, mode 0600, by which peers can open it. Owner only.
  void link();
  /// Takes memory for [offset, offset + bytes). Error(out_of_memory) if there is none. Owner only.
  void commit(int64_t offset, int64_t bytes);
  /// Removes the name; mappings stay. Owner only; harmless when called again.
  void unlink() noexcept;
  /// Leaves the memory mapped until the process ends: a thread that does not end may still write there.
  void keep_mapped() noexcept { base_ = nullptr; }

 private:
  void map();
  bool own_process() const { return generation_ == Descriptor::current_generation(); }

  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  Descriptor fd_;
  uint32_t generation_ = 0;  // of forks: that of the process that has mapped it
  bool linked_ = false;
  std::string name_;
};

/// Bytes that can still be allocated in /dev/shm.
int64_t available_bytes();

}  // namespace moecomm::shm
