// Dispatch, sending side: every row goes once to each rank that owns one of its experts.
//   - chunks of tokens are taken from several places in turn (TokenOrder), and their rows stored to the
//     staging section of every owner, at the place of (source, token). The results of dispatch_route.cu,
//     which runs before or at the same time, are not needed
//   - on one node a pipe of warps does so (move_pipe.cuh), with workers where rows are quantised. Rows that
//     it cannot take are moved by all warps: each takes chunks, and loads and stores rows piece by piece
//   - when all rows of a chunk have arrived, the owners' arrival flags are set
// The staging section may be too small for all tokens. Then a chunk waits until the owners have read the
// chunks whose memory it reuses. A separate kernel (`later`) sends the chunks that have to wait, and starts
// after the receiving kernels; so the first kernel ends, whatever else the stream holds after it.
//
// The backward of a combine works in the same way along its plan, and this kernel announces it.
//
// The file is compiled once for each format in which rows travel, MOECOMM_WIRE (CMakeLists.txt).
//
// With several nodes rows go to owners on this node, and once to each other node that needs them: into host
// memory, numbered by relay index, from where the network sends them; these rows wait for the routes. The
// last blocks relay arriving rows of the rail: they send them in the same way to the owners on this node, on
// behalf of the source.
#include <type_traits>

#include "kernels/gpu/dispatch/quantise_rows.cuh"
#include "kernels/gpu/dispatch/send_list.cuh"
#include "kernels/gpu/dispatch/send_rows.cuh"
#include "kernels/gpu/internode/relay_records.cuh"

