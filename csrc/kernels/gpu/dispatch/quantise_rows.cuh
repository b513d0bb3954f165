// Dispatch, sending side, of rows that are quantised: by a warp for those of a chunk (QuantiseRows), or by
// the workers of a pipe (QuantiseWork).
#pragma once

#include "kernels/gpu/common/strip.cuh"
#include "kernels/gpu/common/wire_vector.cuh"
#include "kernels/gpu/dispatch/move_pipe.cuh"
#include "kernels/gpu/dispatch/send_rows.cuh"

namespace moecomm::gpu {

/// Quantises rows of `dtype` to another format with scales, and sends them.
template <DType dtype, WireFormat wire, bool kNodes>
class QuantiseRows {
  using E = Element<dtype>;
  using V = WireVector<dtype, wire>;
  using W = Wire<wire>;
  using Scale = typename W::Scale;
  static constexpr int kScaleColumns = W::kScaleColumns;
  static constexpr int kSteps = kSumPiece / 512;
  static constexpr int kColumns = kSumPiece / 16 * E::kVector;  ///< of a piece
  static constexpr int kBlockLanes = kScaleColumns / E::kVector;
  static constexpr int kPieceScales = kColumns / kScaleColumns;  ///< of a piece
  static_assert(kColumns % kScaleColumns == 0 && kBlockLanes >= 4 && kBlockLanes <= 32);
  static_assert(kPieceScales * sizeof(Scale) % 16 == 0);
  static constexpr int kRowStage = kWarpBytes / kOutStages;
  /// Bytes of scales per stage, where a row's scales are sent apart from its values.
  static constexpr int kStageScales = kScaleBuffer / kOutStages;
  static_assert(kStageScales % 16 == 0 && kRowStage / kScaleColumns * sizeof(Scale) <= kStageScales);

  /// The scales of a piece's blocks, one block per lane: of the lanes [0, kBlockLanes) of a step, one quarter
  /// each holds steps 0, 1, 2 and 3.
  struct BlockScales {
    static constexpr int kHalf = kBlockLanes / 2, kQuarter = kBlockLanes / 4;
    Scale scale;
    float inverse;

    __device__ float inverse_of(int step) const {
      const int from = (lane_id() & ~(kBlockLanes - 1)) | (step & 2 ? kHalf : 0) | (step & 1 ? kQuarter : 0);
      return __shfl_sync(0xffffffffu, inverse, from);
    }
    __device__ void store(Scale* to, int vectors) const {
      const int lane = lane_id(), step = (lane & kHalf ? 2 : 0) | (lane & kQuarter ? 1 : 0);
      const int v = step * 32 + (lane & ~(kBlockLanes - 1));  // first lane's vector of the block
      if ((lane & (kQuarter - 1)) == 0 && v < vectors) to[v / kBlockLanes] = scale;
    }
  };

  /// Lanes reduce the four steps of their blocks together. Each exchange halves the steps that a lane goes on
  /// with, so one division per lane serves all blocks.
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
    const Scale scale = W::scale(largest);
    return {scale, W::inverse(scale)};
  }

 public:
  __device__ QuantiseRows(const Comm& comm, const SendArguments& args, uint64_t epoch, WarpMemory memory)
      : comm_(comm),
        args_(args),
        paths_{comm, epoch, args.x, comm.rank, false},
        scales_(memory.scales),
        pieces_(full_pieces(comm.window.shape.row_bytes())),
        whole_(comm.window.shape.wire_row_bytes() <= kRowStage),
        out_(memory.pieces, pieces_.count, kColumns, kRowStage) {}

  __device__ void send(int64_t begin, uint32_t tokens, const ChunkMeta& meta, Announcer& announcer) {
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
      const int i = store.token(), count = meta.counts[i];
      const int vectors = static_cast<int>(pieces_.size(store.piece) / 16);
      std::byte* const out = out_.piece(store.piece);
      const int first = out_.first(store.piece);
      std::byte* const stage_scales = whole_ ? out_.stage() + comm_.window.shape.wire_data_bytes()
                                             : scales_ + out_.number() * kStageScales;
      Scale* const out_scales = reinterpret_cast<Scale*>(stage_scales) + (store.piece - first) * kPieceScales;
      const BlockScales blocks = scale_blocks(now, vectors);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int v = step * 32 + lane_id();
        const float inverse = blocks.inverse_of(step);
        if (v >= vectors) continue;
        float values[E::kVector];
        E::widen(now.raw[step], values);
        auto* const to = reinterpret_cast<uint32_t*>(out) + v * (E::kVector / 4);
#pragma unroll
        for (int e = 0; e < E::kVector; e += 4) to[e / 4] = W::write(values + e, inverse);
      }
      blocks.store(out_scales, vectors);
      now = next;
      if (!out_.complete(store.piece)) {
        store.advance(pieces_.count);
        continue;
      }
      const uint32_t columns = pieces_.through(first, store.piece) / 16 * E::kVector;
      const uint32_t scale_bytes = (columns + kScaleColumns - 1) / kScaleColumns * sizeof(Scale);
      publish_piece();
      for (int j = 0; j < count; ++j) {
        std::byte* const row = paths_.to(begin, i, j, meta);
        if (whole_) {
          store_piece(row, out_.stage(), static_cast<uint32_t>(comm_.window.shape.wire_row_bytes()));
          continue;
        }
        store_piece(row + int64_t{first} * kColumns, out_.stage(), columns);
        store_piece(row + comm_.window.shape.wire_data_bytes() + first * (kPieceScales * sizeof(Scale)),
                    stage_scales, (scale_bytes + 15) / 16 * 16);
      }
      commit_stores();
      announcer.group_committed();
      store.advance(pieces_.count);
    }
  }

 private:
  const Comm& comm_;
  const SendArguments& args_;
  const RowPaths<kNodes> paths_;
  std::byte* const scales_;
  const Pieces pieces_;
  const bool whole_;  ///< one store sends a row with its scales
  OutRing out_;
};

/// Quantises rows of `dtype`. For the workers of a pipe.
template <DType dtype, WireFormat wire>
class QuantiseWork {
  using V = WireVector<dtype, wire>;
  static constexpr int kSteps = MovePipe<kWorkers>::kPiece / 16 / kWorkerThreads;

 public:
  explicit __device__ QuantiseWork(const KernelShape& shape) : shape_(shape) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List&, int, int thread, float*) {
    const int vectors = static_cast<int>(shape_.row_bytes() / 16);
    uint4 raw[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      raw[s] = v < vectors ? reinterpret_cast<const uint4*>(stage)[v] : uint4{};
    }
    sync_workers();  // the values overwrite what was read
    auto* const scales = reinterpret_cast<typename V::Scale*>(stage + shape_.wire_data_bytes());
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      const auto scale = V::block_scale(raw[s]);
      if (v >= vectors) continue;
      reinterpret_cast<typename V::Values*>(stage)[v] = V::write(raw[s], V::W::inverse(scale));
      if (v % V::kBlockLanes == 0) scales[v / V::kBlockLanes] = scale;
    }
  }

 private:
  const KernelShape& shape_;
};

}  // namespace moecomm::gpu
