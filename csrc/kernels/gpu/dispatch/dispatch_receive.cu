// Dispatch, receiving side: copies each arriving row to all its output rows.
//   - items are taken in order, from sources in turn, this rank's own first. An item is one chunk of a
//     source's tokens, or several consecutive ones
//   - in a dispatch, the source's routes (route.cuh) and the beginnings of its rows (plan.cuh) give each
//     row's positions in expert-major order, and in the rank layout its output row. Both are kept in the plan
//     for the backward of combine. In the expert layout the positions are the output rows; in the rank layout
//     they index a table of the rows that they read
//   - once the chunk has arrived, a pipe of warps stores its rows unchanged to every place (move_pipe.cuh).
//     Rows that are converted from the wire format, or multiplied by the factor of a place, go through a pipe
//     with workers (dispatch_change.cu). Rows that no pipe can take are moved piece by piece by all warps
//   - the padding rows of each expert are zeroed
#include <type_traits>

#include "kernels/gpu/common/announcer.cuh"
#include "kernels/gpu/common/strip.cuh"
#include "kernels/gpu/common/wire_vector.cuh"
#include "kernels/gpu/dispatch/receive_list.cuh"

namespace moecomm::gpu {
namespace {

struct Wanted {
  uint32_t tokens = 0;  ///< bit i: token i has an output row
  bool sent = false;    ///< rows of the chunk come to this rank, possibly to be left out
  bool known = true;    ///< false: the routes do not arrive
};

/// Fills meta[i * top_k ...] with the output rows of token i, and counts[i] with their number.
__device__ Wanted list_rows(const Comm& comm, const ReceiveArguments& args, uint64_t epoch, const Item& item,
                            int32_t* meta, int32_t* counts) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id(), tokens = static_cast<int>(item.end - item.begin);
  const bool by_expert = args.layout == RowLayout::expert;
  ChunkRows<kMaxChunk> chunk;
  if (args.operation == Operation::dispatch) {
    const TokenLanes map = TokenLanes::of_one(top_k);
    ChunkRoutes<kMaxChunk> routes(comm, epoch, map, item);
    if (!routes.wait(comm, epoch, map, item)) return {.known = false};
    chunk = resolve_rows(comm, args, RowTables::of(plan), map, item, routes);
    write_rows(comm, args, map, item, chunk);
  } else {
    const int64_t first = item.source * comm.window.shape.max_tokens + item.begin;
#pragma unroll
    for (int i = 0; i < kMaxChunk; ++i)
      (by_expert ? chunk.position : chunk.row)[i] =
          i < tokens ? planned_row(plan, args.layout, first + i, top_k) : kRowElsewhere;
  }
  Wanted wanted;
  __syncwarp();  // all lanes have finished the previous chunk
#pragma unroll
  for (int i = 0; i < kMaxChunk; ++i) {
    if (i >= tokens) continue;
    const int32_t row = by_expert ? chunk.position[i] : lane == 0 ? chunk.row[i] : kRowElsewhere;
    wanted.sent = wanted.sent || __any_sync(0xffffffffu, row != kRowElsewhere);
    const int count = compact(meta + i * top_k, row, row >= 0);
    if (lane == 0) counts[i] = count;
    if (count > 0) wanted.tokens |= 1u << i;
  }
  __syncwarp();
  return wanted;
}

/// Copies rows as they arrive. With out_scales they stay in the wire format, as values and scales.
class CopyOut {
 public:
  __device__ CopyOut(const Comm& comm, const ReceiveArguments& args, uint64_t epoch, WarpMemory memory)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        ring_(memory.pieces, memory.barriers),
        values_(pieces_of(comm.window.shape.wire_data_bytes(), kCopyPiece)),
        scale_bytes_(args.out_scales != nullptr ? comm.window.shape.wire_scale_bytes() : 0),
        // Scales are one more piece, if their rows are aligned for bulk copies.
        pieces_(values_.count + (scale_bytes_ > 0 && scale_bytes_ % 16 == 0 && scale_bytes_ <= kCopyPiece)) {}

  __device__ void receive(const Item& item, uint32_t tokens, const int32_t* meta, const int32_t* counts) {
    PieceCursor load{tokens}, store{tokens};
    while (!store.done()) {
      while (!load.done() && ring_.in_flight() < kCopyStages / 2) {
        wait_stores_read<kCopyStages / 2>();
        ring_.load(arrived_row(comm_, args_, epoch_, item, item.begin + load.token()) + offset(load.piece),
                   size(load.piece));
        load.advance(pieces_);
      }
      const std::byte* const piece = ring_.wait();
      const int i = store.token(), count = counts[i];
      const int32_t* const rows = meta + i * comm_.top_k();
      const bool values = store.piece < values_.count;
      std::byte* const out = values ? args_.out + offset(store.piece) : args_.out_scales;
      const int64_t stride = values ? values_.total : scale_bytes_;
      for (int j = 0; j < count; ++j) store_piece(out + rows[j] * stride, piece, size(store.piece));
      commit_stores();
      if (scale_bytes_ > 0 && pieces_ == values_.count && store.piece == 0)
        hand_on_scales(item, i, rows, count);
      ring_.release();
      store.advance(pieces_);
    }
  }

