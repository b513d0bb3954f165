// Dispatch of few tokens in one kernel, sending and receiving, for one node. Its time is set by dependent
// loads and stores rather than bytes, so it has few accesses that depend on another. Its rows may go to, and
// come from, ranks that run dispatch_send.cu and dispatch_receive.cu, which write the same to the windows.
//   - one to three leading blocks move no rows. The last of them computes the routes and pushes them to all
//     ranks (route_few.cuh). The first makes the plan as the counts of all ranks arrive (plan.cuh). With
//     three, the middle one checks whether a capacity is exceeded
//   - in the other blocks each team (warps that move one row together) stores a row to the staging section of
//     every owner, quantised if requested. Then it sets the owners' arrival flags. Sending waits for nothing
//   - the same blocks then read the counts of all sources as they arrive, in words that hold the epoch. Each
//     block computes in its shared memory where rows begin, and so waits for no other block and no record
//   - teams take the rows of all sources in turn. A team loads a row's arrival flag together with the next
//     row's route, whose words hold the epoch too. Then it loads the row, and stores it to all its output
//     rows. Where there are fewer rows than teams, several teams share a row
// If arguments differ between ranks, the first block finds that and calls the operation off. Output that was
// written until then is not used, and no rank has written outside of its output.
//
// With more tokens (`senders` > 0) some blocks send and the others receive. Shares of the work are fixed, so
// there is no counter to read or to reset: the operation ends with its last row. The time for few tokens is
// the time of dependent instructions, some five cycles each. So there are hardly any divisions, and loops are
// short and not unrolled where bytes do not limit them. Blocks that wait for the counts compute meanwhile
// which rows they take if all ranks have as many tokens as this rank.
//
// A dropless dispatch may get an output before the number of its rows is known. If that output is too small,
// nothing is received. This kernel then runs again with a larger output, and only receives.
// In the backward of a combine this kernel follows the combine's plan, without making routes and tables.
//
// The file is compiled once for each format in which rows travel, MOECOMM_WIRE (CMakeLists.txt).
#include <type_traits>

#include "kernels/gpu/dispatch/plan.cuh"
#include "kernels/gpu/dispatch/resolve.cuh"
#include "kernels/gpu/dispatch/route_few.cuh"
#include "kernels/gpu/dispatch/team_rows.cuh"

namespace moecomm::gpu {
namespace {

/// The kernels of this object file send and receive rows in this wire format, with or without a conversion.
constexpr WireFormat kWire = WireFormat::MOECOMM_WIRE;

struct FusedMemory {
  int32_t counts[kFusedCounts];  ///< where routes are computed: bitmaps; where the plan is made or a capacity
                                 ///< is checked: counts of all ranks; where rows are moved: OwnCounts
  int32_t tables[kFusedTables];
};
static_assert(sizeof(FusedMemory) <= kMostShared);

/// Sends a team's share of the rows. The constructor starts to load the ids of the first token, and for very
/// few tokens also its row. With more tokens a row is loaded only once its owners are known: rows that leave
/// earlier delay the routes, which queue after them on the links.
template <DType dtype>
class RowSender {
 public:
  /// `sends`: false if this block sends nothing.
  __device__ RowSender(const Comm& comm, const SendArguments& args, const Team& team, bool sends)
      : comm_(comm),
        args_(args),
        team_(team),
        early_(args.tokens <= kEarlyTokens),
        token_(sends && team.number >= 0 ? int64_t{team.number} : args.tokens) {
    load();
  }

  __device__ void send_all(uint64_t epoch) {
    while (token_ < args_.tokens) {
      send(epoch);
      token_ += team_.count;
      load();
    }
  }

 private:
  static constexpr int kEarlyTokens = 8;  ///< most tokens for which rows are loaded early; measured

