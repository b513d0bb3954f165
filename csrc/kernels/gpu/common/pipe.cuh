// The pipe with which a warp moves rows: it loads pieces ahead into a ring in shared memory, and stores them
// from there. One lane issues both as bulk copies.
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
inline constexpr int kMetaWords = kMaxChunk * kMaxTopK;   ///< words per warp for a chunk's places
inline constexpr int kCopyStages = 4, kCopyPiece = 4096;  ///< for pieces that are moved unchanged
inline constexpr int kSumStages = 4, kSumPiece = 2048;    ///< for pieces that are summed
inline constexpr int kScaleBuffer = 512;                  ///< bytes for a part of a row's scales
inline constexpr int kOutStages = 2, kOutPiece = 4096;    ///< for results that are being stored
static_assert(kCopyStages * kCopyPiece == kWarpBytes);
static_assert(kSumStages * kSumPiece + kOutStages * kOutPiece == kWarpBytes);

/// Shared memory of a block, by warp.
struct BlockMemory {
  alignas(128) std::byte pieces[kWarps][kWarpBytes];
  int32_t meta[kWarps][kMetaWords];
  int32_t numbers[kWarps][kMetaWords];  ///< with several nodes: a number for each entry of meta
  int32_t from[kWarps][kMaxChunk];      ///< with several nodes: a number for each token of a chunk
  int32_t counts[kWarps][kMaxChunk];    ///< number of entries in meta for each token of a chunk
  uint64_t barriers[kWarps][8];
  alignas(16) std::byte scales[kWarps][kScaleBuffer];
};
static_assert(kRouteWords * sizeof(int32_t) <= kMostShared);
static_assert(sizeof(BlockMemory) <= kMostShared);

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) & 31; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) >> 5; }

/// True in the first of `lanes` that has this value, which must not be negative. All lanes.
__device__ inline bool first_with(int32_t value, uint32_t lanes = 0xffffffffu) {
  const uint32_t same = __match_any_sync(0xffffffffu, value >= 0 ? value : -1 - lane_id()) & lanes;
  return value >= 0 && (same & ((1u << lane_id()) - 1)) == 0;
}

/// How the (token, k) of consecutive tokens are spread over the lanes of a warp, in rounds of whole tokens.
struct TokenLanes {
  int top_k, tokens;  ///< k per token; tokens per round
  int within, k;      ///< this lane's token within a round, and its k
  uint32_t lanes;     ///< lanes of the same token

  /// One token per round.
  __device__ static TokenLanes of_one(int top_k) { return TokenLanes(top_k, 1, 0); }
  /// As many tokens per round as a warp holds.
  __device__ static TokenLanes of_many(int top_k) { return TokenLanes(top_k, 32 / top_k, lane_id() / top_k); }

  /// True if this lane has a (token, k) in round j of the first `all` tokens.
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

/// Copies `bytes` of a row's scales, which are `row_bytes` in all, with all lanes. Rows of scales are
/// contiguous, so they are copied in words only where they are aligned to them.
__device__ inline void copy_scales(std::byte* to, const std::byte* from, uint32_t bytes, int64_t row_bytes) {
  if (row_bytes % 4 == 0) {
    for (uint32_t i = lane_id(); i < bytes / 4; i += 32)
      reinterpret_cast<uint32_t*>(to)[i] = __ldcg(reinterpret_cast<const uint32_t*>(from) + i);
    return;
  }
  for (uint32_t i = lane_id(); i < bytes; i += 32)
    to[i] = static_cast<std::byte>(__ldcg(reinterpret_cast<const uint8_t*>(from) + i));
}

/// Pieces that are being loaded, in order. All lanes call every function.
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
  /// Starts to load the next piece. Fewer than `stages` may be in flight; the stage's old contents must be
  /// read.
  __device__ void load(const void* from, uint32_t bytes) {
    const uint32_t stage = issued_ % stages;
    ++issued_;
    if (lane_id() == 0) {
      ptx::barrier_expect(&barriers_[stage], bytes);
      ptx::bulk_load(memory_ + stage * piece, from, bytes, &barriers_[stage]);
    }
  }
  /// Returns the oldest piece, once it has arrived.
  __device__ std::byte* wait() {
    const uint32_t stage = taken_ % stages;
    while (!ptx::barrier_done(&barriers_[stage], (taken_ / stages) & 1)) {
    }
    return memory_ + stage * piece;
  }
  /// Releases the oldest piece, after all lanes are done with it.
  __device__ void release() {
    __syncwarp();
    ++taken_;
  }

 private:
  std::byte* memory_;
  uint64_t* barriers_;
  uint32_t issued_ = 0, taken_ = 0;
};

/// Starts a store from shared memory. Stores run in order, in groups.
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

/// Waits until all but the newest `pending` groups have arrived.
template <int pending>
__device__ inline void wait_stores() {
  if (lane_id() == 0) ptx::bulk_wait<pending>();
  __syncwarp();
}

/// Orders stores from shared memory after the lanes' earlier writes to it.
__device__ inline void publish_piece() {
  ptx::fence_shared_to_bulk();
  __syncwarp();
}

/// Orders bulk loads after earlier acquires.
__device__ inline void open_for_loads() {
  ptx::fence_global_to_bulk();
  __syncwarp();
}

/// Results that are being stored, several pieces of a row per store, since small stores do not fill a link.
/// All lanes fill `piece(i)` for each piece i of a row in order; where `complete(i)` is true, the caller
/// stores all of `stage()` and commits.
class OutRing {
 public:
  /// `pieces` pieces per row, each of `bytes` when stored, up to `stage_bytes` per store.
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
  /// The first piece in the stage that holds piece i.
  __device__ int first(int i) const { return i / group_ * group_; }
  __device__ std::byte* stage() const { return memory_ + (count_ % kOutStages) * stage_bytes_; }
  __device__ uint32_t number() const { return count_ % kOutStages; }

 private:
  std::byte* const memory_;
  const int pieces_, bytes_, stage_bytes_, group_;
  uint32_t count_ = 0;
};

/// Walks over (token, piece) of the tokens in a mask.
struct PieceCursor {
  uint32_t tokens;  ///< bit i: token i of the chunk is still to be visited
  int piece = 0;
  __device__ bool done() const { return tokens == 0; }
  __device__ int token() const { return __ffs(static_cast<int>(tokens)) - 1; }
  __device__ void advance(int pieces) {
    if (++piece < pieces) return;
    piece = 0;
    tokens &= tokens - 1;
  }
};

/// How a row is cut into pieces of at most one stage.
struct Pieces {
  int32_t count;
  int32_t bytes;  ///< bytes of all pieces but the last
  int32_t total;

  __device__ uint32_t size(int piece) const {
    return piece + 1 < count ? static_cast<uint32_t>(bytes) : static_cast<uint32_t>(total - piece * bytes);
  }
  __device__ int64_t offset(int piece) const { return int64_t{piece} * bytes; }
  /// Bytes of pieces `first` to `last`.
  __device__ uint32_t through(int first, int last) const {
    return static_cast<uint32_t>((last - first) * bytes) + size(last);
  }
};

}  // namespace moecomm::gpu
