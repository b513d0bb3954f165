// Waits of kernels. Each wait has the communicator's deadline, checks for peers that the host knows to be
// gone, and ends early when another wait of this rank has failed, or the operation is called off because its
// records disagree. Nothing traps: a kernel whose wait fails reports to the host and returns.
#pragma once

#include "device/comm.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"

namespace moecomm::device {

struct WaitInfo {
  int32_t peer;
  WaitPhase phase;
  Operation operation;
  uint64_t expected;
  bool until_called_off = true;  ///< true: the wait also ends if the operation is called off
};

/// The last epoch for which `rank` has signalled its record to this rank.
__device__ inline uint64_t begun_epoch(const Comm& comm, int32_t rank) {
  const uint64_t even = ptx::load_relaxed_sys(&comm.record(comm.own, rank, 0).epoch);
  const uint64_t odd = ptx::load_relaxed_sys(&comm.record(comm.own, rank, 1).epoch);
  return even > odd ? even : odd;
}

/// Tells the host, once, that a wait failed because of `peer`.
__device__ __noinline__ inline void report_failure(const Comm& comm, const WaitInfo& info, int32_t peer,
                                                   Cause cause, int32_t first) {
  if (atomicCAS(&comm.state().failed, 0u, 1u) != 0) return;
  HostStatus::Broken& broken = comm.host->broken;
  broken.peer = peer;
  broken.cause = cause;
  broken.phase = info.phase;
  broken.operation = info.operation;
  broken.first = first;
  broken.expected = info.expected;
  broken.seen = begun_epoch(comm, peer);
  ptx::store_release_sys(&broken.set, 1);
}

/// True if a wait of this rank has failed, so that its kernels should stop. Threads that ask at different
/// times may get different answers; a whole block or warp decides by one of the two functions below.
__device__ inline bool already_failed(const Comm& comm) {
  return ptx::load_relaxed_sys(&comm.state().failed) != 0;
}
/// already_failed() with one answer for the whole block.
__device__ inline bool failed_for_block(const Comm& comm) { return __syncthreads_or(already_failed(comm)); }
/// already_failed() with one answer for all lanes of the warp.
__device__ inline bool failed_for_warp(const Comm& comm) {
  return __any_sync(0xffffffffu, already_failed(comm));
}

/// The rank to blame for a failed wait. It is a rank whose record of the operation is missing, since the
/// awaited peer may itself wait for that rank; if none is missing, the peer. Ranks of this node come first:
/// announcements of other nodes pass through them.
__device__ inline int32_t missing_rank(const Comm& comm, const WaitInfo& info) {
  for (int32_t i = 0; i < comm.ranks(); ++i) {
    const int32_t r = (comm.first_rank + i) % comm.ranks();
    if (begun_epoch(comm, r) < info.expected) return r;
  }
  return info.peer;
}

/// A wait goes on (wait; absent: a rank has not begun) or ends (ended: see look_around(); peer lost or late).
enum class Outlook { wait, absent, ended, lost, late };

/// True if `loss` ends a wait for what its peer does in `epoch`.
__device__ inline bool ends_wait(const PeerLoss& loss, uint64_t epoch) {
  return ptx::load_acquire_sys(&loss.set) != 0 && epoch > loss.complete;
}

/// Looks for reasons to end a wait besides its signal: another wait failed or the operation is called off
/// (ended), a peer is lost or late. Nanoseconds: `waited` so far; `present`: since a rank was last absent.
__device__ __noinline__ inline Outlook look_around(const Comm& comm, const WaitInfo& info, uint64_t waited,
                                                   uint64_t present) {
  if (already_failed(comm) ||
      (info.until_called_off && ptx::load_relaxed_sys(&comm.state().cancelled) == info.expected))
    return Outlook::ended;
  const PeerLoss* const losses = comm.mine<PeerLoss>(comm.window.losses);
  // Data of a peer on another node comes through the rank of this node on the peer's rail.
  if (ends_wait(losses[info.peer], info.expected) ||
      ends_wait(losses[comm.relay_rank(info.peer)], info.expected))
    return Outlook::lost;
  if (comm.absence_ns <= comm.timeout_ns) return waited <= comm.timeout_ns ? Outlook::wait : Outlook::late;
  // A rank that is alive but busy elsewhere, for example saving a checkpoint, is not late yet. Once it has
  // begun the operation, the timeout applies to it.
  if (begun_epoch(comm, missing_rank(comm, info)) < info.expected)
    return waited <= comm.absence_ns ? Outlook::absent : Outlook::late;
  return present <= comm.timeout_ns ? Outlook::wait : Outlook::late;
}

/// Tells the host why a wait failed: a peer is lost, or late. A late peer that has closed counts as lost.
__device__ __noinline__ inline void report_wait(const Comm& comm, const WaitInfo& info, Outlook outlook) {
  const PeerLoss* const losses = comm.mine<PeerLoss>(comm.window.losses);
  const PeerLoss& own = losses[info.peer];
  const bool closed = outlook == Outlook::late && ptx::load_acquire_sys(&own.set) != 0;
  if (outlook == Outlook::late && !closed) {
    report_failure(comm, info, missing_rank(comm, info), Cause::no_signal, comm.rank);
    return;
  }
  const PeerLoss& loss = closed || ends_wait(own, info.expected) ? own : losses[comm.relay_rank(info.peer)];
  report_failure(comm, info, loss.peer, loss.cause, loss.first);
}

/// Says when a wait that polls a word also looks at the sender's record: at every kEvery-th poll, since a
/// look costs a load. Only after an error, or from another node, can the record come without the word.
class RareLook {
 public:
  static constexpr int kEvery = 8;
  __device__ bool due() const { return ++looks_ % kEvery == 0; }

