// Dispatch, receiving side: lists the sources and targets of rows for a pipe of warps (move_pipe.cuh).
#pragma once

#include "kernels/gpu/dispatch/move_pipe.cuh"
#include "kernels/gpu/dispatch/resolve.cuh"

namespace moecomm::gpu {

/// What happens to arriving rows. `apart`: the scales of rows in the wire format get an output of their own.
enum class Arrival { as_it_is, dequantised, scaled, apart };

inline Arrival arrival_of(const ReceiveArguments& args) {
  return args.dequantise                                   ? Arrival::dequantised
         : args.scales != nullptr || args.other != nullptr ? Arrival::scaled
         : args.out_scales != nullptr                      ? Arrival::apart
                                                           : Arrival::as_it_is;
}

/// The kernels of dispatch_change.cu: for rows that change, and where a list does not hold a chunk.
cudaError_t launch_dispatch_change(const Launch& launch, const Comm& comm, const ReceiveArguments& args);
cudaError_t prepare_dispatch_change(const DeviceShape& shape, Arrival arrival);

/// What a receiving kernel finds at its start: rows, nothing to do, or too little room in the output.
enum class Found { rows, nothing, no_room };

/// Waits for a dispatch's plan or, in the backward of a combine, for all ranks' records, and compares these.
__device__ inline Found start(const Comm& comm, const ReceiveArguments& args, uint64_t epoch) {
  if (failed_for_block(comm)) return Found::nothing;
  bool going = true;
  if (args.operation == Operation::dispatch) {
    if (threadIdx.x == 0)
      going = device::wait_until(comm, {comm.rank, WaitPhase::blocks, args.operation, epoch},
                                 device::EpochFlag{&comm.state().planned, epoch});
    going = __syncthreads_and(going);
  } else {
    going = agree_on_operation(comm, args.operation, epoch);
  }
  const PlanHeader& header = PlanView{args.plan, comm.plan_fields}.header();
  if (!going || header.id == 0) return Found::nothing;
  return args.offered && !has_room(header, args) ? Found::no_room : Found::rows;
}

/// The work of a receiving kernel: if there are rows, clears unused ids and calls receive(epoch); then ends
/// the operation. If the output is too small, leaves rows in the window, and the operation open. All blocks.
template <class Receive>
__device__ inline void receive_and_end(const Comm& comm, const ReceiveArguments& args,
                                       const Receive& receive) {
  const uint64_t epoch = comm.state().epoch + 1;
  const Found found = start(comm, args, epoch);
  if (found == Found::no_room) return leave_rows(comm, epoch);
  if (found == Found::rows) {
    const int64_t rows = PlanView{args.plan, comm.plan_fields}.header().needed_rows;
    clear_ids(comm, args, rows, int64_t{blockIdx.x} * blockDim.x + threadIdx.x,
              int64_t{gridDim.x} * blockDim.x);
    receive(epoch);
  }
  end_operation(comm, args.operation, epoch, true, args.senders);
}

/// The order in which a source's tokens arrive, in spans (what a lister claims at once) of `span` tokens.
__device__ inline TokenOrder order_of(const Comm& comm, int32_t source, int32_t tokens, int span) {
  return {tokens, span, places_shift(comm, source, tokens)};
}

/// The most claims (TokenOrder) that any source needs; span(tokens): tokens per span of a source.
template <class Span>
__device__ int32_t most_claims(const Comm& comm, const int32_t* tokens_of, const Span& span) {
  int32_t most = 0;
  for (int32_t source = 0; source < comm.ranks(); ++source)
    most = max(most, order_of(comm, source, tokens_of[source], span(tokens_of[source])).claims());
  return most;
}

/// For a source's number of tokens: tokens per list, list(), and per span, operator() (a list or a chunk).
template <int workers>
struct ByList {
  /// True for lone workers, whose lists may be shorter than a chunk, and so than a span. Elsewhere each list
  /// is a whole span, which takes fewer registers.
  static constexpr bool kShorter = MovePipe<workers>::kAlone;
  const TokenLanes& map;
  int ranks;
  int64_t token_bytes;  ///< bytes that a token has in this rank's output, in the mean
  __device__ int list(int64_t tokens) const {
    return move_tokens<workers>(map, map.top_k, chunk_tokens(tokens), tokens * ranks, token_bytes);
  }
  __device__ int operator()(int64_t tokens) const {
    return kShorter ? max(list(tokens), chunk_tokens(tokens)) : list(tokens);
  }
};

/// A list of one source's tokens, and the data that gives their output rows: in a dispatch the source's
/// routes, else rows from the plan. This data loads while the list before is processed.
struct ReceiveList {
  Item item{};
  int of_source = 0;  ///< number of all tokens of the source
  ChunkRoutes<kMoveRounds> routes;
  int32_t planned[kMoveRounds];
  __device__ int tokens() const { return static_cast<int>(item.end - item.begin); }
};

/// Cuts the tokens of all sources into lists, and finds their output rows. All lanes call every function.
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
        size_{map, comm.ranks(),
              comm.window.shape.row_bytes() *
                  (args.layout == RowLayout::expert ? map.top_k : min(map.top_k, comm.ranks())) /
                  comm.ranks()},
        claims_end_(static_cast<uint32_t>(most_claims(comm, tokens_of_, size_) * comm.ranks())),
        claims_(&comm.state().item_next) {}

