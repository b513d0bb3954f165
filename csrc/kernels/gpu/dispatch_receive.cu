// Dispatch, receiving side: each row that arrives goes to all the output rows that want it.
//   - items are taken in order: a chunk of one source's tokens, or a few, sources in turn, this rank's own
//   first
//   - in a dispatch, what the source has worked out (route.cuh) and where its rows begin (plan.cuh) give each
//     row's positions in expert-major order, and in the rank layout its output row; they are kept in the
//     plan, where the backward of combine finds them. In the expert layout the positions are the output rows;
//     in the rank layout they are those of the index, which says which row each position reads
//   - once the chunk has arrived, its rows are loaded and stored to every place: as they are by a pipe of
//   warps
//     (move_pipe.cuh); out of the wire format, or times the factor of the place, by all warps, piece by piece
//   - the alignment rows of each expert are zeroed
#include <type_traits>

#include "kernels/gpu/announcer.cuh"
#include "kernels/gpu/kernel.cuh"
#include "kernels/gpu/move_pipe.cuh"
#include "kernels/gpu/resolve.cuh"
#include "kernels/gpu/strip.cuh"
#include "kernels/gpu/wire_vector.cuh"

namespace moecomm::gpu {
namespace {

struct Wanted {
  uint32_t tokens = 0;  ///< bit i: token i has an output row
  bool sent = false;    ///< rows of the chunk come here, if only to be left out
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
    chunk = resolve_rows(comm, args, RowTables::of(plan), map, item,
                         ChunkRoutes<kMaxChunk>(comm, args, epoch, map, item));
    write_rows(comm, args, map, item, chunk);
  } else {
    const int64_t first = item.source * comm.window.shape.max_tokens + item.begin;
#pragma unroll
    for (int i = 0; i < kMaxChunk; ++i)
      (by_expert ? chunk.position : chunk.row)[i] =
          i < tokens ? planned_row(plan, args.layout, first + i, top_k) : kRowElsewhere;
  }
  Wanted wanted;
  __syncwarp();  // all lanes are done with the chunk before
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

/// Rows as they arrive. With out_scales they stay in the wire format: values and scales.
class CopyOut {
 public:
  __device__ CopyOut(const Comm& comm, const ReceiveArguments& args, uint64_t epoch, WarpMemory memory)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        ring_(memory.pieces, memory.barriers),
        values_(pieces_of(comm.window.shape.wire_data_bytes(), kCopyPiece)),
        scale_bytes_(args.out_scales != nullptr ? comm.window.shape.wire_scale_bytes() : 0),
        // Scales are one more piece, if their rows lie as bulk copies want it.
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

/// Rows in another format, with scales, which become rows of `dtype`.
template <DType dtype, WireFormat wire>
class DequantiseOut {
  using E = Element<dtype>;
  using W = Wire<wire>;
  static constexpr int kColumns = kOutPiece / 16 * E::kVector;  ///< of a piece, which is one store

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
      float row_scale = 0;
      if constexpr (W::kRowScale)
        row_scale = __ldcg(reinterpret_cast<const float*>(row + comm_.window.shape.wire_row_scale()));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int v = step * 32 + lane_id();
        if (v >= vectors) continue;
        const int64_t column = int64_t{load.piece} * kColumns + v * E::kVector;
        piece.values[step] = __ldcg(reinterpret_cast<const Values*>(row + column * W::kValueBits / 8));
        piece.scales[step] = W::factor(__ldcg(&scales[column / W::kScaleColumns]), row_scale);
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
        const auto* const words = reinterpret_cast<const typename W::Four*>(&now.values[step]);
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
  static constexpr int kVectorBytes = E::kVector * W::kValueBits / 8;  // of a vector's values on the wire
  using Values = std::conditional_t<kVectorBytes == 8, uint2,
                                    std::conditional_t<kVectorBytes == 4, uint32_t, unsigned short>>;
  static constexpr int kSteps = kOutPiece / 512;
  struct Fetched {
    Values values[kSteps];
    float scales[kSteps];
  };

