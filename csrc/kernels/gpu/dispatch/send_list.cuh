// Dispatch, sending side: lists the sources and targets of rows for a pipe of warps (move_pipe.cuh), and
// waits before a chunk of tokens reuses another chunk's memory in the staging section.
#pragma once

#include "kernels/gpu/common/route.cuh"
#include "kernels/gpu/dispatch/move_pipe.cuh"

namespace moecomm::gpu {

/// Calls visit(peer, flag) for each of `peers`, until a call returns false. The flag (a credit) says that the
/// peer has read `chunk` of `source`. All lanes; true if all calls return true.
template <class Visit>
__device__ inline bool all_credits(const Comm& comm, int32_t source, uint64_t epoch, int64_t chunk,
                                   const PeerSet& peers, const Visit& visit) {
  bool all = true;
  peers.for_each([&](int32_t peer) {
    all = all && visit(peer, device::EpochFlag{device::credit_here(comm, source, peer, chunk), epoch});
  });
  return __all_sync(0xffffffffu, all);
}

/// Waits until the owners, `peers`, have read all earlier chunks that used this chunk's memory. A credit for
/// the last of these is not enough: an owner without rows in that chunk may give its credit before it has
/// read earlier ones. Calls flush() before a wait, to send what is complete. False if a wait fails.
template <class Flush>
__device__ inline bool wait_for_place(const Comm& comm, Operation operation, int32_t source, int64_t tokens,
                                      uint64_t epoch, int64_t chunk, const PeerSet& peers,
                                      const Flush& flush) {
  const int64_t places = comm.window.chunks_at_once(tokens);
  bool flushed = false;
  for (int64_t before = chunk - places; before >= 0; before -= places) {
    if (all_credits(comm, source, epoch, before, peers,
                    [](int32_t, const device::EpochFlag& flag) { return flag.arrived(); }))
      continue;
    if (!flushed) flush();  // earlier rows must not wait for this chunk
    flushed = true;
    if (!all_credits(comm, source, epoch, before, peers, [&](int32_t peer, const device::EpochFlag& flag) {
          return device::wait_until(comm, {peer, WaitPhase::credit, operation, epoch}, flag);
        }))
      return false;
  }
  open_for_loads();
  return true;
}

/// The most targets that a row can have: ranks that own one of its experts.
__device__ inline int most_owners(const Comm& comm) { return min(comm.top_k(), comm.ranks()); }

/// A list of this rank's tokens with their expert ids, which load while the list before is processed.
template <class Id>
struct SendList {
  int begin = 0, tokens = 0;  ///< first token, and number of tokens; 0: there are no more lists
  Id ids[kMoveRounds];
};

/// Cuts the tokens of chunks [first, all) into lists, and loads their ids. Warps with the same `counter`
/// share the chunks. `each`: most targets of a row; `row_bytes`: bytes of a row; `shift`: as in TokenOrder.
/// All lanes call every function.
template <int workers, class Id>
class SendLister {
 public:
  __device__ SendLister(const SendArguments& args, const TokenLanes& map, const Id* ids, int each,
                        int64_t row_bytes, int64_t first, int64_t all, int shift, uint32_t* counter)
      : ids_(ids),
        map_(map),
        // A chunk that has to wait for memory gets a list of its own.
        size_(args.later
                  ? chunk_tokens(args.tokens)
                  : move_tokens<workers>(map, each, chunk_tokens(args.tokens), args.tokens, row_bytes)),
        begin_(static_cast<int>(first * chunk_tokens(args.tokens))),
        end_(static_cast<int>(min(all * chunk_tokens(args.tokens), args.tokens))),
        order_(max(end_ - begin_, 0), size_, shift),
        claims_(counter) {}

