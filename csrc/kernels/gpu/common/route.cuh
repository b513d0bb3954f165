// Routes of a dispatch. The source rank numbers its rows for each expert. The route of a (token, k) is its
// expert and this number. A receiver adds the position at which the source's rows for the expert begin.
//   1. blocks divide the tokens in order, and warps a block's tokens. Each warp counts its ids in a histogram
//   2. blocks exchange their counts. A histogram then holds where its warp's rows for each expert begin
//   3. warps walk their tokens again in order, number rows, and push the routes to every rank of the node
// The start (which announces the dispatch), counts and routes are sent as soon as they are known, in words
// that hold the epoch. Such words cross a link once and need no fence. Afterwards the caller signals the
// record (SignalRecord: the arguments of the operation), which may arrive before these words.
//
// Routes for other nodes go to host memory, one copy for all nodes. Relay indices go with them: for each node
// the tokens that it needs are numbered, like an expert's rows. The last block to end sends this data.
//
// Example: ids {5} {2} {5} {5} of one source. Numbers are 0, 0, 1, 2; a receiver with 40 rows of earlier
// experts and 3 of earlier sources for expert 5 puts token 3 into row 40 + 3 + 2.
#pragma once

#include "device/rail.cuh"
#include "kernels/gpu/common/arguments.hpp"
#include "kernels/gpu/common/pipe.cuh"
#include "layout/routing.hpp"

namespace moecomm::gpu {

using device::Comm;
using device::PlanView;
using device::Rail;

__device__ inline int64_t read_id(const SendArguments& args, int64_t index) {
  return args.wide_ids ? static_cast<const int64_t*>(args.ids)[index]
                       : static_cast<const int32_t*>(args.ids)[index];
}

/// Returns an id if it names an expert, else kNoExpert.
__device__ inline int32_t valid_id(const Comm& comm, int64_t id) {
  return id >= 0 && id < comm.window.shape.num_experts ? static_cast<int32_t>(id) : kNoExpert;
}

/// Notes a bad id; of several the one at the lowest `index` is kept. `repeats`: 1 + the earlier k at which
/// the token has the same id; 0: this id is no repeat.
__device__ inline void note_bad_id(DeviceState& state, int64_t index, int repeats) {
  atomicMin(reinterpret_cast<unsigned long long*>(&state.bad_id),
            static_cast<unsigned long long>(index) << 8 | static_cast<unsigned long long>(repeats));
}

/// One step of a RouteWalk as one lane holds it: one (token, k). The lanes of a warp hold whole tokens.
struct RouteStep {
  int64_t token;
  int32_t k;
  bool active;
  uint32_t token_lanes;  ///< lanes of the same token
  int32_t id, owner;     ///< the expert, and the rank that has it; -1: none
  uint32_t owner_lanes;  ///< lanes of the token whose ids have this owner; this lane if it has none
  bool first;            ///< this lane is the first of owner_lanes
  int32_t sender;        ///< rank in whose slot the owner's sum arrives in combine (Comm::sender)
  bool first_of_sender;  ///< this lane is the first of its token with this sender
};

/// A warp's walk over tokens [begin, end), in steps of as many whole tokens as its lanes can hold.
class RouteWalk {
 public:
  __device__ RouteWalk(const Comm& comm, int64_t begin, int64_t end)
      : comm_(comm), top_k_(comm.top_k()), tokens_(32 / comm.top_k()), begin_(begin), end_(end) {}