  const Comm& comm_;
  const ReceiveArguments& args_;
  const uint64_t epoch_;
  const Pieces pieces_;
  OutRing out_;
};

/// Walks (token, place, piece), for what is different at each place.
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

/// Rows times the factor of each place (the gradients of a weighted combine), and their products with other
/// rows (the gradients of the weights).
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

/// Waits until the items of an operation can be worked on. Whole block; false if there are none.
__device__ bool start(const Comm& comm, const ReceiveArguments& args, uint64_t epoch) {
  if (failed_for_block(comm)) return false;
  bool going = true;
  if (args.operation == Operation::dispatch) {
    if (threadIdx.x == 0)
      going = device::wait_until(comm, {comm.rank, WaitPhase::blocks, args.operation, epoch},
                                 device::EpochFlag{&comm.state().planned, epoch});
    going = __syncthreads_and(going);
  } else {
    going = agree_on_operation(comm, args.operation, epoch);
  }
  return going && PlanView{args.plan, comm.plan_fields}.header().id != 0;
}

/// The most chunks, or spans of span(tokens) tokens, that one source has.
template <class Span>
__device__ int64_t most_spans(const int32_t* tokens_of, int32_t ranks, const Span& span) {
  int64_t most = 0;
  for (int32_t source = 0; source < ranks; ++source) {
    const int64_t tokens = tokens_of[source];
    if (tokens > 0) most = max(most, (tokens - 1) / span(tokens) + 1);
  }
  return most;
}

/// Spans of a chunk each.
struct ByChunk {
  __device__ int64_t operator()(int64_t tokens) const { return chunk_tokens(tokens); }
};

#if MOECOMM_HAS_BULK

/// Spans of a list each, of a pipe with so many workers.
template <int workers>
struct ByList {
  const TokenLanes& map;
  int ranks;
  __device__ int operator()(int64_t tokens) const {
    return move_tokens<workers>(map, map.top_k, chunk_tokens(tokens), tokens * ranks);
  }
};

/// A list of one source's tokens, and what tells their rows here, which is under way while those of others
/// are listed: in a dispatch what the source has pushed, else rows of the plan, which are in `packed`.
struct ReceiveList {
  Item item{};
  int of_source = 0;  ///< tokens of the source
  ChunkRoutes<kMoveRounds> known;
  __device__ int tokens() const { return static_cast<int>(item.end - item.begin); }
};

/// Lists the tokens of all sources. All lanes call every function. `operation`: whose rows arrive.
template <int workers, Operation operation>
class ReceiveLister {
 public:
  __device__ ReceiveLister(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                           const TokenLanes& map)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        map_(map),
        plan_{args.plan, comm.plan_fields},
        tokens_of_(plan_.at(plan_.fields.tokens)),
        size_{map, comm.ranks()},
        claims_end_(static_cast<uint32_t>(most_spans(tokens_of_, comm.ranks(), size_) * comm.ranks())),
        claims_(&comm.state().item_next) {}

  /// A list without tokens is the last one.
  __device__ ReceiveList next() {
    ReceiveList list;
    const auto ranks = static_cast<uint32_t>(comm_.ranks());
    while (list.tokens() == 0) {
      const auto claim = static_cast<uint32_t>(claims_.take());
      if (claim >= claims_end_) return list;
      const uint32_t number = claim / ranks;
      list.item.source = comm_.rank + static_cast<int32_t>(claim - number * ranks);
      if (list.item.source >= comm_.ranks()) list.item.source -= comm_.ranks();
      list.of_source = tokens_of_[list.item.source];
      const int size = size_(list.of_source);
      list.item.begin = min(static_cast<int>(number) * size, list.of_source);
      list.item.end = min(static_cast<int>(list.item.begin) + size, list.of_source);
    }
    list.item.chunk = list.item.begin >> (__ffs(chunk_tokens(list.of_source)) - 1);
    list.item.landing = args_.copied ? landing_of(comm_, epoch_, list.item.source) : 0;
    if constexpr (operation == Operation::dispatch) {
      list.known = ChunkRoutes<kMoveRounds>(comm_, args_, epoch_, map_, list.item);
      return list;
    }
    const bool by_expert = args_.layout == RowLayout::expert;
    const int64_t entry = list.item.source * comm_.window.shape.max_tokens + list.item.begin + map_.within;
    const int32_t* const planned = plan_.at(by_expert ? plan_.fields.positions : plan_.fields.rows) +
                                   (by_expert ? entry * map_.top_k + map_.k : entry);
    const int each = map_.tokens * (by_expert ? map_.top_k : 1);  // of a round
#pragma unroll
    for (int j = 0; j < kMoveRounds; ++j)
      list.known.packed[j] =
          map_.has(j, list.tokens()) && (by_expert || map_.leads()) ? planned[j * each] : kRowElsewhere;
    return list;
  }

