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
  if (args.copied) return comm.landed_row(item.landing, item.source, token, comm.window.wire_bytes);
  return comm.staged_row(comm.own, epoch, item.source, token);
}

/// Rows of a chunk of at most `most` tokens in the lanes of a warp: lane k holds k of each token.
template <int most>
struct ChunkRows {
  int32_t position[most];  ///< in expert-major order, kRowElsewhere or kRowDropped
  int32_t local[most];     ///< expert of this rank, -1: another's
  int32_t row[most];       ///< rank layout: output row of the token, or likewise
  int32_t slot[most];      ///< all lanes: this rank's among the token's sums at its home, -1: it makes none
};

/// What the source of a chunk has pushed about its tokens; lane k holds k of each.
template <int most>
struct ChunkRoutes {
  int32_t packed[most];  ///< as in the window, -1 past the tokens
  int32_t place[most];   ///< rank layout; means something where a row comes here

  /// Starts the loads of all tokens together.
  __device__ ChunkRoutes(const Comm& comm, RowLayout layout, uint64_t epoch, const Item& item) {
    const DeviceWindow& w = comm.window;
    const int top_k = comm.top_k(), lane = lane_id(), tokens = static_cast<int>(item.end - item.begin);
    const int64_t first = item.source * w.shape.max_tokens + item.begin;
    const int32_t* const packed_routes =
        comm.mine<int32_t>(w.packed_routes[epoch & 1]) + first * top_k + lane;
    const int32_t* const places = comm.mine<int32_t>(w.places[epoch & 1]) + first;
#pragma unroll
    for (int i = 0; i < most; ++i) {
      packed[i] = i < tokens && lane < top_k ? packed_routes[i * top_k] : -1;
      place[i] = i < tokens && layout == RowLayout::rank ? places[i] : 0;
    }
  }
};

/// Writes the weights that go with the output rows of a chunk, and with its positions.
template <int most>
__device__ inline void place_weights(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                     const Item& item, const ChunkRows<most>& chunk) {
  const int top_k = comm.top_k(), lane = lane_id(), tokens = static_cast<int>(item.end - item.begin);
  if (lane >= top_k) return;
  const float* const weights = comm.mine<float>(comm.window.weights[epoch & 1]) +
                               (item.source * comm.window.shape.max_tokens + item.begin) * top_k + lane;
  float* const out = reinterpret_cast<float*>(args.out_weights);
#pragma unroll
  for (int i = 0; i < most; ++i) {
    if (i >= tokens) continue;
    if (args.layout == RowLayout::expert) {
      if (chunk.position[i] >= 0) out[chunk.position[i]] = weights[i * top_k];
    } else if (chunk.row[i] >= 0) {
      const float weight = chunk.local[i] >= 0 ? weights[i * top_k] : 0.0f;
      out[int64_t{chunk.row[i]} * top_k + lane] = weight;
      if (args.out_index_weights != nullptr && chunk.position[i] >= 0)
        reinterpret_cast<float*>(args.out_index_weights)[chunk.position[i]] = weight;
    }
  }
}

/// Whose sum is this rank's among those of a token, lane k knowing the owner of its k: at a home on this node
/// each owner here and each other node has one; for one on another node, each owner here.
__device__ inline int slot_between_nodes(const Comm& comm, int32_t home, int32_t owner) {
  const int32_t sender = comm.is_local(home) || comm.is_local(owner) ? comm.sender(owner) : -1;
  return __popc(__ballot_sync(0xffffffffu, first_with(sender) && sender < comm.rank));
}

/// Dispatch: the positions and output rows of a chunk, by what its source has pushed and where its rows
/// begin.
template <int most>
__device__ inline ChunkRows<most> resolve_rows(const Comm& comm, const ReceiveArguments& args,
                                               const RowTables& tables, const Item& item,
                                               const ChunkRoutes<most>& routes) {
  ChunkRows<most> chunk;
  const int tokens = static_cast<int>(item.end - item.begin), number_bits = comm.window.number_bits;
  const bool by_expert = args.layout == RowLayout::expert;
  const int32_t* const bases = tables.bases + item.source * comm.local_experts;
  const int32_t source_base = by_expert ? 0 : tables.source_bases[item.source];
  const auto fitting = [](int32_t number, int64_t capacity) {
    return number < capacity ? number : kRowDropped;
  };
#pragma unroll
  for (int i = 0; i < most; ++i) {
    chunk.position[i] = chunk.row[i] = kRowElsewhere;
    chunk.local[i] = chunk.slot[i] = -1;
    if (i >= tokens) continue;
    const int32_t packed = routes.packed[i], expert = packed >= 0 ? packed >> number_bits : kNoExpert;
    const int32_t owner = expert_owner(expert, comm.local_experts);
    const bool mine = owner == comm.rank;
    const bool here = __any_sync(0xffffffffu, mine);
    const bool leads = first_with(owner);
    const int slot = comm.rail.others == 0 ? __popc(__ballot_sync(0xffffffffu, leads && owner < comm.rank))
                                           : slot_between_nodes(comm, item.source, owner);
    if (here) chunk.slot[i] = slot;
    if (mine) chunk.local[i] = expert - comm.rank * comm.local_experts;
    if (!by_expert && here) chunk.row[i] = fitting(source_base + routes.place[i], args.rows);
    if (mine)  // a position without its row stays empty
      chunk.position[i] =
          chunk.row[i] == kRowDropped
              ? kRowDropped
              : fitting(bases[chunk.local[i]] + (packed & ((1 << number_bits) - 1)), args.positions);
  }
  return chunk;
}

/// Writes the rows of a chunk into the plan, and what goes with a row to its place.
template <int most>
__device__ inline void write_rows(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                  const Item& item, const ChunkRows<most>& chunk) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id(), tokens = static_cast<int>(item.end - item.begin);
  const bool by_expert = args.layout == RowLayout::expert;
  const int64_t first = item.source * comm.window.shape.max_tokens + item.begin;
#pragma unroll
  for (int i = 0; i < most; ++i) {
    if (i >= tokens) continue;
    if (lane == 0) plan.at(plan.fields.slots)[first + i] = chunk.slot[i];
    if (lane == 0 && !by_expert) plan.at(plan.fields.rows)[first + i] = chunk.row[i];
    if (lane >= top_k) continue;
    plan.at(plan.fields.positions)[(first + i) * top_k + lane] = chunk.position[i];
    if (by_expert) continue;
    if (args.out_ids != nullptr && chunk.row[i] >= 0)
      args.out_ids[int64_t{chunk.row[i]} * top_k + lane] = chunk.local[i];
    if (args.out_index != nullptr && chunk.position[i] >= 0) args.out_index[chunk.position[i]] = chunk.row[i];
  }
  if (args.out_weights != nullptr) place_weights(comm, args, epoch, item, chunk);
}

__device__ inline void zero(std::byte* memory, int64_t bytes) {
  for (int64_t i = lane_id(); i < bytes; i += 32) memory[i] = std::byte{0};
}

/// Zeroes the alignment rows of local expert `e`.
__device__ inline void zero_padding(const Comm& comm, const ReceiveArguments& args, const RowTables& tables,
                                    int64_t e) {
  const DeviceShape& s = comm.window.shape;
  const int64_t first = tables.ends[e], rows = tables.offsets[e] - first;
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
