// Records: what each rank announces to every rank in each operation (layout/control.hpp), as kernels write
// and read them.
#pragma once

#include "common/error.hpp"
#include "device/clock.cuh"
#include "device/wait.cuh"

namespace moecomm::device {

/// Writes the record of `writer` to every rank of this node. A rank that sees the record's epoch also sees
/// what this block wrote before a barrier that the calling threads have passed. Whole blocks or warps call
/// it; their threads share the peers.
__device__ inline void signal_records(const Comm& comm, const SignalRecord& record, int32_t writer,
                                      int thread, int threads) {
  for (int peer = thread; peer < comm.local_ranks; peer += threads) {
    SignalRecord& slot = comm.record(comm.bases[comm.first_rank + peer], writer, record.epoch);
    slot.operation = record.operation;
    slot.caller = record.caller;
    slot.error = record.error;
    slot.rows_offset = record.rows_offset;
    slot.capacity = record.capacity;
    slot.plan = record.plan;
    slot.tokens = record.tokens;
    slot.alignment = record.alignment;
    slot.layout = record.layout;
    slot.carries = record.carries;
    slot.detail = record.detail;
    ptx::store_release_sys(&slot.epoch, record.epoch);
  }
}

/// Writes this rank's record to every rank of this node. Whole block.
__device__ inline void signal_records(const Comm& comm, const SignalRecord& record) {
  signal_records(comm, record, comm.rank, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
}

/// Adds to the statistics how long, from the time `begun` on, this rank has waited for `peer` to begin an
/// operation. Returns nothing, so that no thread waits for the atomic operation.
__device__ inline void note_late(const Comm& comm, int32_t peer, uint64_t begun) {
  atomicAdd(reinterpret_cast<unsigned long long*>(comm.mine<uint64_t>(comm.window.late_ns)) + peer,
            static_cast<unsigned long long>(ptx::global_nanoseconds() - begun));
}

/// Stores the time as Phase::agreed, and adds the wait since `begun` to the statistics. One thread.
__device__ inline void note_agreed(const Comm& comm, Operation operation, uint64_t begun) {
  comm.state().wait_ns += ptx::global_nanoseconds() - begun;
  note_phase(comm, operation, Phase::agreed);
}

/// Waits for every rank's record of `epoch`. With `counts` it adds the time that it waited for each rank to
/// the statistics. Whole block; false for all threads if the wait of one thread fails.
__device__ inline bool wait_records(const Comm& comm, Operation operation, uint64_t epoch, bool counts) {
  const uint64_t start = counts ? ptx::global_nanoseconds() : 0;
  bool arrived = true;
  for (int peer = threadIdx.x; arrived && peer < comm.ranks(); peer += blockDim.x) {
    arrived = wait_until(comm, {peer, WaitPhase::records, operation, epoch},
                         EpochFlag{&comm.record(comm.own, peer, epoch).epoch, epoch});
    if (counts) note_late(comm, peer, start);
  }
  arrived = __syncthreads_and(arrived);
  if (counts && threadIdx.x == 0) note_agreed(comm, operation, start);
  return arrived;
}

/// Waits for every rank's record of `epoch`. The grid's first block adds its wait to the statistics.
__device__ inline bool wait_records(const Comm& comm, Operation operation, uint64_t epoch) {
  return wait_records(comm, operation, epoch, blockIdx.x == 0);
}

/// True if `record`, of rank `r`, has no error and agrees with `first`, of rank 0. Else `verdict` says why.
__device__ inline bool judge_record(const SignalRecord& first, const SignalRecord& record, int32_t r,
                                    HostStatus::Verdict& verdict) {
  verdict = HostStatus::Verdict{};
  verdict.rank = r;
  if (record.error != 0) {
    verdict.kind = record.error;
    verdict.index = record.rows_offset;
    verdict.value = record.detail;
    verdict.has_text = record.operation == Operation::none;
    return false;
  }
  verdict.kind = static_cast<uint32_t>(ErrorKind::mismatched_arguments);
  const auto same = [&](Disagreement about, int64_t at_first, int64_t here) {
    verdict.about = about;
    verdict.index = at_first;
    verdict.value = here;
    return at_first == here;
  };
  return same(Disagreement::operation, static_cast<int64_t>(first.operation),
              static_cast<int64_t>(record.operation)) &&
         same(Disagreement::caller, first.caller, record.caller) &&
         same(Disagreement::layout, static_cast<int64_t>(first.layout),
              static_cast<int64_t>(record.layout)) &&
         same(Disagreement::alignment, first.alignment, record.alignment) &&
         same(Disagreement::capacity, first.capacity, record.capacity) &&
         same(Disagreement::index_capacity, first.detail, record.detail) &&
         same(Disagreement::plan, static_cast<int64_t>(first.plan), static_cast<int64_t>(record.plan)) &&
         same(Disagreement::carries, first.carries, record.carries);
}

/// Compares the records of `epoch`. False, with `verdict` set, if a record has an error or differs from rank
/// 0's. Every rank compares the same records and so comes to the same verdict: on the first rank with an
/// error, else on the first rank that differs. One warp.
__device__ inline bool compare_records(const Comm& comm, uint64_t epoch, HostStatus::Verdict& verdict) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const SignalRecord first = comm.record(comm.own, 0, epoch);
  int32_t error = INT32_MAX, different = INT32_MAX;  // ranks
  for (int32_t r = lane; r < comm.ranks(); r += 32) {
    const SignalRecord record = comm.record(comm.own, r, epoch);
    HostStatus::Verdict own;
    if (judge_record(first, record, r, own)) continue;
    if (record.error != 0)
      error = min(error, r);
    else
      different = min(different, r);
  }
  error = __reduce_min_sync(0xffffffffu, error);
  different = __reduce_min_sync(0xffffffffu, different);
  const int32_t bad = error != INT32_MAX ? error : different;
  if (bad == INT32_MAX) return true;
  judge_record(first, comm.record(comm.own, bad, epoch), bad, verdict);
  return false;
}

/// Hands a verdict and its error text, if any, to the host, unless an earlier one is there. One thread.
__device__ inline void report_verdict(const Comm& comm, const HostStatus::Verdict& verdict, uint64_t epoch) {
  HostStatus::Verdict& out = comm.host->verdict;
  if (ptx::load_acquire_sys(&out.set) != 0) return;
  if (verdict.has_text != 0) {
    const int32_t rank = verdict.rank;
    const char* const text =
        comm.is_local(rank)
            ? comm.at<char>(comm.bases[rank], comm.window.error_text[epoch & 1])
            : comm.at<char>(comm.bases[comm.relay_rank(rank)], comm.window.relay_text[epoch & 1]) +
                  comm.other_of(rank) * kErrorText;
    for (int i = 0; i < kErrorText; ++i) comm.host->text[i] = text[i];
  }
  out.kind = verdict.kind;
  out.rank = verdict.rank;
  out.about = verdict.about;
  out.index = verdict.index;
  out.value = verdict.value;
  out.has_text = verdict.has_text;
  ptx::store_release_sys(&out.set, 1);
}

}  // namespace moecomm::device
