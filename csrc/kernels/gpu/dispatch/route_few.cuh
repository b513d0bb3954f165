// Computes the routes of at most kMostFusedTokens tokens, on one node, with one block (others: route.cuh).
// Each expert and each rank has a bitmap of tokens. So a (token, k) gets its number without a walk in order:
// it is the number of lower tokens in the map of its expert.
//   1. each thread takes the ids of some (token, k), and sets their tokens' bits
//   2. the bits of each map are counted, and every rank gets the counts. The number of bits before each word
//      of a map is kept. The map of a rank is the union of its experts' maps
//   3. the number of bits below a token's bit goes into the route, and every rank gets the route. In short
//      maps these bits are counted anew, so that some warps do this while others do step 2
// Other ranks wait for this block, so it starts all its loads at once, before anything else.
#pragma once

#include "kernels/gpu/common/route.cuh"

namespace moecomm::gpu {

/// The bitmaps of tokens, one for each bin (experts, then ranks), of `words` words each.
struct TokenMaps {
  static constexpr int kShort = 4;  ///< most words of a short map, whose bits below() counts at each call
  uint32_t* bits;
  uint16_t* before;  ///< for each word: number of tokens in earlier words of its map
  int words, stride;

  /// Lays the maps out in `scratch`, which has route_few_words() words of shared memory.
  __device__ TokenMaps(int32_t* scratch, int64_t counts, int64_t tokens)
      : bits(reinterpret_cast<uint32_t*>(scratch)), words(map_words(tokens)), stride(map_stride(tokens)) {
    before = reinterpret_cast<uint16_t*>(bits + counts * stride);
  }
  /// Adds a token to the map of `bin`; true if the map had it before.
  __device__ bool add(int32_t bin, int32_t token) const {
    const uint32_t bit = 1u << (token & 31);
    return atomicOr(&bits[bin * stride + (token >> 5)], bit) & bit;
  }
  __device__ bool is_short() const { return words <= kShort; }
  /// The number of tokens below `token` in the map of `bin`. Long maps need count() or join() first.
  __device__ int32_t below(int32_t bin, int32_t token) const {
    const int first = bin * stride, word = first + (token >> 5);
    int32_t count = __popc(bits[word] & ((1u << (token & 31)) - 1));
    if (!is_short()) return count + before[word];
#pragma unroll 1
    for (int w = first; w < word; ++w) count += __popc(bits[w]);
    return count;
  }
  /// True if `token` is in the map of `bin`.
  __device__ bool has(int32_t bin, int32_t token) const {
    return bits[bin * stride + (token >> 5)] >> (token & 31) & 1;
  }
  /// Fills `before` for the complete map of `bin`, and returns the number of tokens in the map.
  __device__ int32_t count(int32_t bin) const {
    int32_t count = 0;
#pragma unroll 2
    for (int w = 0; w < words; ++w) {
      before[bin * stride + w] = static_cast<uint16_t>(count);
      count += __popc(bits[bin * stride + w]);
    }
    return count;
  }
  /// Makes the map `bin` of a rank, the union of its `local` experts' maps from expert `first` on, and its
  /// `before`; returns the number of tokens in it. One warp: lanes share the words and the experts.
  __device__ int32_t join(int32_t bin, int32_t first, int32_t local) const {
    int width = 1;  // lanes for the words
    while (width < words) width *= 2;
    const int word = lane_id() % width, parts = 32 / width;
    uint32_t tokens = 0;
    if (word < words) {
#pragma unroll 4
      for (int32_t e = lane_id() / width; e < local; e += parts) tokens |= bits[(first + e) * stride + word];
    }
    for (int lanes = width; lanes < 32; lanes *= 2) tokens |= __shfl_xor_sync(0xffffffffu, tokens, lanes);
    int32_t inclusive = __popc(tokens);
    for (int lanes = 1; lanes < width; lanes *= 2) {
      const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, lanes, width);
      if (word >= lanes) inclusive += below;
    }
    if (lane_id() < words) {
      bits[bin * stride + word] = tokens;
      before[bin * stride + word] = static_cast<uint16_t>(inclusive - __popc(tokens));
    }
    return __shfl_sync(0xffffffffu, inclusive, width - 1);
  }
};
static_assert(map_words(kMostFusedTokens) <= 32, "a lane for each word");