  /// The output row of this lane's (token, k) in each round of a list, kRowElsewhere or kRowDropped; in the
  /// rank layout the first lane of a token has it. A dispatch writes it into the plan.
  __device__ void resolve(const ReceiveList& list, int32_t (&rows)[kMoveRounds]) const {
    if constexpr (operation == Operation::dispatch) {
      const auto found = resolve_rows(comm_, args_, RowTables::of(plan_), map_, list.item, list.known);
      write_rows(comm_, args_, map_, list.item, found);
#pragma unroll
      for (int j = 0; j < kMoveRounds; ++j)
        rows[j] = args_.layout == RowLayout::expert ? found.position[j]
                  : map_.leads()                    ? found.row[j]
                                                    : kRowElsewhere;
    } else {
#pragma unroll
      for (int j = 0; j < kMoveRounds; ++j) rows[j] = list.known.packed[j];
    }
  }

 private:
  const Comm& comm_;
  const ReceiveArguments& args_;
  const uint64_t epoch_;
  const TokenLanes& map_;
  const PlanView plan_;
  const int32_t* const tokens_of_;
  const ByList<workers> size_;
  const uint32_t claims_end_;
  Claims claims_;
};

/// Waits for those chunks, of `size` tokens each, of a list that have one of `tokens`, bits of the list's
/// tokens. All lanes; false if it waits in vain.
__device__ bool wait_for_list(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              const Item& item, int size, uint32_t tokens) {
  const int first = min(lane_id() * size, 31);
  const bool waits =
      args.copied ? lane_id() == 0 && tokens != 0 : (tokens >> first & ((1u << size) - 1)) != 0;
  const int64_t flag = args.copied ? kCopiesChunk : item.chunk + lane_id();
  bool here = true;
  if (waits)
    here = device::wait_until(comm, {item.source, WaitPhase::rows, args.operation, epoch},
                              device::EagerFlag{comm.arrival(comm.own, item.source, flag), epoch});
  __syncwarp();  // what a lane has acquired, all lanes load
  return __all_sync(0xffffffffu, here);
}

/// The work of a unit's lister: where the rows of all sources go. add(pipe, list, j, source, row) adds those
/// of round j of a list, where `source` is the row of a lane's token and `row` the output row of its (token,
/// k), if it is not negative.
template <int workers, Operation operation, class Add>
__device__ void list_arriving(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              MoveLister<workers>& pipe, const TokenLanes& map, const Add& add) {
  ReceiveLister<workers, operation> lister(comm, args, epoch, map);
  ReceiveList next = lister.next();
  while (next.tokens() > 0) {
    const ReceiveList list = next;
    next = lister.next();
    const int size = chunk_tokens(list.of_source);
    const bool travels = list.item.source != comm.rank || comm.own_rows_travel();
    const bool in_turn = travels && !args.copied && list.of_source > comm.window.stage_tokens;
    int32_t rows[kMoveRounds];
    lister.resolve(list, rows);
    auto& out = pipe.open();
    uint32_t awaited = 0;  // tokens whose row comes here; only to be left out, if its place is given back
#pragma unroll
    for (int j = 0; j < kMoveRounds; ++j) {
      const int first = j * map.tokens;
      if (first >= list.tokens()) continue;
      const bool comes = in_turn ? rows[j] != kRowElsewhere : rows[j] >= 0;
      awaited |= __reduce_or_sync(0xffffffffu, comes ? 1u << (first + map.within) : 0u);
      add(arrived_row(comm, args, epoch, list.item, list.item.begin + first + map.within), rows[j]);
    }
    if (travels && !wait_for_list(comm, args, epoch, list.item, size, awaited)) return;
    int flags = 0;  // the place of each chunk may be taken when its rows have been read
    if (in_turn) {
      flags = (list.tokens() + size - 1) / size;
      if (lane_id() < flags)
        out.flags[lane_id()] = comm.flag(comm.bases[comm.relay_rank(list.item.source)], comm.window.credits,
                                         comm.pair(list.item.source, comm.rank), list.item.chunk + lane_id());
    }
    if (!pipe.empty() || flags > 0) pipe.hand_over(flags);
  }
}

/// Zeroes the alignment rows of all experts. All lanes of the warps that share them.
__device__ void zero_paddings(const Comm& comm, const ReceiveArguments& args) {
  if (args.layout != RowLayout::expert) return;
  const RowTables tables = RowTables::of({args.plan, comm.plan_fields});
  Claims claims(&comm.state().receive_next);
  for (int64_t e = claims.take(); e < comm.local_experts; e = claims.take())
    zero_padding(comm, args, tables, e);
}

/// Lists rows that go to all their places, by a pipe with so many workers.
template <int workers>
__device__ void list_rows_to_places(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                    MoveLister<workers>& pipe) {
  const TokenLanes map = TokenLanes::of_many(comm.top_k());
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const auto add = [&](const std::byte* source, int32_t row) {
    pipe.add(map, source, row >= 0, args.out + row * row_bytes);
  };
  if (args.operation == Operation::dispatch)
    list_arriving<workers, Operation::dispatch>(comm, args, epoch, pipe, map, add);
  else
    list_arriving<workers, Operation::redispatch>(comm, args, epoch, pipe, map, add);
}

/// Receives rows as they arrive, by a pipe. Whole block.
__device__ void receive_by_pipe(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                std::byte* shared) {
  const int64_t row_bytes = comm.window.wire_bytes;
  run_move_pipe<0>(
      shared, MoveShape::of<0>(row_bytes, row_bytes), epoch,
      [&](MoveLister<0>& pipe) { list_rows_to_places(comm, args, epoch, pipe); },
      [&] { zero_paddings(comm, args); });
}

/// Makes rows of `dtype` of those in a wire format. For the workers of a pipe.
template <DType dtype, WireFormat wire>
class DequantiseWork {
  using V = WireVector<dtype, wire>;
  static constexpr int kSteps = MovePipe<kWorkers>::kPiece / 16 / kWorkerThreads;

