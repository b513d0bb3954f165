// Moves rows by pipes of warps; a row goes to one target address or several. The warps of one pipe are a
// unit; a block has two to four units. A unit has three warps, and more where rows are changed:
//   - the lister finds sources and targets of rows, a few at a time; on the receiving side it waits for rows
//   - the loader starts bulk copies of these rows, in pieces, into a ring of stages (buffers) in shared
//     memory, as far ahead as there is room. So copies overlap with the lister's waits
//   - workers, if there are any, change a row in its stage. All of them share each row; or, where rows are
//     short or need several pieces, each worker takes pieces alone (lone workers)
//   - the storer, one thread, starts bulk copies of each piece from its stage to all targets of the row. It
//     sets the flags of a list, for which other ranks wait, once all earlier stores have arrived
// Without workers no thread touches the bytes of a row, so an SM moves as much as its copy engine can.
#pragma once

#include "device/rail.cuh"
#include "kernels/gpu/common/stages.cuh"
#include "kernels/gpu/common/token_order.cuh"

namespace moecomm::gpu {

inline constexpr int kMoveTokens = 8,
                     kMoveWords = 64;  ///< of a list: most tokens; most targets, and most flags
inline constexpr int kMoveLists = 3, kMoveRounds = 4;  ///< lists per unit; most rounds (TokenLanes) per list
static_assert(kMoveTokens >= kMaxChunk);

/// True where a list has room for all tokens of a chunk, with at most `each` targets a row. If it has not,
/// only lone workers can move this communicator's rows.
MOECOMM_HD inline bool lists_hold(const DeviceShape& shape, int each) {
  const int chunk = chunk_tokens(shape.max_tokens);
  return chunk * each <= kMoveWords && chunk <= kMoveRounds * (32 / shape.top_k);
}

/// Worker warps of a unit: kWorkers where all of them share each row, kLoneWorkers where each works alone.
inline constexpr int kWorkers = 8, kWorkerThreads = kWorkers * 32, kLoneWorkers = 4;

/// A pipe whose units have `workers` worker warps.
template <int workers>
struct MovePipe {
  static constexpr bool kWorks = workers > 0, kAlone = workers == kLoneWorkers;
  static constexpr int kUnits = kAlone ? 3 : kWorks ? 2 : 4, kUnitWarps = workers + 3;
  static constexpr int kThreads = kUnits * kUnitWarps * 32;
  static constexpr int kBytes = kAlone ? 57344 : kWorks ? 98304 : 49152;  ///< bytes of a unit's stages
  /// Most bytes of a piece of a row.
  static constexpr int kPiece = kWorks && !kAlone ? 16384 : 8192;
  /// Most entries of a list: one for each row and, with workers, one for each target that gets its own row.
  static constexpr int kEntries = kMoveTokens + (kWorks ? kMoveWords : 0);
  static constexpr int kFlags = 128;

  /// What the lister passes to the other warps: some rows and their targets. An entry is a row to load or to
  /// make; each of its pieces takes a stage.
  struct List {
    const std::byte* sources[kEntries];  ///< null: nothing to load
    std::byte* targets[kMoveWords];      ///< grouped by entry, in order
    uint64_t* flags[kMoveWords];         ///< set when the entries of this and all earlier lists have arrived
    int32_t ends[kEntries];              ///< end of each entry's range in `targets`
    float factors[kWorks ? kEntries : 1];
    float* products[kWorks ? kEntries : 1];          ///< address for an entry's dot product, or null
    const std::byte* others[kAlone ? kEntries : 1];  ///< per entry: its scales, or a row for a dot product
    int32_t entries, flag_count;
    bool is_last;  ///< the end marker, without entries
  };

