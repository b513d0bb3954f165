// Combine between nodes, for tokens whose own rank (home) is on another node. The owners on this node write
// their sums, in the dtype of rows, to the rank here that has the home's local number (its rail).
// That rank adds them by ascending owner rank in float32, rounds once more or quantises, and sends one row.
// Blocks of its reducing kernel do this.
#pragma once

#include "kernels/gpu/common/strip.cuh"
#include "kernels/gpu/common/token_order.cuh"
#include "kernels/gpu/internode/relay_records.cuh"

namespace moecomm::gpu {

/// Waits until `owners`, ranks of this node, have written their sums for a chunk of `home`. All lanes.
__device__ inline bool wait_partials(const Comm& comm, int32_t home, uint64_t epoch, int64_t chunk,
                                     const gpu::PeerSet& owners) {
  bool here = true;
  owners.for_each([&](int32_t owner) {
    here = here &&
           device::wait_sums_here(comm, {owner, WaitPhase::rows, Operation::combine, epoch}, home, chunk);
  });
  __syncwarp();  // all lanes load what one lane has acquired
  return __all_sync(0xffffffffu, here);
}

/// Adds up the sums for tokens of this rank's rail, and sends the totals in format `wire`. All announced rows
/// are sent even if the operation is cancelled; they may then hold anything.
template <DType dtype, WireFormat wire>
__device__ inline void relay_sums(const Comm& comm, int32_t* plan_words, uint64_t epoch) {
  constexpr int kSteps = 4, kBatch = 2;
  const PlanView plan{plan_words, comm.plan_fields};
  const int32_t others = comm.rail.others;
  const int lane = gpu::lane_id();
  const int64_t row_bytes = comm.window.shape.row_bytes(), sum_bytes = sum_row_bytes(comm, wire);
  const int64_t scales_at = sum_scales_at(comm, wire);
  const int vectors = static_cast<int>(row_bytes / 16);
  int64_t most_chunks = 0;
  for (int32_t other = 0; other < others; ++other)
    most_chunks = max(most_chunks, chunk_count(plan.at(plan.fields.tokens)[comm.rail_rank(other)]));
  gpu::Claims claims(&comm.state().relay_summed);
  for (int64_t claim = claims.take(); claim < most_chunks * others; claim = claims.take()) {
    const int64_t number = claim / others;
    const auto other = static_cast<int32_t>((comm.rail.node + claim) % others);
    const int32_t home = comm.rail_rank(other);
    const int64_t tokens = plan.at(plan.fields.tokens)[home];
    if (number >= chunk_count(tokens)) continue;
    const RelayChunk chunk = relay_chunk(comm, plan, other, tokens, number);
    gpu::PeerSet owners;
    int32_t counts = 0;  // number of sums for this lane's token
    for (uint32_t left = chunk.tokens; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int32_t owner = relayed_owner(comm, plan, other, chunk.begin + i);
      const int count = __popc(__ballot_sync(0xffffffffu, owner >= 0));
      if (lane == i) counts = count;
      owners.insert_lanes(owner, owner >= 0);
    }
    const bool here = wait_partials(comm, home, epoch, number, owners);
    if (!here && gpu::failed_for_warp(comm)) return;
    for (uint32_t left = here ? chunk.tokens : 0; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int count = __shfl_sync(0xffffffffu, counts, i);
      std::byte* const to = comm.rail.staged(other, __shfl_sync(0xffffffffu, chunk.number, i), sum_bytes);
      const std::byte* const first_slot = comm.partial_row(comm.own, epoch, other, chunk.begin + i, 0);
      const auto row = [&](int j) { return first_slot + j * row_bytes; };
      for (int first = 0; first < vectors; first += kSteps * 32)
        gpu::sum_rows<dtype, kSteps, kBatch>(count, row, static_cast<const float*>(nullptr), first, vectors)
            .template travelling<wire>(first, vectors)
            .store(to, first, vectors, scales_at);
    }
    __syncwarp();
    if (chunk.number >= 0) {
      ptx::fence_sys();
      device::row_staged(comm, wire, other, chunk.number, plan.at(plan.fields.relay_tokens)[other], epoch);
    }
    // All ranks of this node get a credit: a rank that waits for this memory does not know who wrote to it.
    if (tokens > comm.window.partial_tokens)
      for (int32_t r = lane; r < comm.local_ranks; r += 32)
        device::signal(device::sums_credit_flag(comm, comm.first_rank + r, home, number), epoch);
  }
}

/// Sends the weight gradients of the rail's tokens once this node's ranks have written theirs. Whole block.
__device__ inline void relay_weight_grads(const Comm& comm, int32_t* plan_words, uint64_t epoch,
                                          RelayBlocks relay) {
  const PlanView plan{plan_words, comm.plan_fields};
  const int64_t section = comm.window.shape.max_tokens * comm.top_k();
  constexpr int64_t kPiece = WindowShape::kPieceBytes / sizeof(float);
  for (int32_t i = 0; i < comm.rail.others; ++i) {
    const int32_t other = (comm.rail.node + i) % comm.rail.others, home = comm.rail_rank(other);
    bool here = true;
    for (int32_t r = static_cast<int32_t>(threadIdx.x); here && r < comm.local_ranks;
         r += static_cast<int32_t>(blockDim.x))
      here = device::wait_sums_here(comm, {comm.first_rank + r, WaitPhase::rows, Operation::combine, epoch},
                                    home, comm.gradients_number());
    if (!__syncthreads_and(here) && gpu::failed_for_block(comm)) return;
    const int64_t values = plan.at(plan.fields.tokens)[home] * comm.top_k();
    const float* const from = comm.mine<float>(comm.window.relay_grads[epoch & 1]) + other * section;
    float* const to = comm.rail.weights(comm.rail.layout.outgoing_grads[epoch & 1], other);
    for (int64_t piece = relay.block; piece * kPiece < values; piece += relay.blocks) {
      const int64_t begin = piece * kPiece, end = min(begin + kPiece, values);
      for (int64_t at = begin + threadIdx.x; at < end; at += blockDim.x) to[at] = __ldcg(from + at);
      __syncthreads();
      if (threadIdx.x == 0) {
        ptx::fence_sys();
        device::push_command(comm, {Command::Kind::grads, static_cast<uint8_t>(epoch),
                                    static_cast<uint16_t>(other), static_cast<uint32_t>(piece),
                                    static_cast<uint32_t>((end - begin) * int64_t{sizeof(float)}), 0});
      }
    }
  }
}

}  // namespace moecomm::gpu
