// The routes of few tokens, on one node, by one block: what route.cuh works out, for at most
// kMostFusedTokens. A bitmap of tokens for each expert and each rank tells every (token, k) its number
// without a walk in order: the tokens below it in the map of its expert.
//   1. each thread takes the ids of some (token, k), and sets their bits
//   2. the bits of a map are a count; those below a token are its number. Both are pushed to every rank
//   3. the block signals the records of the dispatch
#pragma once

#include "kernels/gpu/route.cuh"

namespace moecomm::gpu {

/// Bitmaps of tokens, of `words` words each.
struct TokenMaps {
  uint32_t* bits;
  int words;

  __device__ uint32_t* map(int32_t bin) const { return bits + bin * words; }
  /// Adds a token to the map of `bin`; true if it is there already.
  __device__ bool add(int32_t bin, int32_t token) const {
    const uint32_t bit = 1u << (token & 31);
    return atomicOr(map(bin) + (token >> 5), bit) & bit;
  }
  /// Tokens of a map below `token`.
  __device__ int32_t below(int32_t bin, int32_t token) const {
    const uint32_t* const of = map(bin);
    int32_t count = __popc(of[token >> 5] & ((1u << (token & 31)) - 1));
    for (int w = 0; w < token >> 5; ++w) count += __popc(of[w]);
    return count;
  }
  __device__ int32_t count(int32_t bin) const {
    int32_t count = 0;
    for (int w = 0; w < words; ++w) count += __popc(map(bin)[w]);
    return count;
  }
};

/// Remembers the first bad id of a dispatch that has one: that of no expert, or of one that the token names
/// before.
__device__ inline void find_bad_ids(const Comm& comm, const SendArguments& args) {
  const int top_k = comm.top_k();
  const int64_t experts = comm.window.shape.num_experts;
  for (int64_t i = threadIdx.x; i < args.tokens * top_k; i += kThreads) {
    const int64_t id = read_id(args, i);
    if (id < -1 || id >= experts) note_bad_id(comm.state(), i, 0);
    if (id < 0) continue;
    const int k = static_cast<int>(i % top_k);
    for (int before = 0; before < k; ++before) {
      if (read_id(args, i - k + before) != id) continue;
      note_bad_id(comm.state(), i, before + 1);
      break;
    }
  }
}

/// Sets the bits of a warp's tokens in the maps of ranks, and writes what a token's home has to know: its
/// number of sums, and which of them in ascending order is this rank's.
__device__ inline void map_ranks(const Comm& comm, const SendArguments& args, const TokenMaps& maps) {
  const int32_t experts = static_cast<int32_t>(comm.window.shape.num_experts), ranks = comm.ranks();
  const int top_k = comm.top_k();
  const PlanView plan{args.plan, comm.plan_fields};
  for (int word = warp_id(); word < maps.words; word += kWarps) {
    const int token = word * 32 + lane_id();
    uint64_t owners = 0;
#pragma unroll 4
    for (int k = 0; token < args.tokens && k < top_k; ++k) {
      const int32_t id = valid_id(comm, read_id(args, token * top_k + k));
      if (id >= 0) owners |= uint64_t{1} << expert_owner(id, comm.local_experts);
    }
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const uint32_t tokens = __ballot_sync(0xffffffffu, owners >> rank & 1);
      if (lane_id() == 0) maps.map(experts + rank)[word] = tokens;
    }
    const bool own = owners >> comm.rank & 1;
    const int slot = own ? __popcll(owners & ((uint64_t{1} << comm.rank) - 1)) : kNoOwnSlot;
    if (token < args.tokens) plan.at(plan.fields.home)[token] = __popcll(owners) | slot << 16;
  }
}

/// Whole block. `scratch`: shared memory, overwritten.
__device__ inline void route_few(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                 int32_t* scratch) {
  const DeviceWindow& w = comm.window;
  const auto experts = static_cast<int32_t>(w.shape.num_experts);
  const auto counts = static_cast<int32_t>(w.shape.counts());
  const int32_t rank = comm.rank, ranks = comm.ranks(), local = comm.local_experts;
  const int top_k = comm.top_k(), thread = static_cast<int>(threadIdx.x), number_bits = w.number_bits;
  const auto tokens = static_cast<int32_t>(args.tokens), entries = tokens * top_k;
  const PlanView plan{args.plan, comm.plan_fields};
  int32_t* const local_topk_idx = plan.at(plan.fields.local_topk_idx);
  const TokenMaps maps{reinterpret_cast<uint32_t*>(scratch), max((tokens + 31) / 32, 1)};

  for (int i = thread; i < experts * maps.words; i += kThreads) maps.bits[i] = 0;
  __syncthreads();

  // 1
  bool bad = false;
  for (int entry = thread; entry < entries; entry += kThreads) {
    const int64_t given = read_id(args, entry);
    const int32_t id = valid_id(comm, given);
    local_topk_idx[entry] = id;
    bad = bad || given < -1 || given >= experts;
    if (id >= 0) bad = maps.add(id, entry / top_k) || bad;
  }
  map_ranks(comm, args, maps);
  bad = __syncthreads_or(bad);
  if (bad) find_bad_ids(comm, args);

  // 2
  const float* const weights = reinterpret_cast<const float*>(args.weights);
  const int64_t first = rank * w.shape.max_tokens, to_counts = w.counts[epoch & 1];
  const int64_t to_routes = w.packed_routes[epoch & 1], to_weights = w.weights[epoch & 1];
  const int64_t to_places = w.places[epoch & 1];
  for (int bin = thread; bin < counts; bin += kThreads) {
    const int32_t count = maps.count(bin);
    for (int32_t peer = 0; peer < ranks; ++peer)
      comm.at<int32_t>(comm.bases[peer], to_counts)[int64_t{rank} * counts + bin] = count;
  }
  for (int entry = thread; entry < entries; entry += kThreads) {
    const int32_t id = valid_id(comm, read_id(args, entry)), token = entry / top_k;
    const float weight = weights != nullptr ? weights[entry] : 0.0f;
    const int32_t packed = id < 0 ? -1 : id << number_bits | maps.below(id, token);
    const int64_t at = first * top_k + entry;
    for (int32_t peer = 0; peer < ranks; ++peer) {
      std::byte* const base = comm.bases[peer];
      comm.at<int32_t>(base, to_routes)[at] = packed;
      if (weights != nullptr) comm.at<float>(base, to_weights)[at] = weight;
    }
    if (id < 0 || args.layout == RowLayout::expert) continue;
    const int32_t owner = expert_owner(id, local);
    comm.at<int32_t>(comm.bases[owner], to_places)[first + token] = maps.below(experts + owner, token);
  }

  // 3
  __syncthreads();
  announce_routes(comm, args, epoch, bad);
}

}  // namespace moecomm::gpu
