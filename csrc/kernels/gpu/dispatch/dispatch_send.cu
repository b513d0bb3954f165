// Dispatch, sending side: every row goes once to each rank that owns one of its experts.
//   - warps take chunks of tokens, from several starting points in turn (TokenOrder). They store the rows to
//     the staging section of every owner, where (source, token) alone gives the address. On one node this
//     does not need the results of dispatch_route.cu, which runs before or at the same time
//   - a pipe of warps moves the rows (move_pipe.cuh). It has workers where rows are quantised or have scales
//     from the caller, where a list has no room for a chunk's rows, and with several nodes
//   - when all rows of a chunk have arrived, the owners' arrival flags for the chunk are set
// The staging section may be too small for all tokens. Then later chunks wait until the owners have read
// the chunks whose memory they reuse. A separate kernel (`later`) sends the chunks that have to wait, and is
// launched after the receiving kernel. So the first sending kernel ends, whatever the stream holds after it.
//
// The backward of a combine sends rows in the same way, along the plan of the combine's dispatch. There this
// kernel also announces the operation.
// The file is compiled once for each format in which rows travel, MOECOMM_WIRE (CMakeLists.txt).
//
// With several nodes a row goes to its owners on this node, and once to each other node that needs it. Rows
// for other nodes wait for the routes, which number these rows (relay index). They go into host memory, from
// where the network sends them. The last blocks relay the rows that arrive from the rail (the ranks with this
// rank's number on other nodes): they send these rows to the owners on this node, on behalf of the source.
#include "kernels/gpu/dispatch/quantise_rows.cuh"
#include "kernels/gpu/dispatch/send_list.cuh"
#include "kernels/gpu/dispatch/send_rows.cuh"

