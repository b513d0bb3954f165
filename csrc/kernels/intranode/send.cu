// Dispatch, sending side: every row goes once to each rank that owns one of its experts.
//   - some blocks first work out and announce where the rows will go (route.cuh); one then waits for what the
//     other ranks announce, and makes the plan of what arrives here (plan.cuh)
//   - warps take chunks of tokens in order; a row is loaded piece by piece (and quantised, if asked), and
//     each piece stored to the staging section of every owner, at the place of (source, token)
//   - when all rows of a chunk are in place, the owners' arrival flags are set
// The staging section may be smaller than all tokens: then a chunk waits until the owners have read those
// whose place it takes.
#include "kernels/intranode/announcer.cuh"
#include "kernels/intranode/element.cuh"
#include "kernels/intranode/kernel.cuh"
#include "kernels/intranode/plan.cuh"
#include "kernels/intranode/route.cuh"
#include "kernels/intranode/strip.cuh"

namespace moecomm::intranode {
namespace {

/// Owners of the tokens of a chunk.
struct ChunkOwners {
  uint32_t tokens = 0;  ///< bit i: token i goes somewhere
  PeerSet peers;
};

/// Fills meta[i * top_k ...] with the ranks that token i of the chunk goes to, and counts[i] with their
/// number.
__device__ ChunkOwners list_owners(const Comm& comm, const SendArguments& args, int64_t begin, int64_t end,
                                   int32_t* meta, int32_t* counts) {
  ChunkOwners chunk;
  const int top_k = comm.top_k(), lane = lane_id(), tokens = static_cast<int>(end - begin);
  const PlanView plan{args.plan, comm.plan_fields};
  const int32_t* const kept = plan.at(plan.fields.home_ids);
  int64_t id[kMaxChunk];
  __syncwarp();  // all lanes are done with the chunk before
#pragma unroll
  for (int i = 0; i < kMaxChunk; ++i) {
    const int64_t index = (begin + i) * top_k + lane;
    id[i] = i >= tokens || lane >= top_k            ? kNoExpert
            : args.operation == Operation::dispatch ? read_id(args, index)
                                                    : int64_t{kept[index]};
  }
#pragma unroll
  for (int i = 0; i < kMaxChunk; ++i) {
    if (i >= tokens) continue;
    int32_t owner = -1;
    if (id[i] >= 0 && id[i] < comm.window.shape.num_experts)
      owner = expert_owner(static_cast<int32_t>(id[i]), comm.local_experts);
    if (owner == comm.rank && !comm.own_rows_travel()) owner = -1;
    const uint32_t same = __match_any_sync(0xffffffffu, owner >= 0 ? owner : -1 - lane);
    const bool first = owner >= 0 && (same & ((1u << lane) - 1)) == 0;
    const int count = compact(meta + i * top_k, owner, first);
    if (lane == 0) counts[i] = count;
    if (count == 0) continue;
    chunk.tokens |= 1u << i;
    for (uint32_t left = __ballot_sync(0xffffffffu, first); left != 0; left &= left - 1)
      chunk.peers.insert(__shfl_sync(0xffffffffu, owner, __ffs(static_cast<int>(left)) - 1));
  }
  __syncwarp();
  return chunk;
}

/// Where this rank's token goes in the staging section of `peer`.
__device__ std::byte* staged_row(const Comm& comm, uint64_t epoch, int32_t peer, int64_t token) {
  return comm.staged_row(comm.bases[peer], epoch, comm.rank, token);
}

/// Rows as they are.
class CopyRows {
 public:
  __device__ CopyRows(const Comm& comm, const SendArguments& args, uint64_t epoch, WarpMemory memory)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        ring_(memory.pieces, memory.barriers),
        scales_(memory.scales),
        pieces_(pieces_of(comm.window.shape.wire_data_bytes(), kCopyPiece)) {}

  __device__ void send(int64_t begin, uint32_t tokens, const int32_t* meta, const int32_t* counts,
                       Announcer& announcer) {
    PieceCursor load{tokens}, store{tokens};
    const int64_t row_bytes = pieces_.total;
    while (!store.done()) {
      while (!load.done() && ring_.in_flight() < kCopyStages / 2) {
        wait_stores_read<kCopyStages / 2>();
        ring_.load(args_.x + (begin + load.token()) * row_bytes + pieces_.offset(load.piece),
                   pieces_.size(load.piece));
        load.advance(pieces_.count);
      }
      const std::byte* const piece = ring_.wait();
      const int i = store.token(), count = counts[i];
      const int32_t* const owners = meta + i * comm_.top_k();
      for (int j = 0; j < count; ++j)
        store_piece(staged_row(comm_, epoch_, owners[j], begin + i) + pieces_.offset(store.piece), piece,
                    pieces_.size(store.piece));
      commit_stores();
      if (args_.x_scales != nullptr && store.piece == 0) send_scales(begin + i, owners, count);
      ring_.release();
      announcer.group_committed();
      store.advance(pieces_.count);
    }
  }