  __device__ bool converts() const { return kWire != WireFormat::same && args_.quantises(); }
  __device__ void load() {
    if (token_ >= args_.tokens) return;
    const PlanView plan{args_.plan, comm_.plan_fields};
    const int64_t index = token_ * comm_.top_k() + lane_id();
    given_ = kNoExpert;
    if (lane_id() < comm_.top_k())
      given_ = args_.operation == Operation::dispatch ? read_id(args_, index)
                                                      : plan.at(plan.fields.local_topk_idx)[index];
    if (early_) load_row();
  }
  __device__ void load_row() {
    const KernelShape& s = comm_.window.shape;
    const int64_t bytes = converts() ? s.row_bytes() : s.wire_data_bytes();
    ahead_.load(team_, {}, args_.x + token_ * bytes, bytes);
  }
  __device__ void send(uint64_t epoch) {
    const KernelShape& s = comm_.window.shape;
    int32_t owner = comm_.owner(valid_id(comm_, given_));
    if (owner == comm_.rank && !comm_.own_rows_travel()) owner = -1;
    const bool first = first_with(owner);
    const uint32_t targets = __ballot_sync(0xffffffffu, first);
    if (targets == 0) return;
    if (!early_) load_row();
    std::byte* const base = first ? comm_.bases[owner] : nullptr;
    const auto to =
        first ? reinterpret_cast<unsigned long long>(comm_.staged_row(owner, epoch, comm_.rank, token_))
              : 0ull;
    bool converted = false;
    if constexpr (kWire != WireFormat::same) {
      converted = converts();
      if (converted) Convert<dtype, kWire>::send(comm_, team_, ahead_, targets, to);
    }
    if (!converted) ahead_.copy(team_, targets, to);
    if (args_.x_scales != nullptr)
      copy_scales_of_row(team_, args_.x_scales + token_ * s.wire_scale_bytes(), s.wire_scale_bytes(), targets,
                         first ? to + static_cast<unsigned long long>(s.wire_data_bytes()) : 0ull);
    team_.sync();
    if (first && team_.leads()) device::signal(comm_.arrival(base, comm_.rank, token_), epoch);
  }

  const Comm& comm_;
  const SendArguments& args_;
  const Team& team_;
  const bool early_;  ///< a row is loaded together with its ids
  int64_t token_;
  int64_t given_ = kNoExpert;  ///< the id of this lane's (token, k)
  RowAhead ahead_;
};

/// The output rows of a token. `targets`: mask of lanes that have an output row; `row`: this lane's, or < 0.
struct Places {
  uint32_t targets;
  int32_t row;
  bool sent;  ///< the token's row is sent to this rank, which may drop it
};

__device__ Places places_of(RowLayout layout, int32_t position, int32_t row) {
  const int32_t place = layout == RowLayout::expert ? position : lane_id() == 0 ? row : kRowElsewhere;
  return {__ballot_sync(0xffffffffu, place >= 0), place,
          __any_sync(0xffffffffu, place != kRowElsewhere) != 0};
}

/// True if rows are copied to the output as they arrived: neither converted nor multiplied.
__device__ bool passes_unchanged(const ReceiveArguments& args) {
  return kWire == WireFormat::same ? args.scales == nullptr : !args.dequantise;
}

/// Moves a part of an arrived row (from `from`) to the row's output rows, and converts or multiplies it if
/// requested. If `loaded`, `ahead` holds the part's first vectors already.
template <DType dtype, bool dispatch>
__device__ void receive_row(const Comm& comm, const ReceiveArguments& args, const Team& team,
                            const RowPart& part, const std::byte* from, const Places& places, RowAhead& ahead,
                            bool loaded) {
  const KernelShape& s = comm.window.shape;
  if constexpr (kWire == WireFormat::same) {
    if (!dispatch && args.scales != nullptr)
      return scale_row<dtype>(comm, team, part, args, from, places.targets, places.row);
  } else {
    if (args.dequantise)
      return Convert<dtype, kWire>::receive(comm, team, part, from, args.out, places.targets, places.row);
  }
  const int64_t bytes = s.wire_data_bytes();
  const auto to = [&](std::byte* out, int64_t each) {
    return reinterpret_cast<unsigned long long>(out + places.row * each);
  };
  if (!loaded) ahead.load(team, part, from, bytes);
  ahead.copy(team, places.targets, to(args.out, bytes));
  if (args.out_scales != nullptr && part.number == 0)
    copy_scales_of_row(team, from + bytes, s.wire_scale_bytes(), places.targets,
                       to(args.out_scales, s.wire_scale_bytes()));
}

/// A token whose row a team may have to receive. The team visits all tokens of its chunks, in order.
struct ReceivedToken {
  int number;  ///< number of the chunk, counted round-robin over the sources
  Item chunk;
  int64_t token;
  bool valid;

