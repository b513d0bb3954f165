// What pipes have in common: how tokens are spread over lanes, and rows cut into pieces. A pipe is a group of
// warps that pass pieces of rows on to each other in shared memory.
#pragma once

#include <cstdint>

#include "kernels/gpu/common/heuristics.hpp"
#include "layout/device_window.hpp"
#include "ptx/bulk.cuh"

namespace moecomm::gpu {

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1100)
#error "kernels are for compute capability 9.0 and 10.x: others lack bulk copies, or shared memory"
#endif
/// The most shared memory that a kernel may request: what a block can have on compute capability 9.0 and
/// 10.x, less a kilobyte for static variables.
inline constexpr size_t kMostShared = (227 - 1) * 1024;

inline constexpr int kThreads = kWarps * 32;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) & 31; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) >> 5; }

/// True if no lower lane of `lanes` has this lane's `value`, and the value is not negative. All lanes.
__device__ inline bool first_with(int32_t value, uint32_t lanes = 0xffffffffu) {
  const uint32_t same = __match_any_sync(0xffffffffu, value >= 0 ? value : -1 - lane_id()) & lanes;
  return value >= 0 && (same & ((1u << lane_id()) - 1)) == 0;
}

/// How (token, k) pairs of consecutive tokens are spread over a warp's lanes, in rounds of whole tokens.
struct TokenLanes {
  int top_k, tokens;  ///< k per token; tokens per round
  int within, k;      ///< this lane's token within a round, and its k
  uint32_t lanes;     ///< lanes of the same token

  /// One token per round.
  __device__ static TokenLanes of_one(int top_k) { return TokenLanes(top_k, 1, 0); }
  /// As many tokens per round as a warp holds.
  __device__ static TokenLanes of_many(int top_k) { return TokenLanes(top_k, 32 / top_k, lane_id() / top_k); }

  /// True if this lane has a (token, k) in round j, where all rounds together have `all` tokens.
  __device__ bool has(int j, int all) const {
    return within < tokens && k < top_k && j * tokens + within < all;
  }
  /// True in the first lane of a token.
  __device__ bool leads() const { return k == 0 && within < tokens; }

 private:
  __device__ TokenLanes(int each, int of_round, int own)
      : top_k(each),
        tokens(of_round),
        within(own),
        k(lane_id() - own * each),
        lanes((each == 32 ? ~0u : (1u << each) - 1) << (own * each & 31)) {}
};

/// Copies `bytes` of a row's scales with all lanes; all scales of a row take `row_bytes`. No padding follows
/// a row's scales, so they are copied in words of four bytes only if `row_bytes` is a multiple of four.
__device__ inline void copy_scales(std::byte* to, const std::byte* from, uint32_t bytes, int64_t row_bytes) {
  if (row_bytes % 4 == 0) {
    for (uint32_t i = lane_id(); i < bytes / 4; i += 32)
      reinterpret_cast<uint32_t*>(to)[i] = __ldcg(reinterpret_cast<const uint32_t*>(from) + i);
    return;
  }
  for (uint32_t i = lane_id(); i < bytes; i += 32)
    to[i] = static_cast<std::byte>(__ldcg(reinterpret_cast<const uint8_t*>(from) + i));
}

/// Orders a warp's later bulk loads after its earlier acquires. All lanes.
__device__ inline void open_for_loads() {
  ptx::fence_global_to_bulk();
  __syncwarp();
}

/// How a row is cut into pieces, each of which fits a stage (a slot in shared memory).
struct Pieces {
  int32_t count;
  int32_t bytes;  ///< bytes of all pieces but the last
  int32_t total;  ///< bytes of the row

  __device__ uint32_t size(int piece) const {
    return piece + 1 < count ? static_cast<uint32_t>(bytes) : static_cast<uint32_t>(total - piece * bytes);
  }
  __device__ int64_t offset(int piece) const { return int64_t{piece} * bytes; }
};

}  // namespace moecomm::gpu