 public:
  explicit __device__ DequantiseWork(const DeviceShape& shape) : shape_(shape) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List&, int, int thread, float*) {
    const int vectors = static_cast<int>(shape_.row_bytes() / 16);
    const auto* const scales = reinterpret_cast<const typename V::Scale*>(stage + shape_.wire_data_bytes());
    float of_row = 0;
    if constexpr (V::W::kRowScale) of_row = *reinterpret_cast<const float*>(stage + shape_.wire_row_scale());
    typename V::Values packed[kSteps];
    float factors[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      if (v >= vectors) continue;
      packed[s] = reinterpret_cast<const typename V::Values*>(stage)[v];
      factors[s] = V::W::factor(scales[v / V::kBlockLanes], of_row);
    }
    sync_workers();  // the row takes the place of what was read
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      if (v < vectors) reinterpret_cast<uint4*>(stage)[v] = V::read(packed[s], factors[s]);
    }
  }

 private:
  const DeviceShape& shape_;
};

/// Receives rows in a wire format, which become rows of `dtype`. Whole block.
template <DType dtype, WireFormat wire>
__device__ void dequantise_by_pipe(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                   std::byte* shared) {
  run_move_pipe<kWorkers>(
      shared, MoveShape::of<kWorkers>(comm.window.wire_bytes, comm.window.shape.row_bytes()), epoch,
      [&](MoveLister<kWorkers>& pipe) { list_rows_to_places(comm, args, epoch, pipe); },
      [&] { zero_paddings(comm, args); }, DequantiseWork<dtype, wire>(comm.window.shape));
}

/// Makes of a row of `dtype` one for each of its places: times the place's factor. The row that lies in the
/// place's stage before, if there is one, is what its product is with. For the workers of a pipe: what a
/// thread keeps of the row.
template <DType dtype>
class ScaleWork {
  using E = Element<dtype>;
  static constexpr int kSteps = MovePipe<kWorkers>::kPiece / 16 / kWorkerThreads;

 public:
  __device__ ScaleWork(const ReceiveArguments& args, int64_t row_bytes)
      : scales_(args.scales != nullptr), vectors_(static_cast<int>(row_bytes / 16)) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List& list, int entry, int thread, float* parts) {
    auto* const values = reinterpret_cast<uint4*>(stage);
    const int first = entry > 0 ? list.ends[entry - 1] : 0;
    if (list.ends[entry] == first) {  // the row of a token
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        if (s * kWorkerThreads + thread < vectors_) row_[s] = values[s * kWorkerThreads + thread];
      return;
    }
    const bool products = list.products[entry] != nullptr;
    const float factor = list.factors[entry];
    float dot = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      if (v >= vectors_) continue;
      float row[E::kVector];
      E::widen(row_[s], row);
      if (products) {
        float with[E::kVector];
        E::widen(values[v], with);
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) dot = __fmaf_rn(row[e], with[e], dot);
      }
#pragma unroll
      for (int e = 0; e < E::kVector; ++e) row[e] = scales_ ? multiply(row[e], factor) : row[e];
      values[v] = E::narrow(row);
    }
    if (!products) return;
    for (int width = 16; width > 0; width /= 2) dot = add(dot, __shfl_xor_sync(0xffffffffu, dot, width));
    if (lane_id() == 0) parts[thread / 32] = dot;
  }

 private:
  const bool scales_;
  const int vectors_;
  uint4 row_[kSteps];
};

