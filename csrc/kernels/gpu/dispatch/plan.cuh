// Makes the plan of a dispatch, by one block: where the rows of each (source, expert) begin in expert-major
// order, and in the rank layout also where the rows of each source begin. This is a prefix sum over the
// counts that all sources push here. Local expert e begins at the aligned end of e - 1; within it, source s
// begins after the sources below s. Example (docs/routing.md), alignment 4: expert 0 gets 2 rows from source
// 0 and 1 from source 1, expert 1 gets 1 and 2. Expert 0 begins at row 0 (source 1 at 2) and ends at 3,
// aligned 4; expert 1 begins at 4 (source 1 at 5) and ends at 7, aligned 8.
//
// A source announces a dispatch to all ranks by a start (DispatchStart: a hash of its arguments), by counts
// and by a record (SignalRecord: the arguments). Starts and counts are in words that hold the epoch. Records
// are read only if ranks seem to run different operations, or if a start is missing (other nodes send none).
#pragma once

#include "kernels/gpu/common/kernel.cuh"
#include "kernels/gpu/common/route.cuh"
#include "layout/routing.hpp"

namespace moecomm::gpu {

/// Returns the sum of `value` in all lower threads; `total` is the sum in all threads. Whole block.
__device__ __noinline__ inline int32_t block_scan(int32_t value, int32_t& total) {
  __shared__ int32_t warp_sums[kWarps];
  int32_t inclusive = value;
  for (int width = 1; width < 32; width *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, width);
    if (lane_id() >= width) inclusive += below;
  }
  if (lane_id() == 31) warp_sums[warp_id()] = inclusive;
  __syncthreads();
  const int32_t of_warp = lane_id() < kWarps ? warp_sums[lane_id()] : 0;
  total = __reduce_add_sync(0xffffffffu, of_warp);
  const int32_t before = __reduce_add_sync(0xffffffffu, lane_id() < warp_id() ? of_warp : 0);
  __syncthreads();
  return before + inclusive - value;
}

/// The counts of all sources, read from this rank's window, to which the sources push them.
struct PushedCounts {
  static constexpr int kAhead = 4;     ///< counts that a thread loads together to add them
  static constexpr int kTogether = 4;  ///< counts that a thread loads together in take_counts
  const uint64_t* all;                 ///< EpochNumbers [ranks][announced]
  int64_t announced;
  __device__ int32_t operator()(int32_t source, int64_t bin) const {
    return EpochNumber::number(ptx::load_relaxed_sys(all + source * announced + bin));
  }
  __device__ int32_t each() const { return static_cast<int32_t>(announced - 1); }
  __device__ int32_t bin(int32_t number) const { return number; }
  __device__ void keep(int32_t, int32_t, int32_t) const {}
};

/// The counts of all sources, copied to shared memory: [ranks][bins].
struct StagedCounts {
  static constexpr int kAhead = 1, kTogether = 4;
  int32_t* of;
  int64_t bins;
  __device__ int32_t operator()(int32_t source, int64_t bin) const { return of[source * bins + bin]; }
  __device__ int32_t each() const { return static_cast<int32_t>(bins); }
  __device__ int32_t bin(int32_t number) const { return number; }
  __device__ void keep(int32_t source, int32_t number, int32_t count) const {
    of[source * bins + number] = count;
  }
};

/// The counts that decide where rows go on this rank, copied to shared memory: each source's rows for each
/// local expert, and in the rank layout also each source's rows for this rank.
struct OwnCounts {
  static constexpr int kAhead = 1, kTogether = 1;
  int32_t* of;
  int32_t rank, local, first_expert, number;
  int64_t experts;  ///< experts of all ranks

  __device__ OwnCounts(int32_t* memory, const Comm& comm, RowLayout layout)
      : of(memory),
        rank(comm.rank),
        local(comm.local_experts),
        first_expert(comm.rank * comm.local_experts),
        number(local + (layout == RowLayout::rank ? 1 : 0)),
        experts(comm.window.shape.num_experts) {}
  __device__ int32_t operator()(int32_t source, int64_t bin) const {
    return of[source * number + (bin < experts ? bin - first_expert : local)];
  }
  /// Counts per source: rows for each local expert; in the rank layout then the rows for this rank.
  __device__ int32_t each() const { return number; }
  __device__ int32_t bin(int32_t i) const {
    return i < local ? first_expert + i : static_cast<int32_t>(experts) + rank;
  }
  __device__ void keep(int32_t source, int32_t i, int32_t count) const { of[source * number + i] = count; }
};

