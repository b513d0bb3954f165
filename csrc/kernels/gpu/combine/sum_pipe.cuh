// Sums of rows by a pipe of warps. A block has kSumUnits pipes (units). The warps of a unit are:
//   - the lister finds the sources of the sums of a few tokens: their rows, factors, and destinations. At a
//     token's own rank (its home) it waits for the sums of other ranks
//   - the loader starts bulk copies of pieces of rows into a ring of stages in shared memory, as far ahead as
//     there is room. So the lister's waits overlap with copies
//   - the adders take the pieces in order. Each thread adds its own columns in registers, and writes the sum
//     of an item (a piece of a sum) to the stage of its last source
//   - the storer copies the sum to its destination by a bulk copy, and sets the item's flag once the sums of
//     this item and all earlier ones have arrived
// Sums run left to right, with each product and sum rounded as in strip.cuh, so the bits are the same.
#pragma once

#include "kernels/gpu/combine/sum_list.cuh"
#include "kernels/gpu/common/stages.cuh"
#include "kernels/gpu/common/strip.cuh"

namespace moecomm::gpu {

inline constexpr int kAdders = 8, kUnitWarps = kAdders + 3;  ///< the last three: lister, loader, storer
inline constexpr int kAdderThreads = kAdders * 32;
inline constexpr int kUnitBytes = 102400, kPipePiece = 16384;
/// Items that a unit holds: those whose last stage is not free yet, and those of a new list.
inline constexpr int kItems = 64;
static_assert(kItems >= kMaxStages + kListTokens);
inline constexpr int kMaxSteps = kPipePiece / 16 / kAdderThreads;  ///< vectors of 16 bytes per adding thread
static_assert(kPipeThreads == kSumUnits * kUnitWarps * 32);

/// Shared memory of a unit, the group of warps that list, load, add up and store together.
struct alignas(128) SumUnit {
  std::byte stages[kUnitBytes];
  SumItem items[kItems];
  uint64_t full[kMaxStages], empty[kMaxStages], summed[kItems];
  float factors[kMaxStages];  ///< factors of the rows in the stages
  SumList lists[2];
  uint64_t listed[2], taken[2];
  // For the lister, per token: number of its first row, and its rows' index in `sources` less their number.
  int32_t starts[kListTokens + 1], offsets[kListTokens];
  const std::byte* slots[kMaxTopK];
};

struct SumPipeMemory {
  SumUnit units[kSumUnits];
  int32_t shared_word;
};
static_assert(sizeof(SumPipeMemory) <= kMostShared);

/// The lister's side of a unit. All lanes call every function.
class SumLister {
 public:
  explicit __device__ SumLister(SumUnit& unit) : unit_(unit) {}

  /// Begins a list with the rows of `tokens` tokens; lane i completes `token`, which is token i. Rows are at
  /// `base`, with `row_bytes` each.
  __device__ void list(const ListMap& map, const ListedRows& rows, int tokens, const std::byte* base,
                       int64_t row_bytes, ListedToken& token) {
    SumList& list = open();
    const int lane = lane_id();
    int before = 0, place[kListRounds];
#pragma unroll
    for (int j = 0; j < kListRounds; ++j) {
      if (j * 32 >= tokens * map.each()) continue;
      const uint32_t kept = __ballot_sync(0xffffffffu, rows.row[j] >= 0);
      place[j] = before + __popc(kept & ((1u << lane) - 1));
      if (map.first_of_token(j) && map.token(j) < tokens) unit_.starts[map.token(j)] = place[j];
      before += __popc(kept);
    }
    if (lane == 0) unit_.starts[tokens] = before;
    __syncwarp();
    int end = 0;
    if (lane < tokens) {
      token.rows = unit_.starts[lane + 1] - unit_.starts[lane];
      token.count = token.wanted ? max(token.rows + token.others, 1) : 0;
      end = token.count;
    }
#pragma unroll
    for (int by = 1; by < kListTokens; by *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, end, by);
      if (lane >= by) end += below;
    }
    token.first = end - token.count;
    if (lane < tokens) {
      unit_.offsets[lane] = token.first - unit_.starts[lane];
      if (token.wanted && token.rows + token.others == 0) list.sources[token.first] = nullptr;
    }
    if (lane == tokens - 1) list.total = end;
    if (lane == 0) list.row_bytes = static_cast<int32_t>(row_bytes);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kListRounds; ++j) {
      if (rows.row[j] < 0) continue;
      const int at = unit_.offsets[map.token(j)] + place[j];
      list.sources[at] = base + rows.row[j] * row_bytes;
      list.factors[at] = rows.factor[j];
    }
  }

  /// The sources of the current list. A ListedToken says where those of its token are.
  __device__ const std::byte** sources() { return now().sources; }

  /// Hands the list to the loader; `item` describes the sum of this lane's token.
  __device__ void hand_over(const ListedToken& token, SumItem item) {
    const int lane = lane_id();
    if (lane < kListTokens) {
      item.rows = token.rows;
      now().items[lane] = item;
      now().first[lane] = token.first;
      now().counts[lane] = token.count;
    }
    close();
  }

  /// Adds an item without a sum. Its flag is set once the sums of all earlier items have arrived.
  __device__ void add_flag(uint64_t* flag) {
    SumItem item{};
    item.flag = flag;
    add_nothing(item);
  }
  __device__ void end() {
    SumItem item{};
    item.ends = 1;
    add_nothing(item);
  }

 private:
  __device__ SumList& now() { return unit_.lists[number_ % 2]; }
  __device__ SumList& open() {
    wait_barrier(&unit_.taken[number_ % 2], number_ / 2 + 1);
    return now();
  }
  __device__ void close() {
    __syncwarp();
    if (lane_id() == 0) ptx::barrier_arrive(&unit_.listed[number_ % 2]);
    ++number_;
  }
  /// Hands over an item without sources.
  __device__ void add_nothing(const SumItem& item) {
    SumList& list = open();
    if (lane_id() == 0) {
      list.sources[0] = nullptr;
      list.total = 1;
      list.row_bytes = 0;
    }
    ListedToken token{lane_id() == 0, 0};
    token.count = lane_id() == 0;
    hand_over(token, item);
  }

  SumUnit& unit_;
  uint32_t number_ = 0;
};