  /// The first token of the first non-empty chunk of `number`, `number` + `step`, ...; not valid if none.
  __device__ static ReceivedToken first_of(const Comm& comm, const RowTables& tables, int step, int number,
                                           int chunks) {
    for (; number < chunks; number += step) {
      const auto [source, of_source] = comm.turn(number);
      Item chunk{};
      chunk.chunk = of_source;
      chunk.source = source;
      const int tokens = tables.tokens[chunk.source], size = chunk_tokens(tokens);
      chunk.begin = chunk.chunk * size;
      chunk.end = min(chunk.begin + size, int64_t{tokens});
      if (chunk.begin < chunk.end) return {number, chunk, chunk.begin, true};
    }
    return {number, {}, 0, false};
  }
  /// The token that the team visits after this one.
  __device__ ReceivedToken next(const Comm& comm, const RowTables& tables, int step, int chunks) const {
    if (!ends_chunk()) return {number, chunk, token + 1, true};
    return first_of(comm, tables, step, number + step, chunks);
  }
  __device__ bool ends_chunk() const { return token + 1 == chunk.end; }
  /// This token as an item of its own.
  __device__ Item item() const { return {chunk.source, chunk.chunk, token, token + 1}; }
};

/// Finds the output rows of a dispatch, from the sources' routes and from where each source's rows begin.
struct ByAnnouncement {
  using Known = ChunkRoutes<1>;  ///< routes of a token whose loads may still be in flight
  const Comm& comm;
  const ReceiveArguments& args;
  uint64_t epoch;
  const RowTables& tables;

  __device__ Known load(const TokenLanes& map, const ReceivedToken& at) const {
    return at.valid ? Known(comm, epoch, map, at.item()) : Known();
  }
  /// Sets `rows` to the output rows of the item's token; false if its routes do not arrive.
  __device__ bool resolve(const TokenLanes& map, const Item& item, Known& known, ChunkRows<1>& rows) const {
    const bool all = known.wait(comm, epoch, map, item);
    rows = resolve_rows(comm, args, tables, map, item, known);
    return all;
  }
};

/// Reads output rows from an existing plan.
struct ByPlan {
  using Known = int32_t;
  const Comm& comm;
  const ReceiveArguments& args;

  __device__ Known load(const TokenLanes&, const ReceivedToken& at) const {
    const int64_t entry = at.chunk.source * comm.window.shape.max_tokens + at.token;
    return at.valid ? planned_row(PlanView{args.plan, comm.plan_fields}, args.layout, entry, comm.top_k())
                    : kRowElsewhere;
  }
};

/// A team's share of the arriving rows.
struct Share {
  int chunks;    ///< end of the chunk numbers: ranks times the most chunks of any source
  int first;     ///< number of the team's first chunk
  int step;      ///< distance between the numbers of the team's chunks
  RowPart part;  ///< the part of each row that the team moves