/// Where the rows of a dispatch begin and end on this rank. Held in the plan, or in a block's shared memory.
struct RowTables {
  int32_t *expert_rows, *offsets, *ends, *bases, *source_bases, *source_ends, *tokens;  ///< as in DevicePlan

  __device__ static RowTables of(const PlanView& plan) {
    const DevicePlan& f = plan.fields;
    return {plan.at(f.expert_rows),  plan.at(f.offsets),     plan.at(f.ends),  plan.at(f.bases),
            plan.at(f.source_bases), plan.at(f.source_ends), plan.at(f.tokens)};
  }
  /// Lays the tables out in `words`, which has (3 + ranks) * local experts + 3 * ranks words.
  __device__ static RowTables in(int32_t* words, const Comm& comm) {
    const int32_t local = comm.local_experts, ranks = comm.ranks();
    int32_t* const sources = words + (3 + ranks) * local;
    return {words,   words + local,   words + 2 * local,  words + 3 * local,
            sources, sources + ranks, sources + 2 * ranks};
  }
};

/// Size of an expert's group that receives `rows` rows: these rows with padding, or the fixed size that all
/// groups have. The host ensures that a rank's rows fit 31 bits.
__device__ inline int32_t group_rows(const SendArguments& args, int32_t rows) {
  if (args.fixed_groups()) return static_cast<int32_t>(args.positions);
  const auto alignment = static_cast<int32_t>(args.alignment);
  return alignment == 1 ? rows : (rows + alignment - 1) / alignment * alignment;
}

/// Lays out `groups` groups of rows one behind another; group i has size_of(rows_of(i)) rows. Calls begin(i,
/// first, rows, end) for each group, in a thread of its own, with its first row, rows_of(i) and its end.
/// Returns the end of the last group. Whole block.
template <class Size, class Rows, class Begin>
__device__ inline int32_t lay_out(int32_t groups, const Size& size_of, const Rows& rows_of,
                                  const Begin& begin) {
  int32_t base = 0;
#pragma unroll 1
  for (int32_t first = 0; first < groups; first += kThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const int32_t rows = i < groups ? rows_of(i) : 0;
    const int32_t size = i < groups ? size_of(rows) : 0;
    int32_t total;
    const int32_t start = base + block_scan(size, total);
    if (i < groups) begin(i, start, rows, start + size);
    base += total;
  }
  return base;
}

/// The most output rows, or expert-major positions, that any rank needs, and a rank that needs so many.
struct Need {
  int32_t most, rank;
};

/// Finds the rank that needs the most rows (`of_positions`: positions), of several the lowest. Whole block.
template <class Counts>
__device__ inline Need fullest_rank(const Comm& comm, const SendArguments& args, const Counts& counts,
                                    bool of_positions) {
  __shared__ Need of_warps[kWarps];
  const KernelShape& s = comm.window.shape;
  const int32_t bins = of_positions ? comm.local_experts : 1;
  Need found{-1, INT32_MAX};
#pragma unroll 1
  for (int32_t rank = warp_id(); rank < s.ranks; rank += kWarps) {  // a rank for each warp
    const int64_t first = of_positions ? int64_t{rank} * bins : s.num_experts + rank;
    int32_t needed = 0;
#pragma unroll 1
    for (int32_t i = lane_id(); i < bins; i += 32) {
      int32_t rows = 0;
#pragma unroll Counts::kAhead
      for (int32_t source = 0; source < s.ranks; ++source) rows += counts(source, first + i);
      needed += of_positions ? group_rows(args, rows) : rows;
    }
    needed = __reduce_add_sync(0xffffffffu, needed);
    if (needed > found.most) found = {needed, rank};
  }
  __syncthreads();  // a previous call has ended in all threads
  if (lane_id() == 0) of_warps[warp_id()] = found;
  __syncthreads();
  const Need of_warp = lane_id() < kWarps ? of_warps[lane_id()] : Need{-1, INT32_MAX};
  const int32_t most = __reduce_max_sync(0xffffffffu, of_warp.most);
  return {most, __reduce_min_sync(0xffffffffu, of_warp.most == most ? of_warp.rank : INT32_MAX)};
}

