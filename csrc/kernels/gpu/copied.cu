// The two ends of transfers by the copy engine: a rank says that its copies have arrived, and waits until
// those of all ranks have. One block each; while the copies are under way no kernel of the operation runs.
#include "kernels/gpu/kernel.cuh"

namespace moecomm::gpu {
namespace {

struct CopiedArguments {
  Operation operation;
};

/// The copies come before this kernel on its stream, so that they are visible to whoever sees the flags.
__global__ void __launch_bounds__(kThreads, 1)
    signal_copied_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CopiedArguments) {
  if (already_failed(comm)) return;
  const uint64_t epoch = comm.state().epoch + 1;
  for (auto peer = static_cast<int32_t>(threadIdx.x); peer < comm.ranks();
       peer += static_cast<int32_t>(blockDim.x))
    ptx::store_release_sys(comm.arrival(comm.bases[peer], comm.rank, Comm::copies_number()), epoch);
}

__global__ void __launch_bounds__(kThreads, 1)
    wait_copied_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CopiedArguments args) {
  if (already_failed(comm)) return;
  const uint64_t epoch = comm.state().epoch + 1;
  for (auto peer = static_cast<int32_t>(threadIdx.x); peer < comm.ranks();
       peer += static_cast<int32_t>(blockDim.x))
    device::wait_until(comm, {peer, WaitPhase::rows, args.operation, epoch},
                       device::EpochFlag{comm.arrival(comm.own, peer, Comm::copies_number()), epoch});
}

}  // namespace

cudaError_t launch_signal_copied(const Launch& launch, const Comm& comm) {
  return launch_kernel<signal_copied_kernel>(launch, kThreads, 0, comm, CopiedArguments{Operation::none});
}

cudaError_t launch_wait_copied(const Launch& launch, const Comm& comm, Operation operation) {
  return launch_kernel<wait_copied_kernel>(launch, kThreads, 0, comm, CopiedArguments{operation});
}

cudaError_t prepare_copied() {
  const cudaError_t error = prepare_kernel<signal_copied_kernel>(0);
  return error != cudaSuccess ? error : prepare_kernel<wait_copied_kernel>(0);
}

}  // namespace moecomm::gpu