 private:
  /// A token's scales, which the caller has; their rows need not be aligned as bulk copies want it.
  __device__ void send_scales(int64_t token, const int32_t* owners, int count) {
    const int64_t number = comm_.window.shape.wire_scales();
    const float* const from = args_.x_scales + token * number;
    for (int64_t first = 0; first < number; first += kScaleBuffer) {
      wait_stores_read<0>();
      const int part = static_cast<int>(min(number - first, int64_t{kScaleBuffer}));
      for (int s = lane_id(); s < part; s += 32) scales_[s] = from[first + s];
      publish_piece();
      for (int j = 0; j < count; ++j)
        store_piece(staged_row(comm_, epoch_, owners[j], token) + pieces_.total + first * 4,
                    reinterpret_cast<const std::byte*>(scales_), (part * 4 + 15) / 16 * 16);
      commit_stores();
    }
  }

  const Comm& comm_;
  const SendArguments& args_;
  const uint64_t epoch_;
  LoadRing<kCopyStages, kCopyPiece> ring_;
  float* const scales_;
  const Pieces pieces_;
};

/// Rows of `dtype`, which go out in another format, with scales.
template <DType dtype, WireFormat wire>
class QuantiseRows {
  using E = Element<dtype>;
  using W = Wire<wire>;
  static constexpr int kScaleColumns = W::kScaleColumns;
  static constexpr int kSteps = kSumPiece / 512;
  static constexpr int kColumns = kSumPiece / 16 * E::kVector;  ///< of a piece
  static constexpr int kBlockLanes = kScaleColumns / E::kVector;
  static_assert(kColumns % kScaleColumns == 0 && kBlockLanes <= 32);
  static constexpr int kRowStage = kWarpBytes / kOutStages;
  static_assert(kRowStage / kScaleColumns <= kScaleBuffer / kOutStages);

  /// The scales of a piece's blocks, one block a lane: of a step's lanes [0, kBlockLanes) a quarter each
  /// knows about step 0, 1, 2 and 3.
  struct BlockScales {
    static constexpr int kHalf = kBlockLanes / 2, kQuarter = kBlockLanes / 4;
    float scale, inverse;

    __device__ float inverse_of(int step) const {
      const int from = (lane_id() & ~(kBlockLanes - 1)) | (step & 2 ? kHalf : 0) | (step & 1 ? kQuarter : 0);
      return __shfl_sync(0xffffffffu, inverse, from);
    }
    __device__ void store(float* to, int vectors) const {
      const int lane = lane_id(), step = (lane & kHalf ? 2 : 0) | (lane & kQuarter ? 1 : 0);
      const int v = step * 32 + (lane & ~(kBlockLanes - 1));  // the block's first
      if ((lane & (kQuarter - 1)) == 0 && v < vectors) to[v / kBlockLanes] = scale;
    }
  };