/// A capacity, the rank with the highest need, and whether that need exceeds the capacity (`passed`).
struct Overflow {
  Need need;
  int64_t capacity;
  bool passed;
  bool of_positions;  ///< the capacity limits the rank layout's positions, not output rows
};

/// Finds whether a rank needs more than the capacity of rows or (rank layout) of positions. Whole block.
template <class Counts>
__device__ inline Overflow find_overflow(const Comm& comm, const SendArguments& args, const Counts& counts) {
  const bool by_rank = args.layout == RowLayout::rank;
  const auto found = [&](bool of_positions, int64_t capacity) {
    const Need need = fullest_rank(comm, args, counts, of_positions);
    return Overflow{need, capacity, need.most > capacity, by_rank && of_positions};
  };
  if (args.capacity < 0) return {};
  if (!by_rank) return found(true, args.capacity);
  const Overflow rows = found(false, args.capacity);
  return rows.passed ? rows : found(true, args.positions);
}

/// Tells the host if a capacity is exceeded, unless an earlier report is still unread. Whole block.
template <class Counts>
__device__ inline void report_overflow(const Comm& comm, const SendArguments& args, const Counts& counts) {
  const Overflow found = find_overflow(comm, args, counts);
  HostStatus::Overflow& overflow = comm.host->overflow;
  if (threadIdx.x != 0 || !found.passed || ptx::load_acquire_sys(&overflow.set) != 0) return;
  overflow.rank = found.need.rank;
  overflow.needed = found.need.most;
  overflow.capacity = found.capacity;
  overflow.of_positions = found.of_positions;
  ptx::store_release_sys(&overflow.set, 1);
}

/// Writes a plan that moves nothing, for a dispatch that fails on all ranks. Whole block.
__device__ inline void write_empty_plan(const Comm& comm, const PlanView& plan) {
  const DevicePlan& f = plan.fields;
  for (int64_t i = threadIdx.x; i < comm.local_experts; i += kThreads)
    plan.at(f.expert_rows)[i] = plan.at(f.offsets)[i] = plan.at(f.ends)[i] = 0;
  for (int64_t i = threadIdx.x; i < comm.ranks(); i += kThreads)
    plan.at(f.source_ends)[i] = plan.at(f.tokens)[i] = 0;
  if (threadIdx.x != 0) return;
  plan.at(f.expert_starts)[0] = 0;
  plan.header() = PlanHeader{};
}

/// Fills `tables` with the row ranges of sources and experts; returns the plan's header. Whole block.
template <class Counts>
__device__ inline PlanHeader lay_out_rows(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                          const Counts& counts, const RowTables& tables) {
  const KernelShape& s = comm.window.shape;
  const int32_t local = comm.local_experts, first_expert = comm.rank * local;
  const bool by_expert = args.layout == RowLayout::expert;
  // Capacities fit 31 bits.
  const auto capacity = static_cast<int32_t>(args.capacity);
  const int32_t most_positions = by_expert ? capacity : static_cast<int32_t>(args.positions);
  const auto clamp = [](int32_t row, int32_t most) { return most < 0 ? row : min(row, most); };
  const auto expert_rows = [&](int32_t e) {
    int32_t rows = 0;
#pragma unroll Counts::kAhead
    for (int32_t source = 0; source < s.ranks; ++source) rows += counts(source, first_expert + e);
    return rows;
  };
  const int32_t positions = lay_out(
      local, [&](int32_t rows) { return group_rows(args, rows); }, expert_rows,
      [&](int32_t e, int32_t start, int32_t rows, int32_t end) {
        tables.expert_rows[e] = rows;
        tables.offsets[e] = clamp(end, most_positions);
        tables.ends[e] = args.fixed_groups() ? tables.offsets[e] : clamp(start + rows, most_positions);
#pragma unroll Counts::kAhead
        for (int32_t source = 0; source < s.ranks; ++source) {
          tables.bases[source * local + e] = start;
          start += counts(source, first_expert + e);
        }
      });
  int32_t needed = positions;
  if (!by_expert)
    needed = lay_out(
        s.ranks, [](int32_t rows) { return rows; },
        [&](int32_t source) { return counts(source, s.num_experts + comm.rank); },
        [&](int32_t source, int32_t start, int32_t, int32_t end) {
          tables.source_bases[source] = start;
          tables.source_ends[source] = clamp(end, capacity);
        });
  if (by_expert)
    for (auto source = static_cast<int32_t>(threadIdx.x); source < s.ranks; source += kThreads)
      tables.source_ends[source] = 0;
  PlanHeader header{};
  header.id = epoch;
  header.needed_rows = needed;
  header.rows = capacity < 0 ? needed : capacity;
  header.needed_positions = positions;
  header.positions = most_positions < 0 ? positions : most_positions;
  header.overflow = needed > header.rows           ? header.needed_rows
                    : positions > header.positions ? header.needed_positions
                                                   : 0;
  return header;
}

