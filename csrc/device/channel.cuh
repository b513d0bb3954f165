// What this rank exchanges with the ranks of its node besides rows: it signals chunks of rows or sums, and
// waits for those of others. A flag holds the epoch of the operation.
#pragma once

#include "device/comm.cuh"
#include "device/wait.cuh"

namespace moecomm::device {

/// Sets a flag. A thread that sees it also sees what this thread has stored, or acquired, before.
__device__ inline void signal(uint64_t* flag, uint64_t epoch) { ptx::store_release_sys(flag, epoch); }

/// The flag at `peer`, a rank of this node, which says that chunk `number` of `source` is there.
__device__ inline uint64_t* arrival_flag(const Comm& comm, int32_t peer, int32_t source, int64_t number) {
  return comm.arrival(comm.bases[peer], source, number);
}

/// The flag by which `source` learns that this rank has read its chunk `number`: its memory is free then. For
/// a source on another node it is at the rank that relays for it. `one_node`: there are no other nodes.
template <bool one_node = false>
__device__ inline uint64_t* credit_flag(const Comm& comm, int32_t source, int64_t number) {
  const int32_t at = one_node ? source : comm.relay_rank(source);
  return comm.flag(comm.bases[at], comm.window.credits, comm.pair(source, comm.rank), number);
}

/// The flag by which `home`, or the rank that relays for it, learns that this rank's sums of chunk `number`
/// are there.
__device__ inline uint64_t* sums_flag(const Comm& comm, int32_t home, int64_t number) {
  if (comm.is_local(home)) return arrival_flag(comm, home, comm.rank, number);
  return comm.flag(comm.bases[comm.relay_rank(home)], comm.window.partial_arrived, comm.pair(home, comm.rank),
                   number);
}

/// Waits for chunk `number` of the rank that `info` names. False if the wait fails.
template <class Flag = EpochFlag>
__device__ inline bool wait_arrival(const Comm& comm, const WaitInfo& info, int64_t number) {
  return wait_until(comm, info, Flag{comm.arrival(comm.own, info.peer, number), info.expected});
}

}  // namespace moecomm::device