 private:
  mutable uint32_t looks_ = 0;
};

/// Polls read.arrived() every Read::kInterval nanoseconds until it is true; it acquires the data that a flag
/// stands for. False if the wait ends before: at its deadline, or for a reason that look_around() finds.
template <class Read>
__device__ inline bool wait_until(const Comm& comm, const WaitInfo& info, const Read& read) {
  constexpr uint64_t kLookAround = 20'000;  // ns between checks for other reasons to end the wait
  if (read.arrived()) return true;
  const uint64_t start = ptx::global_nanoseconds();
  uint64_t look = start + kLookAround, present_since = start;
  while (true) {
    for (int spin = 0; spin < 16; ++spin) {
      if (read.arrived()) return true;
      __nanosleep(Read::kInterval);
    }
    const uint64_t now = ptx::global_nanoseconds();
    if (now < look) continue;
    look = now + kLookAround;
    const Outlook outlook = look_around(comm, info, now - start, now - present_since);
    if (outlook == Outlook::absent) present_since = now;
    if (outlook == Outlook::wait || outlook == Outlook::absent) continue;
    if (outlook == Outlook::ended) return false;
    // A signal that the peer gave before it ended counts. A read may look for it at few polls (RareLook).
    for (int look = 0; look < RareLook::kEvery; ++look)
      if (read.arrived()) return true;
    report_wait(comm, info, outlook);
    return false;
  }
}

/// A flag, or the epoch of a record. It holds the whole epoch: fewer bits would wrap around, and a flag
/// written long ago would then count as one of a later epoch.
struct EpochFlag {
  static constexpr unsigned kInterval = 32;
  const uint64_t* address;
  uint64_t epoch;
  __device__ bool arrived() const {
    // An acquire drops the multiprocessor's cache, so it comes only when there is something to acquire.
    return ptx::load_relaxed_sys(address) >= epoch && ptx::load_acquire_sys(address) >= epoch;
  }
};

/// A flag for threads that have nothing else to do: every poll acquires.
struct EagerFlag {
  static constexpr unsigned kInterval = 32;
  const uint64_t* address;
  uint64_t epoch;
  __device__ bool arrived() const { return ptx::load_acquire_sys(address) >= epoch; }
};

/// A word in host memory, which the proxy sets to an epoch or counts up. It is polled less often: polls share
/// the link to the host with the rows that go to the network.
struct HostWord : EpochFlag {
  static constexpr unsigned kInterval = 400;
};

/// A word in this rank's own memory. It has arrived when it is equal to `value`.
struct OwnWord {
  static constexpr unsigned kInterval = 100;
  const uint64_t* address;
  uint64_t value;
  __device__ bool arrived() const {
    return ptx::load_relaxed_gpu(address) == value && ptx::load_acquire_gpu(address) == value;
  }
};

/// A counter that blocks of this device increment.
struct BlockCount {
  static constexpr unsigned kInterval = 32;
  const uint32_t* address;
  uint32_t count;
  __device__ bool arrived() const { return ptx::load_acquire_gpu(address) >= count; }
};

}  // namespace moecomm::device