/// Adds this rank's output rows, and the bytes that come from other ranks, to the statistics. One thread.
template <class Counts>
__device__ inline void count_rows(const Comm& comm, const PlanHeader& header, const Counts& counts) {
  const KernelShape& s = comm.window.shape;
  int64_t entries = 0;
#pragma unroll Counts::kAhead
  for (int32_t source = 0; source < s.ranks; ++source)
    if (source != comm.rank) entries += counts(source, s.num_experts + comm.rank);
  // The additions return nothing, so that no thread waits for the memory.
  const auto add = [](uint64_t& to, int64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&to), static_cast<unsigned long long>(value));
  };
  add(comm.state().rows_out, min(header.needed_rows, header.rows));
  add(comm.state().bytes_wire, entries * comm.window.shape.wire_row_bytes());
}

/// What is known of all ranks after a wait for their announcements.
struct Agreement {
  bool alive;  ///< all ranks have announced an operation
  bool same;   ///< all ranks run the same operation
};

/// Waits for the records of all ranks and compares them; if they differ, `verdict` says how. Whole block.
__device__ inline Agreement agree(const Comm& comm, uint64_t epoch, HostStatus::Verdict& verdict) {
  __shared__ bool same;
  if (!device::wait_records(comm, Operation::dispatch, epoch, false)) return {false, false};
  if (threadIdx.x < 32) {
    HostStatus::Verdict found;
    const bool here = device::compare_records(comm, epoch, found);
    if (threadIdx.x == 0) {
      same = here;
      verdict = found;
    }
  }
  __syncthreads();
  return {true, same};
}

/// Polls for a source's start, and now and then for its record, since some sources send only a record.
struct StartArrival {
  static constexpr unsigned kInterval = 32;
  const DispatchStart* start;
  const SignalRecord* record;
  uint64_t epoch;
  mutable ptx::Pair found{};
  device::RareLook at_record{};

  __device__ bool has_start() const { return EpochNumber::is_of(found.high, epoch); }
  __device__ bool arrived() const {
    found = ptx::load_relaxed_sys_pair(start);
    if (has_start()) return true;
    if (!at_record.due() || ptx::load_acquire_sys(&record->epoch) < epoch) return false;
    found = ptx::load_relaxed_sys_pair(start);  // if the source sends a start, it is here before the record
    return true;
  }
};

/// Waits for the starts of all ranks; the block's threads share the ranks, last threads first. Calls
/// note(rank) when a rank's start or record has come. False if a rank of this thread has other arguments than
/// this rank, or sends no start (only its record, or nothing): then records have to be compared.
template <class Note>
__device__ inline bool starts_alike(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                    const Note& note) {
  const DispatchStart* const starts = comm.mine<DispatchStart>(comm.window.starts[epoch & 1]);
  bool alike = true;
  for (auto peer = static_cast<int32_t>(kThreads - 1 - threadIdx.x); peer < comm.ranks(); peer += kThreads) {
    const StartArrival arrival{starts + peer, &comm.record(comm.own, peer, epoch), epoch};
    const bool come =
        device::wait_until(comm, {peer, WaitPhase::records, Operation::dispatch, epoch}, arrival);
    if (come) note(peer);
    alike = come && arrival.has_start() &&
            arrival.found.low == arguments_hash(dispatch_record(comm, args, epoch, false)) && alike;
  }
  return alike;
}

