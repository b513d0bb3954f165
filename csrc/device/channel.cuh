// What this rank exchanges with the ranks of its node: it puts words into their windows, signals chunks of
// rows or sums (a chunk: tokens with one arrival flag), and waits for chunks of others. A flag holds the
// operation's epoch. A token's home is the rank that it comes from. Data of a rank on another node passes
// through its relay: the rank of this node with the same local number. `one_node`: there are no other nodes.
#pragma once

#include "device/comm.cuh"
#include "device/wait.cuh"

namespace moecomm::device {

/// Puts one word, or two at once, into a window. A word holds its epoch (EpochNumber): no flag has to follow.
__device__ inline void put(uint64_t* to, uint64_t word) { ptx::store_relaxed_sys(to, word); }
__device__ inline void put(void* to, ptx::Pair words) { ptx::store_relaxed_sys_pair(to, words); }

/// Sets a flag. A thread that acquires it also sees what this thread has stored, or acquired, before.
__device__ inline void signal(uint64_t* flag, uint64_t epoch) { ptx::store_release_sys(flag, epoch); }
/// Sets a flag by a relaxed store. Call it after a fence, which orders what was stored before.
__device__ inline void relaxed_signal(uint64_t* flag, uint64_t epoch) { ptx::store_relaxed_sys(flag, epoch); }

/// The flag at `peer`, a rank of this node, which says that chunk `number` of `source` has arrived at `peer`.
__device__ inline uint64_t* arrival_flag(const Comm& comm, int32_t peer, int32_t source, int64_t number) {
  return comm.arrival(comm.bases[peer], source, number);
}
/// The flag at this rank which says that chunk `number` of `source` has arrived here.
__device__ inline uint64_t* arrival_here(const Comm& comm, int32_t source, int64_t number) {
  return comm.arrival(comm.own, source, number);
}

/// The flag that tells `source`: this rank has read chunk `number` of `source`, so the chunk's memory is
/// free. For a source on another node the flag is at the relay of `source`.
template <bool one_node = false>
__device__ inline uint64_t* credit_flag(const Comm& comm, int32_t source, int64_t number) {
  const int32_t at = one_node ? source : comm.relay_rank(source);
  return comm.flag(comm.bases[at], comm.window.credits, comm.pair(source, comm.rank), number);
}
/// The flag at this rank which says that `peer` has read chunk `number` of `source`, which is this rank or a
/// rank that it relays for.
__device__ inline uint64_t* credit_here(const Comm& comm, int32_t source, int32_t peer, int64_t number) {
  return comm.flag(comm.own, comm.window.credits, comm.pair(source, peer), number);
}

/// The flag that tells `home`, or its relay, that this rank's sums of chunk `number` have arrived.
template <bool one_node = false>
__device__ inline uint64_t* sums_flag(const Comm& comm, int32_t home, int64_t number) {
  if (one_node || comm.is_local(home)) return arrival_flag(comm, home, comm.rank, number);
  return comm.flag(comm.bases[comm.relay_rank(home)], comm.window.partial_arrived, comm.pair(home, comm.rank),
                   number);
}
/// The flag at this rank, the relay of `home`, which says that sums of `owner` for chunk `number` are here.
__device__ inline uint64_t* sums_here(const Comm& comm, int32_t home, int32_t owner, int64_t number) {
  return comm.flag(comm.own, comm.window.partial_arrived, comm.pair(home, owner), number);
}

/// The flag that tells `peer` that this rank, the relay of `home`, has read all sums of chunk `number`.
__device__ inline uint64_t* sums_credit_flag(const Comm& comm, int32_t peer, int32_t home, int64_t number) {
  return comm.flag(comm.bases[peer], comm.window.partial_credits, home, number);
}
/// The flag that tells this rank that the relay of `home` has read all sums of chunk `number`.
__device__ inline uint64_t* sums_credit_here(const Comm& comm, int32_t home, int64_t number) {
  return comm.flag(comm.own, comm.window.partial_credits, home, number);
}

/// The slots for sums of a home's tokens, from token `begin` on, in the window of the home or of its relay.
struct SumPlaces {
  std::byte* first;
  int64_t slots;   ///< slots of each token
  int64_t stride;  ///< bytes of a slot

  template <bool one_node>
  __device__ static SumPlaces of(const Comm& comm, uint64_t epoch, int32_t home, int64_t begin) {
    const int64_t row_bytes = comm.window.shape.row_bytes();
    if (one_node || comm.is_local(home))
      return {comm.slot_row(comm.bases[home], epoch, begin, 0), comm.window.shape.slots(), row_bytes};
    return {comm.partial_row(comm.bases[comm.relay_rank(home)], epoch, comm.other_of(home), begin, 0),
            comm.window.shape.node_slots(), row_bytes};
  }
  /// Address of slot `slot` of token begin + i.
  __device__ std::byte* at(int i, int32_t slot) const { return first + (i * slots + slot) * stride; }
};

/// Waits for chunk `number` of the rank info.peer. False if the wait fails.
template <class Flag = EpochFlag>
__device__ inline bool wait_arrival(const Comm& comm, const WaitInfo& info, int64_t number) {
  return wait_until(comm, info, Flag{arrival_here(comm, info.peer, number), info.expected});
}

/// Waits for the sums of chunk `number` that the rank info.peer makes for `home`. False if the wait fails.
__device__ inline bool wait_sums_here(const Comm& comm, const WaitInfo& info, int32_t home, int64_t number) {
  return wait_until(comm, info, EpochFlag{sums_here(comm, home, info.peer, number), info.expected});
}

}  // namespace moecomm::device
