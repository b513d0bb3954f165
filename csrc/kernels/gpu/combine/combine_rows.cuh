// Combine: finds what a token's sum is made of, and adds it up. At an owner of its experts: rows. At its own
// rank (home): rows, and the other owners' sums in slots of the window. combine_*.cu choose the warps.
#pragma once

#include "device/rail.cuh"
#include "kernels/gpu/common/strip.cuh"
#include "kernels/gpu/common/token_order.cuh"
#include "layout/routing.hpp"

namespace moecomm::gpu {

inline constexpr int kMetaWords = kMaxChunk * kMaxTopK;  ///< words per warp for the sources of a chunk's sums

/// Shared memory of a block: for each warp the rows (sources) that its chunk's sums are made of.
struct ReduceMemory {
  float weights[kReduceWarps][kMetaWords];
  int32_t sources[kReduceWarps][kMetaWords];
  int32_t counts[kReduceWarps][kMaxChunk];
  int32_t slots[kReduceWarps][kMaxChunk];
  int32_t shared_word;
};

/// The weight of row `row` on this rank; 1 if rows have no weights, or `row` is negative (no row).
__device__ inline float factor_of(const CombineArguments& args, int32_t row) {
  return args.weights != nullptr && row >= 0 ? reinterpret_cast<const float*>(args.weights)[row] : 1.0f;
}

/// Lists the rows of `tokens` tokens of rank `home`, from token `begin` on. For token i: sources[i * top_k
/// ...] are its rows here, `weights` at these indices their factors factor(row), counts[i] their number, and
/// slots[i] the slot of its sum. Returns a bit mask of the tokens with experts on this rank. All lanes.
template <int most, class Factor>
__device__ inline uint32_t list_owned(const Comm& comm, const CombineArguments& args, int32_t home,
                                      int64_t begin, int tokens, int32_t* sources, float* weights,
                                      int32_t* counts, int32_t* slots, const Factor& factor) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  const int64_t at = home * comm.window.shape.max_tokens + begin;
  int32_t slot[most], row[most];
  float weight[most];
#pragma unroll
  for (int i = 0; i < most; ++i) {
    slot[i] = i < tokens ? plan.at(plan.fields.slots)[at + i] : -1;
    row[i] = i < tokens ? planned_row(plan, args.layout, at + i, top_k) : kRowElsewhere;
  }
#pragma unroll
  for (int i = 0; i < most; ++i) weight[i] = factor(row[i]);
  uint32_t owned = 0;
  __syncwarp();  // all lanes have finished the previous chunk
#pragma unroll
  for (int i = 0; i < most; ++i) {
    if (slot[i] < 0) continue;
    owned |= 1u << i;
    const bool keep = row[i] >= 0;
    compact(weights + i * top_k, weight[i], keep);
    const int count = compact(sources + i * top_k, row[i], keep);
    if (lane == 0) {
      counts[i] = count;
      slots[i] = slot[i];
    }
  }
  __syncwarp();
  return owned;
}

inline constexpr int kSumBatch = 4;

/// Shared memory of a block: for each warp this rank's rows for the warp's token, and their factors.
struct SumMemory {
  float weights[kSumWarps][kMaxTopK];
  int32_t sources[kSumWarps][kMaxTopK];
  const std::byte* slots[kSumWarps][kMaxTopK];  ///< several nodes: addresses of the token's sums
};

/// A token's result is added up from `slots` sums. Sum number `own_slot` is made here from `own_rows` rows.
struct TokenSum {
  int32_t slots, own_slot, own_rows;
  int32_t owner;  ///< the owner whose sum this lane waits for; -1: none
};

/// Returns the rank that owns the expert of this lane's k, for one of this rank's own tokens; -1: none.
__device__ inline int32_t own_owner(const Comm& comm, const PlanView& plan, int64_t token) {
  const int top_k = comm.top_k(), lane = lane_id();
  const int32_t id = lane < top_k ? plan.at(plan.fields.local_topk_idx)[token * top_k + lane] : kNoExpert;
  return comm.owner(id);
}

/// For an own token of this rank: fills `sources` with its rows here, and `weights` with the rows' factors.
template <Way way>
__device__ inline TokenSum list_own_rows(const Comm& comm, const CombineArguments& args, int64_t token,
                                         int32_t* sources, float* weights) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k();
  const int32_t home = plan.at(plan.fields.home)[token];
  const int32_t owner = own_owner(comm, plan, token);
  const int32_t row = planned_row(plan, args.layout, comm.rank * comm.window.shape.max_tokens + token, top_k);
  const bool by_token = args.token_weights != nullptr && row >= 0;
  const float weight = by_token ? args.token_weights[token * top_k + lane_id()] : factor_of(args, row);
  const bool sends = owner >= 0 && owner != comm.rank && (way != Way::nodes || comm.is_local(owner));
  const int32_t sender = sends ? owner : -1;
  const bool keep = row >= 0;
  __syncwarp();  // all lanes have finished the previous token
  compact(weights, weight, keep);
  const int count = compact(sources, row, keep);
  __syncwarp();
  return {home & 0xffff, home >> 16 & 0xffff, count, first_with(sender) ? sender : -1};
}