namespace moecomm::gpu {
namespace {

/// The kernels of this object file send rows in this wire format.
constexpr WireFormat kWire = WireFormat::MOECOMM_WIRE;

/// Bytes of the stages of a unit (a pipe's warps): its share of `args.warps` * kWarpBytes. More would queue.
template <int workers>
__device__ int stage_bytes(const SendArguments& args) {
  return args.warps * kWarpBytes / MovePipe<workers>::kUnits;
}

/// Sends rows unchanged. Whole block.
[[maybe_unused]] __device__ void send_by_pipe(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                              std::byte* shared) {
  const int64_t row_bytes = comm.window.shape.wire_row_bytes();
  run_move_pipe<0>(
      shared, MoveShape::of<0>(row_bytes, row_bytes, stage_bytes<0>(args)), epoch,
      [&](MoveLister<0>& pipe) { list_own(comm, args, epoch, pipe); }, [] {});
}

/// Sends rows of `dtype`, quantised to this file's wire format. Whole block.
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

/// Sends rows that arrive from the rail to owners on this node; false if some do not arrive. Whole block.
__device__ bool relay_rows(const Comm& comm, const SendArguments& args, uint64_t epoch, std::byte* shared) {
  const LoneShape shape(CopyAlone::whole_rows(comm.window.shape));
  bool all = true;
  run_move_pipe<kLoneWorkers>(
      shared, shape, epoch,
      [&](MoveLister<kLoneWorkers>& pipe) { all = list_relayed(comm, args, epoch, pipe); }, [] {},
      CopyAlone(comm.window.shape, shape));
  return all;
}

/// The work of the relaying blocks: they forward the rail's records, then the rows that arrive from the rail.
__device__ void relay(const Comm& comm, const SendArguments& args, uint64_t epoch, RelayBlocks relay,
                      bool valid, std::byte* shared) {
  // In a dispatch the route kernel forwards the records.
  if (args.operation != Operation::dispatch &&
      !gpu::relay_records(comm, args.operation, args.plan, epoch, relay))
    return;
  if (!gpu::wait_forwarded(comm, args.operation, epoch)) return;
  const bool all = !valid || relay_rows(comm, args, epoch, shared);
  if (relay.block == 0 && __syncthreads_and(all)) device::wait_all_here(comm, args.operation, epoch);
}

/// Waits until the `blocks` route blocks of a dispatch have numbered the rows for other nodes. Whole block.
__device__ bool wait_routed(const Comm& comm, Operation operation, uint64_t epoch, int blocks) {
  bool routed = true;
  if (threadIdx.x == 0)
    routed = device::wait_until(comm, {comm.rank, WaitPhase::blocks, operation, epoch, false},
                                device::BlockCount{&comm.state().route_done, static_cast<uint32_t>(blocks)});
  return __syncthreads_and(routed);
}

/// Sends rows by lone workers: of chunks that wait for no memory; if `later`, of the others. Whole block.
template <Way way, class Work>
__device__ void send_alone(const Comm& comm, const SendArguments& args, uint64_t epoch, std::byte* shared) {
  const LoneRows rows = Work::rows(comm.window.shape, args.x_scales != nullptr);
  LoneShape shape = Work::kChanges ? LoneShape(rows) : LoneShape(rows, stage_bytes<kLoneWorkers>(args));
  if constexpr (way == Way::nodes) {
    const PlanView plan{args.plan, comm.plan_fields};
    shape.comm = &comm;
    shape.sent = plan.at(plan.fields.node_tokens);
  }
  // Owners on this node may wait for rows from other nodes, so rows for other nodes must not wait for owners:
  // every second unit sends these rows first. They reuse no memory, so the `later` kernel has none of them.
  const int passes = way == Way::nodes && !args.later ? 2 : 1;
  const int unit = warp_id() / MovePipe<kLoneWorkers>::kUnitWarps;
  run_move_pipe<kLoneWorkers>(
      shared, shape, epoch,
      [&](MoveLister<kLoneWorkers>& pipe) {
        if constexpr (way == Way::whole && Work::kChanges)
          if (lists_hold(comm.window.shape, most_owners(comm))) return list_own(comm, args, epoch, pipe);
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass)
          list_chunks<way>(comm, args, epoch, shape.rows,
                           passes == 2 && pass == unit % 2 ? Reach::others : Reach::node, pipe);
      },
      [] {}, Work(comm.window.shape, shape));
}

/// Announces the backward of a combine. Whole block.
__device__ void announce_start(const Comm& comm, const SendArguments& args, uint64_t epoch) {
  signal_start(comm, args.operation, epoch, args.plan, args.layout, args.tokens,
               kCarriesRows | args.after | (args.quantises() ? kCarriesQuantised : 0u));
}

/// What all blocks do when a sending kernel begins and ends. In a dispatch the route kernel starts the clock.
__device__ void begin_kernel(const Comm& comm, const SendArguments& args) {
  ptx::launch_dependents();
  if (args.operation != Operation::dispatch && !args.later) device::start_clock(comm, args.operation);
}
__device__ void end_kernel(const Comm& comm, const SendArguments& args) {
  device::note_sent(comm, args.operation);
  // Waits for the end of the route kernel, so that a later wait for this kernel's end covers both.
  if (blockIdx.x == 0 && threadIdx.x == 0) ptx::wait_for_previous_kernel();
  if (args.later) end_sending(comm);
}

/// With several nodes: sends this rank's rows by move(epoch), or, in the last blocks, relays the rail's rows.
template <class Move>
__device__ void send_between_nodes(const Comm& comm, const SendArguments& args, uint64_t epoch,
                                   std::byte* shared, const Move& move) {
  const bool dispatch = args.operation == Operation::dispatch;
  const bool valid = dispatch || PlanView{args.plan, comm.plan_fields}.header().id != 0;
  if (args.later && !valid) return;
  const int senders = static_cast<int>(gridDim.x) - args.relay_blocks;
  if (static_cast<int>(blockIdx.x) >= senders) {
    if (!args.later)
      relay(comm, args, epoch, {static_cast<int>(blockIdx.x) - senders, args.relay_blocks}, valid, shared);
    else if (gpu::wait_forwarded(comm, args.operation, epoch))
      relay_rows(comm, args, epoch, shared);
    return;
  }
  if (!args.later && !device::wait_sent(comm, args.operation, epoch)) return;
  // Relay indices are known once all route blocks are done.
  if (dispatch && !wait_routed(comm, args.operation, epoch, args.route_blocks)) return;
  if (!dispatch && !args.later && blockIdx.x == 0) announce_start(comm, args, epoch);
  if (valid) move(epoch);
}

/// The whole work of a sending kernel, which moves rows by move(epoch). All blocks.
template <Way way, class Move>
__device__ void send(const Comm& comm, const SendArguments& args, std::byte* shared, const Move& move) {
  const uint64_t epoch = comm.state().epoch + 1;
  begin_kernel(comm, args);
  if (!failed_for_block(comm)) {
    if constexpr (way == Way::nodes) {
      send_between_nodes(comm, args, epoch, shared, move);
    } else {
      const bool dispatch = args.operation == Operation::dispatch;
      if (!dispatch && !args.later && blockIdx.x == 0) announce_start(comm, args, epoch);
      if (dispatch || PlanView{args.plan, comm.plan_fields}.header().id != 0) move(epoch);
    }
  }
  end_kernel(comm, args);
}

/// The kernel that sends rows unchanged, on one node.
template <Way way>
__global__ void __launch_bounds__(MovePipe<0>::kThreads, 1)
    dispatch_send_kernel(const __grid_constant__ Comm comm, const __grid_constant__ SendArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  send<way>(comm, args, shared, [&](uint64_t epoch) { send_by_pipe(comm, args, epoch, shared); });
}

/// The kernel that sends quantised rows, on one node; all workers of a pipe share each row.
template <DType dtype>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_quantise_kernel(const __grid_constant__ Comm comm, const __grid_constant__ SendArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  send<Way::whole>(comm, args, shared,
                   [&](uint64_t epoch) { quantise_by_pipe<dtype>(comm, args, epoch, shared); });
}

/// The kernel that sends rows in all other cases, by lone workers.
template <Way way, class Work>
__global__ void __launch_bounds__(MovePipe<kLoneWorkers>::kThreads, 1)
    dispatch_send_alone_kernel(const __grid_constant__ Comm comm,
                               const __grid_constant__ SendArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  send<way>(comm, args, shared, [&](uint64_t epoch) { send_alone<way, Work>(comm, args, epoch, shared); });
}

/// Calls use.operator()<kernel>() with the kernel for a shape's rows. `scales`: the caller gives scales.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, [[maybe_unused]] bool scales, const Use& use) {
  const auto with_pipe = [&]<auto kernel, int workers>() {
    return use.template operator()<kernel>(MovePipe<workers>::kThreads,
                                           sizeof(typename MovePipe<workers>::Memory));
  };
  const auto alone = [&]<class Work>() {
    return with_way(shape, [&]<Way way>() {
      return with_pipe.template operator()<&dispatch_send_alone_kernel<way, Work>, kLoneWorkers>();
    });
  };
  const bool listed = shape.other_nodes() == 0 && lists_hold(shape, std::min(shape.top_k, shape.ranks));
  if constexpr (kWire == WireFormat::same) {
    if (listed && !scales) return with_pipe.template operator()<&dispatch_send_kernel<Way::whole>, 0>();
    return alone.template operator()<CopyAlone>();
  } else {
    return with_dtype(shape.dtype, [&]<DType dtype>() {
      if (listed && work_together(shape))
        return with_pipe.template operator()<&dispatch_quantise_kernel<dtype>, kWorkers>();
      return alone.template operator()<QuantiseAlone<dtype, kWire>>();
    });
  }
}

}  // namespace

template <>
cudaError_t launch_dispatch_send<kWire>(const Launch& launch, const Comm& comm, const SendArguments& args) {
  return with_kernel(comm.window.shape, args.x_scales != nullptr, Start(launch, comm, args));
}

template <>
cudaError_t prepare_dispatch_send<kWire>(const DeviceShape& shape) {
  const cudaError_t error = with_kernel(shape, false, Prepare{});
  return error != cudaSuccess || shape.wire == WireFormat::same ? error : with_kernel(shape, true, Prepare{});
}

}  // namespace moecomm::gpu
