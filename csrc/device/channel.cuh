// What this rank exchanges with the ranks of its node: it puts words into their windows, signals chunks of
// rows or sums, and waits for those of others. A flag holds the epoch of the operation. What goes to or comes
// from a rank of another node passes through the rank here on its rail; `one_node`: there are no other nodes.
#pragma once

#include "device/comm.cuh"
#include "device/wait.cuh"

namespace moecomm::device {

/// Puts a word, or two, into a window. They hold their epoch (EpochNumber), so that no flag follows them.
__device__ inline void put(uint64_t* to, uint64_t word) { ptx::store_relaxed_sys(to, word); }
__device__ inline void put(void* to, ptx::Pair words) { ptx::store_relaxed_sys_pair(to, words); }

/// Sets a flag. A thread that sees it also sees what this thread has stored, or acquired, before.
__device__ inline void signal(uint64_t* flag, uint64_t epoch) { ptx::store_release_sys(flag, epoch); }
/// The same, where a fence has ordered what was stored before.
__device__ inline void relaxed_signal(uint64_t* flag, uint64_t epoch) { ptx::store_relaxed_sys(flag, epoch); }

/// The flag at `peer`, a rank of this node, which says that chunk `number` of `source` is there.
__device__ inline uint64_t* arrival_flag(const Comm& comm, int32_t peer, int32_t source, int64_t number) {
  return comm.arrival(comm.bases[peer], source, number);
}
/// The same flag at this rank.
__device__ inline uint64_t* arrival_here(const Comm& comm, int32_t source, int64_t number) {
  return comm.arrival(comm.own, source, number);
}

/// The flag by which `source` learns that this rank has read its chunk `number`: its memory is free then. For
/// a source on another node it is at the rank that relays for it.
template <bool one_node = false>
__device__ inline uint64_t* credit_flag(const Comm& comm, int32_t source, int64_t number) {
  const int32_t at = one_node ? source : comm.relay_rank(source);
  return comm.flag(comm.bases[at], comm.window.credits, comm.pair(source, comm.rank), number);
}
/// The flag by which this rank, for itself or for the `source` that it relays, learns the same of `peer`.
__device__ inline uint64_t* credit_here(const Comm& comm, int32_t source, int32_t peer, int64_t number) {
  return comm.flag(comm.own, comm.window.credits, comm.pair(source, peer), number);
}

/// The flag by which `home`, or the rank that relays for it, learns that this rank's sums of chunk `number`
/// are there.
template <bool one_node = false>
__device__ inline uint64_t* sums_flag(const Comm& comm, int32_t home, int64_t number) {
  if (one_node || comm.is_local(home)) return arrival_flag(comm, home, comm.rank, number);
  return comm.flag(comm.bases[comm.relay_rank(home)], comm.window.partial_arrived, comm.pair(home, comm.rank),
                   number);
}
/// The flag by which this rank, which relays for `home`, learns the same of `owner`.
__device__ inline uint64_t* sums_here(const Comm& comm, int32_t home, int32_t owner, int64_t number) {
  return comm.flag(comm.own, comm.window.partial_arrived, comm.pair(home, owner), number);
}

/// The flag by which `peer` learns that this rank, which relays for `home`, has read its sums of a chunk.
__device__ inline uint64_t* sums_credit_flag(const Comm& comm, int32_t peer, int32_t home, int64_t number) {
  return comm.flag(comm.bases[peer], comm.window.partial_credits, home, number);
}
/// The flag by which this rank learns the same.
__device__ inline uint64_t* sums_credit_here(const Comm& comm, int32_t home, int64_t number) {
  return comm.flag(comm.own, comm.window.partial_credits, home, number);
}

/// The places for this rank's sums of a home's tokens, from one token on: at the home, or at the rank that
/// relays for it.
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
  /// Slot `slot` of the i-th token.
  __device__ std::byte* at(int i, int32_t slot) const { return first + (i * slots + slot) * stride; }
};

/// Waits for chunk `number` of the rank that `info` names. False if the wait fails.
template <class Flag = EpochFlag>
__device__ inline bool wait_arrival(const Comm& comm, const WaitInfo& info, int64_t number) {
  return wait_until(comm, info, Flag{arrival_here(comm, info.peer, number), info.expected});
}

/// Waits for the sums of chunk `number` for `home` of the rank that `info` names. False if the wait fails.
__device__ inline bool wait_sums_here(const Comm& comm, const WaitInfo& info, int32_t home, int64_t number) {
  return wait_until(comm, info, EpochFlag{sums_here(comm, home, info.peer, number), info.expected});
}

}  // namespace moecomm::device