  /// Shared memory of a unit.
  struct alignas(128) Unit {
    std::byte stages[kBytes];
    List lists[kMoveLists];
    uint64_t full[kMaxStages], ready[kMaxStages], empty[kMaxStages];
    uint64_t listed[kMoveLists], taken[kMoveLists];
    float parts[kWorks && !kAlone ? kMaxStages : 1]
               [kWorks ? workers : 1];  ///< [stage][worker] the worker's share of a dot product
    // For the storer alone: flags that are not set yet, and the number of bulk groups before each flag.
    uint64_t* flags[kFlags];
    uint32_t groups[kFlags];
  };
  struct Memory {
    Unit units[kUnits];
  };
};

static_assert(kRouteWords * sizeof(int32_t) <= kMostShared);
static_assert(sizeof(MovePipe<0>::Memory) <= kMostShared);
static_assert(sizeof(MovePipe<kWorkers>::Memory) <= kMostShared);
static_assert(sizeof(MovePipe<kLoneWorkers>::Memory) <= kMostShared);

/// True if all workers of a unit share each row that they change; else lone workers change rows. Shared rows
/// have to fit one piece, and to be so long that the cost per row does not matter (docs/history.md).
inline bool work_together(const DeviceShape& shape) {
  constexpr int kMost = MovePipe<kWorkers>::kPiece, kLeast = kMost / 2;
  return shape.row_bytes() >= kLeast && shape.row_bytes() <= kMost && shape.wire_row_bytes() <= kMost;
}

/// Returns the tokens per list: a multiple of `chunk` (tokens per chunk). For lone workers it is a fraction
/// of a chunk if a list does not hold a whole chunk. `each`: most targets of a row. All units of the grid
/// share `tokens` tokens, and store `token_bytes` bytes for each, in the mean. Lists are so short that the
/// units end at about the same time; those of few bytes are longer, since each list takes some 4 us.
template <int workers>
__device__ inline int move_tokens(const TokenLanes& map, int each, int chunk, int64_t tokens,
                                  int64_t token_bytes) {
  constexpr int kLists = 16, kFewLists = 3;  // least lists per unit; the same where a list has few bytes
  constexpr int64_t kFewBytes = 20 << 10;
  const int64_t units = int64_t{gridDim.x} * MovePipe<workers>::kUnits;
  const auto least = [&](int of) { return of * token_bytes > kFewBytes ? kLists : kFewLists; };
  int most = kMoveTokens;
  while ((most > chunk && most * least(most) * units > tokens) ||
         ((most > chunk || MovePipe<workers>::kAlone) &&
          (most * each > kMoveWords || most > kMoveRounds * map.tokens)))
    most /= 2;
  return most;
}

/// Sizes of what is loaded into a stage and stored from it. A row that all workers share is one piece.
struct MoveShape : PipeShape {
  uint32_t row_stored;  ///< bytes of a changed row; 0: unchanged
  bool pass = false;    ///< this operation reads neither the loaded nor the stored bytes again