/// Polls for a number that a source pushes, or for a record that says that the source may push none.
struct CountArrival {
  static constexpr unsigned kInterval = 32;
  const uint64_t* word;
  const SignalRecord* record;
  uint64_t epoch;
  mutable uint64_t number = 0;  ///< the word as last loaded: number and epoch
  device::RareLook at_record{};

  __device__ void load() const { number = ptx::load_relaxed_sys(word); }
  __device__ bool has_come() const { return EpochNumber::is_of(number, epoch); }
  __device__ bool arrived() const {
    load();
    if (has_come()) return true;
    return at_record.due() && ptx::load_relaxed_sys(&record->epoch) >= epoch &&
           ptx::load_acquire_sys(&record->epoch) >= epoch &&
           (record->operation != Operation::dispatch || record->error != 0);
  }
};

/// Copies each source's counts to `counts`, and its number of tokens to `tokens`[source], as they arrive.
/// The whole block calls it. False if a wait fails, or if a source sends no counts because it runs another
/// operation or has an error.
template <class Counts>
__device__ inline bool take_counts(const Comm& comm, uint64_t epoch, const Counts& counts, int32_t* tokens) {
  constexpr int kTogether = Counts::kTogether;
  const int32_t each = counts.each() + 1, bins = static_cast<int32_t>(comm.window.shape.counts());
  const int32_t all = each * comm.ranks();
  bool here = true;
#pragma unroll 1
  for (auto first = static_cast<int32_t>(threadIdx.x); here && first < all; first += kTogether * kThreads) {
    CountArrival arrivals[kTogether];
    int32_t sources[kTogether], numbers[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int32_t i = min(first + j * kThreads, all - 1);
      sources[j] = i / each;
      numbers[j] = i - sources[j] * each;
      const int32_t bin = numbers[j] == each - 1 ? bins : counts.bin(numbers[j]);
      arrivals[j] = {comm.counts(comm.own, sources[j], epoch) + bin,
                     &comm.record(comm.own, sources[j], epoch), epoch};
      arrivals[j].load();
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (first + j * kThreads >= all) break;
      if (!arrivals[j].has_come())
        here = here && device::wait_until(comm, {sources[j], WaitPhase::records, Operation::dispatch, epoch},
                                          arrivals[j]);
      here = here && arrivals[j].has_come();
      if (!here) break;
      const int32_t number = EpochNumber::number(arrivals[j].number);
      if (numbers[j] == each - 1)
        tokens[sources[j]] = number;
      else
        counts.keep(sources[j], numbers[j], number);
    }
  }
  return __syncthreads_and(here);
}

/// What the block that makes the plan does besides, for many tokens or for few (dispatch_fused.cu).
enum class Planner {
  of_many,         ///< releases the receiving kernel, which waits for the plan; checks the capacity
  of_few,          ///< checks the capacity; no kernel waits for the plan
  of_few_watched,  ///< as of_few, but if the starts agree, another block checks the capacity
};

/// Writes the plan from `counts`; its `tokens` are there already. Releases a kernel that waits for the plan
/// (`planner`), and a host that waits for the number of rows. Adds to the statistics. Whole block.
template <class Counts>
__device__ inline void publish_plan(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                    const Counts& counts, Planner planner) {
  const PlanView plan{args.plan, comm.plan_fields};
  const RowTables tables = RowTables::of(plan);
  const PlanHeader header = lay_out_rows(comm, args, epoch, counts, tables);
  if (args.capacity < 0)
    for (auto e = static_cast<int32_t>(threadIdx.x); e < comm.local_experts; e += kThreads)
      host_counts(comm.host)[e] = tables.expert_rows[e];  // this thread wrote it, so no barrier
  if (threadIdx.x == 0) {
    plan.at(plan.fields.expert_starts)[0] = 0;
    plan.header() = header;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (planner == Planner::of_many) ptx::store_release_gpu(&comm.state().planned, epoch);
    device::note_phase(comm, Operation::dispatch, Phase::planned);
    if (args.capacity < 0) {
      HostStatus::Rows& rows = comm.host->rows;
      rows.rows = header.needed_rows;
      rows.positions = header.needed_positions;
      ptx::store_release_sys(&rows.ticket, args.ticket);
    }
    count_rows(comm, header, counts);
  }
}

