// Relay of records (announcements of an operation). A rail: the ranks with the same local number on all
// nodes. Some blocks of an operation's first kernel forward the records, counts and routes of this rank's
// rail to all ranks of this node, as if the rail's ranks had written there themselves. Starts (DispatchStart)
// are not forwarded: the records of other nodes' ranks stand for them.
#pragma once

#include "device/rail.cuh"
#include "kernels/gpu/common/kernel.cuh"
#include "kernels/gpu/common/route.cuh"
#include "layout/routing.hpp"

namespace moecomm::gpu {

using device::Comm;
using device::PlanView;
using device::Rail;

/// Number of the calling block among those that relay, and how many relay.
struct RelayBlocks {
  int block, blocks;
};

/// Tables of a dispatch from the rail's rank on another node: counts, packed routes, Route::place.
__device__ inline const std::byte* relayed_tables(const Rail& rail, uint64_t epoch, int32_t other) {
  return rail.memory + rail.layout.relay_ids[epoch & 1] + other * rail.ids_bytes;
}

/// Forwards the counts and the number of tokens of a dispatch of `source`. Whole block.
__device__ inline void hand_on_counts(const Comm& comm, const SignalRecord& record, int32_t source,
                                      int32_t other) {
  const int64_t counts = comm.window.shape.counts();
  const auto* const counted =
      reinterpret_cast<const int32_t*>(relayed_tables(comm.rail, record.epoch, other));
  for (int64_t bin = threadIdx.x; bin < comm.window.shape.announced(); bin += blockDim.x)
    push_count(comm, source, record.epoch, bin, bin < counts ? __ldcg(counted + bin) : record.tokens);
}

/// Forwards this block's share of a dispatch's routes from `source`; keeps ids and relay indices in the plan.
__device__ inline void hand_on_tables(const Comm& comm, int32_t* plan_words, const SignalRecord& record,
                                      int32_t source, int32_t other, RelayBlocks relay) {
  const DeviceWindow& w = comm.window;
  const Rail& rail = comm.rail;
  const int parity = static_cast<int>(record.epoch & 1);
  const PlanView plan{plan_words, comm.plan_fields};
  const int64_t tokens = record.tokens, most = w.shape.max_tokens, top_k = comm.top_k();
  const int64_t begin = tokens * relay.block / relay.blocks, end = tokens * (relay.block + 1) / relay.blocks;
  const std::byte* const tables = relayed_tables(rail, record.epoch, other);
  const int32_t* const packed_routes = reinterpret_cast<const int32_t*>(tables + rail.counts_bytes);
  const int32_t* const places = packed_routes + tokens * top_k;
  const int32_t* const index = rail.at<int32_t>(rail.layout.relay_index[parity]) + other * most;
  const float* const weights = rail.weights(rail.layout.relay_weights[parity], other);
  const bool weighted = (record.carries & kCarriesWeights) != 0, by_rank = record.layout == RowLayout::rank;
  for (int64_t i = begin * top_k + threadIdx.x; i < end * top_k; i += blockDim.x) {
    const int32_t packed = __ldcg(packed_routes + i);
    const float weight = weighted ? __ldcg(weights + i) : 0.0f;
    push_route(comm, source, record.epoch, i,
               route_word(record.epoch, packed, weight, by_rank ? __ldcg(places + i) : 0));
    plan.at(plan.fields.relay_ids)[other * most * top_k + i] =
        packed < 0 ? kNoExpert : packed >> w.number_bits;
  }
  for (int64_t token = begin + threadIdx.x; token < end; token += blockDim.x)
    plan.at(plan.fields.relay_index)[other * most + token] = __ldcg(index + token);
}

/// Forwards the rail's records for `epoch`, with error texts and a dispatch's counts; with its routes only if
/// this rank runs a dispatch too. All relaying blocks; false if a record does not arrive.
__device__ inline bool relay_records(const Comm& comm, Operation operation, int32_t* plan_words,
                                     uint64_t epoch, RelayBlocks relay) {
  const Rail& rail = comm.rail;
  __shared__ bool last;
  for (int32_t i = 0; i < rail.others; ++i) {
    const int32_t other = (rail.node + i) % rail.others, source = comm.rail_rank(other);
    const SignalRecord& lines = rail.at<PeerLines>(rail.layout.peers)[source].record[epoch & 1];
    bool here = true;
    if (threadIdx.x == 0)
      here = device::wait_until(comm, {source, WaitPhase::records, operation, epoch, false},
                                device::HostWord{{&lines.epoch, epoch}});
    if (!__syncthreads_and(here)) return false;
    const SignalRecord record = lines;
    const Announcement& head = device::arrived_head(comm, epoch, other);
    const bool same = record.operation == operation;
    // Ranks of this node that dispatch wait for the counts, whichever operation this rank runs.
    if (relay.block == 0 && record.operation == Operation::dispatch)
      hand_on_counts(comm, record, source, other);
    if (same && operation == Operation::dispatch)
      hand_on_tables(comm, plan_words, record, source, other, relay);
    if (relay.block == 0 && record.error != 0 && record.operation == Operation::none) {
      char* const text = comm.mine<char>(comm.window.relay_text[epoch & 1]) + other * kErrorText;
      for (int c = static_cast<int>(threadIdx.x); c < kErrorText; c += static_cast<int>(blockDim.x))
        text[c] = head.text[c];
    }
    RelayState& state = comm.mine<RelayState>(comm.window.relay_state)[other];
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::fence_sys();
      last = ptx::add_acq_rel_gpu(&state.parts, 1) + 1 == static_cast<uint32_t>(relay.blocks);
    }
    __syncthreads();
    if (!last) continue;
    device::signal_records(comm, record, source, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
    if (threadIdx.x == 0) {
      state.parts = 0;
      state.tokens = same ? record.tokens : 0;
      if (same && operation == Operation::dispatch)
        PlanView{plan_words, comm.plan_fields}.at(comm.plan_fields.relay_tokens)[other] =
            static_cast<int32_t>(head.rows);
      ptx::store_release_gpu(&state.forwarded, epoch);
    }
    __syncthreads();  // before `last` is written again
  }
  return true;
}

/// Waits until all records of the rail are forwarded, so that the plan has their data. Whole block.
__device__ inline bool wait_forwarded(const Comm& comm, Operation operation, uint64_t epoch) {
  bool here = true;
  const RelayState* const states = comm.mine<RelayState>(comm.window.relay_state);
  for (int32_t other = static_cast<int32_t>(threadIdx.x); here && other < comm.rail.others;
       other += static_cast<int32_t>(blockDim.x))
    here = device::wait_until(comm, {comm.rail_rank(other), WaitPhase::records, operation, epoch, false},
                              device::EpochFlag{&states[other].forwarded, epoch});
  return __syncthreads_and(here);
}

/// A chunk of a rail rank's tokens as a warp holds it: lane i has the chunk's token i.
struct RelayChunk {
  int64_t begin, end;  ///< tokens
  int32_t number;      ///< relay index (route.cuh) of this lane's token; -1: not needed on this node
  uint32_t tokens;     ///< bit mask of tokens that are needed on this node
};

__device__ inline RelayChunk relay_chunk(const Comm& comm, const PlanView& plan, int32_t other,
                                         int64_t tokens, int64_t chunk) {
  const int64_t size = chunk_tokens(tokens);
  const int lane = gpu::lane_id();
  RelayChunk out{chunk * size, min(chunk * size + size, tokens), -1, 0};
  if (out.begin + lane < out.end && lane < kMaxChunk)
    out.number = plan.at(plan.fields.relay_index)[other * comm.window.shape.max_tokens + out.begin + lane];
  out.tokens = __ballot_sync(0xffffffffu, out.number >= 0);
  return out;
}

/// Returns the rank of this node that owns the expert of this lane's k, for a token of the rail's rank on
/// node `other`. Each rank is returned in one lane only; -1: none. All lanes.
__device__ inline int32_t relayed_owner(const Comm& comm, const PlanView& plan, int32_t other,
                                        int64_t token) {
  const int lane = gpu::lane_id(), top_k = comm.top_k();
  const int64_t at = (other * comm.window.shape.max_tokens + token) * top_k + lane;
  int32_t owner = -1;
  if (lane < top_k) owner = comm.owner(plan.at(plan.fields.relay_ids)[at]);
  if (!comm.is_local(owner)) owner = -1;
  return gpu::first_with(owner) ? owner : -1;
}

}  // namespace moecomm::gpu
