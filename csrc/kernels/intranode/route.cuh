// Where a source's rows go, worked out by the source: for each (token, k) its number among the source's rows
// for that expert, so that a receiver only has to add where the source's rows of the expert begin.
//   1. blocks share the tokens in order, warps share a block's; each warp counts its ids into a histogram
//   2. blocks exchange their counts; a histogram then holds where its warp's rows of each expert begin
//   3. warps walk their tokens again in order, hand out numbers, and push them to every rank
//   4. the last block to end signals the records of the dispatch
// Example: ids {5} {2} {5} {5} of one source. Numbers are 0, 0, 1, 2; a receiver with 40 rows of earlier
// experts and 3 of earlier sources for expert 5 puts token 3 into row 40 + 3 + 2.
#pragma once

#include "kernels/intranode/arguments.hpp"
#include "kernels/intranode/pipe.cuh"
#include "layout/routing.hpp"
#include "transport/device/signal.cuh"

namespace moecomm::intranode {

using device::Comm;
using device::PlanView;

__device__ inline int64_t read_id(const SendArguments& args, int64_t index) {
  return args.wide_ids ? static_cast<const int64_t*>(args.ids)[index]
                       : static_cast<const int32_t*>(args.ids)[index];
}

/// What a lane knows about its (token, k) in a step of a warp over whole tokens.
struct RouteStep {
  int64_t token;
  int32_t k;
  bool active;
  uint32_t token_lanes;  ///< lanes of the same token
  int32_t id, owner;     ///< -1: none
  bool first;            ///< the first of the token's ids with this owner
};

class RouteWalk {
 public:
  __device__ RouteWalk(const Comm& comm, int64_t begin, int64_t end)
      : comm_(comm), top_k_(comm.top_k()), tokens_(32 / comm.top_k()), next_(begin), end_(end) {}

  /// The next tokens; false after the last. read(index) gives a lane's checked id.
  template <class Read>
  __device__ bool step(RouteStep& s, const Read& read) {
    if (next_ >= end_) return false;
    const int lane = lane_id(), within = lane / top_k_;
    s.k = lane - within * top_k_;
    s.token = next_ + within;
    s.active = within < tokens_ && s.token < end_;
    s.token_lanes = ((top_k_ == 32 ? 0u : 1u << top_k_) - 1) << (within * top_k_ & 31);
    next_ += tokens_;
    s.id = s.active ? read(s, s.token * top_k_ + s.k) : kNoExpert;
    s.owner = expert_owner(s.id, comm_.local_experts);
    const uint32_t same = __match_any_sync(0xffffffffu, s.owner >= 0 ? s.owner : -1 - lane) & s.token_lanes;
    s.first = s.owner >= 0 && (same & ((1u << lane) - 1)) == 0;
    return true;
  }