/// Makes an empty plan for a dispatch that can't go on, and reports why if all ranks are alive. In any case
/// releases the receiving kernel and, without a capacity, the host, which wait for the plan. Whole block.
__device__ inline void call_off(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                const Agreement& found, const HostStatus::Verdict& verdict) {
  write_empty_plan(comm, PlanView{args.plan, comm.plan_fields});
  __syncthreads();
  if (threadIdx.x != 0) return;
  DeviceState& state = comm.state();
  if (found.alive) {
    device::report_verdict(comm, verdict, epoch);
    ptx::store_release_gpu(&state.cancelled, epoch);
  }
  ptx::store_release_gpu(&state.planned, epoch);
  if (args.capacity >= 0) return;
  HostStatus::Rows& rows = comm.host->rows;
  rows.rows = -1;
  rows.positions = 0;
  ptx::store_release_sys(&rows.ticket, args.ticket);
}

/// Makes the plan from the announcements of all ranks as they arrive; if these differ, calls the dispatch
/// off. Tells the host if a capacity is exceeded, unless another block does that (`planner`). Whole block.
template <class Counts>
__device__ inline void make_plan(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                 const Counts& counts, Planner planner) {
  __shared__ HostStatus::Verdict verdict;
  const RowTables tables = RowTables::of(PlanView{args.plan, comm.plan_fields});
  Agreement found{};
  bool by_starts = false;
  if (!failed_for_block(comm)) {
    const uint64_t begun = ptx::global_nanoseconds();
    const bool alike =
        starts_alike(comm, args, epoch, [&](int32_t peer) { device::note_late(comm, peer, begun); });
    const bool taken = take_counts(comm, epoch, counts, tables.tokens);
    by_starts = __syncthreads_and(alike && taken);
    if (by_starts) {
      found = {true, true};
    } else {
      found = agree(comm, epoch, verdict);
      found.alive = found.alive && (taken || !found.same);
      found.same = found.same && taken;
    }
    if (found.same && threadIdx.x == 0) device::note_agreed(comm, Operation::dispatch, begun);
  }
  if (!found.same) return call_off(comm, args, epoch, found, verdict);
  publish_plan(comm, args, epoch, counts, planner);
  if (planner != Planner::of_few_watched || !by_starts) report_overflow(comm, args, counts);
}

/// Makes the plan. Copies the counts to `scratch`, `words` words of shared memory, if they fit there.
__device__ inline void make_plan(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                 int32_t* scratch, int64_t words, Planner planner) {
  const int64_t bins = comm.window.shape.counts(), announced = comm.window.shape.announced();
  if (bins * comm.ranks() <= words) return make_plan(comm, args, epoch, StagedCounts{scratch, bins}, planner);
  make_plan(comm, args, epoch, PushedCounts{comm.counts(comm.own, 0, epoch), announced}, planner);
}

/// If the starts of a dispatch agree, tells the host if a capacity is exceeded. Another block makes the plan.
/// Whole block. `scratch`, `tokens`: shared memory for all ranks' counts, and for a number per rank.
__device__ inline void watch_capacity(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                      int32_t* scratch, int32_t* tokens) {
  if (args.capacity < 0 || failed_for_block(comm)) return;
  const int64_t bins = comm.window.shape.counts();
  const bool alike = starts_alike(comm, args, epoch, [](int32_t) {});
  const bool taken = take_counts(comm, epoch, StagedCounts{scratch, bins}, tokens);
  if (__syncthreads_and(alike && taken)) report_overflow(comm, args, StagedCounts{scratch, bins});
}

}  // namespace moecomm::gpu
