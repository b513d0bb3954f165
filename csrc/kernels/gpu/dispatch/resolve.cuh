// Dispatch, receiving side: finds the output rows of a token, from its source's routes (route.cuh) and from
// where the rows of each source and expert begin on this rank (plan.cuh). Writes all outputs but the rows.
#pragma once

#include "kernels/gpu/common/kernel.cuh"
#include "kernels/gpu/dispatch/plan.cuh"
#include "layout/routing.hpp"

namespace moecomm::gpu {

/// Consecutive tokens of one source: a chunk, several chunks, or a part of a chunk.
struct Item {
  int32_t source;
  int64_t chunk, begin, end;  ///< number of the first token's chunk; tokens [begin, end)
};

/// The address of a token's row: in the staging section, or in `x` for own rows that are not staged.
__device__ inline const std::byte* arrived_row(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                               const Item& item, int64_t token) {
  if (item.source == comm.rank && !comm.own_rows_travel())
    return args.x + token * comm.window.shape.row_bytes();
  return comm.staged_row(comm.rank, epoch, item.source, token);
}

/// Where the rows of consecutive tokens go. A lane of a warp has a (token, k) in each round (TokenLanes).
template <int rounds>
struct ChunkRows {
  int32_t position[rounds];  ///< position in expert-major order, kRowElsewhere or kRowDropped
  int32_t local[rounds];     ///< local expert; -1: none, or on another rank
  int32_t row[rounds];       ///< rank layout: output row of the token, kRowElsewhere or kRowDropped
  int32_t slot[rounds];      ///< combine: slot for this rank's sum at the token's own rank; -1: none
  float weight[rounds];      ///< routing weight from the source
};

/// Polls until a source's routes are there: first[i * each] for each bit i of `wanted`.
struct RouteArrival {
  static constexpr unsigned kInterval = 32;
  const Route* first;
  int each;
  uint32_t wanted;
  uint64_t epoch;

  __device__ bool arrived() const {
    bool all = true;
#pragma unroll 1
    for (uint32_t left = wanted; left != 0; left &= left - 1)
      all = all &&
            EpochNumber::is_of(
                ptx::load_relaxed_sys_pair(first + (__ffs(static_cast<int>(left)) - 1) * each).high, epoch);
    return all;
  }
};

/// Waits until all wanted routes have arrived; false if the wait fails. Not inlined: callers seldom wait, and
/// have no registers to spare for it.
__device__ __noinline__ inline bool wait_for_routes(const Comm& comm, int32_t source,
                                                    const RouteArrival& arrival) {
  return device::wait_until(comm, {source, WaitPhase::records, Operation::dispatch, arrival.epoch}, arrival);
}

/// The routes of consecutive tokens of a source, in words that hold the epoch. Until wait() has returned,
/// some may not have arrived.
template <int rounds>
class ChunkRoutes {
 public:
  ChunkRoutes() = default;
  /// Starts to load the routes of all tokens together, without waiting for the results.
  __device__ ChunkRoutes(const Comm& comm, uint64_t epoch, const TokenLanes& map, const Item& item) {
    const Route* const first = first_of(comm, epoch, map, item);
#pragma unroll
    for (int j = 0; j < rounds; ++j) {
      words_[j] = {~uint64_t{0}, EpochNumber::word(epoch, 0)};  // no route, for lanes past the tokens
      if (map.has(j, static_cast<int>(item.end - item.begin)))
        words_[j] = ptx::load_relaxed_sys_pair(first + j * map.tokens * map.top_k);
    }
  }
  /// Waits for missing routes. All lanes; if the wait fails, returns false, and all routes become -1.
  __device__ bool wait(const Comm& comm, uint64_t epoch, const TokenLanes& map, const Item& item) {
    uint32_t missing = 0;
#pragma unroll
    for (int j = 0; j < rounds; ++j)
      if (!EpochNumber::is_of(words_[j].high, epoch)) missing |= 1u << j;
    if (__all_sync(0xffffffffu, missing == 0)) return true;
    const RouteArrival arrival{first_of(comm, epoch, map, item), map.tokens * map.top_k, missing, epoch};
    const bool here = __all_sync(0xffffffffu, missing == 0 || wait_for_routes(comm, item.source, arrival));
    *this = ChunkRoutes(comm, epoch, map, item);
#pragma unroll
    for (int j = 0; j < rounds; ++j)
      if (!here) words_[j] = {~uint64_t{0}, 0};
    return here;
  }