  /// Calls use(step, value) for each step: value = load(index of the (token, k)), step.id = id(step, value).
  /// Loads of several steps overlap. The loop over values is not unrolled: a warp has few steps.
  template <class Load, class Id, class Use>
  __device__ void for_each(const Load& load, const Id& id, const Use& use) const {
    constexpr int kAhead = 4;
    using Value = decltype(load(int64_t{}));
#pragma unroll 1
    for (int64_t next = begin_; next < end_; next += kAhead * tokens_) {
      Value values[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const RouteStep s = place(next + i * tokens_);
        values[i] = s.active ? load(s.token * top_k_ + s.k) : Value{};
      }
#pragma unroll 1
      for (int i = 0; i < kAhead; ++i) {
        RouteStep s = place(next + i * tokens_);
        if (next + i * tokens_ >= end_) break;
        const Value value = values[0];
#pragma unroll
        for (int j = 0; j + 1 < kAhead; ++j) values[j] = values[j + 1];
        s.id = s.active ? id(s, value) : kNoExpert;
        s.owner = comm_.owner(s.id);
        const uint32_t same = __match_any_sync(0xffffffffu, s.owner >= 0 ? s.owner : -1 - lane_id());
        s.owner_lanes = s.owner >= 0 ? same & s.token_lanes : same;
        s.first = s.owner >= 0 && (s.owner_lanes & ((1u << lane_id()) - 1)) == 0;
        s.sender = s.owner;
        s.first_of_sender = s.first;
        if (comm_.rail.others > 0) {
          s.sender = comm_.sender(s.owner);
          const uint32_t together =
              __match_any_sync(0xffffffffu, s.sender >= 0 ? s.sender : -1 - lane_id()) & s.token_lanes;
          s.first_of_sender = s.owner >= 0 && (together & ((1u << lane_id()) - 1)) == 0;
        }
        use(s, value);
      }
    }
  }

 private:
  /// Returns this lane's view of the step from token `first` on; fields that depend on the id stay unset.
  __device__ RouteStep place(int64_t first) const {
    const int within = lane_id() / top_k_;
    RouteStep s;
    s.k = lane_id() - within * top_k_;
    s.token = first + within;
    s.active = within < tokens_ && s.token < end_;
    s.token_lanes = ((top_k_ == 32 ? 0u : 1u << top_k_) - 1) << (within * top_k_ & 31);
    return s;
  }