 private:
  __device__ int64_t offset(int piece) const {
    return piece < values_.count ? values_.offset(piece) : values_.total;
  }
  __device__ uint32_t size(int piece) const {
    return piece < values_.count ? values_.size(piece) : static_cast<uint32_t>(scale_bytes_);
  }

  __device__ void hand_on_scales(const Item& item, int i, const int32_t* rows, int count) {
    const std::byte* const scales = arrived_row(comm_, args_, epoch_, item, item.begin + i) + values_.total;
    for (int j = 0; j < count; ++j)
      copy_scales(args_.out_scales + rows[j] * scale_bytes_, scales, static_cast<uint32_t>(scale_bytes_),
                  scale_bytes_);
  }

  const Comm& comm_;
  const ReceiveArguments& args_;
  const uint64_t epoch_;
  LoadRing<kCopyStages, kCopyPiece> ring_;
  const Pieces values_;
  const int64_t scale_bytes_;
  const int pieces_;
};

/// Converts rows with scales from another format to `dtype`.
template <DType dtype, WireFormat wire>
class DequantiseOut {
  using E = Element<dtype>;
  using V = WireVector<dtype, wire>;
  using W = Wire<wire>;
  static constexpr int kColumns = kOutPiece / 16 * E::kVector;  ///< columns of a piece, which is one store

 public:
  __device__ DequantiseOut(const Comm& comm, const ReceiveArguments& args, uint64_t epoch, WarpMemory memory)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        pieces_(full_pieces(comm.window.shape.row_bytes(), kOutPiece)),
        out_(memory.pieces + kSumStages * kSumPiece, pieces_.count, kOutPiece) {}

  __device__ void receive(const Item& item, uint32_t tokens, const int32_t* meta, const int32_t* counts) {
    PieceCursor load{tokens}, store{tokens};
    Fetched now, next;
    const auto fetch = [&](Fetched& piece) {
      const std::byte* const row = arrived_row(comm_, args_, epoch_, item, item.begin + load.token());
      const auto* const scales =
          reinterpret_cast<const typename W::Scale*>(row + comm_.window.shape.wire_data_bytes());
      const int vectors = static_cast<int>(pieces_.size(load.piece) / 16);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int v = step * 32 + lane_id();
        if (v >= vectors) continue;
        const int64_t column = int64_t{load.piece} * kColumns + v * E::kVector;
        piece.values[step] = __ldcg(reinterpret_cast<const typename V::Values*>(row + column));
        piece.scales[step] = W::factor(__ldcg(&scales[column / W::kScaleColumns]));
      }
      load.advance(pieces_.count);
    };
    fetch(now);
    while (!store.done()) {
      if (!load.done()) fetch(next);
      const int i = store.token(), count = counts[i];
      const int32_t* const rows = meta + i * comm_.top_k();
      const int vectors = static_cast<int>(pieces_.size(store.piece) / 16);
      std::byte* const out = out_.piece(store.piece);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int v = step * 32 + lane_id();
        if (v >= vectors) continue;
        const auto* const words = reinterpret_cast<const uint32_t*>(&now.values[step]);
        float values[E::kVector];
#pragma unroll
        for (int e = 0; e < E::kVector; e += 4) W::read(words[e / 4], now.scales[step], values + e);
        reinterpret_cast<uint4*>(out)[v] = E::narrow(values);
      }
      publish_piece();
      for (int j = 0; j < count; ++j)
        store_piece(args_.out + int64_t{rows[j]} * pieces_.total + pieces_.offset(store.piece), out,
                    pieces_.size(store.piece));
      commit_stores();
      now = next;
      store.advance(pieces_.count);
    }
  }

 private:
  static constexpr int kSteps = kOutPiece / 512;
  struct Fetched {
    typename V::Values values[kSteps];
    float scales[kSteps];
  };

  const Comm& comm_;
  const ReceiveArguments& args_;
  const uint64_t epoch_;
  const Pieces pieces_;
  OutRing out_;
};

