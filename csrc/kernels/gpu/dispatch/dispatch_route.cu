// Makes the routes and the plan of a dispatch: computes where this rank's rows go, and where the rows of all
// ranks arrive here.
//   - blocks share the tokens, compute the routes of their rows, and push the routes to all ranks (route.cuh;
//     for few tokens one block does this: route_few.cuh)
//   - a further block, or the first if there is none, reads the announcements of all ranks as they arrive.
//     It makes the plan of the rows that arrive here (plan.cuh)
// The sending kernel runs at the same time, or begins when routes have been sent (`routes_first`). It waits
// for this kernel's routes only where rows go to other nodes. This kernel's blocks use the SMs of the
// receiving blocks, which have nothing to do yet. With several nodes, further blocks forward the records and
// routes of this rank's rail (the ranks with its number on other nodes) to this node (relay_records.cuh).
// The plan needs these records and routes. This kernel ends whether or not the next kernel has begun.
#include "kernels/gpu/common/kernel.cuh"
#include "kernels/gpu/dispatch/plan.cuh"
#include "kernels/gpu/dispatch/route_few.cuh"
#include "kernels/gpu/internode/relay_records.cuh"

namespace moecomm::gpu {
namespace {

template <Way way>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_route_kernel(const __grid_constant__ Comm comm, const __grid_constant__ SendArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ int32_t shared_word;
  int32_t* const scratch = reinterpret_cast<int32_t*>(shared);
  if (!args.routes_first) ptx::launch_dependents();
  const uint64_t epoch = comm.state().epoch + 1;
  device::start_clock(comm, args.operation);
  const bool failed = failed_for_block(comm);
  const int block = static_cast<int>(blockIdx.x);
  if constexpr (way == Way::nodes) {
    const int relaying = block - args.route_blocks;
    if (relaying >= 0 && relaying < args.relay_blocks) {
      if (!failed) relay_records(comm, args.operation, args.plan, epoch, {relaying, args.relay_blocks});
      return;
    }
  }
  SignalRecord record{};
  if (block < args.route_blocks && !failed &&
      (way == Way::whole || device::wait_sent(comm, args.operation, epoch))) {
    if (way == Way::whole && routes_few(comm.window.shape, args.tokens, kRouteWords))
      record = route_few(comm, args, epoch, scratch, kRouteWords, [] {
        __syncthreads();
        return false;
      });
    else if (route(comm, args, epoch, args.route_blocks, scratch, kRouteWords, &shared_word) && block == 0)
      record = dispatch_record(comm, args, epoch, true);
  }
  if (args.routes_first) ptx::launch_dependents();
  if (record.operation == Operation::dispatch) device::signal_records(comm, record);
  if (block != args.plan_block) return;
  __syncthreads();
  make_plan(comm, args, epoch, scratch, kRouteWords, Planner::of_many);
}

/// Calls use.operator()<kernel>() with the kernel for a shape: for one node, or for several.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, const Use& use) {
  return with_way(shape, [&]<Way way>() {
    return use.template operator()<&dispatch_route_kernel<way>>(kThreads, kRouteWords * sizeof(int32_t));
  });
}

}  // namespace

cudaError_t launch_dispatch_route(const Launch& launch, const Comm& comm, const SendArguments& args) {
  return with_kernel(comm.window.shape, Start(launch, comm, args));
}

cudaError_t prepare_dispatch_route(const DeviceShape& shape) { return with_kernel(shape, Prepare{}); }

}  // namespace moecomm::gpu
