// Records: what each rank announces to every rank in each operation (layout/control.hpp), here between
// kernels.
#pragma once

#include "transport/device/wait.cuh"

namespace moecomm::device {

/// Writes `record` to every rank. Everything this block's earlier fence covers is visible to whoever sees its
/// epoch. Called by whole blocks or warps: threads share the peers.
__device__ inline void signal_records(const Comm& comm, const SignalRecord& record, int thread, int threads) {
  for (int peer = thread; peer < comm.ranks(); peer += threads) {
    SignalRecord& slot = comm.record(comm.bases[peer], comm.rank, record.epoch);
    slot.operation = record.operation;
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

/// Waits for every rank's record of `epoch`. Whole block; false for all threads if one of them waits in vain.
__device__ inline bool wait_records(const Comm& comm, Operation operation, uint64_t epoch) {
  bool arrived = true;
  for (int peer = threadIdx.x; arrived && peer < comm.ranks(); peer += blockDim.x)
    arrived = wait_until(comm, {peer, WaitPhase::records, operation, epoch},
                         RecordEpoch{&comm.record(comm.own, peer, epoch).epoch, epoch});
  return __syncthreads_and(arrived);
}

/// Compares the records of `epoch`; every rank looks at the same ones, so every rank comes to the same
/// verdict. One thread. Fills `verdict` and returns false if they do not agree.
__device__ inline bool compare_records(const Comm& comm, uint64_t epoch, HostStatus::Verdict& verdict) {
  for (int32_t r = 0; r < comm.ranks(); ++r) {
    const SignalRecord& record = comm.record(comm.own, r, epoch);
    if (record.error == 0) continue;
    verdict.kind = record.error;
    verdict.rank = r;
    verdict.about = Disagreement::none;
    verdict.index = record.rows_offset;
    verdict.value = record.detail;
    verdict.has_text = record.operation == Operation::none;
    return false;
  }
  const SignalRecord& first = comm.record(comm.own, 0, epoch);
  for (int32_t r = 1; r < comm.ranks(); ++r) {
    const SignalRecord& other = comm.record(comm.own, r, epoch);
    const auto differ = [&](Disagreement about, int64_t at_first, int64_t here) {
      if (at_first == here) return false;
      verdict.kind = 3;  // ErrorKind::mismatched_arguments
      verdict.rank = r;
      verdict.about = about;
      verdict.index = at_first;
      verdict.value = here;
      verdict.has_text = 0;
      return true;
    };
    if (differ(Disagreement::operation, static_cast<int64_t>(first.operation),
               static_cast<int64_t>(other.operation)) ||
        differ(Disagreement::layout, static_cast<int64_t>(first.layout),
               static_cast<int64_t>(other.layout)) ||
        differ(Disagreement::alignment, first.alignment, other.alignment) ||
        differ(Disagreement::capacity, first.capacity, other.capacity) ||
        differ(Disagreement::plan, static_cast<int64_t>(first.plan), static_cast<int64_t>(other.plan)) ||
        differ(Disagreement::carries, first.carries, other.carries))
      return false;
  }
  return true;
}

/// Hands a verdict to the host, unless one is waiting there already. One thread.
__device__ inline void report_verdict(const Comm& comm, const HostStatus::Verdict& verdict, uint64_t epoch) {
  HostStatus::Verdict& out = comm.host->verdict;
  if (ptx::load_acquire_sys(&out.set) != 0) return;
  if (verdict.has_text != 0) {
    const char* text = comm.at<char>(comm.bases[verdict.rank], comm.window.error_text[epoch & 1]);
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