/// Walks over (token, place, piece), for what differs between places.
struct PlaceCursor {
  uint32_t tokens;
  int place = 0, piece = 0;
  __device__ bool done() const { return tokens == 0; }
  __device__ int token() const { return __ffs(static_cast<int>(tokens)) - 1; }
  __device__ void advance(int pieces, const int32_t* counts) {
    if (++piece < pieces) return;
    piece = 0;
    if (++place < counts[token()]) return;
    place = 0;
    tokens &= tokens - 1;
  }
};

/// Multiplies rows by the factor of each place (the gradients of a weighted combine), and computes their dot
/// products with other rows (the gradients of the weights).
template <DType dtype>
class ScaleOut {
  using E = Element<dtype>;

 public:
  __device__ ScaleOut(const Comm& comm, const ReceiveArguments& args, uint64_t epoch, WarpMemory memory)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        ring_(memory.pieces, memory.barriers),
        pieces_(full_pieces(comm.window.shape.row_bytes())),
        out_(memory.pieces + kSumStages * kSumPiece, pieces_.count, kSumPiece) {}

  __device__ void receive(const Item& item, uint32_t tokens, const int32_t* meta, const int32_t* counts) {
    PlaceCursor load{tokens}, store{tokens};
    const bool dots = args_.other != nullptr;
    const int each = dots ? 2 : 1;  // pieces a step
    float dot = 0;
    while (!store.done()) {
      while (!load.done() && ring_.in_flight() + each <= kSumStages) {
        const int64_t offset = pieces_.offset(load.piece);
        const uint32_t bytes = pieces_.size(load.piece);
        ring_.load(arrived_row(comm_, args_, epoch_, item, item.begin + load.token()) + offset, bytes);
        if (dots)
          ring_.load(
              args_.other + int64_t{meta[load.token() * comm_.top_k() + load.place]} * pieces_.total + offset,
              bytes);
        load.advance(pieces_.count, counts);
      }
      const int32_t row = meta[store.token() * comm_.top_k() + store.place];
      const int vectors = static_cast<int>(pieces_.size(store.piece) / 16);
      const float factor = args_.scales != nullptr ? reinterpret_cast<const float*>(args_.scales)[row] : 1.0f;
      const uint4* const piece = reinterpret_cast<const uint4*>(ring_.wait());
      std::byte* const out = out_.piece(store.piece);
      float values[kSumPiece / 512][E::kVector];
#pragma unroll
      for (int step = 0; step < kSumPiece / 512; ++step) {
        const int v = step * 32 + lane_id();
        if (v >= vectors) continue;
        E::widen(piece[v], values[step]);
        float scaled[E::kVector];
#pragma unroll
        for (int e = 0; e < E::kVector; ++e)
          scaled[e] = args_.scales != nullptr ? multiply(values[step][e], factor) : values[step][e];
        reinterpret_cast<uint4*>(out)[v] = E::narrow(scaled);
      }
      ring_.release();
      if (out_.complete(store.piece)) {
        publish_piece();
        const int first = out_.first(store.piece);
        store_piece(args_.out + int64_t{row} * pieces_.total + pieces_.offset(first), out_.stage(),
                    pieces_.through(first, store.piece));
        commit_stores();
      }
      if (dots) {
        const uint4* const other = reinterpret_cast<const uint4*>(ring_.wait());
#pragma unroll
        for (int step = 0; step < kSumPiece / 512; ++step) {
          const int v = step * 32 + lane_id();
          if (v >= vectors) continue;
          float with[E::kVector];
          E::widen(other[v], with);
#pragma unroll
          for (int e = 0; e < E::kVector; ++e) dot = add(dot, multiply(values[step][e], with[e]));
        }
        ring_.release();
        if (store.piece + 1 == pieces_.count) {
          for (int width = 16; width > 0; width /= 2)
            dot = add(dot, __shfl_xor_sync(0xffffffffu, dot, width));
          if (lane_id() == 0) reinterpret_cast<float*>(args_.dots)[row] = dot;
          dot = 0;
        }
      }
      store.advance(pieces_.count, counts);
    }
  }

 private:
  const Comm& comm_;
  const ReceiveArguments& args_;
  const uint64_t epoch_;
  LoadRing<kSumStages, kSumPiece> ring_;
  const Pieces pieces_;
  OutRing out_;
};

/// Spans of one chunk each.
struct ByChunk {
  __device__ int operator()(int64_t tokens) const { return chunk_tokens(tokens); }
};

/// Receives rows unchanged, by a pipe. Whole block.
__device__ void receive_by_pipe(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                std::byte* shared) {
  const int64_t row_bytes = comm.window.shape.wire_row_bytes();
  run_move_pipe<0>(
      shared, MoveShape::of<0>(row_bytes, row_bytes).passing(), epoch,
      [&](MoveLister<0>& pipe) { list_rows_to_places(comm, args, epoch, pipe); },
      [&] { zero_paddings(comm, args); });
}