  /// Rows of `loaded` bytes, changed to `stored` bytes, in stages of at most `bytes` in all.
  template <int workers>
  __device__ static MoveShape of(int64_t loaded, int64_t stored, int bytes = MovePipe<workers>::kBytes) {
    using Pipe = MovePipe<workers>;
    MoveShape shape{
        PipeShape(Pipe::kWorks ? max(loaded, stored) : loaded, Pipe::kPiece, min(bytes, Pipe::kBytes)),
        Pipe::kWorks ? static_cast<uint32_t>(stored) : 0};
    if (Pipe::kWorks) shape.pieces = {1, static_cast<int32_t>(loaded), static_cast<int32_t>(loaded)};
    return shape;
  }
  /// Returns this shape with `pass` set.
  __device__ MoveShape passing() const {
    MoveShape shape = *this;
    shape.pass = true;
    return shape;
  }
  __device__ uint32_t stored(int piece) const { return row_stored > 0 ? row_stored : pieces.size(piece); }
  __device__ int64_t place(int piece) const { return pieces.offset(piece); }  ///< offset in the stored row
  __device__ void signal(uint64_t* flag, uint64_t epoch) const { device::relaxed_signal(flag, epoch); }
};

inline constexpr int32_t kLonePiece = MovePipe<kLoneWorkers>::kPiece;  ///< bytes of a lone worker's piece

/// Cuts `total` bytes into pieces of at most `each`. Columns that share a scale stay in one piece.
__device__ inline Pieces row_pieces(int64_t total, int32_t each) {
  return full_pieces(total, min(each, static_cast<int32_t>(total)));
}
/// Cuts a row's scales into pieces that match `values`, the pieces of the row's values (a value is one byte).
/// The bytes of all scales are rounded up to 16 for bulk copies. Empty if the wire format has no scales.
__device__ inline Pieces scale_pieces(const KernelShape& shape, const Pieces& values) {
  const WireEntry wire = wire_entry(shape.wire);
  if (wire.scale_columns == 0) return {};
  const auto total = static_cast<int32_t>((shape.wire_scale_bytes() + 15) / 16 * 16);
  return row_pieces(total, values.count > 1 ? values.bytes / wire.scale_columns * wire.scale_bytes : total);
}

/// The pieces of a row that lone workers load and store.
struct LoneRows {
  Pieces loaded, with;    ///< `with` is loaded behind `loaded`: the row's scales, or another row
  int64_t with_at;        ///< offset in the loaded row of the scales in `with`; 0: `with` is another row
  Pieces stored, scales;  ///< what is stored from a stage: `stored` at its start, `scales` behind
  int64_t scales_at;      ///< offset of `scales` in the stored row
  bool in_place;          ///< `loaded` goes to the stage's start, where the stored row overwrites it
};

/// The MoveShape of lone workers. Where rows go to other nodes, `sent` has the number of rows for each.
struct LoneShape : MoveShape {
  LoneRows rows;
  int32_t at;  ///< offset in a stage to which rows are loaded
  const Comm* comm = nullptr;
  const int32_t* sent = nullptr;

  explicit __device__ LoneShape(const LoneRows& of, int bytes = MovePipe<kLoneWorkers>::kBytes)
      : MoveShape{PipeShape(of.loaded.bytes, of.loaded.bytes, bytes), 0, true},
        rows(of),
        at(of.in_place ? 0 : of.stored.bytes + of.scales.bytes) {
    pieces = rows.loaded;
    const int used = max(at + pieces.bytes + rows.with.bytes, rows.stored.bytes + rows.scales.bytes);
    stage_bytes = (used + 127) / 128 * 128;
    stages = min(kMaxStages, max(3, min(bytes, MovePipe<kLoneWorkers>::kBytes) / stage_bytes));
  }
  /// True where one worker has to take all pieces, to add up a row's dot product in the order of its pieces.
  __device__ bool in_order() const { return pieces.count > 1 && rows.with.count > 0 && rows.with_at == 0; }
  __device__ uint32_t stored(int piece) const { return rows.stored.size(piece); }
  __device__ int64_t place(int piece) const { return rows.stored.offset(piece); }
  /// Encodes row `number` for node `other` as a flag of a list. Bit 0 tells it from the address of a flag;
  /// signal() then sets no flag, but counts the row as staged.
  __device__ static uint64_t* staged(int32_t other, int32_t number) {
    return reinterpret_cast<uint64_t*>(uintptr_t{static_cast<uint32_t>(number)} << 16 |
                                       static_cast<uint32_t>(other << 1 | 1));
  }
  __device__ void signal(uint64_t* flag, uint64_t epoch) const {
    const auto word = reinterpret_cast<uintptr_t>(flag);
    if ((word & 1) == 0) return device::relaxed_signal(flag, epoch);
    const auto other = static_cast<int32_t>(word >> 1 & 0x7fff);
    device::row_staged(*comm, comm->window.shape.wire, other, static_cast<int32_t>(word >> 16),
                       __ldcg(sent + other), epoch);
  }
};

/// The lister warp fills its unit's lists with this. All lanes call every function.
template <int workers>
class MoveLister {
 public:
  using Pipe = MovePipe<workers>;
  explicit __device__ MoveLister(typename Pipe::Unit& unit) : unit_(unit) {}