  /// Lanes reduce the four steps of their blocks together: each exchange halves the steps that a lane goes on
  /// with, so that one division a lane does for all blocks.
  __device__ static BlockScales scale_blocks(const Strip<kSteps>& strip, int vectors) {
    static_assert(kSteps == 4);
    constexpr int kHalf = BlockScales::kHalf, kQuarter = BlockScales::kQuarter;
    float amax[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      amax[step] = step * 32 + lane_id() < vectors ? E::largest(strip.raw[step]) : 0.0f;
    const auto exchange = [](float keep, float give, int width) {
      return fmaxf(keep, __shfl_xor_sync(0xffffffffu, give, width));
    };
    const bool late = lane_id() & kHalf, odd = lane_id() & kQuarter;
    const float even_step = exchange(late ? amax[2] : amax[0], late ? amax[0] : amax[2], kHalf);
    const float odd_step = exchange(late ? amax[3] : amax[1], late ? amax[1] : amax[3], kHalf);
    float largest = exchange(odd ? odd_step : even_step, odd ? even_step : odd_step, kQuarter);
#pragma unroll
    for (int width = kQuarter / 2; width > 0; width /= 2) largest = exchange(largest, largest, width);
    const float scale = W::scale(largest);
    return {scale, __fdiv_rn(1.0f, scale)};
  }

 public:
  __device__ QuantiseRows(const Comm& comm, const SendArguments& args, uint64_t epoch, WarpMemory memory)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        scales_(memory.scales),
        pieces_(full_pieces(comm.window.shape.row_bytes())),
        whole_(comm.window.wire_bytes <= kRowStage),
        out_(memory.pieces, pieces_.count, kColumns, kRowStage) {}

  __device__ void send(int64_t begin, uint32_t tokens, const int32_t* meta, const int32_t* counts,
                       Announcer& announcer) {
    PieceCursor load{tokens}, store{tokens};
    Strip<kSteps> now, next;
    const auto fetch = [&](Strip<kSteps>& strip) {
      strip.load(args_.x + (begin + load.token()) * pieces_.total + pieces_.offset(load.piece), 0,
                 static_cast<int>(pieces_.size(load.piece) / 16));
      load.advance(pieces_.count);
    };
    fetch(now);
    while (!store.done()) {
      if (!load.done()) fetch(next);
      const int i = store.token(), count = counts[i];
      const int32_t* const owners = meta + i * comm_.top_k();
      const int vectors = static_cast<int>(pieces_.size(store.piece) / 16);
      std::byte* const out = out_.piece(store.piece);
      const int first = out_.first(store.piece);
      float* const stage_scales =
          whole_ ? reinterpret_cast<float*>(out_.stage() + comm_.window.shape.wire_data_bytes())
                 : scales_ + out_.number() * (kScaleBuffer / kOutStages);
      float* const out_scales = stage_scales + (store.piece - first) * (kColumns / kScaleColumns);
      const BlockScales blocks = scale_blocks(now, vectors);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int v = step * 32 + lane_id();
        const float inverse = blocks.inverse_of(step);
        if (v >= vectors) continue;
        float values[E::kVector];
        E::widen(now.raw[step], values);
        uint32_t* const to = reinterpret_cast<uint32_t*>(out) + v * (E::kVector / 4);
#pragma unroll
        for (int e = 0; e < E::kVector; e += 4) to[e / 4] = W::write(values + e, inverse);
      }
      blocks.store(out_scales, vectors);
      now = next;
      if (!out_.complete(store.piece)) {
        store.advance(pieces_.count);
        continue;
      }
      publish_piece();
      const uint32_t columns = pieces_.through(first, store.piece) / 16 * E::kVector;
      const uint32_t scales = (columns + kScaleColumns - 1) / kScaleColumns;
      for (int j = 0; j < count; ++j) {
        std::byte* const row = staged_row(comm_, epoch_, owners[j], begin + i);
        if (whole_) {
          store_piece(row, out_.stage(), static_cast<uint32_t>(comm_.window.wire_bytes));
          continue;
        }
        store_piece(row + int64_t{first} * kColumns, out_.stage(), columns);
        store_piece(row + comm_.window.shape.wire_data_bytes() + first * (kColumns / kScaleColumns * 4),
                    reinterpret_cast<const std::byte*>(stage_scales), (scales * 4 + 15) / 16 * 16);
      }
      commit_stores();
      announcer.group_committed();
      store.advance(pieces_.count);
    }
  }