  /// Returns the next list; a list without tokens says that there are no more.
  __device__ ReceiveList next() {
    ReceiveList list;
    if (kShorter) {
      list.item = rest_;
      list.of_source = rest_of_;
    }
    while (list.tokens() == 0) {
      const auto claim = static_cast<int32_t>(claims_.take());
      if (static_cast<uint32_t>(claim) >= claims_end_) return list;
      const auto [source, number] = comm_.turn(claim);
      list.item.source = source;
      list.of_source = tokens_of_[list.item.source];
      const int size = size_(list.of_source);
      list.item.begin = order_of(comm_, source, list.of_source, size).begin(number);
      list.item.end = min(static_cast<int>(list.item.begin) + size, list.of_source);
    }
    if (kShorter) {
      rest_ = list.item;
      rest_of_ = list.of_source;
      list.item.end = min(list.item.begin + size_.list(list.of_source), list.item.end);
      rest_.begin = list.item.end;
    }
    list.item.chunk = list.item.begin >> chunk_shift(list.of_source);
    if constexpr (operation == Operation::dispatch) {
      list.routes = ChunkRoutes<kMoveRounds>(comm_, epoch_, map_, list.item);
      return list;
    }
    const bool by_expert = args_.layout == RowLayout::expert;
    const int64_t entry = list.item.source * comm_.window.shape.max_tokens + list.item.begin + map_.within;
    const int32_t* const planned = plan_.at(by_expert ? plan_.fields.positions : plan_.fields.rows) +
                                   (by_expert ? entry * map_.top_k + map_.k : entry);
    const int each = map_.tokens * (by_expert ? map_.top_k : 1);  // plan entries per round
#pragma unroll
    for (int j = 0; j < kMoveRounds; ++j)
      list.planned[j] =
          map_.has(j, list.tokens()) && (by_expert || map_.leads()) ? planned[j * each] : kRowElsewhere;
    return list;
  }

  /// Sets `rows` to the output row of this lane's (token, k) in each round, kRowElsewhere or kRowDropped. In
  /// the rank layout only a token's first lane gets its row, the others kRowElsewhere. A dispatch also
  /// writes these tokens' plan entries, ids and weights (write_rows). False if routes do not arrive.
  __device__ bool resolve(ReceiveList& list, int32_t (&rows)[kMoveRounds]) const {
    if constexpr (operation == Operation::dispatch) {
      if (!list.routes.wait(comm_, epoch_, map_, list.item)) return false;
      const auto found = resolve_rows(comm_, args_, RowTables::of(plan_), map_, list.item, list.routes);
      write_rows(comm_, args_, map_, list.item, found);
#pragma unroll
      for (int j = 0; j < kMoveRounds; ++j)
        rows[j] = args_.layout == RowLayout::expert ? found.position[j]
                  : map_.leads()                    ? found.row[j]
                                                    : kRowElsewhere;
    } else {
#pragma unroll
      for (int j = 0; j < kMoveRounds; ++j) rows[j] = list.planned[j];
    }
    return true;
  }

 private:
  const Comm& comm_;
  const ReceiveArguments& args_;
  const uint64_t epoch_;
  const TokenLanes& map_;
  const PlanView plan_;
  const int32_t* const tokens_of_;
  const ByList<workers> size_;
  static constexpr bool kShorter = ByList<workers>::kShorter;

  const uint32_t claims_end_;
  Claims claims_;
  Item rest_{};  ///< tokens of the last span that are not in a list yet
  int rest_of_ = 0;
};

