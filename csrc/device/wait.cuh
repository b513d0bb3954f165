// Waits of kernels. Each has the communicator's deadline, looks for peers that the host knows to be gone, and
// ends early when another wait of this rank has failed or the operation was called off. Nothing traps: a
// kernel whose wait fails reports to the host and returns.
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
  bool until_called_off = true;  ///< the wait ends if the operation is called off
};

/// The last epoch of which `rank` has signalled its record to this one.
__device__ inline uint64_t begun_epoch(const Comm& comm, int32_t rank) {
  const uint64_t even = ptx::load_relaxed_sys(&comm.record(comm.own, rank, 0).epoch);
  const uint64_t odd = ptx::load_relaxed_sys(&comm.record(comm.own, rank, 1).epoch);
  return even > odd ? even : odd;
}

/// Tells the host, once, that a wait ended in vain because of `peer`.
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

/// True if a wait of this rank has failed, so that its kernels should not go on. Threads that ask at
/// different times may hear different answers: what a block or a warp does together hangs on one of the two
/// below.
__device__ inline bool already_failed(const Comm& comm) {
  return ptx::load_relaxed_sys(&comm.state().failed) != 0;
}
/// Whole block, which hears one answer.
__device__ inline bool failed_for_block(const Comm& comm) { return __syncthreads_or(already_failed(comm)); }
/// All lanes, which hear one answer.
__device__ inline bool failed_for_warp(const Comm& comm) {
  return __any_sync(0xffffffffu, already_failed(comm));
}

/// Whom to blame for a wait in vain: a rank whose record of the operation is not here, if there is one, since
/// the peer that is waited for may itself be waiting for that rank. Those of this node first: what ranks of
/// other nodes announce comes through them.
__device__ inline int32_t missing_rank(const Comm& comm, const WaitInfo& info) {
  for (int32_t i = 0; i < comm.ranks(); ++i) {
    const int32_t r = (comm.first_rank + i) % comm.ranks();
    if (begun_epoch(comm, r) < info.expected) return r;
  }
  return info.peer;
}

/// What a wait that goes on finds when it looks at more than what it waits for.
enum class Outlook { wait, absent, ended, lost, late };

/// True if `loss` ends a wait for what its peer does in `epoch`.
__device__ inline bool ends_wait(const PeerLoss& loss, uint64_t epoch) {
  return ptx::load_acquire_sys(&loss.set) != 0 && epoch > loss.complete;
}

/// Looks at what else may end a wait that has been going on for `waited` nanoseconds, `present` of them since
/// the rank it waits for was last found absent.
__device__ __noinline__ inline Outlook look_around(const Comm& comm, const WaitInfo& info, uint64_t waited,
                                                   uint64_t present) {
  if (already_failed(comm) ||
      (info.until_called_off && ptx::load_relaxed_sys(&comm.state().cancelled) == info.expected))
    return Outlook::ended;
  const PeerLoss* const losses = comm.mine<PeerLoss>(comm.window.losses);
  // Data of a rank on another node comes through the local rank of its rail.
  if (ends_wait(losses[info.peer], info.expected) ||
      ends_wait(losses[comm.relay_rank(info.peer)], info.expected))
    return Outlook::lost;
  if (comm.absence_ns <= comm.timeout_ns) return waited <= comm.timeout_ns ? Outlook::wait : Outlook::late;
  // A rank that lives and does something else, like saving a checkpoint, is not late yet. Once it has come,
  // it has the timeout for what it has begun.
  if (begun_epoch(comm, missing_rank(comm, info)) < info.expected)
    return waited <= comm.absence_ns ? Outlook::absent : Outlook::late;
  return present <= comm.timeout_ns ? Outlook::wait : Outlook::late;
}

/// Tells the host why a wait ends in vain: a peer is lost, or it is late. One that is late and has closed is
/// lost, too.
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

/// How often a wait looks for a word until it looks for a record instead, which comes in its place only where
/// something is wrong, or from another node: every look takes as long as a load.
class RareLook {
 public:
  static constexpr int kEvery = 8;
  __device__ bool due() const { return ++looks_ % kEvery == 0; }

 private:
  mutable uint32_t looks_ = 0;
};

/// Polls every Read::kInterval nanoseconds until read.arrived(), which acquires what comes with a flag. False
/// if it never will: after the deadline, when the host has lost a peer, or after another failure.
template <class Read>
__device__ inline bool wait_until(const Comm& comm, const WaitInfo& info, const Read& read) {
  constexpr uint64_t kLookAround = 20'000;  // ns between looks at what else may end the wait
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
    // A signal that a peer gave before it ended counts, also one that is rarely looked for.
    for (int look = 0; look < RareLook::kEvery; ++look)
      if (read.arrived()) return true;
    report_wait(comm, info, outlook);
    return false;
  }
}

/// A flag, or the epoch of a record. All of the epoch is in it: a part would wrap, and then a flag that
/// nobody has written for a long time would count as one of an epoch to come.
struct EpochFlag {
  static constexpr unsigned kInterval = 32;
  const uint64_t* address;
  uint64_t epoch;
  __device__ bool arrived() const {
    // Acquiring drops the multiprocessor's cache: only once there is something to acquire.
    return ptx::load_relaxed_sys(address) >= epoch && ptx::load_acquire_sys(address) >= epoch;
  }
};

/// A flag that is polled by threads that have nothing else to do: what has arrived is acquired at once.
struct EagerFlag {
  static constexpr unsigned kInterval = 32;
  const uint64_t* address;
  uint64_t epoch;
  __device__ bool arrived() const { return ptx::load_acquire_sys(address) >= epoch; }
};

/// A word in host memory, which the proxy sets to an epoch or counts up. It is polled less often: reads of it
/// share their way with the rows that go to the network.
struct HostWord : EpochFlag {
  static constexpr unsigned kInterval = 400;
};

/// A word of this rank's own memory, which takes one value after another.
struct OwnWord {
  static constexpr unsigned kInterval = 100;
  const uint64_t* address;
  uint64_t value;
  __device__ bool arrived() const {
    return ptx::load_relaxed_gpu(address) == value && ptx::load_acquire_gpu(address) == value;
  }
};

/// A counter of this device's blocks.
struct BlockCount {
  static constexpr unsigned kInterval = 32;
  const uint32_t* address;
  uint32_t count;
  __device__ bool arrived() const { return ptx::load_acquire_gpu(address) >= count; }
};

}  // namespace moecomm::device