template <class Rows>
__device__ void receive_items(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              BlockMemory& block) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int32_t* const tokens_of = plan.at(plan.fields.tokens);
  const int32_t ranks = comm.ranks();
  const int64_t most_chunks = most_claims(comm, tokens_of, ByChunk{});
  const int64_t paddings = args.layout == RowLayout::expert ? comm.local_experts : 0;

  if constexpr (std::is_same_v<Rows, CopyOut>)
    if (args.out_scales == nullptr && lists_hold(comm.window.shape, comm.top_k()))
      return receive_by_pipe(comm, args, epoch, reinterpret_cast<std::byte*>(&block));

  int32_t* const meta = block.meta[warp_id()];
  int32_t* const counts = block.counts[warp_id()];
  Rows rows(comm, args, epoch, warp_memory(block));
  Claims claims(&comm.state().item_next);
  for (int64_t claim = claims.take(); claim < paddings + most_chunks * ranks; claim = claims.take()) {
    if (claim < paddings) {
      zero_padding(comm, args, RowTables::of(plan), claim);
      continue;
    }
    Item item;
    const auto [source, number] = comm.turn(static_cast<int32_t>(claim - paddings));
    item.source = source;
    const int64_t tokens = tokens_of[item.source], size = chunk_tokens(tokens);
    item.begin = order_of(comm, source, tokens_of[item.source], static_cast<int>(size)).begin(number);
    item.chunk = item.begin >> chunk_shift(tokens);
    item.end = min(item.begin + size, tokens);
    if (item.begin >= item.end) continue;
    const Wanted wanted = list_rows(comm, args, epoch, item, meta, counts);
    if (!wanted.known) break;
    const bool travels = item.source != comm.rank || comm.own_rows_travel();
    const bool in_turn = travels && tokens > comm.window.stage_tokens;
    if (travels && (wanted.tokens != 0 || (in_turn && wanted.sent))) {
      bool here = true;
      if (lane_id() == 0)
        here = device::wait_arrival(comm, {item.source, WaitPhase::rows, args.operation, epoch}, item.chunk);
      if (!__all_sync(0xffffffffu, here)) break;
      open_for_loads();
    }
    if (wanted.tokens != 0) rows.receive(item, wanted.tokens, meta, counts);
    if (!in_turn) continue;
    __syncwarp();  // the loads of all lanes complete before the release
    if (lane_id() == 0) device::signal(device::credit_flag(comm, item.source, item.chunk), epoch);
  }
  wait_stores<0>();
}

template <class Rows>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_receive_kernel(const __grid_constant__ Comm comm,
                            const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args, [&](uint64_t epoch) {
    receive_items<Rows>(comm, args, epoch, *reinterpret_cast<BlockMemory*>(shared));
  });
}

/// Calls use.operator()<kernel>() with the kernel for this way of writing rows.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, Arrival arrival, const Use& use) {
  const auto with_rows = [&]<class Rows>() {
    return use.template operator()<&dispatch_receive_kernel<Rows>>(kThreads, sizeof(BlockMemory));
  };
  switch (arrival) {
    case Arrival::scaled:
      return with_dtype(shape.dtype,
                        [&]<DType dtype>() { return with_rows.template operator()<ScaleOut<dtype>>(); });
    case Arrival::dequantised:
      return with_conversion(shape, [&]<DType dtype, WireFormat wire>() {
        return with_rows.template operator()<DequantiseOut<dtype, wire>>();
      });
    case Arrival::as_it_is:
      break;
  }
  return with_rows.template operator()<CopyOut>();
}

}  // namespace

cudaError_t launch_dispatch_receive(const Launch& launch, const Comm& comm, const ReceiveArguments& args) {
  const KernelShape& shape = comm.window.shape;
  const Arrival arrival = arrival_of(args);
  if (arrival != Arrival::as_it_is && pipe_works(shape, shape.top_k))
    return launch_dispatch_change(launch, comm, args);
  return with_kernel(shape, arrival, Start(launch, comm, args));
}

cudaError_t prepare_dispatch_receive(const DeviceShape& shape) {
  for (const Arrival arrival : {Arrival::as_it_is, Arrival::scaled, Arrival::dequantised}) {
    if (arrival == Arrival::dequantised && shape.wire == WireFormat::same) continue;
    const cudaError_t error = arrival != Arrival::as_it_is && pipe_works(shape, shape.top_k)
                                  ? prepare_dispatch_change(shape, arrival)
                                  : with_kernel(shape, arrival, Prepare{});
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace moecomm::gpu