  const Comm& comm_;
  const int top_k_, tokens_;
  const int64_t begin_, end_;
};

/// Numbers the lanes of each `bin` in order, from histogram[bin] on, and advances histogram[bin]; -1: no bin.
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

/// Writes to the plan what a combine needs for the step's token: the number of sums that are added up, and
/// which of them this rank makes itself (or kNoOwnSlot).
__device__ inline void note_home(const Comm& comm, const SendArguments& args, const RouteStep& s) {
  const PlanView plan{args.plan, comm.plan_fields};
  const uint32_t sums = __ballot_sync(0xffffffffu, s.first_of_sender) & s.token_lanes;
  const uint32_t below =
      __ballot_sync(0xffffffffu, s.first_of_sender && s.sender < comm.rank) & s.token_lanes;
  const uint32_t own = __ballot_sync(0xffffffffu, s.owner == comm.rank) & s.token_lanes;
  if (s.active && s.k == 0)
    plan.at(plan.fields.home)[s.token] = __popc(sums) | (own != 0 ? __popc(below) : kNoOwnSlot) << 16;
}

/// True in one lane for each other node that needs the step's token.
__device__ inline bool leaves_node(const Comm& comm, const RouteStep& s) {
  return comm.rail.others > 0 && s.first_of_sender && !comm.is_local(s.owner);
}

/// Marks the step's token as needed by no other node; push_routes then marks the nodes that need it.
__device__ inline void clear_home_index(const Comm& comm, const SendArguments& args, const RouteStep& s) {
  const PlanView plan{args.plan, comm.plan_fields};
  if (!s.active) return;
  for (int32_t other = s.k; other < comm.rail.others; other += comm.top_k())
    plan.at(plan.fields.home_index)[other * comm.window.shape.max_tokens + s.token] = -1;
}

/// What a warp loads for a (token, k) in step 3 (see the top of this file).
struct RoutedId {
  int32_t id = kNoExpert;
  float weight = 0;
};

/// Returns a Route as the two words in which it is stored.
__device__ inline ptx::Pair route_word(uint64_t epoch, int32_t packed, float weight, int32_t place) {
  return {static_cast<uint32_t>(packed) | uint64_t{__float_as_uint(weight)} << 32,
          EpochNumber::word(epoch, place)};
}

/// Pushes a route of `source` to every rank of the node, as entry `entry` = token * top_k + k.
__device__ inline void push_route(const Comm& comm, int32_t source, uint64_t epoch, int64_t entry,
                                  const ptx::Pair& route) {
  const std::byte* const own = reinterpret_cast<std::byte*>(comm.routes(comm.own, source, epoch) + entry);
  const int64_t to = own - comm.own;
#pragma unroll 1
  for (int32_t i = 0; i < comm.local_ranks; ++i) device::put(comm.bases[comm.first_rank + i] + to, route);
}

/// Pushes count number `bin` of `source` to every rank of the node.
__device__ inline void push_count(const Comm& comm, int32_t source, uint64_t epoch, int64_t bin,
                                  int32_t count) {
#pragma unroll 1
  for (int32_t i = 0; i < comm.local_ranks; ++i)
    device::put(comm.counts(comm.bases[comm.first_rank + i], source, epoch) + bin,
                EpochNumber::word(epoch, count));
}

/// Tells all ranks of the node that a dispatch begins; notes the time. `threads` threads share the ranks.
__device__ inline void push_starts(const Comm& comm, const SignalRecord& record, int thread, int threads) {
  if (thread == 0) device::note_phase(comm, Operation::dispatch, Phase::announced);
  for (int32_t i = thread; i < comm.local_ranks; i += threads) {
    DispatchStart* const starts =
        comm.at<DispatchStart>(comm.bases[comm.first_rank + i], comm.window.starts[record.epoch & 1]);
    device::put(starts + comm.rank, {arguments_hash(record), EpochNumber::word(record.epoch, 0)});
  }
}

/// Step 3 for one warp: numbers rows, and pushes routes to every rank of the node, which use the routes to
/// their experts. Calls note_home for each token. Writes routes for other nodes to host memory.
__device__ inline void push_routes(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                   const RouteWalk& walk, const int32_t* local_topk_idx, int32_t* histogram) {
  const DeviceWindow& w = comm.window;
  const bool by_expert = args.layout == RowLayout::expert;
  const float* const weights = reinterpret_cast<const float*>(args.weights);
  walk.for_each(
      [&](int64_t i) { return RoutedId{local_topk_idx[i], weights != nullptr ? weights[i] : 0.0f}; },
      [](const RouteStep&, const RoutedId& routed) { return routed.id; },
      [&](const RouteStep& s, const RoutedId& routed) {
        note_home(comm, args, s);
        const int32_t row = take_number(histogram, s.id);
        const int32_t packed = s.id < 0 ? -1 : s.id << w.number_bits | row;
        const int64_t entry = s.token * comm.top_k() + s.k;
        int32_t place = 0;
        if (!by_expert) {
          const int32_t of_first = take_number(histogram + w.shape.num_experts, s.first ? s.owner : -1);
          place = max(__shfl_sync(0xffffffffu, of_first, __ffs(static_cast<int>(s.owner_lanes)) - 1), 0);
        }
        if (s.active)
          push_route(comm, comm.rank, epoch, entry, route_word(epoch, packed, routed.weight, place));
        if (comm.rail.others == 0) return;
        const Rail& rail = comm.rail;
        if (s.active) {
          int32_t* const packed_routes = rail.at<int32_t>(rail.layout.ids[epoch & 1] + rail.counts_bytes);
          packed_routes[entry] = packed;
          if (!by_expert) packed_routes[args.tokens * comm.top_k() + entry] = place;
          if (weights != nullptr) rail.at<float>(rail.layout.weights[epoch & 1])[entry] = routed.weight;
        }
        const bool leaves = leaves_node(comm, s);
        const int32_t node = s.owner / comm.local_ranks;
        const int32_t number = take_number(histogram + w.shape.counts(), leaves ? node : -1);
        if (leaves)
          PlanView{args.plan, comm.plan_fields}.at(
              comm.plan_fields.home_index)[rail.other_of(node) * w.shape.max_tokens + s.token] = number;
      });
}

/// Sends a dispatch's record, routes, weights and relay indices to other nodes, via host memory. Whole block.
__device__ inline void send_tables(const Comm& comm, const SendArguments& args, const SignalRecord& record) {
  const Rail& rail = comm.rail;
  const PlanView plan{args.plan, comm.plan_fields};
  const int64_t most = comm.window.shape.max_tokens, entries = args.tokens * comm.top_k();
  int32_t* const index = rail.at<int32_t>(rail.layout.index[record.epoch & 1]);
  for (int32_t other = 0; other < rail.others; ++other)
    for (int64_t token = threadIdx.x; token < args.tokens; token += kThreads)
      index[other * most + token] = __ldcg(plan.at(plan.fields.home_index) + other * most + token);
  __syncthreads();
  if (threadIdx.x == 0) ptx::fence_sys();
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t ids = rail.counts_bytes + entries * 4 * (args.layout == RowLayout::rank ? 2 : 1);
  for (int32_t i = 0; i < rail.others; ++i) {
    const int32_t other = (rail.node + i) % rail.others;
    const int64_t rows = __ldcg(plan.at(plan.fields.node_tokens) + other);
    if (thread == 0) device::send_head(comm, record, other, rows, device::chunks_of(rail, rows), false);
    device::push_pieces(comm, Command::Kind::ids, other, ids, record.epoch, thread, kThreads);
    device::push_pieces(comm, Command::Kind::index, other, args.tokens * 4, record.epoch, thread, kThreads);
    if (args.weights != nullptr)
      device::push_pieces(comm, Command::Kind::weights, other,
                          entries * weight_bytes(comm.window.shape.dtype), record.epoch, thread, kThreads);
  }
}

/// Returns the record of a dispatch. With `may_be_bad` the record reports an error if a bad id was found.
__device__ inline SignalRecord dispatch_record(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                               bool may_be_bad) {
  SignalRecord record{};
  record.epoch = epoch;
  record.operation = Operation::dispatch;
  record.caller = args.caller;
  record.capacity = args.capacity;
  record.tokens = static_cast<int32_t>(args.tokens);
  record.alignment = static_cast<int32_t>(args.alignment);
  record.layout = args.layout;
  record.carries = kCarriesRows | args.after | (args.weights != nullptr ? kCarriesWeights : 0u);
  record.detail = args.positions;
  const uint64_t bad = may_be_bad ? ptx::load_relaxed_gpu(&comm.state().bad_id) : ~uint64_t{0};
  if (bad != ~uint64_t{0}) {
    record.error = static_cast<uint32_t>(ErrorKind::invalid_routing);
    record.rows_offset = static_cast<int64_t>(bad >> 8 | (bad & 0xff) << 48);
    record.detail = read_id(args, static_cast<int64_t>(bad >> 8));
  }
  return record;
}

/// Computes and sends counts and routes (steps 1 to 3) in `blocks` blocks; false if their wait for each other
/// fails. If true, the caller's first block signals the records. `histogram`: shared memory, overwritten.
__device__ inline bool route(const Comm& comm, const SendArguments& args, uint64_t epoch, int blocks,
                             int32_t* histogram, int64_t histogram_words, int32_t* shared_word) {
  const DeviceWindow& w = comm.window;
  const int bins = static_cast<int>(w.shape.bins()), counts = static_cast<int>(w.shape.counts());
  const int experts = static_cast<int>(w.shape.num_experts);
  const int top_k = comm.top_k(), warp = warp_id(), block = static_cast<int>(blockIdx.x);
  const int warps = static_cast<int>(min(static_cast<int64_t>(kWarps), histogram_words / bins));
  DeviceState& state = comm.state();
  const PlanView plan{args.plan, comm.plan_fields};
  int32_t* const local_topk_idx = plan.at(plan.fields.local_topk_idx);

  for (int i = threadIdx.x; i < warps * bins; i += kThreads) histogram[i] = 0;
  __syncthreads();

  const int64_t block_begin = args.tokens * block / blocks, block_end = args.tokens * (block + 1) / blocks;
  const int64_t span = block_end - block_begin;
  const int64_t begin = block_begin + span * min(warp, warps) / warps;
  const int64_t end = block_begin + span * min(warp + 1, warps) / warps;
  int32_t* const own = histogram + min(warp, warps - 1) * bins;

  const RouteWalk walk(comm, begin, end);
  // 1. Counts ids.
  walk.for_each([&](int64_t index) { return read_id(args, index); },
                [&](const RouteStep& s, int64_t id) {
                  if (id < -1 || id >= experts) note_bad_id(state, s.token * top_k + s.k, 0);
                  return valid_id(comm, id);
                },
                [&](RouteStep s, int64_t) {
                  const uint32_t same =
                      __match_any_sync(0xffffffffu, s.id >= 0 ? s.id : -1 - lane_id()) & s.token_lanes;
                  const uint32_t below = same & ((1u << lane_id()) - 1);
                  if (s.id >= 0 && below != 0) {  // a token names an expert twice
                    note_bad_id(state, s.token * top_k + s.k,
                                (__ffs(static_cast<int>(below)) - 1) % top_k + 1);
                    s.id = kNoExpert;
                    s.first = s.first_of_sender = false;
                  }
                  if (s.active) local_topk_idx[s.token * top_k + s.k] = s.id;
                  if (s.id >= 0) atomicAdd(&own[s.id], 1);
                  if (s.first) atomicAdd(&own[experts + s.owner], 1);
                  if (leaves_node(comm, s)) atomicAdd(&own[counts + s.owner / comm.local_ranks], 1);
                  clear_home_index(comm, args, s);
                });
  __syncthreads();

  // 2. Exchanges counts.
  int32_t* const scratch = comm.mine<int32_t>(w.route_counts);
  if (blocks > 1) {
#pragma unroll 1
    for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
      int32_t sum = 0;
#pragma unroll 4
      for (int i = 0; i < warps; ++i) sum += histogram[i * bins + bin];
      __stcg(&scratch[int64_t{block} * bins + bin], sum);
    }
    __syncthreads();
    bool counted = true;
    if (threadIdx.x == 0) {
      __threadfence();
      ptx::add_acq_rel_gpu(&state.route_counted, 1);
      // This wait goes on after a cancellation: it waits for no peer, and other nodes need what follows.
      counted = device::wait_until(comm, {comm.rank, WaitPhase::blocks, Operation::dispatch, epoch, false},
                                   device::BlockCount{&state.route_counted, static_cast<uint32_t>(blocks)});
    }
    if (!__syncthreads_and(counted)) return false;
  }
#pragma unroll 1
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    int32_t next = 0;
#pragma unroll 8
    for (int i = 0; i < block; ++i) next += __ldcg(&scratch[int64_t{i} * bins + bin]);
#pragma unroll 2
    for (int i = 0; i < warps; ++i) {
      const int32_t count = histogram[i * bins + bin];
      histogram[i * bins + bin] = next;
      next += count;
    }
    if (block != blocks - 1) continue;
    if (bin < counts) {
      push_count(comm, comm.rank, epoch, bin, next);
      if (comm.rail.others > 0) comm.rail.at<int32_t>(comm.rail.layout.ids[epoch & 1])[bin] = next;
    } else if (bin - counts != comm.rail.node) {
      plan.at(plan.fields.node_tokens)[comm.rail.other_of(bin - counts)] = next;
    }
  }
  if (block == blocks - 1 && threadIdx.x == kThreads - 1)
    push_count(comm, comm.rank, epoch, counts, static_cast<int32_t>(args.tokens));
  if (block == 0 && warp == kWarps - 1)
    push_starts(comm, dispatch_record(comm, args, epoch, true), lane_id(), 32);
  __syncthreads();

  // 3. Numbers rows and pushes routes.
  push_routes(comm, args, epoch, walk, local_topk_idx, own);

  if (comm.rail.others == 0) return true;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_sys();
    *shared_word = ptx::add_acq_rel_gpu(&state.route_done, 1) + 1 == static_cast<uint32_t>(blocks);
  }
  __syncthreads();
  if (*shared_word != 0) send_tables(comm, args, dispatch_record(comm, args, epoch, true));
  return true;
}

}  // namespace moecomm::gpu