  /// Waits until the other warps have read an earlier list, and starts a new one in its memory.
  __device__ typename Pipe::List& open() {
    wait_barrier(&unit_.taken[number_ % kMoveLists], number_ / kMoveLists + 1);
    entries_ = targets_ = 0;
    return now();
  }
  /// Adds the rows of a round of tokens. Each lane gives its token's row and, if `wanted`, a target for that
  /// row. Targets of a row are in lane order; a row without any is left out. `other`: as in List::others.
  __device__ void add(const TokenLanes& map, const std::byte* source, bool wanted, std::byte* target,
                      const std::byte* other = nullptr) {
    const uint32_t places = __ballot_sync(0xffffffffu, wanted), below = (1u << lane_id()) - 1;
    if (wanted) now().targets[targets_ + __popc(places & below)] = target;
    const bool row = map.leads() && (places & map.lanes) != 0;
    const uint32_t rows = __ballot_sync(0xffffffffu, row);
    if (row) {
      const int at = entries_ + __popc(rows & below);
      now().sources[at] = source;
      now().ends[at] = targets_ + __popc(places & (below | map.lanes));
      if (Pipe::kWorks) now().products[at] = nullptr;
      if (Pipe::kAlone) now().others[at] = other;
    }
    entries_ += __popc(rows);
    targets_ += __popc(places);
  }
  /// Like add(), but workers make a row for each target: the source row times `factor`. `product`, if not
  /// null, gets the dot product of the source row and the row at `other`. Where workers share rows, an entry
  /// that only loads the source row comes first.
  __device__ void add_each(const TokenLanes& map, const std::byte* source, bool wanted, std::byte* target,
                           float factor, const std::byte* other, float* product) {
    const uint32_t places = __ballot_sync(0xffffffffu, wanted), below = (1u << lane_id()) - 1;
    const bool row = !Pipe::kAlone && map.leads() && (places & map.lanes) != 0;
    const uint32_t rows = __ballot_sync(0xffffffffu, row);
    const int place = __popc(places & below);
    if (row) {
      const int at = entries_ + place + __popc(rows & below);
      now().sources[at] = source;
      now().ends[at] = targets_ + place;
    }
    if (wanted) {
      const int at = entries_ + place + __popc(rows & (below | 1u << lane_id()));
      now().sources[at] = Pipe::kAlone ? source : other;
      if (Pipe::kAlone) now().others[at] = other;
      now().ends[at] = targets_ + place + 1;
      now().targets[targets_ + place] = target;
      now().factors[at] = factor;
      now().products[at] = product;
    }
    entries_ += __popc(rows) + __popc(places);
    targets_ += __popc(places);
  }
  __device__ bool empty() const { return entries_ == 0; }
  /// True if the list has room for one more token, with up to `each` targets.
  __device__ bool has_room(int each) const { return entries_ < kMoveTokens && targets_ + each <= kMoveWords; }
  /// Hands the list, in which the caller has set `flags` flags, to the other warps. Bulk copies of its rows
  /// see all memory that the lanes have acquired.
  __device__ void hand_over(int flags, bool is_last = false) {
    if (lane_id() == 0) {
      now().entries = entries_;
      now().flag_count = flags;
      now().is_last = is_last;
    }
    __syncwarp();
    if (lane_id() == 0) ptx::barrier_arrive(&unit_.listed[number_ % kMoveLists]);
    ++number_;
  }
  __device__ void end() {
    open();
    hand_over(0, true);
  }

 private:
  __device__ typename Pipe::List& now() { return unit_.lists[number_ % kMoveLists]; }