  /// Route::packed of this lane's route in round j; -1: none.
  __device__ int32_t packed(int j) const { return static_cast<int32_t>(words_[j].low); }
  __device__ float weight(int j) const { return __uint_as_float(static_cast<uint32_t>(words_[j].low >> 32)); }
  __device__ int32_t place(int j) const { return EpochNumber::number(words_[j].high); }  ///< Route::place

 private:
  __device__ static const Route* first_of(const Comm& comm, uint64_t epoch, const TokenLanes& map,
                                          const Item& item) {
    return comm.routes(comm.own, item.source, epoch) + (item.begin + map.within) * map.top_k + map.k;
  }

  ptx::Pair words_[rounds];
};

/// Writes the routing weights of tokens to their output rows; in the rank layout also to their positions.
template <int rounds>
__device__ inline void place_weights(const ReceiveArguments& args, const TokenLanes& map, int tokens,
                                     const ChunkRows<rounds>& chunk) {
  float* const out = reinterpret_cast<float*>(args.out_weights);
#pragma unroll
  for (int j = 0; j < rounds; ++j) {
    if (!map.has(j, tokens)) continue;
    if (args.layout == RowLayout::expert) {
      if (chunk.position[j] >= 0) out[chunk.position[j]] = chunk.weight[j];
    } else if (chunk.row[j] >= 0) {
      const float weight = chunk.local[j] >= 0 ? chunk.weight[j] : 0.0f;
      out[int64_t{chunk.row[j]} * map.top_k + map.k] = weight;
      if (args.out_index_weights != nullptr && chunk.position[j] >= 0)
        reinterpret_cast<float*>(args.out_index_weights)[chunk.position[j]] = weight;
    }
  }
}

/// In combine: the slot for this rank's sum of a token that comes from rank `home`. Each lane gives the owner
/// of its (token, k). Each owner on this node has a slot; if `home` is on this node, each other node too.
__device__ inline int slot_between_nodes(const Comm& comm, const TokenLanes& map, int32_t home,
                                         int32_t owner) {
  const int32_t sender = comm.is_local(home) || comm.is_local(owner) ? comm.sender(owner) : -1;
  return __popc(__ballot_sync(0xffffffffu, first_with(sender, map.lanes) && sender < comm.rank) & map.lanes);
}

/// Finds the positions, output rows and slots of an item's tokens, from their routes and from `tables`.
template <int rounds>
__device__ inline ChunkRows<rounds> resolve_rows(const Comm& comm, const ReceiveArguments& args,
                                                 const RowTables& tables, const TokenLanes& map,
                                                 const Item& item, const ChunkRoutes<rounds>& routes) {
  ChunkRows<rounds> chunk;
  const int tokens = static_cast<int>(item.end - item.begin), number_bits = comm.window.number_bits;
  const bool by_expert = args.layout == RowLayout::expert;
  const int32_t* const bases = tables.bases + item.source * comm.local_experts;
  const int32_t source_base = by_expert ? 0 : tables.source_bases[item.source];
  const auto fitting = [](int32_t number, int64_t capacity) {
    return number < capacity ? number : kRowDropped;
  };
  const auto expert_of = [&](int j) {
    return routes.packed(j) >= 0 ? routes.packed(j) >> number_bits : kNoExpert;
  };
  const int32_t first_expert = comm.rank * comm.local_experts;
  int32_t base[rounds];  // all of them are loaded before the first is used
#pragma unroll
  for (int j = 0; j < rounds; ++j) {
    const int32_t local = expert_of(j) - first_expert;
    const bool mine = expert_of(j) >= 0 && local >= 0 && local < comm.local_experts;
    chunk.local[j] = mine ? local : -1;
    base[j] = mine ? bases[local] : 0;
    chunk.weight[j] = routes.weight(j);
  }
#pragma unroll
  for (int j = 0; j < rounds; ++j) {
    chunk.position[j] = chunk.row[j] = kRowElsewhere;
    chunk.slot[j] = -1;
    if (j * map.tokens >= tokens) continue;
    const int32_t owner = comm.owner(expert_of(j));
    const bool mine = chunk.local[j] >= 0;
    const uint32_t all_mine = __ballot_sync(0xffffffffu, mine) & map.lanes;
    const bool here = all_mine != 0;
    const bool leads = first_with(owner, map.lanes);
    const int slot = comm.rail.others == 0
                         ? __popc(__ballot_sync(0xffffffffu, leads && owner < comm.rank) & map.lanes)
                         : slot_between_nodes(comm, map, item.source, owner);
    if (here) chunk.slot[j] = slot;
    if (!by_expert) {  // Route::place for this rank is in the lanes whose expert is here
      const int32_t place =
          __shfl_sync(0xffffffffu, routes.place(j), here ? __ffs(static_cast<int>(all_mine)) - 1 : 0);
      if (here) chunk.row[j] = fitting(source_base + place, args.rows);
    }
    if (mine)  // where the row is dropped, the position is too
      chunk.position[j] =
          chunk.row[j] == kRowDropped
              ? kRowDropped
              : fitting(base[j] + (routes.packed(j) & ((1 << number_bits) - 1)), args.positions);
  }
  return chunk;
}

/// Rank layout: writes a local expert id to the output, at index `at`.
__device__ inline void put_id(const ReceiveArguments& args, int64_t at, int32_t id) {
  if (args.wide_ids)
    static_cast<int64_t*>(args.out_ids)[at] = id;
  else
    static_cast<int32_t*>(args.out_ids)[at] = id;
}

/// Rank layout: sets the ids of all output rows but the first `rows` to kNoExpert. `thread`: this thread's
/// number among the `threads` threads that share these rows.
__device__ inline void clear_ids(const Comm& comm, const ReceiveArguments& args, int64_t rows, int64_t thread,
                                 int64_t threads) {
  if (args.out_ids == nullptr) return;
  const int64_t end = args.rows * comm.top_k();
  for (int64_t i = rows * comm.top_k() + thread; i < end; i += threads) put_id(args, i, kNoExpert);
}

/// Writes tokens' slots, positions and rows to the plan, and their ids, index and weights to the output.
template <int rounds>
__device__ inline void write_rows(const Comm& comm, const ReceiveArguments& args, const TokenLanes& map,
                                  const Item& item, const ChunkRows<rounds>& chunk) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int tokens = static_cast<int>(item.end - item.begin);
  const bool by_expert = args.layout == RowLayout::expert;
  const int64_t first = item.source * comm.window.shape.max_tokens + item.begin + map.within;
#pragma unroll
  for (int j = 0; j < rounds; ++j) {
    if (!map.has(j, tokens)) continue;
    const int64_t entry = first + j * map.tokens;
    if (map.leads()) plan.at(plan.fields.slots)[entry] = chunk.slot[j];
    if (map.leads() && !by_expert) plan.at(plan.fields.rows)[entry] = chunk.row[j];
    plan.at(plan.fields.positions)[entry * map.top_k + map.k] = chunk.position[j];
    if (by_expert) continue;
    if (args.out_ids != nullptr && chunk.row[j] >= 0)
      put_id(args, int64_t{chunk.row[j]} * map.top_k + map.k, chunk.local[j]);
    if (args.out_index != nullptr && chunk.position[j] >= 0) args.out_index[chunk.position[j]] = chunk.row[j];
  }
  if (args.out_weights != nullptr) place_weights(args, map, tokens, chunk);
}