  Share() = default;
  __device__ Share(const Comm& comm, const RowTables& tables, const Team& team) {
    constexpr int kMostParts = 8;
    int most = 0, shift = 0;
    bool in_turn = false;  // chunks reuse memory: one team frees each, so teams share no row
    for (int32_t source = 0; source < comm.ranks(); ++source) {
      most = max(most, static_cast<int>(chunk_count(tables.tokens[source])));
      in_turn = in_turn || tables.tokens[source] > comm.window.stage_tokens;
    }
    chunks = most * comm.ranks();
    while (!in_turn && 1 << shift < kMostParts && max(chunks, 1) << (shift + 1) <= team.count) ++shift;
    part = {team.number & ((1 << shift) - 1), shift};
    step = team.count >> shift;
    first = team.number >> shift;
    if (first >= step) first = chunks;  // this team is not needed
  }
};

/// Receives this team's share of all sources' rows, from token `at` on. `where` finds a token's output rows
/// from data that loads while the previous row moves; `known` is this data for `at`. False if a wait fails.
template <DType dtype, class Where>
__device__ bool receive_rows(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                             const RowTables& tables, const Team& team, const Share& share, ReceivedToken at,
                             const Where& where, typename Where::Known known) {
  constexpr bool kDispatch = !std::is_same_v<Where, ByPlan>;
  const TokenLanes map = TokenLanes::of_one(comm.top_k());
  bool here = false;  // the token's chunk has arrived
  bool all = true;    // everything that this warp waited for has arrived
  while (at.valid) {
    const Item item = at.item();
    const bool travels = item.source != comm.rank || comm.own_rows_travel();
    const bool in_turn = travels && tables.tokens[item.source] > comm.window.stage_tokens;
    const device::EagerFlag arrival{device::arrival_here(comm, item.source, item.chunk), epoch};
    const std::byte* const from = arrived_row(comm, args, epoch, item, at.token);
    // Loads the arrival flag along with the route, even if no row comes. Where several teams share a row,
    // also loads this team's part of the row.
    here = here || !travels || __all_sync(0xffffffffu, arrival.arrived());
    RowAhead ahead;
    const bool loaded = here && share.part.shift > 0 && passes_unchanged(args);
    if (loaded) ahead.load(team, share.part, from, comm.window.shape.wire_data_bytes());
    const ReceivedToken after = at.next(comm, tables, share.step, share.chunks);
    const typename Where::Known following = where.load(map, after);
    ChunkRows<1> rows;
    Places places;
    if constexpr (kDispatch) {
      all = where.resolve(map, item, known, rows) && all;
      places = places_of(args.layout, rows.position[0], rows.row[0]);
    } else {
      places = places_of(args.layout, known, known);
    }
    if (all && !here && (places.targets != 0 || (in_turn && places.sent))) {
      bool arrived = true;
      if (lane_id() == 0)
        arrived = device::wait_until(comm, {item.source, WaitPhase::rows, args.operation, epoch}, arrival);
      __syncwarp();  // all lanes load what one lane has acquired
      here = all = __all_sync(0xffffffffu, arrived);
    }
    if (all && places.targets != 0)
      receive_row<dtype, kDispatch>(comm, args, team, share.part, from, places, ahead, loaded);
    if (kDispatch && team.trails() && share.part.number == 0) write_rows(comm, args, map, item, rows);
    if (at.ends_chunk()) {
      if (in_turn && team.all(all) && team.thread() == 0)
        device::signal(device::credit_flag<true>(comm, item.source, item.chunk), epoch);
      here = false;
    }
    at = after;
    known = following;
  }
  return all;
}

/// Zeroes this team's share of all experts' padding rows. In the rank layout sets the ids behind the first
/// `rows` output rows to kNoExpert instead.
__device__ void zero_paddings(const Comm& comm, const ReceiveArguments& args, const RowTables& tables,
                              const Team& team, int64_t rows) {
  if (args.layout == RowLayout::rank)
    return clear_ids(comm, args, rows, int64_t{team.number} * team.threads() + team.thread(),
                     int64_t{team.count} * team.threads());
  // Warps take experts, from the last teams on: these have received the fewest rows.
  for (int64_t e = (team.count - 1 - team.number) * team.warps + warp_id() - team.first_warp;
       e < comm.local_experts; e += int64_t{team.count} * team.warps)
    zero_padding(comm, args, tables, e);
}

/// The work of the first `leads` blocks. The last of them announces the operation, with routes in a dispatch.
/// The first waits for all ranks, and plans a dispatch. With three, the middle one checks a capacity.
__device__ void lead(const Comm& comm, const SendArguments& args, uint64_t epoch, int leads,
                     FusedMemory& memory) {
  const int block = static_cast<int>(blockIdx.x);
  const bool announces = block == leads - 1, waits = block == 0, watches = leads > 2 && block == 1;
  if (args.operation == Operation::dispatch) {
    SignalRecord record{};
    if (announces)
      record =
          route_few(comm, args, epoch, memory.counts, kFusedCounts, [&] { return failed_for_block(comm); });
    __syncthreads();
    pass_epoch(comm, epoch);
    if (record.operation == Operation::dispatch) device::signal_records(comm, record);
    if (watches) watch_capacity(comm, args, epoch, memory.counts, memory.tables);
    if (!waits) return;
    make_plan(comm, args, epoch, memory.counts, kFusedCounts,
              leads > 2 ? Planner::of_few_watched : Planner::of_few);
    __syncthreads();
    if (threadIdx.x == 0) comm.state().bad_id = ~uint64_t{0};
    return;
  }
  const bool failed = failed_for_block(comm);
  if (announces && !failed)
    signal_start(comm, args.operation, epoch, args.plan, args.layout, args.tokens,
                 kCarriesRows | args.after | (args.quantises() ? kCarriesQuantised : 0u));
  pass_epoch(comm, epoch);
  if (waits && !failed) agree_on_operation(comm, args.operation, epoch);
}

/// Sends this block's share of the rows; notes that it has read the epoch. False if no rows are to come.
template <DType dtype>
__device__ bool send(const Comm& comm, const FusedArguments& args, uint64_t epoch, int block, int senders,
                     FusedMemory& memory) {
  const Operation operation = args.send.operation;
  const Team team(args.team_warps, block, senders);
  RowSender<dtype> rows(comm, args.send, team, block < senders);
  const bool failed = failed_for_block(comm);
  const bool valid = !failed && (operation == Operation::dispatch ||
                                 PlanView{args.send.plan, comm.plan_fields}.header().id != 0);
  if (valid) rows.send_all(epoch);
  // No barrier here: warps need not wait for those that still wait for the links.
  if (lane_id() == 0) device::note_phase(comm, operation, Phase::sent);
  pass_epoch(comm, epoch);
  return valid;
}

/// What a receiving team starts with: its share of the rows, and its first token.
struct FirstRow {
  Share share{};
  ReceivedToken token{};