 private:
  const Comm& comm_;
  const int top_k_, tokens_;
  int64_t next_, end_;
};

/// Number of a lane among those of lower lanes with the same `bin`, counted on from histogram[bin]. -1: no
/// bin.
__device__ inline int32_t take_number(int32_t* histogram, int32_t bin) {
  const int lane = lane_id();
  const uint32_t same = __match_any_sync(0xffffffffu, bin >= 0 ? bin : -1 - lane);
  const uint32_t below = same & ((1u << lane) - 1);
  const int32_t number = bin >= 0 ? histogram[bin] + __popc(below) : -1;
  __syncwarp();
  if (bin >= 0 && below == 0) histogram[bin] += __popc(same);
  __syncwarp();
  return number;
}

/// Pushes one step's tokens to every rank.
__device__ inline void push_step(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                 const RouteStep& s, int32_t number, int32_t place) {
  const DeviceWindow& w = comm.window;
  const int top_k = comm.top_k(), lane = lane_id();
  const int64_t max_tokens = w.shape.max_tokens;
  int32_t slot = 0;  // owners below this lane's
  for (int j = 0; j < top_k; ++j) {
    const int from = (lane / top_k * top_k + j) & 31;
    const int32_t owner = __shfl_sync(0xffffffffu, s.first ? s.owner : -1, from);
    slot += owner >= 0 && owner < s.owner;
  }
  const uint32_t firsts = __ballot_sync(0xffffffffu, s.first) & s.token_lanes;
  const uint32_t own = __ballot_sync(0xffffffffu, s.first && s.owner == comm.rank) & s.token_lanes;
  const int32_t own_slot = __shfl_sync(0xffffffffu, slot, own ? __ffs(static_cast<int>(own)) - 1 : lane);
  const PlanView plan{args.plan, comm.plan_fields};
  if (s.active && s.k == 0)
    plan.at(plan.fields.home)[s.token] = __popc(firsts) | (own ? own_slot : kNoOwnSlot) << 16;

  const int64_t entry = (comm.rank * max_tokens + s.token) * top_k + s.k;
  for (int32_t i = 0; i < comm.ranks(); ++i) {
    const int32_t peer = (comm.rank + i) % comm.ranks();
    std::byte* const base = comm.bases[peer];
    const bool goes = s.owner == peer;
    const uint32_t there = __ballot_sync(0xffffffffu, s.first && goes) & s.token_lanes;
    const int from = there ? __ffs(static_cast<int>(there)) - 1 : lane;
    const int32_t there_slot = __shfl_sync(0xffffffffu, slot, from);
    const int32_t there_place = __shfl_sync(0xffffffffu, place, from);
    if (!s.active) continue;
    const int32_t local = s.id - peer * comm.local_experts;
    comm.at<int32_t>(base, w.codes[epoch & 1])[entry] =
        !goes                              ? -1
        : args.layout == RowLayout::expert ? static_cast<int32_t>(local * max_tokens) + number
                                           : local;
    if (s.k == 0)
      comm.at<TokenHead>(base, w.heads[epoch & 1])[comm.rank * max_tokens + s.token] =
          there ? TokenHead{there_slot, there_place} : TokenHead{-1, -1};
    if (args.weights != nullptr && goes) {
      const int64_t home = s.token * top_k + s.k;
      if (w.shape.dtype == DType::float64)
        comm.at<double>(base, w.weights[epoch & 1])[entry] =
            reinterpret_cast<const double*>(args.weights)[home];
      else
        comm.at<float>(base, w.weights[epoch & 1])[entry] =
            reinterpret_cast<const float*>(args.weights)[home];
    }
  }
}

/// Run by blocks [0, blocks) of the send kernel. `histogram`: shared memory, overwritten.
__device__ inline void route(const Comm& comm, const SendArguments& args, uint64_t epoch, int blocks,
                             int32_t* histogram, int64_t histogram_words, int32_t* shared_word) {
  const DeviceWindow& w = comm.window;
  const int bins = static_cast<int>(w.shape.counts()), experts = static_cast<int>(w.shape.num_experts);
  const int top_k = comm.top_k(), warp = warp_id(), block = static_cast<int>(blockIdx.x);
  const int warps = static_cast<int>(min(static_cast<int64_t>(kWarps), histogram_words / bins));
  DeviceState& state = comm.state();
  const PlanView plan{args.plan, comm.plan_fields};
  int32_t* const home_ids = plan.at(plan.fields.home_ids);

  for (int i = threadIdx.x; i < warps * bins; i += kThreads) histogram[i] = 0;
  __syncthreads();

  const int64_t block_begin = args.tokens * block / blocks, block_end = args.tokens * (block + 1) / blocks;
  const int64_t span = block_end - block_begin;
  const int64_t begin = block_begin + span * min(warp, warps) / warps;
  const int64_t end = block_begin + span * min(warp + 1, warps) / warps;
  int32_t* const own = histogram + min(warp, warps - 1) * bins;

  {  // 1
    RouteWalk walk(comm, begin, end);
    RouteStep s;
    const auto read = [&](const RouteStep& step, int64_t index) {
      const int64_t id = read_id(args, index);
      const bool good = id >= -1 && id < experts;
      if (!good)
        atomicMin(reinterpret_cast<unsigned long long*>(&state.bad_id), static_cast<unsigned long long>(index)
                                                                            << 8);
      (void)step;
      return good ? static_cast<int32_t>(id) : kNoExpert;
    };
    while (walk.step(s, read)) {
      const int lane = lane_id();
      const uint32_t same = __match_any_sync(0xffffffffu, s.id >= 0 ? s.id : -1 - lane) & s.token_lanes;
      const uint32_t below = same & ((1u << lane) - 1);
      if (s.id >= 0 && below != 0) {  // one expert twice in a token
        const int k = (__ffs(static_cast<int>(below)) - 1) % top_k;
        atomicMin(reinterpret_cast<unsigned long long*>(&state.bad_id),
                  static_cast<unsigned long long>(s.token * top_k + s.k) << 8 | (k + 1));
        s.id = kNoExpert;
        s.first = false;
      }
      if (s.active) home_ids[s.token * top_k + s.k] = s.id;
      if (s.id >= 0) atomicAdd(&own[s.id], 1);
      if (s.first) atomicAdd(&own[experts + s.owner], 1);
    }
  }
  __syncthreads();

  // 2
  int32_t* const scratch = comm.mine<int32_t>(w.route_counts);
  if (blocks > 1) {
    for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
      int32_t sum = 0;
      for (int i = 0; i < warps; ++i) sum += histogram[i * bins + bin];
      __stcg(&scratch[int64_t{block} * bins + bin], sum);
    }
    __syncthreads();
    bool counted = true;
    if (threadIdx.x == 0) {
      __threadfence();
      ptx::add_acq_rel_gpu(&state.route_counted, 1);
      counted = device::wait_until(comm, {comm.rank, WaitPhase::blocks, Operation::dispatch, epoch},
                                   device::BlockCount{&state.route_counted, static_cast<uint32_t>(blocks)});
    }
    if (!__syncthreads_and(counted)) return;
  }
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    int32_t next = 0;
    for (int i = 0; i < block; ++i) next += __ldcg(&scratch[int64_t{i} * bins + bin]);
    for (int i = 0; i < warps; ++i) {
      const int32_t count = histogram[i * bins + bin];
      histogram[i * bins + bin] = next;
      next += count;
    }
    if (block == blocks - 1)
      for (int32_t i = 0; i < comm.ranks(); ++i)
        comm.at<int32_t>(comm.bases[i], w.counts[epoch & 1])[int64_t{comm.rank} * bins + bin] = next;
  }
  __syncthreads();

  {  // 3
    RouteWalk walk(comm, begin, end);
    RouteStep s;
    const auto read = [&](const RouteStep&, int64_t index) { return home_ids[index]; };
    while (walk.step(s, read)) {
      const int32_t number = args.layout == RowLayout::expert ? take_number(own, s.id) : 0;
      const int32_t place = take_number(own, s.first ? experts + s.owner : -1);
      push_step(comm, args, epoch, s, number, place);
    }
  }

  // 4
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_sys();
    *shared_word = ptx::add_acq_rel_gpu(&state.route_done, 1) + 1 == static_cast<uint32_t>(blocks);
  }
  __syncthreads();
  if (*shared_word == 0) return;
  SignalRecord record{};
  record.epoch = epoch;
  record.operation = Operation::dispatch;
  record.capacity = args.capacity;
  record.tokens = static_cast<int32_t>(args.tokens);
  record.alignment = static_cast<int32_t>(args.alignment);
  record.layout = args.layout;
  record.carries = kCarriesRows | (args.weights != nullptr ? kCarriesWeights : 0u);
  const uint64_t bad = ptx::load_relaxed_gpu(&state.bad_id);
  if (bad != ~uint64_t{0}) {
    record.error = static_cast<uint32_t>(ErrorKind::invalid_routing);
    record.rows_offset = static_cast<int64_t>(bad >> 8 | (bad & 0xff) << 48);
    record.detail = read_id(args, static_cast<int64_t>(bad >> 8));
  }
  device::signal_records(comm, record, static_cast<int>(threadIdx.x), kThreads);
}

}  // namespace moecomm::intranode