namespace moecomm::gpu {
namespace {

/// The kernels of this object file send rows in this wire format.
constexpr WireFormat kWire = WireFormat::MOECOMM_WIRE;

/// Owners of the tokens of a chunk.
struct ChunkOwners {
  uint32_t tokens = 0;  ///< bit i: token i has a target
  PeerSet peers;        ///< owners on this node
};

/// Targets of the rows that a warp sends: owners on this node, or other nodes.
enum class Reach { node, others };

/// Fills `meta` with the targets of a chunk's tokens: ranks, or other nodes.
template <Way way>
__device__ ChunkOwners list_owners(const Comm& comm, const SendArguments& args, Reach reach, int64_t begin,
                                   int64_t end, const ChunkMeta& meta) {
  constexpr bool kNodes = way == Way::nodes;
  ChunkOwners chunk;
  const int top_k = comm.top_k(), lane = lane_id(), tokens = static_cast<int>(end - begin);
  const PlanView plan{args.plan, comm.plan_fields};
  const int32_t* const kept = plan.at(plan.fields.local_topk_idx);
  int64_t id[kMaxChunk];
  __syncwarp();  // all lanes have finished the previous chunk
#pragma unroll
  for (int i = 0; i < kMaxChunk; ++i) {
    const int64_t index = (begin + i) * top_k + lane;
    id[i] = i >= tokens || lane >= top_k                       ? kNoExpert
            : !kNodes && args.operation == Operation::dispatch ? read_id(args, index)
                                                               : int64_t{kept[index]};
  }
#pragma unroll
  for (int i = 0; i < kMaxChunk; ++i) {
    if (i >= tokens) continue;
    int32_t target = -1, number = 0;
    if (id[i] >= 0 && id[i] < comm.window.shape.num_experts) target = comm.owner(static_cast<int32_t>(id[i]));
    if (target == comm.rank && !comm.own_rows_travel()) target = -1;
    if constexpr (kNodes) {
      if (target >= 0 && comm.is_local(target) != (reach == Reach::node)) target = -1;
      if (target >= 0 && reach == Reach::others) {
        const int32_t other = comm.other_of(target);
        number = plan.at(plan.fields.home_index)[other * comm.window.shape.max_tokens + begin + i];
        target = number < 0 ? -1 : comm.ranks() + other;
      }
    }
    const bool first = first_with(target);
    const int count = compact(meta.targets + i * top_k, target, first);
    if constexpr (kNodes) compact(meta.numbers + i * top_k, number, first);
    if (lane == 0) meta.counts[i] = count;
    if (count == 0) continue;
    chunk.tokens |= 1u << i;
    if (kNodes && reach == Reach::others) continue;
    chunk.peers.insert_lanes(target, first);
  }
  __syncwarp();
  return chunk;
}

/// Tells the proxy that the rows of a chunk for other nodes are staged.
__device__ void hand_over(const Comm& comm, const SendArguments& args, uint64_t epoch, uint32_t tokens,
                          const ChunkMeta& meta) {
  const PlanView plan{args.plan, comm.plan_fields};
  wait_stores<0>();
  // Lane 0 has waited for the stores of all lanes.
  if (lane_id() != 0) return;
  ptx::fence_sys();
  for (; tokens != 0; tokens &= tokens - 1) {
    const int i = __ffs(static_cast<int>(tokens)) - 1;
    for (int at = i * comm.top_k(), end = at + meta.counts[i]; at < end; ++at) {
      const int32_t other = meta.targets[at] - comm.ranks();
      device::row_staged(comm, comm.window.shape.wire, other, meta.numbers[at],
                         __ldcg(plan.at(plan.fields.node_tokens) + other), epoch);
    }
  }
}

/// Sends this rank's rows to one kind of targets.
template <Way way, class Rows>
__device__ void send_rows(const Comm& comm, const SendArguments& args, uint64_t epoch, Rows& rows,
                          Reach reach, const ChunkMeta& meta) {
  Announcer announcer(comm, epoch);
  if (reach == Reach::node && !comm.sends_here()) return;
  DeviceState& state = comm.state();
  Claims claims(reach == Reach::others ? &state.stage_next
                : args.later           ? &state.later_next
                                       : &state.send_next);
  const int64_t chunks = chunk_count(args.tokens), size = chunk_tokens(args.tokens);
  // Rows for other nodes do not share memory.
  const int64_t at_once = comm.window.chunks_at_once(args.tokens), first = args.later ? at_once : 0;
  const int64_t all = args.later || reach == Reach::others ? chunks : at_once;
  const auto tokens = static_cast<int>(max(min(all * size, args.tokens) - first * size, int64_t{0}));
  const TokenOrder order(tokens, static_cast<int>(size),
                         reach == Reach::others ? 0 : places_shift(comm, comm.rank, args.tokens));
  for (int next = order.next(claims); next < tokens; next = order.next(claims)) {
    const int64_t begin = first * size + next, end = min(begin + size, args.tokens);
    const int64_t chunk = begin >> chunk_shift(args.tokens);
    const ChunkOwners owners = list_owners<way>(comm, args, reach, begin, end, meta);
    if (owners.tokens == 0) continue;
    if (args.later && !wait_for_place(comm, args.operation, comm.rank, args.tokens, epoch, chunk,
                                      owners.peers, [&] { announcer.flush(); }))
      break;
    rows.send(begin, owners.tokens, meta, announcer);
    if (reach == Reach::node)
      announcer.chunk_stored(comm.rank, chunk, owners.peers);
    else
      hand_over(comm, args, epoch, owners.tokens, meta);
  }
  announcer.flush();
}

/// Sends all rows of this rank, or only those that reuse another's memory.
template <Way way, class Rows>
__device__ __noinline__ void send_own(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                      WarpMemory memory, const ChunkMeta& meta) {
  if (warp_id() >= args.warps) return;
  Rows rows(comm, args, epoch, memory);
  // Rows to other nodes never wait for owners on this node, which may wait for rows from there: half of the
  // warps send them first. They reuse no memory, so none of them is sent later.
  const int passes = way == Way::nodes && !args.later ? 2 : 1;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass)
    send_rows<way>(comm, args, epoch, rows,
                   passes == 2 && pass == warp_id() % 2 ? Reach::others : Reach::node, meta);
}

/// More warps with rows in flight than this only wait for each other, and their rows arrive later.
template <int workers>
__device__ int stage_bytes(const SendArguments& args) {
  return args.warps * kWarpBytes / MovePipe<workers>::kUnits;
}

/// Sends rows unchanged. Whole block.
__device__ void send_by_pipe(const Comm& comm, const SendArguments& args, uint64_t epoch, std::byte* shared) {
  const int64_t row_bytes = comm.window.shape.wire_row_bytes();
  run_move_pipe<0>(
      shared, MoveShape::of<0>(row_bytes, row_bytes, stage_bytes<0>(args)), epoch,
      [&](MoveLister<0>& pipe) { list_own(comm, args, epoch, pipe); }, [] {});
}

/// Sends rows of `dtype` in this file's format. Whole block.
template <DType dtype>
__device__ void quantise_by_pipe(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                 std::byte* shared) {
  run_move_pipe<kWorkers>(
      shared,
      MoveShape::of<kWorkers>(comm.window.shape.row_bytes(), comm.window.shape.wire_row_bytes(),
                              stage_bytes<kWorkers>(args)),
      epoch, [&](MoveLister<kWorkers>& pipe) { list_own(comm, args, epoch, pipe); }, [] {},
      QuantiseWork<dtype, kWire>(comm.window.shape));
}

/// Fills `meta` with the owners on this node of the tokens of a rail rank.
__device__ ChunkOwners list_relayed(const Comm& comm, const PlanView& plan, int32_t other,
                                    const gpu::RelayChunk& chunk, const ChunkMeta& meta) {
  ChunkOwners owners;
  const int top_k = comm.top_k(), lane = lane_id();
  __syncwarp();
  if (lane < kMaxChunk) meta.from[lane] = chunk.number;
  for (uint32_t left = chunk.tokens; left != 0; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
    const int32_t owner = gpu::relayed_owner(comm, plan, other, chunk.begin + i);
    const int count = compact(meta.targets + i * top_k, owner, owner >= 0);
    if (lane == 0) meta.counts[i] = count;
    if (count > 0) owners.tokens |= 1u << i;
    owners.peers.insert_lanes(owner, owner >= 0);
  }
  __syncwarp();
  return owners;
}

/// Relays rows of the rail as they arrive: as with this rank's rows, either those that reuse memory or the
/// others. False if they do not arrive.
__device__ __noinline__ bool relay_rows(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                        WarpMemory memory, const ChunkMeta& meta) {
  const PlanView plan{args.plan, comm.plan_fields};
  const RelayState* const states = comm.mine<RelayState>(comm.window.relay_state);
  const int32_t others = comm.rail.others;
  int64_t most_chunks = 0;
  for (int32_t other = 0; other < others; ++other)
    most_chunks = max(most_chunks, chunk_count(__ldcg(&states[other].tokens)));
  CopyRows<true> rows(comm, args, epoch, memory, comm.window.shape.wire_row_bytes());
  Announcer announcer(comm, epoch);
  Claims claims(args.later ? &comm.state().relay_later_next : &comm.state().relay_next);
  for (int64_t claim = claims.take(); claim < most_chunks * others; claim = claims.take()) {
    const int64_t number = claim / others;
    const auto other = static_cast<int32_t>((comm.rail.node + claim) % others);
    const int64_t tokens = __ldcg(&states[other].tokens);
    if (number >= chunk_count(tokens) || (number >= comm.window.chunks_at_once(tokens)) != args.later)
      continue;
    const gpu::RelayChunk chunk = gpu::relay_chunk(comm, plan, other, tokens, number);
    const ChunkOwners owners = list_relayed(comm, plan, other, chunk, meta);
    if (owners.tokens == 0) continue;
    const int32_t source = comm.rail_rank(other);
    bool here = true;
    const device::RailChunk arrival{comm, epoch, other, max(chunk.number, 0) / comm.rail.chunk_rows};
    if (!__all_sync(0xffffffffu, chunk.number < 0 || arrival.here().arrived()))
      announcer.flush();  // earlier chunks must not wait for this one
    if (chunk.number >= 0) here = arrival.wait({source, WaitPhase::rows, args.operation, epoch, false});
    if (!__all_sync(0xffffffffu, here)) return false;
    open_for_loads();
    rows.start_source(source);
    if (args.later && !wait_for_place(comm, args.operation, source, tokens, epoch, number, owners.peers,
                                      [&] { announcer.flush(); })) {
      if (failed_for_warp(comm)) return false;
      continue;  // called off: no rank reads it
    }
    rows.send(chunk.begin, owners.tokens, meta, announcer);
    announcer.chunk_stored(source, number, owners.peers);
  }
  announcer.flush();
  return true;
}

/// The work of the relaying blocks: records and tables of the rail, then its rows.
__device__ void relay(const Comm& comm, const SendArguments& args, uint64_t epoch, RelayBlocks relay,
                      bool valid, BlockMemory& block, const ChunkMeta& meta) {
  // In a dispatch the kernel of the routes forwards them.
  if (args.operation != Operation::dispatch &&
      !gpu::relay_records(comm, args.operation, args.plan, epoch, relay))
    return;
  if (!gpu::wait_forwarded(comm, args.operation, epoch)) return;
  ptx::fence_shared_to_bulk();
  __syncthreads();
  const bool all = !valid || relay_rows(comm, args, epoch, warp_memory(block), meta);
  if (relay.block == 0 && __syncthreads_and(all)) device::wait_all_here(comm, args.operation, epoch);
}

/// Waits until a dispatch has computed the tables of rows for other nodes. Whole block.
__device__ bool wait_routed(const Comm& comm, Operation operation, uint64_t epoch, int blocks) {
  bool routed = true;
  if (threadIdx.x == 0)
    routed = device::wait_until(comm, {comm.rank, WaitPhase::blocks, operation, epoch, false},
                                device::BlockCount{&comm.state().route_done, static_cast<uint32_t>(blocks)});
  return __syncthreads_and(routed);
}

/// Sends this block's share of this rank's rows: by a pipe, or by all warps. Whole block.
template <Way way, class Rows>
__device__ void send_share(const Comm& comm, const SendArguments& args, uint64_t epoch, BlockMemory& block,
                           const ChunkMeta& meta) {
  if constexpr (way == Way::whole && kWire == WireFormat::same)
    if (args.x_scales == nullptr && lists_hold(comm.window.shape, most_owners(comm)))
      return send_by_pipe(comm, args, epoch, reinterpret_cast<std::byte*>(&block));
  ptx::fence_shared_to_bulk();
  __syncthreads();
  send_own<way, Rows>(comm, args, epoch, warp_memory(block), meta);
}

/// A block's share in sending the chunks that reuse memory.
template <Way way, class Rows>
__device__ void send_later(const Comm& comm, const SendArguments& args, uint64_t epoch, int senders,
                           BlockMemory& block, const ChunkMeta& meta) {
  const bool dispatch = args.operation == Operation::dispatch;
  if (!dispatch && PlanView{args.plan, comm.plan_fields}.header().id == 0) return;
  if constexpr (way == Way::nodes) {
    if (static_cast<int>(blockIdx.x) >= senders) {
      if (gpu::wait_forwarded(comm, args.operation, epoch))
        relay_rows(comm, args, epoch, warp_memory(block), meta);
      return;
    }
    if (dispatch && !wait_routed(comm, args.operation, epoch, args.route_blocks)) return;
  }
  send_share<way, Rows>(comm, args, epoch, block, meta);
}

/// Announces the backward of a combine. Whole block.
__device__ void announce_start(const Comm& comm, const SendArguments& args, uint64_t epoch) {
  signal_start(comm, args.operation, epoch, args.plan, args.layout, args.tokens,
               kCarriesRows | args.after | (args.quantises() ? kCarriesQuantised : 0u));
}

/// The work of a block.
template <Way way, class Rows>
__device__ void send(const Comm& comm, const SendArguments& args, uint64_t epoch, BlockMemory& block) {
  const bool dispatch = args.operation == Operation::dispatch;
  if (failed_for_block(comm)) return;
  const ChunkMeta meta{block.meta[warp_id()], block.counts[warp_id()], block.numbers[warp_id()],
                       block.from[warp_id()]};
  const int senders = static_cast<int>(gridDim.x) - (way == Way::nodes ? args.relay_blocks : 0);
  if (args.later) {
    send_later<way, Rows>(comm, args, epoch, senders, block, meta);
    return;
  }
  const bool valid = dispatch || PlanView{args.plan, comm.plan_fields}.header().id != 0;
  if constexpr (way == Way::nodes) {
    if (static_cast<int>(blockIdx.x) >= senders) {
      relay(comm, args, epoch, {static_cast<int>(blockIdx.x) - senders, args.relay_blocks}, valid, block,
            meta);
      return;
    }
    if (!device::wait_sent(comm, args.operation, epoch)) return;
    // Relay indices are known once all blocks have counted.
    if (dispatch && !wait_routed(comm, args.operation, epoch, args.route_blocks)) return;
  }
  if (!dispatch && blockIdx.x == 0) announce_start(comm, args, epoch);
  if (valid) send_share<way, Rows>(comm, args, epoch, block, meta);
}

/// The beginning and the end of a kernel that sends. Whole grid.
__device__ void begin_kernel(const Comm& comm, const SendArguments& args) {
  ptx::launch_dependents();
  if (args.operation != Operation::dispatch && !args.later) device::start_clock(comm, args.operation);
}
__device__ void end_kernel(const Comm& comm, const SendArguments& args) {
  device::note_sent(comm, args.operation);
  // Waits for the kernel of the routes, so that a later wait for this kernel's end covers both.
  if (blockIdx.x == 0 && threadIdx.x == 0) ptx::wait_for_previous_kernel();
  if (args.later) end_sending(comm);
}

template <Way way, class Rows>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_send_kernel(const __grid_constant__ Comm comm, const __grid_constant__ SendArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  begin_kernel(comm, args);
  send<way, Rows>(comm, args, comm.state().epoch + 1, *reinterpret_cast<BlockMemory*>(shared));
  end_kernel(comm, args);
}

/// The kernel for rows that are quantised on one node, by a pipe with workers.
template <DType dtype>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_quantise_kernel(const __grid_constant__ Comm comm, const __grid_constant__ SendArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  begin_kernel(comm, args);
  if (!failed_for_block(comm)) {
    const bool dispatch = args.operation == Operation::dispatch;
    if (!dispatch && !args.later && blockIdx.x == 0) announce_start(comm, args, epoch);
    if (dispatch || PlanView{args.plan, comm.plan_fields}.header().id != 0)
      quantise_by_pipe<dtype>(comm, args, epoch, shared);
  }
  end_kernel(comm, args);
}

/// Calls use.operator()<kernel>() with the kernel for a shape's rows: with a pipe, if one can quantise them.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, const Use& use) {
  return with_dtype(shape.dtype, [&]<DType dtype>() {
    if constexpr (kWire != WireFormat::same)
      if (shape.other_nodes() == 0 && work_together(shape) &&
          lists_hold(shape, std::min(shape.top_k, shape.ranks)))
        return use.template operator()<&dispatch_quantise_kernel<dtype>>(MovePipe<kWorkers>::kThreads,
                                                                         sizeof(MovePipe<kWorkers>::Memory));
    return with_way(shape, [&]<Way way>() {
      constexpr bool kNodes = way == Way::nodes;
      using Rows =
          std::conditional_t<kWire == WireFormat::same, CopyRows<kNodes>, QuantiseRows<dtype, kWire, kNodes>>;
      return use.template operator()<&dispatch_send_kernel<way, Rows>>(kThreads, sizeof(BlockMemory));
    });
  });
}

}  // namespace

template <>
cudaError_t launch_dispatch_send<kWire>(const Launch& launch, const Comm& comm, const SendArguments& args) {
  return with_kernel(comm.window.shape, Start(launch, comm, args));
}

template <>
cudaError_t prepare_dispatch_send<kWire>(const DeviceShape& shape) {
  return with_kernel(shape, Prepare{});
}

}  // namespace moecomm::gpu