  __device__ SendList<Id> next() {
    SendList<Id> list;
    list.begin = begin_ + order_.next(claims_);
    list.tokens = min(end_ - list.begin, size_);
    const Id* const ids = ids_ + int64_t{list.begin} * map_.top_k + lane_id();
#pragma unroll
    for (int j = 0; j < kMoveRounds; ++j)
      list.ids[j] = map_.has(j, list.tokens) ? ids[j * map_.tokens * map_.top_k] : Id{kNoExpert};
    return list;
  }

 private:
  const Id* const ids_;
  const TokenLanes& map_;
  const int size_, begin_, end_;
  const TokenOrder order_;
  Claims claims_;
};

/// The work of a lister warp: fills lists with this rank's rows, and with their targets, found from `ids`.
template <int workers, class Id>
__device__ void list_own(const Comm& comm, const SendArguments& args, const Id* ids, uint64_t epoch,
                         MoveLister<workers>& pipe) {
  DeviceState& state = comm.state();
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const int shift = __ffs(chunk_tokens(args.tokens)) - 1;
  const TokenLanes map = TokenLanes::of_many(comm.top_k());
  // The first `at_once` chunks wait for no memory; each later chunk reuses the memory of an earlier one.
  const int64_t at_once = comm.window.chunks_at_once(args.tokens);
  SendLister<workers, Id> lister(args, map, ids, most_owners(comm), row_bytes, args.later ? at_once : 0,
                                 args.later ? chunk_count(args.tokens) : at_once,
                                 places_shift(comm, comm.rank, args.tokens),
                                 args.later ? &state.later_next : &state.send_next);
  SendList<Id> next = lister.next();
  while (next.tokens > 0) {
    const SendList<Id> list = next;
    next = lister.next();
    auto& out = pipe.open();
    PeerSet owners;
    int flags = 0;
#pragma unroll
    for (int j = 0; j < kMoveRounds; ++j) {
      if (j * map.tokens >= list.tokens) continue;
      const int token = list.begin + j * map.tokens + map.within;
      int32_t owner = -1;
      if (list.ids[j] >= 0 && list.ids[j] < comm.window.shape.num_experts)
        owner = comm.owner(static_cast<int32_t>(list.ids[j]));
      if (owner == comm.rank && !comm.own_rows_travel()) owner = -1;
      const bool first = first_with(owner, map.lanes);
      pipe.add(map, args.x + token * row_bytes, first,
               first ? comm.staged_row(owner, epoch, comm.rank, token) : nullptr);
      // Lists the flag of each chunk and owner once in a round; a repeat in another round does no harm.
      const int chunk = token >> shift;
      const bool flag = first_with(first ? chunk * comm.ranks() + owner : -1);
      const uint32_t set = __ballot_sync(0xffffffffu, flag);
      if (flag)
        out.flags[flags + __popc(set & ((1u << lane_id()) - 1))] =
            device::arrival_flag(comm, owner, comm.rank, chunk);
      flags += __popc(set);
      if (args.later) owners.insert_lanes(owner, first);
    }
    if (args.later && !wait_for_place(comm, args.operation, comm.rank, args.tokens, epoch,
                                      list.begin >> shift, owners, [] {}))
      return;
    if (!pipe.empty()) pipe.hand_over(flags);
  }
}

/// Lists this rank's rows in chunks that wait for no memory; with `later`, those in chunks that reuse memory.
template <int workers>
__device__ void list_own(const Comm& comm, const SendArguments& args, uint64_t epoch,
                         MoveLister<workers>& pipe) {
  if (!comm.sends_here()) return;
  const PlanView plan{args.plan, comm.plan_fields};
  if (args.operation != Operation::dispatch)
    list_own(comm, args, plan.at(plan.fields.local_topk_idx), epoch, pipe);
  else if (args.wide_ids)
    list_own(comm, args, static_cast<const int64_t*>(args.ids), epoch, pipe);
  else
    list_own(comm, args, static_cast<const int32_t*>(args.ids), epoch, pipe);
}

}  // namespace moecomm::gpu