/// Waits for the sums that owners on this node send for a token in `chunk`. All lanes; false if that fails.
template <class Flag>
__device__ inline bool wait_sums(const Comm& comm, uint64_t epoch, int64_t chunk, const TokenSum& token) {
  bool here = true;
  if (token.owner >= 0)
    here = device::wait_arrival<Flag>(comm, {token.owner, WaitPhase::rows, Operation::combine, epoch}, chunk);
  __syncwarp();  // all lanes load what one lane has acquired
  return __all_sync(0xffffffffu, here);
}

/// Returns the slot of this lane's `sender` for a token: the number of lower senders. `leads` is true in one
/// lane of each sender. All lanes.
__device__ inline int slot_of(int32_t sender, bool leads) {
  int slot = 0;
  for (uint32_t left = __ballot_sync(0xffffffffu, leads); left != 0; left &= left - 1)
    slot += __shfl_sync(0xffffffffu, sender, __ffs(static_cast<int>(left)) - 1) < sender;
  return slot;
}

/// Fills `slots` with the addresses of a token's sums, and waits for the sums from other nodes, which take
/// `sum_bytes` each. All lanes; false if the wait fails.
__device__ inline bool find_slots(const Comm& comm, const CombineArguments& args, uint64_t epoch,
                                  int64_t token, int64_t sum_bytes, const std::byte** slots) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int32_t owner = own_owner(comm, plan, token);
  const int32_t sender = comm.sender(owner);
  const bool leads = first_with(sender);
  const int slot = slot_of(sender, leads);
  bool here = true;
  if (leads) {
    const std::byte* at = comm.slot_row(comm.own, epoch, token, slot);
    if (!comm.is_local(owner)) {
      const int32_t other = comm.other_of(owner);
      const int32_t number = plan.at(plan.fields.home_index)[other * comm.window.shape.max_tokens + token];
      at = comm.rail.arrived(epoch, other, number, sum_bytes);
      here = device::RailChunk{comm, epoch, other, number / comm.rail.chunk_rows}.wait(
          {comm.rail_rank(other), WaitPhase::rows, Operation::combine, epoch});
    }
    slots[slot] = at;
  }
  __syncwarp();
  return __all_sync(0xffffffffu, here);
}

/// Writes this block's share (`block` of `blocks`) of the results as zeros, where the plan's dispatch failed.
__device__ inline void write_nothing(const Comm& comm, const CombineArguments& args, int64_t block,
                                     int64_t blocks) {
  const int64_t first = block * blockDim.x + threadIdx.x, stride = blocks * blockDim.x;
  if (args.y != nullptr)
    for (int64_t i = first; i < args.tokens * comm.window.shape.row_bytes() / 16; i += stride)
      reinterpret_cast<uint4*>(args.y)[i] = {};
  if (args.out_weight_grads != nullptr)
    for (int64_t i = first; i < args.tokens * comm.top_k() * weight_bytes(comm.window.shape.dtype) / 4;
         i += stride)
      reinterpret_cast<uint32_t*>(args.out_weight_grads)[i] = 0;
}

/// Adds up one strip of a token's sums in the order of their slots. slot(s) is the address of a slot. In
/// place of slot `own_slot` it adds own_sum(): this rank's own sum, rounded as if it had travelled.
template <DType dtype, WireFormat wire, class Slot, class Own>
__device__ inline Strip<kSumSteps> sum_token(const TokenSum& token, const Slot& slot, const Own& own_sum,
                                             int first, int vectors, int64_t scales_at) {
  if (token.slots == 0) return {};
  SumStrip<dtype, wire, kSumSteps> own;
  StripSum<dtype, kSumSteps> sum;
  for (int base = 0; base < token.slots; base += kSumBatch) {
    SumStrip<dtype, wire, kSumSteps> strips[kSumBatch];
#pragma unroll
    for (int s = 0; s < kSumBatch; ++s)
      if (base + s < token.slots && base + s != token.own_slot)
        strips[s].load(slot(base + s), first, vectors, scales_at);
    // Loads the sources of the own sum while the slots are being loaded.
    if (base <= token.own_slot && token.own_slot < base + kSumBatch) own = own_sum();
#pragma unroll
    for (int s = 0; s < kSumBatch; ++s) {
      if (base + s == token.own_slot) strips[s] = own;
      if (base + s < token.slots) sum.add_strip(strips[s], base + s == 0);
    }
  }
  return sum.rounded();
}