 private:
  const Comm& comm_;
  const SendArguments& args_;
  const uint64_t epoch_;
  float* const scales_;
  const Pieces pieces_;
  const bool whole_;  ///< a row with its scales goes out in one store
  OutRing out_;
};

/// Calls visit(flag) for the credits that a chunk needs where a smaller staging section makes it wait for its
/// place.
template <class Visit>
__device__ bool all_credits(const Comm& comm, uint64_t epoch, int64_t chunk, const PeerSet& peers,
                            const Visit& visit) {
  bool all = true;
  peers.for_each([&](int32_t peer) {
    all = all && visit(peer, device::EpochFlag{comm.flag(comm.own, comm.window.credits, peer, chunk),
                                               static_cast<uint32_t>(epoch)});
  });
  return __all_sync(0xffffffffu, all);
}

/// Waits until the owners have read all chunks that had this one's place before: not only the last of them,
/// since an owner that gets nothing of it has not waited for those before. False if it waits in vain.
__device__ bool wait_for_place(const Comm& comm, const SendArguments& args, uint64_t epoch, int64_t chunk,
                               const PeerSet& peers, Announcer& announcer) {
  const int64_t places = comm.window.stage_tokens / chunk_tokens(args.tokens);
  bool flushed = false;
  for (int64_t before = chunk - places; before >= 0; before -= places) {
    if (all_credits(comm, epoch, before, peers,
                    [](int32_t, const device::EpochFlag& flag) { return flag.arrived(); }))
      continue;
    if (!flushed) announcer.flush();  // what comes before must not wait for this chunk
    flushed = true;
    if (!all_credits(comm, epoch, before, peers, [&](int32_t peer, const device::EpochFlag& flag) {
          return device::wait_until(comm, {peer, WaitPhase::credit, args.operation, epoch}, flag);
        }))
      return false;
  }
  open_for_loads();
  return true;
}

template <class Rows>
__global__ void __launch_bounds__(kThreads, 1)
    send_kernel(const __grid_constant__ Comm comm, const __grid_constant__ SendArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  BlockMemory& block = *reinterpret_cast<BlockMemory*>(shared);
  ptx::launch_dependents();
  start_clock(comm);
  const uint64_t epoch = comm.state().epoch + 1;
  if (already_failed(comm)) {
    if (args.operation == Operation::dispatch && blockIdx.x == 0) make_plan(comm, args, epoch);
    return;
  }
  bool valid = true;
  if (args.operation == Operation::dispatch) {
    const int blocks = route_blocks(args.tokens, static_cast<int>(gridDim.x));
    if (static_cast<int>(blockIdx.x) < blocks)
      route(comm, args, epoch, blocks, reinterpret_cast<int32_t*>(block.pieces), sizeof(block.pieces) / 4,
            &block.shared_word);
    if (blockIdx.x == 0) make_plan(comm, args, epoch);
  } else {
    const PlanHeader& header = PlanView{args.plan, comm.plan_fields}.header();
    valid = header.id != 0;
    if (blockIdx.x == 0)
      signal_start(comm, args.operation, epoch, header.id, args.layout, args.tokens, kCarriesRows);
  }
#if MOECOMM_HAS_BULK
  ptx::fence_shared_to_bulk();
#endif
  __syncthreads();
  if (!valid) return;

  if (warp_id() >= args.warps) return;
  int32_t* const meta = block.meta[warp_id()];
  int32_t* const counts = block.counts[warp_id()];
  Rows rows(comm, args, epoch, warp_memory(block));
  Announcer announcer(comm, epoch);
  Claims claims(&comm.state().send_next);
  const int64_t chunks = chunk_count(args.tokens), size = chunk_tokens(args.tokens);
  for (int64_t chunk = claims.take(); chunk < chunks; chunk = claims.take()) {
    const int64_t begin = chunk * size, end = min(begin + size, args.tokens);
    const ChunkOwners owners = list_owners(comm, args, begin, end, meta, counts);
    if (owners.tokens == 0) continue;
    if (args.tokens > comm.window.stage_tokens &&
        !wait_for_place(comm, args, epoch, chunk, owners.peers, announcer))
      break;
    rows.send(begin, owners.tokens, meta, counts, announcer);
    announcer.chunk_stored(chunk, owners.peers);
  }
  announcer.flush();
}

template <DType dtype, WireFormat wire>
struct QuantisingKernel {
  static constexpr auto kernel = &send_kernel<QuantiseRows<dtype, wire>>;
};

/// Calls use.operator()<kernel>() with the kernel for rows that are quantised or not.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, bool quantise, const Use& use) {
  return quantise ? with_conversion<QuantisingKernel>(shape, use)
                  : use.template operator()<&send_kernel<CopyRows>>();
}

}  // namespace

cudaError_t launch_send(const Launch& launch, const Comm& comm, const SendArguments& args) {
  return with_kernel(comm.window.shape, args.quantise, [&]<auto kernel>() {
    return launch_kernel<kernel>(launch, block_threads(launch.bulk), block_bytes(launch.bulk), comm, args);
  });
}

cudaError_t prepare_send(const DeviceShape& shape, bool bulk) {
  const Prepare prepare{block_bytes(bulk)};
  const cudaError_t error = with_kernel(shape, false, prepare);
  return error != cudaSuccess || shape.wire == WireFormat::same ? error : with_kernel(shape, true, prepare);
}

}  // namespace moecomm::intranode