/// The loader's side of a unit. All lanes call every function.
class SumLoader {
 public:
  __device__ SumLoader(SumUnit& unit, const PipeShape& shape) : unit_(unit), shape_(shape) {}

  /// Loads the sources of all lists, until one has the end marker.
  __device__ void run() {
    for (uint32_t number = 0;; ++number) {
      const SumList& list = unit_.lists[number % 2];
      wait_barrier(&unit_.listed[number % 2], number / 2);
      open_for_loads();  // so that the loader's loads see what the lister has acquired
      const int lane = lane_id();
      SumItem item{};
      int first = 0, count = 0;
      if (lane < kListTokens) {
        item = list.items[lane];
        first = list.first[lane];
        count = list.counts[lane];
      }
      add(list, item, first, count);
      if (lane == 0) ptx::barrier_arrive(&unit_.taken[number % 2]);
      if (__shfl_sync(0xffffffffu, int{item.ends}, 0) != 0) return;
    }
  }

 private:
  /// Makes an item for each piece of each token's sum, and loads the item's sources. Lane i has token i.
  __device__ void add(const SumList& list, SumItem item, int first, int count) {
    const uint32_t wanted = __ballot_sync(0xffffffffu, count > 0);
    const int place = __popc(wanted & ((1u << lane_id()) - 1)),
              pieces = list.row_bytes > 0 ? shape_.pieces.count : 1;
    uint64_t* const flag = item.flag;
    std::byte* const to = item.to;
    for (int p = 0; p < pieces; ++p) {
      item.to = to + shape_.pieces.offset(p);
      item.bytes = list.row_bytes > 0 ? static_cast<int32_t>(shape_.pieces.size(p)) : 0;
      item.flag = p + 1 == pieces ? flag : nullptr;
      if (count > 0) {
        item.stage = static_cast<uint16_t>((cursor_.stage + first + count - 1) % shape_.stages);
        unit_.items[(number_ + place) % kItems] = item;
      }
      number_ += __popc(wanted);
      load(list, shape_.pieces.offset(p), static_cast<uint32_t>(item.bytes));
    }
  }
  /// Loads a piece of each source as stages of the ring become free. The items of these pieces are in
  /// unit_.items before the pieces arrive.
  __device__ void load(const SumList& list, int64_t offset, uint32_t bytes) {
    const int lane = lane_id();
    __syncwarp();  // all lanes have written before one announces it
    for (int base = 0; base < list.total;) {
      StageCursor mine = cursor_;
      const bool some = lane < min(min(shape_.stages, 31), list.total - base);
      mine.advance(shape_.stages, some ? lane : 0);
      wait_barrier(&unit_.empty[cursor_.stage], cursor_.round + 1);
      const bool free = some && ptx::barrier_done_now(&unit_.empty[mine.stage], (mine.round + 1) & 1);
      const int count = __ffs(static_cast<int>(~__ballot_sync(0xffffffffu, free))) - 1;
      // Lanes stay together: a bulk copy takes its address from uniform registers, one set per warp.
      if (lane < count) {
        const std::byte* const from = list.sources[base + lane];
        unit_.factors[mine.stage] = list.factors[base + lane];
        uint64_t* const full = &unit_.full[mine.stage];
        if (from == nullptr) {
          ptx::barrier_arrive(full);
        } else {
          ptx::barrier_expect(full, bytes);
          ptx::bulk_load(unit_.stages + mine.stage * shape_.stage_bytes, from + offset, bytes, full);
        }
      }
      __syncwarp();
      cursor_.advance(shape_.stages, count);
      base += count;
    }
  }