/// How a token's sum is divided: into `count` parts of `vectors` vectors of 16 bytes.
struct SumParts {
  int count, vectors;

  /// At most `most` parts for each token.
  __device__ SumParts(const Comm& comm, int64_t most) {
    const int strips = sum_strips(comm.window.shape.row_bytes());
    count = static_cast<int>(max(min(most, static_cast<int64_t>(strips)), int64_t{1}));
    vectors = (strips + count - 1) / count * kSumSteps * 32;
  }
};

/// One warp's part of the sum of one of this rank's own tokens.
struct HomePart {
  int64_t token;
  int begin, end;  ///< range of its vectors
  TokenSum sum;

  /// Returns part `number` of the parts of all tokens; lists this rank's rows for its token. One warp.
  template <Way way>
  __device__ static HomePart list(const Comm& comm, const CombineArguments& args, const SumParts& parts,
                                  int64_t number, SumMemory& block) {
    const int32_t token = static_cast<int32_t>(number) / parts.count;  // numbers of parts have 31 bits
    const int begin = (static_cast<int32_t>(number) - token * parts.count) * parts.vectors,
              end = min(begin + parts.vectors, static_cast<int>(comm.window.shape.row_bytes() / 16));
    return {token, begin, end,
            list_own_rows<way>(comm, args, token, block.sources[warp_id()], block.weights[warp_id()])};
  }
  __device__ int strips() const { return max(0, (end - begin + kSumSteps * 32 - 1) / (kSumSteps * 32)); }
  __device__ int first(int strip) const { return begin + strip * kSumSteps * 32; }
};

/// Sums one strip of this rank's rows (listed in `block`) for a part; rounds the sum as if it had travelled.
template <DType dtype, WireFormat wire>
__device__ inline SumStrip<dtype, wire, kSumSteps> sum_own_rows(const Comm& comm,
                                                                const CombineArguments& args,
                                                                const HomePart& part, int strip,
                                                                const SumMemory& block) {
  const int32_t* const rows = block.sources[warp_id()];
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const int first = part.first(strip), vectors = static_cast<int>(row_bytes / 16);
  const auto row = [&](int j) { return args.rows + rows[j] * row_bytes; };
  return sum_rows<dtype, kSumSteps, kSumBatch>(
             part.sum.own_rows, row, args.weighted() ? block.weights[warp_id()] : nullptr, first, vectors)
      .template travelling<wire>(first, vectors);
}

/// Adds up strips [from, to) of a part and stores them. slot(s) is the address of a slot, own(strip) the sum
/// of this rank's rows.
template <DType dtype, WireFormat wire, class Slot, class Own>
__device__ inline void store_sums(const Comm& comm, const CombineArguments& args, const HomePart& part,
                                  const Slot& slot, const Own& own, int from, int to) {
  const int64_t row_bytes = comm.window.shape.row_bytes(), scales_at = sum_scales_at(comm, wire);
  const int vectors = static_cast<int>(row_bytes / 16);
  for (int strip = from; strip < to; ++strip)
    sum_token<dtype, wire>(
        part.sum, slot, [&] { return own(strip); }, part.first(strip), vectors, scales_at)
        .store(args.y + part.token * row_bytes, part.first(strip), vectors);
}

/// Waits for others' sums, adds own(strip), and stores the totals of a part. One warp; false: a wait failed.
template <DType dtype, Way way, WireFormat wire, class Flag, class Own>
__device__ inline bool sum_part(const Comm& comm, const CombineArguments& args, uint64_t epoch,
                                const HomePart& part, const Own& own, SumMemory& block) {
  constexpr bool kNodes = way == Way::nodes;
  const std::byte** const places = block.slots[warp_id()];
  const int64_t row_bytes = comm.window.shape.row_bytes(), t = part.token;
  if constexpr (kNodes)
    if (!find_slots(comm, args, epoch, t, sum_row_bytes(comm, wire), places)) return false;
  if (!wait_sums<Flag>(comm, epoch, t >> chunk_shift(args.tokens), part.sum)) return false;
  const std::byte* const slots = comm.slot_row(comm.own, epoch, t, 0);
  const auto slot = [&](int s) { return kNodes ? places[s] : slots + s * row_bytes; };
  store_sums<dtype, wire>(comm, args, part, slot, own, 0, part.strips());
  return true;
}

}  // namespace moecomm::gpu
