// The pipe by which a warp moves rows: pieces of them are loaded ahead into a ring in shared memory, and
// leave it from shared memory. One lane issues both, as bulk copies.
#pragma once

#include <cstdint>

#include "layout/device_window.hpp"
#include "ptx/bulk.cuh"

namespace moecomm::gpu {

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1100)
#error "kernels are for compute capability 9.0 and 10.x: others lack bulk copies, or shared memory"
#endif
/// The most shared memory that a kernel may ask for: what a block can have on compute capability 9.0
/// and 10.x, less a kilobyte for static variables.
inline constexpr size_t kMostShared = (227 - 1) * 1024;

/// Warps of a block that moves rows: as many as the shared memory holds pieces for.
inline constexpr int kWarps = 12, kThreads = kWarps * 32;
inline constexpr int kWarpBytes = 16384;  ///< of shared memory for pieces of rows
/// Words of shared memory of a block that works out routes.
inline constexpr int64_t kRouteWords = int64_t{kWarps} * kWarpBytes / 4;
inline constexpr int kMetaWords = kMaxChunk * kMaxTopK;   ///< a warp: places of the tokens of a chunk
inline constexpr int kCopyStages = 4, kCopyPiece = 4096;  ///< pieces that pass through unchanged
inline constexpr int kSumStages = 4, kSumPiece = 2048;    ///< pieces that are computed with
inline constexpr int kScaleBuffer = 544;                  ///< bytes of a row's scales, a part of them
inline constexpr int kOutStages = 2, kOutPiece = 4096;    ///< results on their way out
static_assert(kCopyStages * kCopyPiece == kWarpBytes);
static_assert(kSumStages * kSumPiece + kOutStages * kOutPiece == kWarpBytes);

/// Shared memory of a block, by warp.
struct BlockMemory {
  alignas(128) std::byte pieces[kWarps][kWarpBytes];
  int32_t meta[kWarps][kMetaWords];
  int32_t numbers[kWarps][kMetaWords];  ///< with several nodes: what goes with an entry of meta
  int32_t from[kWarps][kMaxChunk];      ///< likewise, with a token of a chunk
  int32_t counts[kWarps][kMaxChunk];    ///< entries of meta for each token of a chunk
  uint64_t barriers[kWarps][8];
  alignas(16) std::byte scales[kWarps][kScaleBuffer];
};
static_assert(kRouteWords * sizeof(int32_t) <= kMostShared);
static_assert(sizeof(BlockMemory) <= kMostShared);

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) & 31; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) >> 5; }

/// True for the first of those `lanes` with its value, which has to be at least 0. All lanes.
__device__ inline bool first_with(int32_t value, uint32_t lanes = 0xffffffffu) {
  const uint32_t same = __match_any_sync(0xffffffffu, value >= 0 ? value : -1 - lane_id()) & lanes;
  return value >= 0 && (same & ((1u << lane_id()) - 1)) == 0;
}

/// How the (token, k) of tokens that follow each other are spread over the lanes of a warp, in rounds of
/// whole tokens.
struct TokenLanes {
  int top_k, tokens;  ///< tokens of a round
  int within, k;      ///< this lane's token in a round, and which of its k
  uint32_t lanes;     ///< those of the same token

  /// A round is one token.
  __device__ static TokenLanes of_one(int top_k) { return TokenLanes(top_k, 1, 0); }
  /// A round is as many tokens as a warp holds.
  __device__ static TokenLanes of_many(int top_k) { return TokenLanes(top_k, 32 / top_k, lane_id() / top_k); }

  /// True if this lane has a (token, k) of the first `all` tokens in round j.
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

/// `bytes` of the scales of a row, which has `row_bytes` of them, by all lanes. Rows of scales lie one behind
/// another: in words where they have whole ones.
__device__ inline void copy_scales(std::byte* to, const std::byte* from, uint32_t bytes, int64_t row_bytes) {
  if (row_bytes % 4 == 0) {
    for (uint32_t i = lane_id(); i < bytes / 4; i += 32)
      reinterpret_cast<uint32_t*>(to)[i] = __ldcg(reinterpret_cast<const uint32_t*>(from) + i);
    return;
  }
  for (uint32_t i = lane_id(); i < bytes; i += 32)
    to[i] = static_cast<std::byte>(__ldcg(reinterpret_cast<const uint8_t*>(from) + i));
}

/// Pieces on their way in, in order. All lanes call every function.
template <int stages, int piece>
class LoadRing {
 public:
  __device__ LoadRing(std::byte* memory, uint64_t* barriers) : memory_(memory), barriers_(barriers) {
    if (lane_id() == 0) {
      for (int i = 0; i < stages; ++i) ptx::barrier_init(&barriers_[i], 1);
      ptx::fence_barrier_init();
    }
    __syncwarp();
  }

