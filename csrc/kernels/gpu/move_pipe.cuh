// Rows moved by a pipe of warps, to one place or to several. A block has a few units, each of three warps:
//   - the lister finds out which rows go where, a few at a time; where rows arrive, it waits for them
//   - the loader has bulk copies bring these rows, in pieces, into a ring of stages in shared memory, as far
//     ahead as there is room. So what the lister waits for is hidden behind pieces that are under way
//   - the storer, one thread, has bulk copies take each piece from its stage to all its places, and sets the
//     flags of a list once all that was stored until then is in place
// None of them touches the bytes of a row, so that a multiprocessor moves as much as its copy engine does.
#pragma once

#include "kernels/gpu/announcer.cuh"
#include "kernels/gpu/stages.cuh"

namespace moecomm::gpu {

#if MOECOMM_HAS_BULK

inline constexpr int kMoveUnits = 4, kMoveWarps = 3;  ///< of a block, and of a unit: lister, loader, storer
inline constexpr int kMoveBytes = 49152, kMovePiece = 8192;  ///< of a unit's stages, and of one at most
inline constexpr int kMoveTokens = 8,
                     kMoveWords = 64;  ///< tokens of a list, and places of their rows, at most
inline constexpr int kMoveLists = 3, kMoveRounds = 4;  ///< rounds of TokenLanes of a list, at most
static_assert(kMoveUnits * kMoveWarps == kWarps && kMoveTokens >= kMaxChunk);
static_assert(kMoveBytes / kMovePiece >= 3);

/// True where a list holds `tokens` tokens, whose rows have at most `each` places.
__device__ inline bool list_holds(const TokenLanes& map, int each, int tokens) {
  return tokens * each <= kMoveWords && tokens <= kMoveRounds * map.tokens;
}

/// Tokens of a list: whole chunks of `chunk`. The units of the grid share `tokens`, so a list has so few that
/// they end at about the same time.
__device__ inline int move_tokens(const TokenLanes& map, int each, int chunk, int64_t tokens) {
  constexpr int kLists = 12;  // of a unit at least
  const int64_t units = int64_t{gridDim.x} * kMoveUnits;
  int most = kMoveTokens;
  while (most > chunk && (!list_holds(map, each, most) || most * kLists * units > tokens)) most /= 2;
  return most;
}

/// What the lister hands to the others.
struct MoveList {
  const std::byte* sources[kMoveTokens];  ///< of rows
  std::byte* targets[kMoveWords];         ///< of one row behind those of another
  uint64_t* flags[kMoveWords];            ///< set when all rows of this list and of those before are in place
  int32_t ends[kMoveTokens];              ///< of each row's targets
  int32_t rows, flag_count;
  bool is_last;  ///< nothing comes after this, and this is nothing
};

/// A unit's shared memory.
struct alignas(128) MoveUnit {
  static constexpr int kFlags = 128;
  std::byte stages[kMoveBytes];
  MoveList lists[kMoveLists];
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t listed[kMoveLists], taken[kMoveLists];
  // The storer's own: flags that are not set yet, and the number of bulk groups before each.
  uint64_t* flags[kFlags];
  uint32_t groups[kFlags];
};

struct MovePipeMemory {
  MoveUnit units[kMoveUnits];
};
static_assert(sizeof(MovePipeMemory) <= block_bytes(true));  // kernels have it instead of a BlockMemory

/// The lister's side of a unit. All lanes call every function.
class MoveLister {
 public:
  explicit __device__ MoveLister(MoveUnit& unit) : unit_(unit) {}

