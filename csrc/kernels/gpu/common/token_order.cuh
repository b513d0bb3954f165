// The order in which warps take chunks (tokens with one arrival flag), and sets of peers that get rows.
#pragma once

#include "device/channel.cuh"
#include "kernels/gpu/common/pipe.cuh"

namespace moecomm::gpu {

/// A set of ranks, spread over the lanes of a warp: lane l holds ranks l, l + 32 and so on.
struct PeerSet {
  uint32_t bits = 0;
  __device__ void insert(int32_t rank) {
    if (lane_id() == (rank & 31)) bits |= 1u << (rank >> 5);
  }
  /// Inserts the `rank` of each lane whose `keep` is true. All lanes.
  __device__ void insert_lanes(int32_t rank, bool keep) {
    for (uint32_t left = __ballot_sync(0xffffffffu, keep); left != 0; left &= left - 1)
      insert(__shfl_sync(0xffffffffu, rank, __ffs(static_cast<int>(left)) - 1));
  }
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (uint32_t left = bits; left != 0; left &= left - 1)
      visit(static_cast<int32_t>(__ffs(static_cast<int>(left)) - 1) * 32 + lane_id());
  }
};

/// Hands a warp numbers from a counter that warps share. Fetches the next one while the warp uses a number.
class Claims {
 public:
  __device__ explicit Claims(uint32_t* counter) : counter_(counter) { ask(); }
  __device__ int64_t take() {
    const int64_t item = __shfl_sync(0xffffffffu, asked_, 0);
    ask();
    return item;
  }

 private:
  __device__ void ask() {
    if (lane_id() == 0) asked_ = atomicAdd(counter_, 1u);
  }
  uint32_t* counter_;
  uint32_t asked_ = 0;
};

/// The order in which a source's tokens are sent and received: in pieces of `size` consecutive tokens (a
/// power of two, at most kMaxChunk), from several starting points (places) in turn. With one starting point,
/// several ranks would more often send to the same receiver at once, and share its link.
class TokenOrder {
 public:
  /// `shift`: log2 of the number of places.
  __device__ TokenOrder(int tokens, int size, int shift)
      : tokens_(tokens),
        size_(size),
        shift_(shift),
        part_((tokens + (kMaxChunk << shift_) - 1) >> shift_ & ~(kMaxChunk - 1)) {}

  /// How many claims (numbers that Claims hands out) cover all pieces.
  __device__ int claims() const { return part_ >> (__ffs(size_) - 1) << shift_; }
  /// Returns the first token of piece number `claim`; the number of tokens if there is no such piece.
  __device__ int begin(int claim) const {
    const int place = claim & ((1 << shift_) - 1), within = (claim >> shift_) * size_;
    return within < part_ ? min(place * part_ + within, tokens_) : tokens_;
  }
  /// Claims the next piece; returns its first token, or the number of tokens if none is left. All lanes.
  __device__ int next(Claims& claimed) const {
    for (;;) {
      const auto claim = static_cast<int>(claimed.take());
      if (const int found = begin(claim); found < tokens_ || claim >= claims()) return found;
    }
  }

 private:
  int tokens_, size_, shift_;
  int part_;  ///< tokens from one place to the next
};

/// Log2 of the number of starting points (TokenOrder) of a source's tokens. It is 0 (one starting point)
/// where chunks reuse memory or come over the network.
__device__ inline int places_shift(const device::Comm& comm, int32_t source, int64_t tokens) {
  return tokens > comm.window.stage_tokens || !comm.is_local(source) ? 0 : comm.places_shift;
}

/// Writes each `value` whose `keep` is true to list[0..], in lane order; returns how many. All lanes.
template <class Value>
__device__ inline int compact(Value* list, Value value, bool keep) {
  const uint32_t kept = __ballot_sync(0xffffffffu, keep);
  if (keep) list[__popc(kept & ((1u << lane_id()) - 1))] = value;
  return __popc(kept);
}

}  // namespace moecomm::gpu
