// A caching allocator for large host outputs. The operating system provides a large new allocation page by
// page, and zeroing the pages costs as much as the copy that fills them. A block that returns to the pool
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
  /// Returns a block of at least `bytes`, aligned to 4096 bytes. It returns to the pool when its last owner
  /// releases it, even after the pool's communicator is gone. Error(out_of_memory) if the system has no
  /// memory. Any thread may call it.
  std::shared_ptr<std::byte> take(int64_t bytes);

  ~HostPool();

 private:
  void give_back(std::byte* block, int64_t bytes);

  std::mutex mutex_;
  std::map<int64_t, std::vector<std::byte*>> free_;  // idle blocks, by size class
  int64_t free_bytes_ = 0, live_bytes_ = 0, peak_live_bytes_ = 0;
};

}  // namespace moecomm