/// Walks over every kThreads-th (token, k) from `entry` on, without a division at each step.
struct EntryWalk {
  int32_t token, k, top_k;

  __device__ explicit EntryWalk(int32_t entry, int32_t of_top_k)
      : token(entry / of_top_k), k(entry % of_top_k), top_k(of_top_k) {}
  __device__ void next() {
    token += kThreads / top_k;
    k += kThreads % top_k;
    if (k < top_k) return;
    k -= top_k;
    ++token;
  }
};

/// Ids and weights, copied to shared memory for as many (token, k) as have room. Each thread copies
/// those that it uses itself, all at once, so no barrier is needed.
struct StagedEntries {
  std::byte* ids;
  float* weights;
  int32_t room;

  /// Uses `words` words of shared memory at `memory`.
  __device__ StagedEntries(int32_t* memory, int64_t words)
      : ids(reinterpret_cast<std::byte*>(memory)), room(static_cast<int32_t>(words / 3)) {
    weights = reinterpret_cast<float*>(ids + int64_t{room} * sizeof(int64_t));
  }
  /// Starts to copy (token, k) number `base` and later ones, while there is room; `entries`: number of all.
  __device__ void copy(const SendArguments& args, int32_t base, int32_t entries) const {
    const int32_t count = min(room, entries - base);
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
      if (args.wide_ids)
        ptx::copy_async<8>(ids + i * 8, static_cast<const int64_t*>(args.ids) + base + i);
      else
        ptx::copy_async<4>(ids + i * 4, static_cast<const int32_t*>(args.ids) + base + i);
      if (args.weights != nullptr)
        ptx::copy_async<4>(weights + i, reinterpret_cast<const float*>(args.weights) + base + i);
    }
  }
  __device__ int64_t id(const SendArguments& args, int32_t i) const {
    return args.wide_ids ? reinterpret_cast<const int64_t*>(ids)[i]
                         : reinterpret_cast<const int32_t*>(ids)[i];
  }
};

/// Notes the first bad id of a dispatch in the state. An id is bad if it names no expert and is not -1, or if
/// it repeats an id of the same token.
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

/// Writes DevicePlan::home for each token: how many sums a combine adds for it, and which of them is this
/// rank's own. Tokens go to the last threads first.
__device__ inline void write_homes(const Comm& comm, const SendArguments& args, const TokenMaps& maps) {
  const int32_t experts = static_cast<int32_t>(comm.window.shape.num_experts), ranks = comm.ranks();
  const PlanView plan{args.plan, comm.plan_fields};
  for (auto token = static_cast<int32_t>(kThreads - 1 - threadIdx.x); token < args.tokens;
       token += kThreads) {
    int sums = 0, slot = kNoOwnSlot;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      if (!maps.has(experts + rank, token)) continue;
      if (rank == comm.rank) slot = sums;
      ++sums;
    }
    plan.at(plan.fields.home)[token] = sums | slot << 16;
  }
}