/// The same for rows times the factors of their places, and their products. Whole block.
template <DType dtype>
__device__ void scale_by_pipe(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              std::byte* shared) {
  const int64_t row_bytes = comm.window.wire_bytes;
  run_move_pipe<kWorkers>(
      shared, MoveShape::of<kWorkers>(row_bytes, row_bytes), epoch,
      [&](MoveLister<kWorkers>& pipe) {
        const TokenLanes map = TokenLanes::of_many(comm.top_k());
        const auto* const scales = reinterpret_cast<const float*>(args.scales);
        auto* const dots = reinterpret_cast<float*>(args.dots);
        list_arriving<kWorkers, Operation::redispatch>(
            comm, args, epoch, pipe, map, [&](const std::byte* source, int32_t row) {
              const bool wanted = row >= 0, products = args.other != nullptr;
              const float factor = wanted && scales != nullptr ? scales[row] : 1.0f;
              pipe.add_each(map, source, wanted, args.out + row * row_bytes, factor,
                            products ? args.other + row * row_bytes : nullptr,
                            products ? dots + row : nullptr);
            });
      },
      [&] { zero_paddings(comm, args); }, ScaleWork<dtype>(args, row_bytes));
}

#endif

template <class Rows>
__device__ void receive_items(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              BlockMemory& block) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int32_t* const tokens_of = plan.at(plan.fields.tokens);
  const int32_t ranks = comm.ranks();
  const int64_t most_chunks = most_spans(tokens_of, ranks, ByChunk{});
  const int64_t paddings = args.layout == RowLayout::expert ? comm.local_experts : 0;

#if MOECOMM_HAS_BULK
  if constexpr (std::is_same_v<Rows, CopyOut>)
    if (args.out_scales == nullptr && lists_hold(comm.window.shape, comm.top_k()))
      return receive_by_pipe(comm, args, epoch, reinterpret_cast<std::byte*>(&block));
#endif

  int32_t* const meta = block.meta[warp_id()];
  int32_t* const counts = block.counts[warp_id()];
  Rows rows(comm, args, epoch, warp_memory(block));
  Claims claims(&comm.state().item_next);
  for (int64_t claim = claims.take(); claim < paddings + most_chunks * ranks; claim = claims.take()) {
    if (claim < paddings) {
      zero_padding(comm, args, RowTables::of(plan), claim);
      continue;
    }
    const auto number = static_cast<uint32_t>(claim - paddings),
               chunk = number / static_cast<uint32_t>(ranks);
    Item item;
    item.chunk = chunk;
    item.source = comm.rank + static_cast<int32_t>(number - chunk * static_cast<uint32_t>(ranks));
    if (item.source >= ranks) item.source -= ranks;
    const int64_t tokens = tokens_of[item.source], size = chunk_tokens(tokens);
    item.begin = item.chunk * size;
    item.end = min(item.begin + size, tokens);
    item.landing = args.copied ? landing_of(comm, epoch, item.source) : 0;
    if (item.begin >= item.end) continue;
    const Wanted wanted = list_rows(comm, args, epoch, item, meta, counts);
    const bool travels = item.source != comm.rank || comm.own_rows_travel();
    const bool in_turn = travels && !args.copied && tokens > comm.window.stage_tokens;
    const int64_t flag = args.copied ? kCopiesChunk : item.chunk;
    if (travels && (wanted.tokens != 0 || (in_turn && wanted.sent))) {
      bool here = true;
      if (lane_id() == 0)
        here = device::wait_until(comm, {item.source, WaitPhase::rows, args.operation, epoch},
                                  device::EpochFlag{comm.arrival(comm.own, item.source, flag), epoch});
      if (!__all_sync(0xffffffffu, here)) break;
      open_for_loads();
    }
    if (wanted.tokens != 0) rows.receive(item, wanted.tokens, meta, counts);
    if (!in_turn) continue;
    __syncwarp();  // the loads of all lanes come before the release
    if (lane_id() == 0)
      ptx::store_release_sys(comm.flag(comm.bases[comm.relay_rank(item.source)], comm.window.credits,
                                       comm.pair(item.source, comm.rank), item.chunk),
                             epoch);
  }
  wait_stores<0>();
}

