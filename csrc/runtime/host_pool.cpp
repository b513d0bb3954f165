#include "runtime/host_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

#include "common/error.hpp"
#include "layout/routing.hpp"

namespace moecomm {
namespace {

/// Rounds a size up to a multiple of a quarter of the power of two below the size (and of a page), so that
/// training steps of slightly different sizes share blocks.
int64_t size_class(int64_t bytes) {
  const auto power = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max(bytes, kPage))));
  return align_up(align_up(std::max(bytes, kPage), power / 4), kPage);
}

std::byte* map_block(int64_t bytes) {
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED)
    throw Error(ErrorKind::out_of_memory, errno_text("mapping an output of a communicator"),
                {.needed = bytes});
  madvise(block, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(block);
}

}  // namespace

std::shared_ptr<std::byte> HostPool::take(int64_t bytes) {
  const int64_t size = size_class(bytes);
  std::byte* block = nullptr;
  {
    std::lock_guard lock(mutex_);
    auto found = free_.find(size);
    if (found != free_.end() && !found->second.empty()) {
      block = found->second.back();
      found->second.pop_back();
      free_bytes_ -= size;
    }
  }
  if (block == nullptr) block = map_block(size);
  {
    std::lock_guard lock(mutex_);
    live_bytes_ += size;
    peak_live_bytes_ = std::max(peak_live_bytes_, live_bytes_);
  }
  return {block, [pool = shared_from_this(), size](std::byte* freed) { pool->give_back(freed, size); }};
}

void HostPool::give_back(std::byte* block, int64_t bytes) {
  std::lock_guard lock(mutex_);
  live_bytes_ -= bytes;
  free_[bytes].push_back(block);
  free_bytes_ += bytes;
  // As sizes drift, classes keep idle blocks that nobody takes. So used and idle blocks together may have at
  // most twice the bytes that were ever in use at one time. The largest idle blocks are freed first.
  while (live_bytes_ + free_bytes_ > 2 * peak_live_bytes_) {
    auto largest = std::prev(free_.end());
    if (largest->second.empty()) {
      free_.erase(largest);
      continue;
    }
    munmap(largest->second.back(), largest->first);
    largest->second.pop_back();
    free_bytes_ -= largest->first;
  }
}

HostPool::~HostPool() {
  for (auto& [bytes, blocks] : free_)
    for (std::byte* block : blocks) munmap(block, bytes);
}

}  // namespace moecomm
