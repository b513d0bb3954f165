// A window in POSIX shared memory. Its owner creates it without a name, names it while the ranks of the node
// map it, and unlinks it again. So the kernel frees the memory when the last process ends, in whatever way. A
// forked child gets neither the mapping nor the descriptor, so it does not keep the memory from being freed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/descriptor.hpp"

namespace moecomm::shm {

class Window {
 public:
  /// Makes a window without a name. The first `committed` bytes are allocated at once, so that a full
  /// /dev/shm is an Error(out_of_memory) here and not a SIGBUS later. First removes windows that killed ranks
  /// have left in /dev/shm with their names.
  static Window create(int64_t bytes, int64_t committed);
  /// Maps a peer's window. Throws Error(invalid_argument) if the window does not have `bytes` bytes.
  static Window open(const std::string& name, int64_t bytes);

  Window() = default;
  Window(Window&& other) noexcept;
  Window& operator=(Window&& other) noexcept;
  ~Window();

  std::byte* base() const { return base_; }

  /// Gives the window a random name, mode 0600, by which peers can open it, and returns it. Owner only.
  const std::string& link();
  /// Allocates memory for [offset, offset + bytes). Throws Error(out_of_memory) if there is none. Owner only.
  void commit(int64_t offset, int64_t bytes);
  /// Removes the name; mappings stay. Owner only; harmless when called again.
  void unlink() noexcept;
  /// Leaves the memory mapped until the process ends: a thread that has not ended may still write to it.
  void keep_mapped() noexcept { base_ = nullptr; }

 private:
  void map();
  bool own_process() const { return generation_ == Descriptor::current_generation(); }

  std::byte* base_ = nullptr;
  int64_t bytes_ = 0;
  Descriptor fd_;
  uint32_t generation_ = 0;  // fork generation of the process that has mapped it
  bool linked_ = false;
  std::string name_;
};

/// Bytes that can still be allocated in /dev/shm; if it has no limit, the size of the machine's memory.
int64_t available_bytes();

}  // namespace moecomm::shm