  SumUnit& unit_;
  const PipeShape shape_;
  StageCursor cursor_;
  uint32_t number_ = 0;
};

/// One adding thread of a unit. It takes the pieces in order, and of each the vectors (16 bytes) `thread`,
/// `thread` + kAdderThreads and so on, at most `steps`.
template <int steps>
class PieceTaker {
 public:
  __device__ PieceTaker(SumUnit& unit, const PipeShape& shape, int thread)
      : unit_(unit),
        stages_(shape.stages),
        stage_bytes_(shape.stage_bytes),
        thread_(thread),
        last_(thread + (steps - 1) * kAdderThreads < shape.stage_bytes / 16 ? steps - 1 : 0) {}

  /// Waits for the first piece of an item.
  __device__ void await() const { wait_barrier(&unit_.full[cursor_.stage], cursor_.round); }
  /// Starts an item of `sources` pieces of 16 * `vectors` bytes, whose first piece has arrived.
  __device__ void begin(int sources, int vectors) {
    left_ = sources;
    vectors_ = vectors;
  }
  /// Returns the next piece, and its row's factor. Vectors past the piece's end are unspecified.
  __device__ Strip<steps> take(float& factor) {
    await();
    Strip<steps> strip;
    factor = unit_.factors[cursor_.stage];
    const auto* const stage = reinterpret_cast<const uint4*>(here()) + thread_;
    if constexpr (steps == 1) {
      if (thread_ < vectors_) strip.raw[0] = *stage;
    } else {
#pragma unroll
      for (int s = 0; s + 1 < steps; ++s) strip.raw[s] = stage[s * kAdderThreads];
      strip.raw[steps - 1] = stage[last_ * kAdderThreads];
    }
    if (--left_ > 0) {
      __syncwarp();
      if (lane_id() == 0) ptx::barrier_arrive(&unit_.empty[cursor_.stage]);
      cursor_.advance(stages_);
    }
    return strip;
  }
  /// Hands an item with a single source to the storer; the piece stays as it is in its stage.
  __device__ void pass(uint64_t* summed) {
    __syncwarp();  // all lanes know the item
    if (lane_id() == 0) ptx::barrier_arrive(summed);
    cursor_.advance(stages_);
  }
  /// Writes the item's sum to the stage of its last piece.
  __device__ void leave(const Strip<steps>& sum, uint64_t* summed) {
    auto* const stage = reinterpret_cast<uint4*>(here()) + thread_;
#pragma unroll
    for (int s = 0; s < steps; ++s)
      if (s * kAdderThreads + thread_ < vectors_) stage[s * kAdderThreads] = sum.raw[s];
    ptx::fence_shared_to_bulk();
    __syncwarp();
    if (lane_id() == 0) ptx::barrier_arrive(summed);
    cursor_.advance(stages_);
  }

 private:
  __device__ std::byte* here() const { return unit_.stages + cursor_.stage * stage_bytes_; }

  SumUnit& unit_;
  const int stages_, stage_bytes_, thread_;
  const int last_;  ///< the last step; 0 if this thread's vector in that step would be past the stage
  StageCursor cursor_;
  int left_ = 0, vectors_ = 0;
};