  /// Starts a list, and waits until there is room for it.
  __device__ MoveList& open() {
    wait_barrier(&unit_.taken[number_ % kMoveLists], number_ / kMoveLists + 1);
    rows_ = targets_ = 0;
    return now();
  }
  /// Adds the rows of a round of tokens: each lane knows where the row of its token is, and if it is `wanted`
  /// a place for it. The places of a row are in the order of the lanes.
  __device__ void add(const TokenLanes& map, const std::byte* source, bool wanted, std::byte* target) {
    const uint32_t places = __ballot_sync(0xffffffffu, wanted), below = (1u << lane_id()) - 1;
    if (wanted) now().targets[targets_ + __popc(places & below)] = target;
    const bool row = map.leads() && (places & map.lanes) != 0;
    const uint32_t rows = __ballot_sync(0xffffffffu, row);
    if (row) {
      const int at = rows_ + __popc(rows & below);
      now().sources[at] = source;
      now().ends[at] = targets_ + __popc(places & (below | map.lanes));
    }
    rows_ += __popc(rows);
    targets_ += __popc(places);
  }
  __device__ bool empty() const { return rows_ == 0; }
  /// Hands the list over, whose first `flags` flags are there. What the lanes have acquired, bulk copies
  /// load.
  __device__ void hand_over(int flags, bool is_last = false) {
    if (lane_id() == 0) {
      now().rows = rows_;
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
  __device__ MoveList& now() { return unit_.lists[number_ % kMoveLists]; }

  MoveUnit& unit_;
  uint32_t number_ = 0;
  int rows_ = 0, targets_ = 0;
};

/// The work of a loader. All lanes.
__device__ inline void load_rows(MoveUnit& unit, const PipeShape& shape) {
  const int lane = lane_id(), pieces = shape.pieces.count;
  StageCursor cursor;
  for (uint32_t number = 0;; ++number) {
    const MoveList& list = unit.lists[number % kMoveLists];
    wait_barrier(&unit.listed[number % kMoveLists], number / kMoveLists);
    if (list.is_last) return;
    open_for_loads();  // of what the lister has acquired
    const int total = list.rows * pieces;
    for (int base = 0; base < total;) {
      StageCursor mine = cursor;
      const bool some = lane < min(min(shape.stages, 31), total - base);
      mine.advance(shape.stages, some ? lane : 0);
      wait_barrier(&unit.empty[cursor.stage], cursor.round + 1);
      const bool free = some && ptx::barrier_done_now(&unit.empty[mine.stage], (mine.round + 1) & 1);
      const int count = __ffs(static_cast<int>(~__ballot_sync(0xffffffffu, free))) - 1;
      // The lanes stay together: the address of a bulk copy is in registers that a warp has once.
      if (lane < count) {
        const int row = pieces == 1 ? base + lane : (base + lane) / pieces,
                  piece = base + lane - row * pieces;
        uint64_t* const full = &unit.full[mine.stage];
        ptx::barrier_expect(full, shape.pieces.size(piece));
        ptx::bulk_load(unit.stages + mine.stage * shape.stage_bytes,
                       list.sources[row] + shape.pieces.offset(piece), shape.pieces.size(piece), full);
      }
      __syncwarp();
      cursor.advance(shape.stages, count);
      base += count;
    }
    if (lane == 0) ptx::barrier_arrive(&unit.taken[number % kMoveLists]);
  }
}

/// Flags of lists, set when what was stored before is in place, and of several lists at a time: the fence
/// before them takes as long as the store of a row or of a few. One thread.
class LateFlags {
 public:
  __device__ LateFlags(MoveUnit& unit, uint64_t epoch) : unit_(unit), epoch_(epoch) {}

  /// Adds a flag behind all groups that were committed.
  __device__ void add(uint64_t* flag) {
    if (end_ - begin_ == MoveUnit::kFlags) flush();
    unit_.flags[end_ % MoveUnit::kFlags] = flag;
    unit_.groups[end_ % MoveUnit::kFlags] = committed_;
    ++end_;
  }
  /// A group of so many bytes was committed.
  __device__ void committed(uint32_t bytes) {
    ++committed_;
    bytes_ += bytes;
    if (bytes_ < kTogether || begin_ == end_) return;
    ptx::bulk_wait<kLag>();
    set(committed_ - kLag);
  }
  __device__ void flush() {
    if (begin_ == end_) return;
    ptx::bulk_wait<0>();
    set(committed_);
  }

 private:
  static constexpr int kLag = 3;                   ///< groups that are under way when flags are set
  static constexpr uint32_t kTogether = 96 << 10;  ///< bytes between two fences at least

  /// Sets the flags behind the first `groups` groups.
  __device__ void set(uint32_t groups) {
    const auto ready = [&] {
      return begin_ != end_ && static_cast<int32_t>(groups - unit_.groups[begin_ % MoveUnit::kFlags]) >= 0;
    };
    if (!ready()) return;
    ptx::fence_sys();
    for (; ready(); ++begin_) ptx::store_relaxed_sys(unit_.flags[begin_ % MoveUnit::kFlags], epoch_);
    bytes_ = 0;
  }

  MoveUnit& unit_;
  const uint64_t epoch_;
  uint32_t begin_ = 0, end_ = 0, committed_ = 0, bytes_ = 0;
};

/// The work of a storer. One thread.
__device__ __noinline__ inline void store_rows(MoveUnit& unit, const PipeShape& shape, uint64_t epoch) {
  constexpr int64_t kPatience = 6'000;  // cycles until flags go out though no further row has come
  constexpr int kHeld = 2;              // stages that stores may be reading
  LateFlags flags(unit, epoch);
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
    const MoveList& list = unit.lists[number % kMoveLists];
    await(&unit.listed[number % kMoveLists], number / kMoveLists);
    if (list.is_last) break;
    int first = 0;
    for (int row = 0; row < list.rows; ++row) {
      const int end = list.ends[row];
      for (int piece = 0; piece < shape.pieces.count; ++piece) {
        await(&unit.full[cursor.stage], cursor.round);
        const uint32_t bytes = shape.pieces.size(piece);
        const std::byte* const stage = unit.stages + cursor.stage * shape.stage_bytes;
        for (int at = first; at < end; ++at)
          ptx::bulk_store(list.targets[at] + shape.pieces.offset(piece), stage, bytes);
        ptx::bulk_commit();
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

/// Runs the pipe of a block: list(lister) lists everything and returns; before(), by all lanes of the
/// storers' warps, comes before the first store. Whole block. A row has `row_bytes`; `bytes`: of the stages
/// of a unit.
template <class List, class Before>
__device__ void run_move_pipe(MovePipeMemory& memory, int64_t row_bytes, int bytes, uint64_t epoch,
                              const List& list, const Before& before) {
  const int number = warp_id() / kMoveWarps, role = warp_id() % kMoveWarps;
  const PipeShape shape(row_bytes, kMovePiece, min(bytes, kMoveBytes));
  MoveUnit& unit = memory.units[number];
  if (role == 0) {
    ptx::barrier_init(&unit.full[lane_id()], 1);
    ptx::barrier_init(&unit.empty[lane_id()], 1);
    if (lane_id() < kMoveLists) {
      ptx::barrier_init(&unit.listed[lane_id()], 1);
      ptx::barrier_init(&unit.taken[lane_id()], 2);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (role == 0) {
    MoveLister lister(unit);
    list(lister);
    lister.end();
  } else if (role == 1) {
    load_rows(unit, shape);
  } else {
    before();
    __syncwarp();
    if (lane_id() == 0) store_rows(unit, shape, epoch);
  }
  __syncthreads();
}

#endif

}  // namespace moecomm::gpu