  FirstRow() = default;
  __device__ FirstRow(const Comm& comm, const RowTables& tables, const Team& team)
      : share(comm, tables, team) {
    if (team.number >= 0)
      token = ReceivedToken::first_of(comm, tables, share.step, share.first, share.chunks);
  }
};

/// Sets `tokens`[source] of all sources to `of_each`, an assumption until counts arrive. Whole block.
__device__ void assume_tokens(const Comm& comm, int64_t of_each, int32_t* tokens) {
  for (auto source = static_cast<int32_t>(threadIdx.x); source < comm.ranks(); source += kThreads)
    tokens[source] = static_cast<int32_t>(of_each);
  __syncthreads();
}

/// True if each source has `of_each` tokens. All lanes.
__device__ bool are_tokens(const Comm& comm, int64_t of_each, const int32_t* tokens) {
  bool all = true;
  for (int32_t source = lane_id(); source < comm.ranks(); source += 32)
    all = all && tokens[source] == of_each;
  return __all_sync(0xffffffffu, all);
}

/// Receives this block's share of a dispatch's rows. `idle`: the block sends no row, so has time to prepare.
template <DType dtype>
__device__ void receive_dispatch(const Comm& comm, const FusedArguments& args, uint64_t epoch,
                                 const Team& team, bool idle, FusedMemory& memory) {
  const ReceiveArguments& receive = args.receive;
  const OwnCounts counts(memory.counts, comm, receive.layout);
  const RowTables tables = RowTables::in(memory.tables, comm);
  FirstRow first;
  if (idle) {
    assume_tokens(comm, args.send.tokens, tables.tokens);
    first = FirstRow(comm, tables, team);
    __syncthreads();  // all threads have read the assumed values
  }
  if (!take_counts(comm, epoch, counts, tables.tokens)) return;
  if (!idle || !are_tokens(comm, args.send.tokens, tables.tokens)) first = FirstRow(comm, tables, team);
  const ByAnnouncement where{comm, receive, epoch, tables};
  const auto known = where.load(TokenLanes::of_one(comm.top_k()), first.token);  // loads during lay_out_rows
  const PlanHeader header = lay_out_rows(comm, args.send, epoch, counts, tables);
  if (receive.offered && !has_room(header, receive)) return leave_rows(comm, epoch);
  __syncthreads();
  if (team.number >= 0 &&
      receive_rows<dtype>(comm, receive, epoch, tables, team, first.share, first.token, where, known))
    zero_paddings(comm, receive, tables, team, header.needed_rows);
}

/// The work of the blocks that send and receive rows.
template <DType dtype>
__device__ void work(const Comm& comm, const FusedArguments& args, uint64_t epoch, int leads,
                     FusedMemory& memory) {
  const int block = static_cast<int>(blockIdx.x) - leads, blocks = static_cast<int>(gridDim.x) - leads;
  const int senders = args.senders == 0 ? blocks : args.senders;
  const bool valid =
      args.again ? !failed_for_block(comm) : send<dtype>(comm, args, epoch, block, senders, memory);
  if (!valid || block < args.senders) return;
  // The blocks that have sent least take the first rows.
  const Team team(args.team_warps, blocks - 1 - block, blocks - args.senders);
  if (args.send.operation == Operation::dispatch)
    return receive_dispatch<dtype>(comm, args, epoch, team,
                                   !args.again && (args.senders > 0 || block >= args.send.tokens), memory);
  const RowTables tables = RowTables::of(PlanView{args.send.plan, comm.plan_fields});
  const FirstRow first(comm, tables, team);
  const ByPlan where{comm, args.receive};
  const auto known = where.load(TokenLanes::of_one(comm.top_k()), first.token);
  if (team.number >= 0 &&
      receive_rows<dtype>(comm, args.receive, epoch, tables, team, first.share, first.token, where, known))
    zero_paddings(comm, args.receive, tables, team, args.receive.rows);
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_fused_kernel(const __grid_constant__ Comm comm, const __grid_constant__ FusedArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  FusedMemory& memory = *reinterpret_cast<FusedMemory*>(shared);
  const uint64_t epoch = comm.state().epoch + (args.again ? 0 : 1);
  // Nothing waits for the middle block, so it starts the clock: first blocks announce, last ones receive.
  if (!args.again) device::start_clock(comm, args.send.operation, gridDim.x / 2);
  const int leads = args.again ? 0 : leading_blocks(static_cast<int>(gridDim.x));
  if (static_cast<int>(blockIdx.x) < leads)
    lead(comm, args.send, epoch, leads, memory);
  else
    work<dtype>(comm, args, epoch, leads, memory);
  __syncthreads();
  if (threadIdx.x == 0) device::note_phase(comm, args.send.operation, Phase::ended);
}

/// Calls use.operator()<kernel>() with the kernel for the dtype of a shape's rows.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, const Use& use) {
  return with_dtype(shape.dtype, [&]<DType dtype>() {
    return use.template operator()<&dispatch_fused_kernel<dtype>>(kThreads, sizeof(FusedMemory));
  });
}

}  // namespace

template <>
cudaError_t launch_dispatch_fused<kWire>(const Launch& launch, const Comm& comm, const FusedArguments& args) {
  if (comm.window.shape.other_nodes() > 0) return cudaErrorInvalidValue;
  return with_kernel(comm.window.shape, Start(launch, comm, args));
}

template <>
cudaError_t prepare_dispatch_fused<kWire>(const DeviceShape& shape) {
  return with_kernel(shape, Prepare{});
}

}  // namespace moecomm::gpu