  __device__ int in_flight() const { return static_cast<int>(issued_ - taken_); }
  /// The next piece; fewer than `stages` may be in flight, and what left the stage must have been read.
  __device__ void load(const void* from, uint32_t bytes) {
    const uint32_t stage = issued_ % stages;
    ++issued_;
    if (lane_id() == 0) {
      ptx::barrier_expect(&barriers_[stage], bytes);
      ptx::bulk_load(memory_ + stage * piece, from, bytes, &barriers_[stage]);
    }
  }
  /// The oldest piece, once it is there.
  __device__ std::byte* wait() {
    const uint32_t stage = taken_ % stages;
    while (!ptx::barrier_done(&barriers_[stage], (taken_ / stages) & 1)) {
    }
    return memory_ + stage * piece;
  }
  /// Releases the oldest piece, with which all lanes are done.
  __device__ void release() {
    __syncwarp();
    ++taken_;
  }

 private:
  std::byte* memory_;
  uint64_t* barriers_;
  uint32_t issued_ = 0, taken_ = 0;
};

/// Stores from shared memory: started in order, in groups.
__device__ inline void store_piece(std::byte* to, const std::byte* from, uint32_t bytes) {
  if (lane_id() == 0) ptx::bulk_store(to, from, bytes);
}

__device__ inline void commit_stores() {
  if (lane_id() == 0) ptx::bulk_commit();
}

/// Waits until the shared memory of all but the newest `pending` groups may be overwritten.
template <int pending>
__device__ inline void wait_stores_read() {
  if (lane_id() == 0) ptx::bulk_wait_read<pending>();
  __syncwarp();
}

/// Waits until all but the newest `pending` groups are in place.
template <int pending>
__device__ inline void wait_stores() {
  if (lane_id() == 0) ptx::bulk_wait<pending>();
  __syncwarp();
}

/// Orders stores from shared memory after what lanes wrote to it before.
__device__ inline void publish_piece() {
  ptx::fence_shared_to_bulk();
  __syncwarp();
}

/// Orders loads after what was acquired before.
__device__ inline void open_for_loads() {
  ptx::fence_global_to_bulk();
  __syncwarp();
}

/// Results on their way out, several pieces of a row in one store: small stores do not fill a link. All lanes
/// fill `piece(i)` for each piece i of a row in order; where `complete(i)`, all of `stage()` is to be stored,
/// and committed.
class OutRing {
 public:
  /// `pieces` of a row, of `bytes` each when they go out, up to `stage_bytes` in one store.
  __device__ OutRing(std::byte* memory, int pieces, int bytes, int stage_bytes = kOutPiece)
      : memory_(memory),
        pieces_(pieces),
        bytes_(bytes),
        stage_bytes_(stage_bytes),
        group_(stage_bytes / bytes) {}

  __device__ std::byte* piece(int i) {
    const int within = i % group_;
    if (within == 0) {
      wait_stores_read<kOutStages - 1>();
      ++count_;
    }
    return stage() + within * bytes_;
  }
  __device__ bool complete(int i) const { return (i + 1) % group_ == 0 || i + 1 == pieces_; }
  /// The first piece in the stage that piece i is in.
  __device__ int first(int i) const { return i / group_ * group_; }
  __device__ std::byte* stage() const { return memory_ + (count_ % kOutStages) * stage_bytes_; }
  __device__ uint32_t number() const { return count_ % kOutStages; }

 private:
  std::byte* const memory_;
  const int pieces_, bytes_, stage_bytes_, group_;
  uint32_t count_ = 0;
};

/// Walks (token, piece) of the tokens in a mask.
struct PieceCursor {
  uint32_t tokens;  ///< bit i: token i of the chunk is still to come
  int piece = 0;
  __device__ bool done() const { return tokens == 0; }
  __device__ int token() const { return __ffs(static_cast<int>(tokens)) - 1; }
  __device__ void advance(int pieces) {
    if (++piece < pieces) return;
    piece = 0;
    tokens &= tokens - 1;
  }
};

/// A row in pieces of at most a stage.
struct Pieces {
  int32_t count;
  int32_t bytes;  ///< of all but the last
  int32_t total;

  __device__ uint32_t size(int piece) const {
    return piece + 1 < count ? static_cast<uint32_t>(bytes) : static_cast<uint32_t>(total - piece * bytes);
  }
  __device__ int64_t offset(int piece) const { return int64_t{piece} * bytes; }
  /// Bytes of the pieces from `first` to `last`.
  __device__ uint32_t through(int first, int last) const {
    return static_cast<uint32_t>((last - first) * bytes) + size(last);
  }
};

}  // namespace moecomm::gpu