/// `tokens` is a bit mask of tokens of the list `item`. Waits until their chunks have arrived. `size`: tokens
/// of a chunk. All lanes; false if the wait fails.
__device__ inline bool wait_for_list(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                     const Item& item, int size, uint32_t tokens) {
  const int first = min(lane_id() * size, 31);
  bool here = true;
  if ((tokens >> first & ((1u << size) - 1)) != 0)
    here = device::wait_arrival<device::EagerFlag>(
        comm, {item.source, WaitPhase::rows, args.operation, epoch}, item.chunk + lane_id());
  __syncwarp();  // all lanes load what one lane has acquired
  return __all_sync(0xffffffffu, here);
}

/// The work of a unit's lister (move_pipe.cuh): lists the rows of all sources once they have arrived. Calls
/// add(source, row) for each round of a list. A lane's `source` is the address of its token's row, and `row`
/// the output row of its (token, k); negative: none.
template <int workers, Operation operation, class Add>
__device__ void list_arriving(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              MoveLister<workers>& pipe, const TokenLanes& map, const Add& add) {
  ReceiveLister<workers, operation> lister(comm, args, epoch, map);
  ReceiveList next = lister.next();
  while (next.tokens() > 0) {
    ReceiveList list = next;
    next = lister.next();
    const int size = chunk_tokens(list.of_source);
    const bool travels = list.item.source != comm.rank || comm.own_rows_travel();
    const bool in_turn = travels && list.of_source > comm.window.stage_tokens;
    int32_t rows[kMoveRounds];
    if (!lister.resolve(list, rows)) return;
    auto& out = pipe.open();
    uint32_t awaited = 0;  // mask of tokens to wait for; if chunks reuse memory, also dropped ones
#pragma unroll
    for (int j = 0; j < kMoveRounds; ++j) {
      const int first = j * map.tokens;
      if (first >= list.tokens()) continue;
      const bool comes = in_turn ? rows[j] != kRowElsewhere : rows[j] >= 0;
      awaited |= __reduce_or_sync(0xffffffffu, comes ? 1u << (first + map.within) : 0u);
      add(arrived_row(comm, args, epoch, list.item, list.item.begin + first + map.within), rows[j]);
    }
    if (travels && !wait_for_list(comm, args, epoch, list.item, size, awaited)) return;
    int flags = 0;  // chunks that end in this list; each has a flag, which frees its memory once it is read
    if (in_turn) {
      const bool part = ByList<workers>::kShorter && list.item.end < list.of_source;  // may end mid-chunk
      flags =
          (list.tokens() + (part ? list.item.begin & (size - 1) : size - 1)) >> chunk_shift(list.of_source);
      if (lane_id() < flags)
        out.flags[lane_id()] = device::credit_flag(comm, list.item.source, list.item.chunk + lane_id());
    }
    if (!pipe.empty() || flags > 0) pipe.hand_over(flags);
  }
}

/// Zeroes all experts' padding rows (expert layout only); all calling warps share the experts. All lanes.
__device__ inline void zero_paddings(const Comm& comm, const ReceiveArguments& args) {
  if (args.layout != RowLayout::expert) return;
  const RowTables tables = RowTables::of({args.plan, comm.plan_fields});
  Claims claims(&comm.state().receive_next);
  for (int64_t e = claims.take(); e < comm.local_experts; e = claims.take())
    zero_padding(comm, args, tables, e);
}

/// Lists arriving rows with all their output rows, where rows are not multiplied by factors. All lanes.
template <int workers>
__device__ void list_rows_to_places(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                    MoveLister<workers>& pipe) {
  const TokenLanes map = TokenLanes::of_many(comm.top_k());
  const KernelShape& shape = comm.window.shape;
  const bool wire = MovePipe<workers>::kAlone && args.out_scales != nullptr;
  const int64_t row_bytes = wire ? shape.wire_data_bytes() : shape.row_bytes();
  const auto add = [&](const std::byte* source, int32_t row) {
    pipe.add(map, source, row >= 0, args.out + row * row_bytes);
  };
  if (args.operation == Operation::dispatch)
    list_arriving<workers, Operation::dispatch>(comm, args, epoch, pipe, map, add);
  else
    list_arriving<workers, Operation::redispatch>(comm, args, epoch, pipe, map, add);
}

}  // namespace moecomm::gpu