/// The sum of `count` pieces from take(i, factor), times their factors if `weighted`; zero if there are none.
/// Where pieces are small, the next piece is loaded while one piece is added.
template <DType dtype, bool weighted, int steps, class Take>
__device__ inline Strip<steps> add_pieces(int count, const Take& take) {
  constexpr bool kAhead = steps == 1;  // larger pieces would not fit into the registers
  if (count == 0) return {};
  StripSum<dtype, steps> sum;
  const auto add_piece = [&](const Strip<steps>& piece, float factor, bool first) {
    if constexpr (weighted)
      sum.add_strip(piece, factor, first);
    else
      sum.add_strip(piece, first);
  };
  float factor;
  Strip<steps> piece = take(0, factor);
  if constexpr (kAhead) {
    bool first = true;
    for (int i = 1; i < count; ++i) {
      float next_factor;
      const Strip<steps> next = take(i, next_factor);
      add_piece(piece, factor, first);
      first = false;
      piece = next;
      factor = next_factor;
    }
    add_piece(piece, factor, first);
  } else {
    add_piece(piece, factor, true);
    for (int i = 1; i < count; ++i) {
      piece = take(i, factor);
      add_piece(piece, factor, false);
    }
  }
  return sum.rounded();
}

/// The work of adding thread `thread` of kAdderThreads. `weighted`: rows have factors. `home`: items have
/// slots.
template <DType dtype, bool home, int steps>
__device__ __noinline__ void add_items(SumUnit& unit, const PipeShape& shape, int thread, bool weighted) {
  PieceTaker<steps> pieces(unit, shape, thread);
  for (uint32_t number = 0;; ++number) {
    const int place = static_cast<int>(number % kItems);
    pieces.await();
    const SumItem item = unit.items[place];
    if (item.sources() == 1 && (item.rows == 0 || !weighted)) {  // one row, or one slot
      pieces.pass(&unit.summed[place]);
      continue;
    }
    pieces.begin(item.sources(), item.bytes / 16);
    const auto row = [&](int, float& factor) { return pieces.take(factor); };
    auto sum = weighted ? add_pieces<dtype, true, steps>(item.rows, row)
                        : add_pieces<dtype, false, steps>(item.rows, row);
    if constexpr (home)
      if (item.slots > 0)
        sum = add_pieces<dtype, false, steps>(item.slots, [&, own = sum](int slot, float& factor) {
          return slot == item.own_slot ? own : pieces.take(factor);
        });
    pieces.leave(sum, &unit.summed[place]);
    if (item.ends != 0) return;
  }
}

/// Calls add_items<steps>() with as few steps as the pieces need.
template <DType dtype, bool home>
__device__ inline void add_items(SumUnit& unit, const PipeShape& shape, int thread, bool weighted) {
  switch ((shape.pieces.bytes - 1) / (16 * kAdderThreads)) {
    case 0:
      return add_items<dtype, home, 1>(unit, shape, thread, weighted);
    case 1:
      return add_items<dtype, home, 2>(unit, shape, thread, weighted);
    case 2:
      return add_items<dtype, home, 3>(unit, shape, thread, weighted);
    default:
      return add_items<dtype, home, kMaxSteps>(unit, shape, thread, weighted);
  }
}
static_assert(kMaxSteps == 4 && kMaxStages == 32);

/// Sets the flags of items after their stores have completed, late and in groups: the fence before a group
/// takes as long as storing a row. When a group of `together` items gets its flags, the stores of the newest
/// `lag` items may still be in flight. One thread.
template <int lag, int together>
class LaggingFlags {
 public:
  __device__ explicit LaggingFlags(uint64_t epoch) : epoch_(epoch) {}

  /// Keeps the flag (or null) of an item whose store was committed, to be set later. May set earlier flags.
  __device__ void add(uint64_t* flag) {
#pragma unroll
    for (int i = 0; i + 1 < lag + together; ++i) flags_[i] = flags_[i + 1];
    flags_[lag + together - 1] = flag;
    if (++added_ % together != 0) return;
    ptx::bulk_wait<lag>();
    set<together>();
  }
  __device__ void flush() {
    ptx::bulk_wait<0>();
    set<lag + together>();
  }

 private:
  /// Sets the oldest `count` of the flags.
  template <int count>
  __device__ void set() {
    bool any = false;
#pragma unroll
    for (int i = 0; i < count; ++i) any = any || flags_[i] != nullptr;
    if (!any) return;
    ptx::fence_sys();
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (flags_[i] != nullptr) device::relaxed_signal(flags_[i], epoch_);
      flags_[i] = nullptr;
    }
  }

  const uint64_t epoch_;
  uint32_t added_ = 0;
  uint64_t* flags_[lag + together] = {};  ///< oldest first; null: no flag, or one that is set
};

/// Replaces LaggingFlags at a token's home, where sums have no flags: waits for stores, sets nothing.
class NoFlags {
 public:
  explicit __device__ NoFlags(uint64_t) {}
  __device__ void add(uint64_t*) {}
  __device__ void flush() { ptx::bulk_wait<0>(); }
};

