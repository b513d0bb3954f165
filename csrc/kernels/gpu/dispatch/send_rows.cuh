// Dispatch, sending side, where no pipe moves the rows: a warp takes the rows of a chunk piece by piece to
// all their targets, unchanged (CopyRows) or quantised (quantise_rows.cuh).
#pragma once

#include "kernels/gpu/common/announcer.cuh"
#include "kernels/gpu/common/kernel.cuh"

namespace moecomm::gpu {

/// Targets of the tokens in a warp's chunk, in shared memory: token i has counts[i] targets, at [i * top_k
/// ...]. Targets below `ranks` are ranks, the others nodes, with the number of the row there.
struct ChunkMeta {
  int32_t* targets;
  int32_t* counts;
  int32_t* numbers;
  int32_t* from;  ///< relayed rows: their number among the rows that arrived here
};

/// Source and target addresses of a sender's rows.
template <bool kNodes>
struct RowPaths {
  const Comm& comm;
  uint64_t epoch;
  const std::byte* x;  ///< this rank's own rows
  int32_t source;      ///< the rank whose rows they are
  bool relayed;        ///< they have come from another node

  /// The row of token i in the chunk that begins with `begin`.
  __device__ const std::byte* from(int64_t begin, int i, const ChunkMeta& meta, int64_t row_bytes) const {
    if constexpr (kNodes)
      if (relayed)
        return comm.rail.arrived(epoch, comm.other_of(source), meta.from[i],
                                 comm.window.shape.wire_row_bytes());
    return x + (begin + i) * row_bytes;
  }
  __device__ std::byte* to(int64_t begin, int i, int j, const ChunkMeta& meta) const {
    const int at = i * comm.top_k() + j;
    const int32_t target = meta.targets[at];
    if constexpr (kNodes)
      if (target >= comm.ranks())
        return comm.rail.staged(target - comm.ranks(), meta.numbers[at], comm.window.shape.wire_row_bytes());
    return comm.staged_row(target, epoch, source, begin + i);
  }
};

/// Sends rows unchanged.
template <bool kNodes>
class CopyRows {
 public:
  __device__ CopyRows(const Comm& comm, const SendArguments& args, uint64_t epoch, WarpMemory memory)
      : CopyRows(comm, args, {comm, epoch, args.x, comm.rank, false}, memory,
                 comm.window.shape.wire_data_bytes()) {}
  /// For rows of other sources, see start_source.
  __device__ CopyRows(const Comm& comm, const SendArguments& args, uint64_t epoch, WarpMemory memory,
                      int64_t row_bytes)
      : CopyRows(comm, args, {comm, epoch, nullptr, comm.rank, true}, memory, row_bytes) {}

  /// From now on, rows that came from another node are those of `source`.
  __device__ void start_source(int32_t source) { paths_.source = source; }

  __device__ void send(int64_t begin, uint32_t tokens, const ChunkMeta& meta, Announcer& announcer) {
    PieceCursor load{tokens}, store{tokens};
    const int64_t row_bytes = pieces_.total;
    while (!store.done()) {
      while (!load.done() && ring_.in_flight() < kCopyStages / 2) {
        wait_stores_read<kCopyStages / 2>();
        ring_.load(paths_.from(begin, load.token(), meta, row_bytes) + pieces_.offset(load.piece),
                   pieces_.size(load.piece));
        load.advance(pieces_.count);
      }
      const std::byte* const piece = ring_.wait();
      const int i = store.token(), count = meta.counts[i];
      for (int j = 0; j < count; ++j)
        store_piece(paths_.to(begin, i, j, meta) + pieces_.offset(store.piece), piece,
                    pieces_.size(store.piece));
      commit_stores();
      if (args_.x_scales != nullptr && !paths_.relayed && store.piece == 0) send_scales(begin, i, meta);
      ring_.release();
      announcer.group_committed();
      store.advance(pieces_.count);
    }
  }

 private:
  __device__ CopyRows(const Comm& comm, const SendArguments& args, const RowPaths<kNodes>& paths,
                      WarpMemory memory, int64_t row_bytes)
      : comm_(comm),
        args_(args),
        paths_(paths),
        ring_(memory.pieces, memory.barriers),
        scales_(memory.scales),
        pieces_(pieces_of(row_bytes, kCopyPiece)) {}

  /// Sends a token's scales, which the caller gives; their rows need not be aligned for bulk copies.
  __device__ void send_scales(int64_t begin, int i, const ChunkMeta& meta) {
    const int64_t bytes = comm_.window.shape.wire_scale_bytes();
    const std::byte* const from = args_.x_scales + (begin + i) * bytes;
    for (int64_t first = 0; first < bytes; first += kScaleBuffer) {
      wait_stores_read<0>();
      const auto part = static_cast<uint32_t>(min(bytes - first, int64_t{kScaleBuffer}));
      copy_scales(scales_, from + first, part, bytes);
      publish_piece();
      for (int j = 0; j < meta.counts[i]; ++j)
        store_piece(paths_.to(begin, i, j, meta) + pieces_.total + first, scales_, (part + 15) / 16 * 16);
      commit_stores();
    }
  }

  const Comm& comm_;
  const SendArguments& args_;
  RowPaths<kNodes> paths_;
  LoadRing<kCopyStages, kCopyPiece> ring_;
  std::byte* const scales_;
  const Pieces pieces_;
};

}  // namespace moecomm::gpu
