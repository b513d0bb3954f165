// Dispatch, sending side: lists rows token by token for a pipe with lone workers (move_pipe.cuh). Used where
// a list may not hold a chunk, where rows have scales from the caller, and with several nodes. Rows for other
// nodes go into host memory, from where the network sends them. Rows that arrive from the rail (the ranks
// with this rank's number on other nodes) go on to the owners on this node.
#pragma once

#include "kernels/gpu/dispatch/send_list.cuh"
#include "kernels/gpu/internode/relay_records.cuh"

namespace moecomm::gpu {

/// Where listed rows go: to owners on this node, or to other nodes.
enum class Reach { node, others };

/// Lets rows pass as they are, and adds the scales that the caller gives, if any. For lone workers.
class CopyAlone {
 public:
  static constexpr bool kChanges = false;
  __device__ static LoneRows rows(const KernelShape& s, bool scales) {
    const Pieces values = row_pieces(s.wire_data_bytes(), kLonePiece);
    return {values, {}, 0, values, scales ? scale_pieces(s, values) : Pieces{}, s.wire_data_bytes(), true};
  }
  /// The pieces of whole rows in the wire format, scales included, which come from another node.
  __device__ static LoneRows whole_rows(const KernelShape& s) {
    const Pieces pieces = row_pieces(s.wire_row_bytes(), kLonePiece);
    return {pieces, {}, 0, pieces, {}, 0, true};
  }
  __device__ CopyAlone(const KernelShape& shape, const LoneShape& pieces)
      : rows_(pieces.rows), bytes_(shape.wire_scale_bytes()) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List& list, int entry, int piece) {
    if (rows_.scales.count == 0) return;
    const int64_t offset = rows_.scales.offset(piece);
    // Not a bulk copy: the caller's scales may not be aligned for one.
    copy_scales(stage + rows_.stored.bytes, list.others[entry] + offset,
                static_cast<uint32_t>(min(int64_t{rows_.scales.size(piece)}, bytes_ - offset)), bytes_);
  }

 private:
  const LoneRows& rows_;
  const int64_t bytes_;
};

/// Lists the rows of a chunk token by token. All lanes call every function.
class ChunkLister {
 public:
  __device__ ChunkLister(const Comm& comm, MoveLister<kLoneWorkers>& pipe)
      : pipe_(pipe), map_(TokenLanes::of_one(comm.top_k())) {}

  /// Begins a chunk.
  __device__ void open() {
    list_ = &pipe_.open();
    staged_ = 0;
  }
  /// Adds a token's row. Each lane with `wanted` gives a target, `to`, and in `flag` null or a flag that is
  /// signalled once the row is there. `scales`: the row's scales from the caller, or null.
  __device__ void add(const std::byte* row, const std::byte* scales, bool wanted, std::byte* to,
                      uint64_t* flag = nullptr) {
    if (!pipe_.has_room(map_.top_k)) pass_on();
    pipe_.add(map_, row, wanted, to, scales);
    const uint32_t flags = __ballot_sync(0xffffffffu, wanted && flag != nullptr);
    if (wanted && flag != nullptr) list_->flags[staged_ + __popc(flags & ((1u << lane_id()) - 1))] = flag;
    staged_ += __popc(flags);
  }
  /// Ends a chunk. For each of `peers` flag(peer) is set once all rows of the chunk are there.
  template <class Flag>
  __device__ void close(const PeerSet& peers, const Flag& flag) {
    for (uint32_t left = __reduce_or_sync(0xffffffffu, peers.bits); left != 0; left &= left - 1) {
      const int word = __ffs(static_cast<int>(left)) - 1;
      const bool some = peers.bits >> word & 1;
      if (staged_ + 32 > kMoveWords) pass_on();
      const uint32_t flags = __ballot_sync(0xffffffffu, some);
      if (some) list_->flags[staged_ + __popc(flags & ((1u << lane_id()) - 1))] = flag(word * 32 + lane_id());
      staged_ += __popc(flags);
    }
    if (!pipe_.empty() || staged_ > 0) pipe_.hand_over(staged_);
  }

 private:
  __device__ void pass_on() {
    pipe_.hand_over(staged_);
    open();
  }

  MoveLister<kLoneWorkers>& pipe_;
  const TokenLanes map_;
  MovePipe<kLoneWorkers>::List* list_ = nullptr;
  int staged_ = 0;  ///< flags in the list
};