  typename Pipe::Unit& unit_;
  uint32_t number_ = 0;
  int entries_ = 0, targets_ = 0;
};

/// The loader's work: starts bulk copies of the rows of all lists into stages. All lanes.
template <int workers, class Shape>
__device__ void load_entries(typename MovePipe<workers>::Unit& unit, const Shape& shape) {
  const int lane = lane_id(), pieces = shape.pieces.count;
  const uint64_t policy = ptx::line_policy(shape.pass);
  StageCursor cursor;
  for (uint32_t number = 0;; ++number) {
    const auto& list = unit.lists[number % kMoveLists];
    wait_barrier(&unit.listed[number % kMoveLists], number / kMoveLists);
    if (list.is_last) return;
    open_for_loads();  // so that bulk copies see what the lister has acquired
    const int total = list.entries * pieces;
    for (int base = 0; base < total;) {
      StageCursor mine = cursor;
      const bool some = lane < min(min(shape.stages, 31), total - base);
      mine.advance(shape.stages, some ? lane : 0);
      wait_barrier(&unit.empty[cursor.stage], cursor.round + 1);
      const bool free = some && ptx::barrier_done_now(&unit.empty[mine.stage], (mine.round + 1) & 1);
      const int count = __ffs(static_cast<int>(~__ballot_sync(0xffffffffu, free))) - 1;
      // The lanes stay together: a bulk copy takes its address from uniform registers, which a warp has once.
      if (lane < count) {
        const int entry = pieces == 1 ? base + lane : (base + lane) / pieces;
        const int piece = base + lane - entry * pieces;
        const std::byte* const from = list.sources[entry];
        uint64_t* const full = &unit.full[mine.stage];
        if constexpr (MovePipe<workers>::kAlone) {
          const LoneRows& rows = shape.rows;
          const std::byte* const other = rows.with_at > 0 ? from + rows.with_at : list.others[entry];
          const uint32_t bytes = rows.loaded.size(piece),
                         with = rows.with.count > 0 ? rows.with.size(piece) : 0;
          std::byte* const to = unit.stages + mine.stage * shape.stage_bytes + shape.at;
          ptx::barrier_expect(full, bytes + with);
          ptx::bulk_load(to, from + rows.loaded.offset(piece), bytes, full, policy);
          if (with > 0)
            ptx::bulk_load(to + rows.loaded.bytes, other + rows.with.offset(piece), with, full, policy);
        } else if (MovePipe<workers>::kWorks && from == nullptr) {
          ptx::barrier_arrive(full);
        } else {
          ptx::barrier_expect(full, shape.pieces.size(piece));
          ptx::bulk_load(unit.stages + mine.stage * shape.stage_bytes, from + shape.pieces.offset(piece),
                         shape.pieces.size(piece), full, policy);
        }
      }
      __syncwarp();
      cursor.advance(shape.stages, count);
      base += count;
    }
    __syncwarp();  // all lanes have read the list, even if it has no entries
    if (lane == 0) ptx::barrier_arrive(&unit.taken[number % kMoveLists]);
  }
}

/// Sets the flags of several lists together, once the stores before each flag have completed. So they
/// share one fence, which takes as long as storing a row or a few. One thread.
template <int workers, class Shape>
class LateFlags {
 public:
  using Pipe = MovePipe<workers>;
  __device__ LateFlags(typename Pipe::Unit& unit, const Shape& shape, uint64_t epoch)
      : unit_(unit), shape_(shape), epoch_(epoch) {}

  /// Adds a flag that is set after all bulk groups committed so far.
  __device__ void add(uint64_t* flag) {
    if (end_ - begin_ == Pipe::kFlags) flush();
    unit_.flags[end_ % Pipe::kFlags] = flag;
    unit_.groups[end_ % Pipe::kFlags] = committed_;
    ++end_;
  }
  /// Counts a committed bulk group of `bytes`; sets flags if enough bytes have followed the last fence.
  __device__ void committed(uint32_t bytes) {
    ++committed_;
    bytes_ += bytes;
    if (bytes_ < (gridDim.x < kFewBlocks ? kTogether : kTogetherOfMany) || begin_ == end_) return;
    ptx::bulk_wait<kLag>();
    set(committed_ - kLag);
  }
  __device__ void flush() {
    if (begin_ == end_) return;
    ptx::bulk_wait<0>();
    set(committed_);
  }

 private:
  static constexpr int kLag = 3;  ///< bulk groups that may be in flight while committed() sets flags
  /// Least bytes between two fences: kTogetherOfMany from kFewBlocks blocks on, since these share the links.
  static constexpr uint32_t kTogether = 96 << 10, kTogetherOfMany = 48 << 10, kFewBlocks = 20;