/// Computes and pushes counts and routes, and announces the dispatch by starts. Whole block. `scratch`:
/// `words` words of shared memory, at least route_few_words(), overwritten. Returns the record, which the
/// caller has to signal. Calls failed(), which is also a barrier, when the first loads are in flight. If it
/// returns true, nothing is sent, and the record names no operation.
template <class Failed>
__device__ inline SignalRecord route_few(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                         int32_t* scratch, int64_t words, const Failed& failed) {
  const DeviceWindow& w = comm.window;
  const auto experts = static_cast<int32_t>(w.shape.num_experts);
  const auto counts = static_cast<int32_t>(w.shape.counts());
  const int32_t ranks = comm.ranks(), local = comm.local_experts;
  const int top_k = comm.top_k(), thread = static_cast<int>(threadIdx.x), number_bits = w.number_bits;
  const auto tokens = static_cast<int32_t>(args.tokens), entries = tokens * top_k;
  const PlanView plan{args.plan, comm.plan_fields};
  const TokenMaps maps(scratch, counts, tokens);
  const int64_t maps_end = map_memory_words(counts, tokens);
  const StagedEntries staged(scratch + maps_end, words - maps_end);

  staged.copy(args, 0, entries);
  for (int i = thread; i < experts * maps.stride; i += kThreads) maps.bits[i] = 0;
  if (failed()) return {};
  // Calls use(entry, token, given id, weight) for each (token, k) of this thread; `entry` is its index. Loops
  // are not unrolled: with few tokens they run a few times.
  const auto each_entry = [&](const auto& use) {
#pragma unroll 1
    for (int32_t base = 0; base < entries; base += staged.room) {
      if (entries > staged.room) staged.copy(args, base, entries);  // else all were copied above
      ptx::wait_for_async_copies();
      EntryWalk at(base + thread, top_k);
      const int32_t count = min(staged.room, entries - base);
#pragma unroll 1
      for (int32_t i = thread; i < count; i += kThreads, at.next())
        use(base + i, at.token, staged.id(args, i), staged.weights[i]);
    }
  };

  // 1. Sets the bits of all ids.
  bool bad = false;
  each_entry([&](int32_t, int32_t token, int64_t given, float) {
    const int32_t id = valid_id(comm, given);
    bad = bad || given < kNoExpert || given >= experts;
    if (id >= 0) bad = maps.add(id, token) || bad;
  });
  bad = __syncthreads_or(bad);
  if (bad) {
    find_bad_ids(comm, args);
    __syncthreads();
  }

  // 2. Counts the maps, from the last warps on: in step 1 the first warps had the most ids.
  const int64_t to_counts = reinterpret_cast<std::byte*>(comm.counts(comm.own, comm.rank, epoch)) - comm.own;
  // Writes the count of a bin to one rank.
  const auto push = [&](int32_t peer, int32_t bin, int32_t count) {
    device::put(comm.at<uint64_t>(comm.bases[peer], to_counts) + bin, EpochNumber::word(epoch, count));
  };
  for (int bin = kThreads - 1 - thread; bin < experts; bin += kThreads) {
    const int32_t count = maps.count(bin);
#pragma unroll 1
    for (int32_t peer = 0; peer < ranks; ++peer) push(peer, bin, count);
  }
  for (int32_t owner = (kWarps + 2 - warp_id()) % kWarps; owner < ranks; owner += kWarps) {
    const int32_t count = maps.join(experts + owner, owner * local, local);
    for (int32_t peer = lane_id(); peer < ranks; peer += 32) push(peer, experts + owner, count);
  }
  const SignalRecord record = dispatch_record(comm, args, epoch, bad);
  const int shifted = (thread + kThreads - 96) % kThreads;
  push_starts(comm, record, shifted, kThreads);
  for (int32_t peer = shifted; peer < ranks; peer += kThreads) push(peer, counts, tokens);

  // 3. Sends the routes.
  const bool weighted = args.weights != nullptr, by_rank = args.layout == RowLayout::rank;
  if (by_rank || !maps.is_short()) __syncthreads();
  each_entry([&](int32_t entry, int32_t token, int64_t given, float weight) {
    const int32_t id = valid_id(comm, given);
    const int32_t packed = id < 0 ? -1 : id << number_bits | maps.below(id, token);
    const int32_t place = by_rank && id >= 0 ? maps.below(experts + comm.owner(id), token) : 0;
    push_route(comm, comm.rank, epoch, entry, route_word(epoch, packed, weighted ? weight : 0.0f, place));
    plan.at(plan.fields.local_topk_idx)[entry] = id;
  });
  __syncthreads();
  write_homes(comm, args, maps);
  return record;
}

}  // namespace moecomm::gpu
