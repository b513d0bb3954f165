// A caching allocator for large host outputs. A fresh allocation of this size comes from the kernel page by
// page, and zeroing those pages costs as much as the copy that fills them; a block that went back to the pool
// keeps its pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace moecomm {

class HostPool : public std::enable_shared_from_this<HostPool> {
 public:
  /// A block of at least `bytes`, aligned to 4096, that returns to the pool when the last owner lets go, even
  /// if that is after the pool's communicator is gone. Error(out_of_memory) if the system has none. Any
  /// thread.
  std::shared_ptr<std::byte> take(int64_t bytes);

  ~HostPool();

 private:
  void give_back(std::byte* block, int64_t bytes);

  std::mutex mutex_;
  std::map<int64_t, std::vector<std::byte*>> free_;  // by size of the class
  int64_t free_bytes_ = 0, live_bytes_ = 0, peak_live_bytes_ = 0;
};

}  // namespace moecomm