  /// Sets the flags that wait for no bulk group but the first `groups`, which are complete.
  __device__ void set(uint32_t groups) {
    const auto in_place = [&] {
      return begin_ != end_ && static_cast<int32_t>(groups - unit_.groups[begin_ % Pipe::kFlags]) >= 0;
    };
    if (!in_place()) return;
    ptx::fence_sys();
    for (; in_place(); ++begin_) shape_.signal(unit_.flags[begin_ % Pipe::kFlags], epoch_);
    bytes_ = 0;
  }

  typename Pipe::Unit& unit_;
  const Shape& shape_;
  const uint64_t epoch_;
  uint32_t begin_ = 0, end_ = 0, committed_ = 0, bytes_ = 0;
};

/// The storer's work: starts bulk copies of pieces to their targets, and sets flags. One thread.
template <int workers, class Shape>
__device__ __noinline__ void store_entries(typename MovePipe<workers>::Unit& unit, const Shape& shape,
                                           uint64_t epoch) {
  constexpr int64_t kPatience = 6'000;  // cycles without anything to store, after which flags are set
  constexpr int kHeld = 2;              // stages that stores may still read
  const uint64_t policy = ptx::line_policy(shape.pass);
  LateFlags<workers, Shape> flags(unit, shape, epoch);
  StageCursor cursor, oldest;
  int held = 0;
  const auto release = [&](int keep) {
    for (; held > keep; --held) {
      ptx::barrier_arrive(&unit.empty[oldest.stage]);
      oldest.advance(shape.stages);
    }
  };
  const auto await = [&](uint64_t* barrier, uint32_t phase) {
    if (ptx::barrier_done_now(barrier, phase & 1)) return;
    ptx::bulk_wait_read<0>();
    release(0);
    const int64_t late = clock64() + kPatience;
    while (!ptx::barrier_done_now(barrier, phase & 1)) {
      if (clock64() < late) continue;
      flags.flush();
      return wait_barrier(barrier, phase);
    }
  };
  for (uint32_t number = 0;; ++number) {
    const auto& list = unit.lists[number % kMoveLists];
    await(&unit.listed[number % kMoveLists], number / kMoveLists);
    if (list.is_last) break;
    int first = 0;
    for (int entry = 0; entry < list.entries; ++entry) {
      const int end = list.ends[entry];
      for (int piece = 0; piece < shape.pieces.count; ++piece) {
        await(MovePipe<workers>::kWorks ? &unit.ready[cursor.stage] : &unit.full[cursor.stage], cursor.round);
        const uint32_t bytes = shape.stored(piece);
        const std::byte* const stage = unit.stages + cursor.stage * shape.stage_bytes;
        for (int at = first; at < end; ++at)
          ptx::bulk_store(list.targets[at] + shape.place(piece), stage, bytes, policy);
        if constexpr (MovePipe<workers>::kAlone)
          for (int at = first; at < end && shape.rows.scales.count > 0; ++at)
            ptx::bulk_store(list.targets[at] + shape.rows.scales_at + shape.rows.scales.offset(piece),
                            stage + shape.rows.stored.bytes, shape.rows.scales.size(piece), policy);
        ptx::bulk_commit();
        if constexpr (MovePipe<workers>::kWorks && !MovePipe<workers>::kAlone)
          if (end > first && list.products[entry] != nullptr) {
            float sum = 0;
#pragma unroll
            for (int w = 0; w < workers; ++w) sum = __fadd_rn(sum, unit.parts[cursor.stage][w]);
            *list.products[entry] = sum;
          }
        cursor.advance(shape.stages);
        ++held;
        ptx::bulk_wait_read<kHeld>();
        release(kHeld);
        flags.committed(bytes * static_cast<uint32_t>(end - first));
      }
      first = end;
    }
    for (int i = 0; i < list.flag_count; ++i) flags.add(list.flags[i]);
    ptx::barrier_arrive(&unit.taken[number % kMoveLists]);
  }
  flags.flush();
  ptx::bulk_wait<0>();
}

/// The work of a worker. Workers that share rows take each stage together; all their threads call work(stage,
/// list, entry, thread, parts), and `parts`[warp] gets a warp's share of a dot product, if there is one. A
/// lone worker takes every kLoneWorkers-th stage; with in_order() the first worker takes all. It waits at
/// each use of its stages, so it never misses a phase of their barriers; its lanes call work(stage, list,
/// entry, piece). Either call leaves the bytes to store in the stage.
template <int workers, class Shape, class Work>
__device__ void work_on_entries(typename MovePipe<workers>::Unit& unit, const Shape& shape, int warp,
                                Work& work) {
  constexpr bool kAlone = MovePipe<workers>::kAlone;
  int pieces = 1;
  bool in_order = false;
  if constexpr (kAlone) pieces = shape.pieces.count, in_order = shape.in_order();
  StageCursor cursor;
  for (uint32_t number = 0;; ++number) {
    const auto& list = unit.lists[number % kMoveLists];
    wait_barrier(&unit.listed[number % kMoveLists], number / kMoveLists);
    if (list.is_last) return;
    const int entries = list.entries;
    for (int entry = 0; entry < entries; ++entry)
      for (int piece = 0; piece < pieces; ++piece) {
        if (!kAlone || (in_order ? 0 : cursor.stage % kLoneWorkers) == warp) {
          wait_barrier(&unit.full[cursor.stage], cursor.round);
          std::byte* const stage = unit.stages + cursor.stage * shape.stage_bytes;
          if constexpr (kAlone)
            work(stage, list, entry, piece);
          else
            work(stage, list, entry, warp * 32 + lane_id(), unit.parts[cursor.stage]);
          ptx::fence_shared_to_bulk();
          __syncwarp();
          if (lane_id() == 0) ptx::barrier_arrive(&unit.ready[cursor.stage]);
        }
        cursor.advance(shape.stages);
      }
    __syncwarp();
    if (lane_id() == 0) ptx::barrier_arrive(&unit.taken[number % kMoveLists]);
  }
}

/// A barrier among the workers of a unit.
__device__ inline void sync_workers() {
  ptx::barrier_and(1 + warp_id() / MovePipe<kWorkers>::kUnitWarps, kWorkerThreads, true);
}

/// Stands for no workers: rows pass unchanged.
struct NoWork {};

/// Runs the pipes of a block. Each unit's lister warp calls list(lister), which hands over all its lists. All
/// lanes of the storers' warps call before() before the first store. Whole block.
template <int workers, class Shape, class List, class Before, class Work = NoWork>
__device__ void run_move_pipe(std::byte* shared, const Shape& shape, uint64_t epoch, const List& list,
                              const Before& before, Work work = {}) {
  using Pipe = MovePipe<workers>;
  const int number = warp_id() / Pipe::kUnitWarps, role = warp_id() % Pipe::kUnitWarps;
  typename Pipe::Unit& unit = reinterpret_cast<typename Pipe::Memory*>(shared)->units[number];
  if (role == 0) {
    ptx::barrier_init(&unit.full[lane_id()], 1);
    ptx::barrier_init(&unit.empty[lane_id()], 1);
    if (Pipe::kWorks) ptx::barrier_init(&unit.ready[lane_id()], Pipe::kAlone ? 1 : workers);
    if (lane_id() < kMoveLists) {
      ptx::barrier_init(&unit.listed[lane_id()], 1);
      ptx::barrier_init(&unit.taken[lane_id()], 2 + workers);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (role == 0) {
    MoveLister<workers> lister(unit);
    list(lister);
    lister.end();
  } else if (role == 1) {
    load_entries<workers>(unit, shape);
  } else if (role == 2) {
    before();
    __syncwarp();
    if (lane_id() == 0) store_entries<workers>(unit, shape, epoch);
  } else {
    if constexpr (Pipe::kWorks) work_on_entries<workers>(unit, shape, role - 3, work);
  }
  __syncthreads();
}

}  // namespace moecomm::gpu