__device__ inline void zero(std::byte* memory, int64_t bytes) {
  for (int64_t i = lane_id(); i < bytes; i += 32) memory[i] = std::byte{0};
}

/// Zeroes the padding rows of local expert `e`, and their scales, weights and dot products, as far as the
/// output has these rows. It has none if the host found no memory for it in a dropless dispatch. All lanes.
__device__ inline void zero_padding(const Comm& comm, const ReceiveArguments& args, const RowTables& tables,
                                    int64_t e) {
  const KernelShape& s = comm.window.shape;
  const int64_t first = tables.ends[e], rows = min(int64_t{tables.offsets[e]}, args.rows) - first;
  if (rows <= 0) return;
  const bool wire = args.out_scales != nullptr;
  const int64_t row_bytes = wire ? s.wire_data_bytes() : s.row_bytes(), weight = weight_bytes(s.dtype);
  uint4* const out = reinterpret_cast<uint4*>(args.out + first * row_bytes);
  for (int64_t i = lane_id(); i < rows * row_bytes / 16; i += 32) out[i] = {};
  if (wire) zero(args.out_scales + first * s.wire_scale_bytes(), rows * s.wire_scale_bytes());
  if (args.out_weights != nullptr) zero(args.out_weights + first * weight, rows * weight);
  if (args.dots != nullptr) zero(args.dots + first * weight, rows * weight);
}

}  // namespace moecomm::gpu
