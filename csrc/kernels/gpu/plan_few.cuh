// What sources announce of few tokens (route_few.cuh), in words that hold their epoch, taken as it comes; and
// the plan by it: what plan.cuh makes of what is there with the records. Of a source of many tokens, which
// has no such words, it is taken when its record has come. For one kernel alone: one that receives routes as
// those of many tokens wants the records first.
#pragma once

#include "kernels/gpu/plan.cuh"
#include "kernels/gpu/route.cuh"

namespace moecomm::gpu {

/// A number that a source announces: in a word that holds its epoch, or, of many tokens, with its record.
struct CountArrival {
  static constexpr unsigned kInterval = 32;
  const uint64_t* word;
  const SignalRecord* record;
  uint64_t epoch;
  mutable uint64_t number;  ///< what was found

  __device__ bool of_few() const { return EpochNumber::is_of(number, epoch); }
  __device__ bool arrived() const {
    number = ptx::load_relaxed_sys(word);
    const uint64_t announced = ptx::load_relaxed_sys(&record->epoch);
    if (of_few()) return true;
    if (announced < epoch) return false;
    ptx::load_acquire_sys(&record->epoch);  // what the source has pushed before is there
    number = ptx::load_relaxed_sys(word);
    return true;
  }
};

/// Takes what each source announces into `counts`, its tokens into `tokens`, and how it does so into `few`.
/// Whole block; false if it waits in vain, or a source does something else.
template <class Counts>
__device__ inline bool take_counts(const Comm& comm, uint64_t epoch, const Counts& counts, int32_t* tokens,
                                   bool* few) {
  const int32_t each = counts.each() + 1, bins = static_cast<int32_t>(comm.window.shape.counts());
  const uint64_t* const words = comm.mine<uint64_t>(comm.window.few_counts[epoch & 1]);
  const PushedCounts pushed{pushed_counts(comm, epoch), bins};
  bool here = true;
#pragma unroll 1
  for (auto i = static_cast<int32_t>(threadIdx.x); here && i < each * comm.ranks(); i += kThreads) {
    const int32_t source = i / each, number = i - source * each;
    const bool of_tokens = number == each - 1;
    const int32_t bin = of_tokens ? bins : counts.bin(number);
    const SignalRecord& record = comm.record(comm.own, source, epoch);
    const CountArrival arrival{words + source * (bins + 1) + bin, &record, epoch, 0};
    here = device::wait_until(comm, {source, WaitPhase::records, Operation::dispatch, epoch}, arrival);
    if (!here) break;
    int32_t value = EpochNumber::number(arrival.number);
    if (!arrival.of_few()) {
      here = record.operation == Operation::dispatch && record.error == 0;
      value = of_tokens ? record.tokens : pushed(source, bin);
    }
    if (of_tokens) {
      tokens[source] = value;
      few[source] = arrival.of_few();
    } else {
      counts.of[source * (each - 1) + number] = value;
    }
  }
  return __syncthreads_and(here);
}

/// A source's announcement of few tokens, or its record.
struct StartArrival {
  static constexpr unsigned kInterval = 32;
  const FewStart* start;
  const SignalRecord* record;
  uint64_t epoch;
  mutable ptx::Pair found;

  __device__ bool of_few() const { return EpochNumber::is_of(found.high, epoch); }
  __device__ bool arrived() const {
    found = ptx::load_relaxed_sys_pair(start);
    const uint64_t announced = ptx::load_relaxed_sys(&record->epoch);
    return of_few() || announced >= epoch;
  }
};

/// True unless a rank that this thread looks at announces other arguments than this one's, or many tokens, so
/// that records have to be looked at. Counts how long it waits for whom. The last threads share the ranks.
__device__ inline bool starts_alike(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                    uint64_t begun) {
  const FewStart* const starts = comm.mine<FewStart>(comm.window.few_starts[epoch & 1]);
  bool alike = true;
  for (auto peer = static_cast<int32_t>(kThreads - 1 - threadIdx.x); peer < comm.ranks(); peer += kThreads) {
    const StartArrival arrival{starts + peer, &comm.record(comm.own, peer, epoch), epoch, {}};
    alike = device::wait_until(comm, {peer, WaitPhase::records, Operation::dispatch, epoch}, arrival) &&
            arrival.of_few() &&
            arrival.found.low == arguments_hash(dispatch_record(comm, args, epoch, false)) && alike;
    device::note_late(comm, peer, begun);
  }
  return alike;
}

/// Makes the plan of a dispatch when all ranks have announced theirs, of few tokens or of many. Whole block.
/// `scratch`: shared memory for the counts of all ranks; `few`: of each source.
__device__ inline void make_plan_of_few(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                        int32_t* scratch, bool* few) {
  __shared__ HostStatus::Verdict verdict;
  const StagedCounts counts{scratch, comm.window.shape.counts()};
  const RowTables tables = RowTables::of(PlanView{args.plan, comm.plan_fields});
  Agreement found{};
  if (!failed_for_block(comm)) {
    const uint64_t begun = ptx::global_nanoseconds();
    const bool alike = starts_alike(comm, args, epoch, begun);
    const bool taken = take_counts(comm, epoch, counts, tables.tokens, few);
    if (__syncthreads_and(alike && taken)) {
      if (threadIdx.x == 0) device::note_agreed(comm, Operation::dispatch, begun);
      found = {true, true};
    } else {
      found = agree(comm, epoch, verdict, [](int, int) {});
      found.alive = found.alive && (taken || !found.same);
      found.same = found.same && taken;
    }
  }
  if (!found.same) return call_off(comm, args, epoch, found, verdict);
  publish_plan(comm, args, epoch, counts);
}

}  // namespace moecomm::gpu