/// Lists this rank's rows for `reach`. For other nodes it lists all rows. For owners on this node it lists
/// rows in chunks that wait for no memory; with `later`, rows in chunks that reuse memory.
template <Way way>
__device__ void list_chunks(const Comm& comm, const SendArguments& args, uint64_t epoch, const LoneRows& rows,
                            Reach reach, MoveLister<kLoneWorkers>& pipe) {
  constexpr bool kNodes = way == Way::nodes;
  if (reach == Reach::node && !comm.sends_here()) return;
  const PlanView plan{args.plan, comm.plan_fields};
  const int32_t* const kept = plan.at(plan.fields.local_topk_idx);
  const int top_k = comm.top_k(), lane = lane_id();
  DeviceState& state = comm.state();
  Claims claims(reach == Reach::others ? &state.stage_next
                : args.later           ? &state.later_next
                                       : &state.send_next);
  const int64_t chunks = chunk_count(args.tokens), size = chunk_tokens(args.tokens);
  // Rows for other nodes do not share memory.
  const int64_t at_once = comm.window.chunks_at_once(args.tokens), first = args.later ? at_once : 0;
  const int64_t all = args.later || reach == Reach::others ? chunks : at_once;
  const auto tokens = static_cast<int>(max(min(all * size, args.tokens) - first * size, int64_t{0}));
  const TokenOrder order(tokens, static_cast<int>(size),
                         reach == Reach::others ? 0 : places_shift(comm, comm.rank, args.tokens));
  ChunkLister list(comm, pipe);
  for (int next = order.next(claims); next < tokens; next = order.next(claims)) {
    const int64_t begin = first * size + next, end = min(begin + size, args.tokens);
    const int64_t chunk = begin >> chunk_shift(args.tokens);
    int32_t target[kMaxChunk], number[kMaxChunk];  // rank that gets the row; or other node, relay index there
    PeerSet owners;
#pragma unroll
    for (int i = 0; i < kMaxChunk; ++i) {
      const int64_t index = (begin + i) * top_k + lane;
      const int64_t id = begin + i >= end || lane >= top_k                  ? kNoExpert
                         : !kNodes && args.operation == Operation::dispatch ? read_id(args, index)
                                                                            : int64_t{kept[index]};
      target[i] = comm.owner(valid_id(comm, id));
      number[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < kMaxChunk; ++i) {
      if (target[i] == comm.rank && !comm.own_rows_travel()) target[i] = -1;
      if constexpr (kNodes) {
        if (target[i] >= 0 && comm.is_local(target[i]) != (reach == Reach::node)) target[i] = -1;
        if (target[i] >= 0 && reach == Reach::others) {
          target[i] = comm.other_of(target[i]);
          number[i] = plan.at(plan.fields.home_index)[target[i] * comm.window.shape.max_tokens + begin + i];
          if (number[i] < 0) target[i] = -1;
        }
      }
      if (!first_with(target[i])) target[i] = -1;
      if (reach == Reach::node) owners.insert_lanes(target[i], target[i] >= 0);
    }
    if (args.later &&
        !wait_for_place(comm, args.operation, comm.rank, args.tokens, epoch, chunk, owners, [] {}))
      return;
    list.open();
#pragma unroll
    for (int i = 0; i < kMaxChunk; ++i) {
      if (begin + i >= end) continue;
      const bool wanted = target[i] >= 0, other = kNodes && reach == Reach::others;
      const int64_t wire_bytes = comm.window.shape.wire_row_bytes();
      std::byte* const to = !wanted ? nullptr
                            : other ? comm.rail.staged(target[i], number[i], wire_bytes)
                                    : comm.staged_row(target[i], epoch, comm.rank, begin + i);
      list.add(args.x + (begin + i) * rows.loaded.total,
               args.x_scales + (begin + i) * comm.window.shape.wire_scale_bytes(), wanted, to,
               wanted && other ? LoneShape::staged(target[i], number[i]) : nullptr);
    }
    list.close(owners, [&](int32_t peer) { return device::arrival_flag(comm, peer, comm.rank, chunk); });
  }
}

/// Lists rows that arrive from the rail, for owners on this node. Lists rows in chunks that wait for no
/// memory at the owners; with `later`, rows in chunks that reuse memory. False if some rows do not arrive.
__device__ inline bool list_relayed(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                    MoveLister<kLoneWorkers>& pipe) {
  const PlanView plan{args.plan, comm.plan_fields};
  const RelayState* const states = comm.mine<RelayState>(comm.window.relay_state);
  const int32_t others = comm.rail.others;
  int64_t most_chunks = 0;
  for (int32_t other = 0; other < others; ++other)
    most_chunks = max(most_chunks, chunk_count(__ldcg(&states[other].tokens)));
  ChunkLister list(comm, pipe);
  Claims claims(args.later ? &comm.state().relay_later_next : &comm.state().relay_next);
  for (int64_t claim = claims.take(); claim < most_chunks * others; claim = claims.take()) {
    const int64_t number = claim / others;
    const auto other = static_cast<int32_t>((comm.rail.node + claim) % others);
    const int64_t tokens = __ldcg(&states[other].tokens);
    if (number >= chunk_count(tokens) || (number >= comm.window.chunks_at_once(tokens)) != args.later)
      continue;
    const gpu::RelayChunk chunk = gpu::relay_chunk(comm, plan, other, tokens, number);
    PeerSet owners;
    for (uint32_t left = chunk.tokens; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int32_t owner = gpu::relayed_owner(comm, plan, other, chunk.begin + i);
      owners.insert_lanes(owner, owner >= 0);
    }
    if (__all_sync(0xffffffffu, owners.bits == 0)) continue;
    const int32_t source = comm.rail_rank(other);
    const device::RailChunk arrival{comm, epoch, other, max(chunk.number, 0) / comm.rail.chunk_rows};
    bool here = true;
    if (chunk.number >= 0) here = arrival.wait({source, WaitPhase::rows, args.operation, epoch, false});
    if (!__all_sync(0xffffffffu, here)) return false;
    if (args.later && !wait_for_place(comm, args.operation, source, tokens, epoch, number, owners, [] {})) {
      if (failed_for_warp(comm)) return false;
      continue;  // the operation was called off, so no rank reads the chunk
    }
    list.open();
    for (uint32_t left = chunk.tokens; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1;
      const int32_t owner = gpu::relayed_owner(comm, plan, other, chunk.begin + i);
      list.add(comm.rail.arrived(epoch, other, __shfl_sync(0xffffffffu, chunk.number, i),
                                 comm.window.shape.wire_row_bytes()),
               nullptr, owner >= 0,
               owner >= 0 ? comm.staged_row(owner, epoch, source, chunk.begin + i) : nullptr);
    }
    list.close(owners, [&](int32_t peer) { return device::arrival_flag(comm, peer, source, number); });
  }
  return true;
}

}  // namespace moecomm::gpu