template <class Rows>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_receive_kernel(const __grid_constant__ Comm comm,
                            const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  if (start(comm, args, epoch))
    receive_items<Rows>(comm, args, epoch, *reinterpret_cast<BlockMemory*>(shared));
  end_operation(comm, args.operation, epoch, args.senders, true, args.copied);
}

/// Rows times factors by a pipe with workers, where rows fit its stages.
template <DType dtype>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_scale_kernel(const __grid_constant__ Comm comm, const __grid_constant__ ReceiveArguments args) {
#if MOECOMM_HAS_BULK
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  if (start(comm, args, epoch)) scale_by_pipe<dtype>(comm, args, epoch, shared);
  end_operation(comm, args.operation, epoch, args.senders, true, args.copied);
#endif
}

/// Rows out of a wire format, likewise.
template <DType dtype, WireFormat wire>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_dequantise_kernel(const __grid_constant__ Comm comm,
                               const __grid_constant__ ReceiveArguments args) {
#if MOECOMM_HAS_BULK
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  if (start(comm, args, epoch)) dequantise_by_pipe<dtype, wire>(comm, args, epoch, shared);
  end_operation(comm, args.operation, epoch, args.senders, true, args.copied);
#endif
}

/// What is done with rows where they arrive: by all warps, or by a pipe with workers.
enum class Arrival { as_it_is, dequantised, scaled };

template <DType dtype>
struct Scaling {
  static constexpr auto kernel = &dispatch_receive_kernel<ScaleOut<dtype>>;
};
template <DType dtype>
struct ScalingByPipe {
  static constexpr auto kernel = &dispatch_scale_kernel<dtype>;
};
template <DType dtype, WireFormat wire>
struct Dequantising {
  static constexpr auto kernel = &dispatch_receive_kernel<DequantiseOut<dtype, wire>>;
};
template <DType dtype, WireFormat wire>
struct DequantisingByPipe {
  static constexpr auto kernel = &dispatch_dequantise_kernel<dtype, wire>;
};

/// Calls use.operator()<kernel>() with the kernel for rows that are written in one of these ways.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, Arrival arrival, bool works, const Use& use) {
  switch (arrival) {
    case Arrival::scaled:
      return works ? with_dtype<ScalingByPipe>(shape.dtype, use) : with_dtype<Scaling>(shape.dtype, use);
    case Arrival::dequantised:
      return works ? with_conversion<DequantisingByPipe>(shape, use)
                   : with_conversion<Dequantising>(shape, use);
    case Arrival::as_it_is:
      break;
  }
  return use.template operator()<&dispatch_receive_kernel<CopyOut>>();
}

}  // namespace

cudaError_t launch_dispatch_receive(const Launch& launch, const Comm& comm, const ReceiveArguments& args) {
  const DeviceShape& shape = comm.window.shape;
  const Arrival arrival = args.dequantise                                   ? Arrival::dequantised
                          : args.scales != nullptr || args.other != nullptr ? Arrival::scaled
                                                                            : Arrival::as_it_is;
  const bool works = arrival != Arrival::as_it_is && launch.bulk && pipe_works(shape, shape.top_k);
  return with_kernel(shape, arrival, works, [&]<auto kernel>() {
    return launch_kernel<kernel>(launch, pipe_threads(works, launch.bulk), pipe_memory(works, launch.bulk),
                                 comm, args);
  });
}

cudaError_t prepare_dispatch_receive(const DeviceShape& shape, bool bulk) {
  for (const Arrival arrival : {Arrival::as_it_is, Arrival::scaled, Arrival::dequantised}) {
    if (arrival == Arrival::dequantised && shape.wire == WireFormat::same) continue;
    const bool works = arrival != Arrival::as_it_is && bulk && pipe_works(shape, shape.top_k);
    const cudaError_t error = with_kernel(shape, arrival, works, Prepare{pipe_memory(works, bulk)});
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace moecomm::gpu