/// The work of a storer. One thread.
template <class Flags>
__device__ __noinline__ void store_items(SumUnit& unit, const PipeShape& shape, uint64_t epoch) {
  constexpr int64_t kPatience = 7'000;  // cycles without a further item after which flags are set
  Flags flags(epoch);
  int held = -1;  // the stage that the last store may still read
  const auto release = [&] {
    if (held >= 0) ptx::barrier_arrive(&unit.empty[held], kAdders);
    held = -1;
  };
  for (uint32_t number = 0;; ++number) {
    uint64_t* const summed = &unit.summed[number % kItems];
    const uint32_t parity = number / kItems & 1;
    if (!ptx::barrier_done_now(summed, parity)) {
      ptx::bulk_wait_read<0>();
      release();
      const int64_t late = clock64() + kPatience;
      bool done = false;
      while (!done && clock64() < late) done = ptx::barrier_done_now(summed, parity);
      if (!done) flags.flush();
      wait_barrier(summed, parity);
    }
    const SumItem item = unit.items[number % kItems];
    if (item.ends != 0) break;
    if (item.bytes > 0)
      ptx::bulk_store(item.to, unit.stages + item.stage * shape.stage_bytes,
                      static_cast<uint32_t>(item.bytes));
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
    release();
    held = item.stage;
    flags.add(item.flag);
  }
  flags.flush();
}

/// Runs a block's pipes (units). Whole block. A unit's listing warp lists its sums by list(lister, unit).
/// `home`: sums are made at the tokens' home; else `blocks` blocks make about `sums` sums of whole rows.
template <DType dtype, bool home, class List>
__device__ void run_sum_pipe(const Comm& comm, SumPipeMemory& memory, uint64_t epoch, bool weighted,
                             const List& list, int64_t sums = 0, int blocks = 1) {
  const int number = warp_id() / kUnitWarps, role = warp_id() % kUnitWarps;
  SumUnit& unit = memory.units[number];
  const PipeShape shape(comm.window.shape.row_bytes(), kPipePiece, kUnitBytes);
  if (role == 0) {
    ptx::barrier_init(&unit.full[lane_id()], 1);
    ptx::barrier_init(&unit.empty[lane_id()], kAdders);
    for (int i = lane_id(); i < kItems; i += 32) ptx::barrier_init(&unit.summed[i], kAdders);
    if (lane_id() < 2) {
      ptx::barrier_init(&unit.listed[lane_id()], 1);
      ptx::barrier_init(&unit.taken[lane_id()], 1);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (role < kAdders) {
    add_items<dtype, home>(unit, shape, role * 32 + lane_id(), weighted);
  } else if (role == kAdders) {
    SumLister lister(unit);
    list(lister, unit);
    lister.end();
  } else if (role == kAdders + 1) {
    SumLoader(unit, shape).run();
  } else if (lane_id() == 0) {
    // Where a unit makes many sums, delaying some flags does not matter.
    constexpr int kMany = 128;
    if constexpr (home)
      store_items<NoFlags>(unit, shape, epoch);
    else if (sums * shape.pieces.count > int64_t{kMany} * kSumUnits * blocks)
      store_items<LaggingFlags<6, 8>>(unit, shape, epoch);
    else
      store_items<LaggingFlags<3, 4>>(unit, shape, epoch);
  }
  __syncthreads();
}

/// The type of a block's shared memory: that of pipes, or `Warps` in kernels without them.
template <class Warps, bool piped>
using SumMemoryOf = std::conditional_t<piped, SumPipeMemory, Warps>;

/// Calls use.operator()<dtype, way, wire, piped>() for sums that travel in `wire`, made by pipes or not.
template <class Use>
cudaError_t with_pipes(const DeviceShape& shape, WireFormat wire, bool piped, const Use& use) {
  return with_sums(shape, wire, [&]<DType dtype, Way way, WireFormat travels>() {
    if constexpr (travels == WireFormat::same)
      if (piped) return use.template operator()<dtype, way, travels, true>();
    return use.template operator()<dtype, way, travels, false>();
  });
}

/// Calls prepare(wire, piped) for the kernels of sums that travel in their dtype or in `sums`.
template <class PrepareIn>
cudaError_t prepare_pipes(WireFormat sums, const PrepareIn& prepare) {
  return prepare_sums(sums, [&](WireFormat wire) {
    const cudaError_t error = prepare(wire, false);
    return error != cudaSuccess || wire != WireFormat::same ? error : prepare(wire, true);
  });
}

}  // namespace moecomm::gpu
