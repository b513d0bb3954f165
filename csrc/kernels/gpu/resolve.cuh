// Dispatch, receiving side: the rows of a token on this rank, by what its source has worked out (route.cuh)
// and where the rows of each source and expert begin (plan.cuh).
#pragma once

#include "kernels/gpu/kernel.cuh"
#include "kernels/gpu/plan.cuh"
#include "layout/routing.hpp"

namespace moecomm::gpu {

/// A chunk of one source.
struct Item {
  int32_t source;
  int64_t chunk, begin, end;  ///< tokens
  int32_t landing;            ///< where the copy engine moves the rows, the section that they come to
};

/// The row of a token as it lies here.
__device__ inline const std::byte* arrived_row(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                               const Item& item, int64_t token) {
  if (item.source == comm.rank && !comm.own_rows_travel())
    return args.x + token * comm.window.shape.row_bytes();
  if (args.copied)
    return comm.landed_row(item.landing, item.source, token, comm.window.shape.wire_row_bytes());
  return comm.staged_row(comm.rank, epoch, item.source, token);
}

/// Rows of tokens that follow each other in the lanes of a warp, in rounds as TokenLanes says.
template <int rounds>
struct ChunkRows {
  int32_t position[rounds];  ///< in expert-major order, kRowElsewhere or kRowDropped
  int32_t local[rounds];     ///< expert of this rank, -1: another's
  int32_t row[rounds];       ///< rank layout: output row of the token, or likewise
  int32_t slot[rounds];      ///< this rank's among the token's sums at its home, -1: it makes none
  float weight[rounds];      ///< as in ChunkRoutes
};

/// What the source of a chunk has pushed about its tokens.
template <int rounds>
struct ChunkRoutes {
  int32_t packed[rounds];  ///< as in the window, -1 past the tokens
  int32_t place[rounds];   ///< rank layout; means something where a row comes here
  float weight[rounds];    ///< means something where the output has weights

  ChunkRoutes() = default;
  /// Starts the loads of all tokens together.
  __device__ ChunkRoutes(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                         const TokenLanes& map, const Item& item) {
    const DeviceWindow& w = comm.window;
    const int top_k = comm.top_k(), tokens = static_cast<int>(item.end - item.begin);
    const int64_t first = item.source * w.shape.max_tokens + item.begin + map.within;
    const int32_t* const packed_routes =
        comm.mine<int32_t>(w.packed_routes[epoch & 1]) + first * top_k + map.k;
    const int32_t* const places = comm.mine<int32_t>(w.places[epoch & 1]) + first;
    const float* const weights = comm.mine<float>(w.weights[epoch & 1]) + first * top_k + map.k;
    const bool by_rank = args.layout == RowLayout::rank, weighted = args.out_weights != nullptr;
#pragma unroll
    for (int j = 0; j < rounds; ++j) {
      const bool some = map.has(j, tokens);
      const int before = j * map.tokens;
      packed[j] = some ? packed_routes[before * top_k] : -1;
      place[j] = some && by_rank ? places[before] : 0;
      weight[j] = some && weighted ? weights[before * top_k] : 0.0f;
    }
  }
};

/// Writes the weights that go with the output rows of a chunk, and with its positions.
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

/// Whose sum is this rank's among those of a token, each lane knowing the owner of its (token, k): at a home
/// on this node each owner here and each other node has one; for one on another node, each owner here.
__device__ inline int slot_between_nodes(const Comm& comm, const TokenLanes& map, int32_t home,
                                         int32_t owner) {
  const int32_t sender = comm.is_local(home) || comm.is_local(owner) ? comm.sender(owner) : -1;
  return __popc(__ballot_sync(0xffffffffu, first_with(sender, map.lanes) && sender < comm.rank) & map.lanes);
}

/// Dispatch: the positions and output rows of a chunk, by what its source has pushed and where its rows
/// begin.
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
    return routes.packed[j] >= 0 ? routes.packed[j] >> number_bits : kNoExpert;
  };
  const int32_t first_expert = comm.rank * comm.local_experts;
  int32_t base[rounds];  // all of them are loaded before one is used
#pragma unroll
  for (int j = 0; j < rounds; ++j) {
    const int32_t local = expert_of(j) - first_expert;
    const bool mine = expert_of(j) >= 0 && local >= 0 && local < comm.local_experts;
    chunk.local[j] = mine ? local : -1;
    base[j] = mine ? bases[local] : 0;
    chunk.weight[j] = routes.weight[j];
  }
#pragma unroll
  for (int j = 0; j < rounds; ++j) {
    chunk.position[j] = chunk.row[j] = kRowElsewhere;
    chunk.slot[j] = -1;
    if (j * map.tokens >= tokens) continue;
    const int32_t owner = comm.owner(expert_of(j));
    const bool mine = chunk.local[j] >= 0;
    const bool here = (__ballot_sync(0xffffffffu, mine) & map.lanes) != 0;
    const bool leads = first_with(owner, map.lanes);
    const int slot = comm.rail.others == 0
                         ? __popc(__ballot_sync(0xffffffffu, leads && owner < comm.rank) & map.lanes)
                         : slot_between_nodes(comm, map, item.source, owner);
    if (here) chunk.slot[j] = slot;
    if (!by_expert && here) chunk.row[j] = fitting(source_base + routes.place[j], args.rows);
    if (mine)  // a position without its row stays empty
      chunk.position[j] =
          chunk.row[j] == kRowDropped
              ? kRowDropped
              : fitting(base[j] + (routes.packed[j] & ((1 << number_bits) - 1)), args.positions);
  }
  return chunk;
}

/// Writes the rows of a chunk into the plan, and what goes with a row to its place.
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
      args.out_ids[int64_t{chunk.row[j]} * map.top_k + map.k] = chunk.local[j];
    if (args.out_index != nullptr && chunk.position[j] >= 0) args.out_index[chunk.position[j]] = chunk.row[j];
  }
  if (args.out_weights != nullptr) place_weights(args, map, tokens, chunk);
}

__device__ inline void zero(std::byte* memory, int64_t bytes) {
  for (int64_t i = lane_id(); i < bytes; i += 32) memory[i] = std::byte{0};
}

/// Zeroes the alignment rows of local expert `e`, as far as the output has them: a dropless dispatch for
/// whose rows there was no memory has none.
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
