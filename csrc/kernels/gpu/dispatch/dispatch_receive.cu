// Dispatch, receiving side: copies each arriving row to all its output rows.
//   - pipes of warps take items from all sources in turn, this rank first. An item is consecutive tokens of
//     one source: a chunk, several chunks, or a part of a chunk
//   - a dispatch finds each row's positions in expert-major order from the source's routes (route.cuh) and
//     the plan (plan.cuh). It keeps the positions in the plan for the backward of combine. In the expert
//     layout a position is an output row. In the rank layout it is an index into a table of output rows, and
//     the plan keeps the output row as well
//   - once a chunk has arrived, a pipe copies its rows unchanged to their output rows (move_pipe.cuh). Rows
//     that change on arrival, or for which a list of the pipe has no room, go through a pipe with workers
//     (dispatch_change.cu)
//   - the padding rows of each expert are zeroed (expert layout)
#include "kernels/gpu/dispatch/receive_list.cuh"

namespace moecomm::gpu {
namespace {

__global__ void __launch_bounds__(MovePipe<0>::kThreads, 1)
    dispatch_receive_kernel(const __grid_constant__ Comm comm,
                            const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args, [&](uint64_t epoch) {
    const int64_t row_bytes = comm.window.shape.wire_row_bytes();
    run_move_pipe<0>(
        shared, MoveShape::of<0>(row_bytes, row_bytes).passing(), epoch,
        [&](MoveLister<0>& pipe) { list_rows_to_places(comm, args, epoch, pipe); },
        [&] { zero_paddings(comm, args); });
  });
}

/// Calls use.operator()<kernel>() with this file's kernel, for rows that stay as they are.
template <class Use>
cudaError_t with_kernel(const Use& use) {
  return use.template operator()<&dispatch_receive_kernel>(MovePipe<0>::kThreads,
                                                           sizeof(MovePipe<0>::Memory));
}

}  // namespace

cudaError_t launch_dispatch_receive(const Launch& launch, const Comm& comm, const ReceiveArguments& args) {
  const KernelShape& shape = comm.window.shape;
  if (arrival_of(args) == Arrival::as_it_is && lists_hold(shape, shape.top_k))
    return with_kernel(Start(launch, comm, args));
  return launch_dispatch_change(launch, comm, args);
}

cudaError_t prepare_dispatch_receive(const DeviceShape& shape) {
  for (const Arrival arrival : {Arrival::scaled, Arrival::dequantised, Arrival::apart}) {
    if (arrival == Arrival::dequantised && shape.wire == WireFormat::same) continue;
    const cudaError_t error = prepare_dispatch_change(shape, arrival);
    if (error != cudaSuccess) return error;
  }
  return with_kernel(Prepare{});
}

}  // namespace moecomm::gpu
