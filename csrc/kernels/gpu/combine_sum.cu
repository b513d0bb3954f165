// Combine, home's side: what the owners of a token sent is added by ascending owner rank in float32 and
// rounded once.
//   - warps take this rank's tokens in order, or parts of their rows, and wait until the sums of the owners
//     have arrived
//   - a slot is the number of an owner among the token's owners in ascending order, so slots are added in
//     their order; this rank's own share never travels: it is summed here at its turn, and rounded as if it
//     had
//   - after copies the slot of an owner is the token's row in what it has sent
//   - another node has one slot, whatever ranks of it own experts of the token: a row that has come over the
//     network, which is read where it has arrived
#include "kernels/gpu/announcer.cuh"
#include "kernels/gpu/combine_rows.cuh"

namespace moecomm::gpu {
namespace {

/// Gradients of the weights: those of experts here, those that owners sent, and zero where a token names no
/// expert. Whole block.
__device__ void collect_weight_grads(const Comm& comm, const CombineArguments& args, uint64_t epoch) {
  const PlanView plan{args.plan, comm.plan_fields};
  bool here = true;
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); here && peer < comm.ranks(); peer += kSumThreads)
    if (peer != comm.rank && comm.is_local(peer))
      here =
          device::wait_until(comm, {peer, WaitPhase::rows, Operation::combine, epoch},
                             device::EpochFlag{comm.arrival(comm.own, peer, comm.gradients_number()), epoch});
  const int64_t pieces = WindowShape::pieces(weights_bytes(comm, args.tokens));
  for (int64_t i = threadIdx.x; here && i < pieces * comm.rail.others; i += kSumThreads) {
    const auto other = static_cast<int32_t>(i / pieces);
    here = device::wait_until(
        comm, {comm.rail_rank(other), WaitPhase::rows, Operation::combine, epoch},
        device::HostWord{{comm.rail.arrival(epoch, other, comm.rail.chunks + i % pieces), epoch}});
  }
  if (!__syncthreads_and(here)) return;
  const float* const section = comm.mine<float>(comm.window.weight_grads[epoch & 1]);
  const int top_k = comm.top_k(), lane = lane_id();
  for (int64_t token = int64_t{blockIdx.x} * kSumWarps + warp_id(); token < args.tokens;
       token += int64_t{gridDim.x} * kSumWarps) {
    if (lane >= top_k) continue;
    const int64_t i = token * top_k + lane;
    const int32_t id = plan.at(plan.fields.local_topk_idx)[i];
    const int32_t owner = expert_owner(id, comm.local_experts);
    if (owner == comm.rank)
      put_weight_grad(comm, args, args.out_weight_grads, token,
                      weight_grad_row(comm, args, comm.rank, token));
    else if (owner < 0 || comm.is_local(owner))
      reinterpret_cast<float*>(args.out_weight_grads)[i] = id < 0 ? 0.0f : __ldcg(section + i);
    else
      reinterpret_cast<float*>(args.out_weight_grads)[i] =
          __ldcg(comm.rail.weights(comm.rail.layout.relay_grads[epoch & 1], comm.other_of(owner)) + i);
  }
}

template <DType dtype, Way way, WireFormat wire>
__device__ void sum_tokens(const Comm& comm, const CombineArguments& args, uint64_t epoch, SumMemory& block) {
  // Few tokens are shared by more warps each, so that the last ones do not take long.
  const int64_t sharing = int64_t{8} * gridDim.x * kSumWarps / max(args.tokens, int64_t{1});
  const SumParts parts(comm, min(sharing, int64_t{8}));
  Claims claims(&comm.state().receive_next);
  for (int64_t claim = claims.take(); claim < args.tokens * parts.count; claim = claims.take())
    if (!sum_part<dtype, way, wire, device::EpochFlag>(comm, args, epoch, parts, claim, block)) return;
}

template <DType dtype, Way way, WireFormat wire>
__global__ void __launch_bounds__(kSumThreads, 1)
    combine_sum_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  if (!failed_for_block(comm) && agree_on_operation(comm, Operation::combine, epoch)) {
    if (PlanView{args.plan, comm.plan_fields}.header().id == 0) {
      write_nothing(comm, args, blockIdx.x, gridDim.x);
    } else {
      if (args.rows != nullptr)
        sum_tokens<dtype, way, wire>(comm, args, epoch, *reinterpret_cast<SumMemory*>(shared));
      if (args.weight_grads != nullptr) collect_weight_grads(comm, args, epoch);
    }
  }
  end_operation(comm, Operation::combine, epoch, args.senders, true, args.copied);
}

template <Way way>
struct SumOf {
  template <DType dtype>
  struct Kernel {
    static constexpr auto kernel = &combine_sum_kernel<dtype, way, WireFormat::same>;
  };
};
template <DType dtype>
struct SumOfFp8 {
  static constexpr auto kernel = &combine_sum_kernel<dtype, Way::whole, WireFormat::fp8>;
};

}  // namespace

cudaError_t launch_combine_sum(const Launch& launch, const Comm& comm, const CombineArguments& args) {
  return with_sums<SumOf, SumOfFp8>(comm.window.shape, args.wire, [&]<auto kernel>() {
    return launch_kernel<kernel>(launch, kSumThreads, sizeof(SumMemory), comm, args);
  });
}

cudaError_t prepare_combine_sum(const DeviceShape& shape, WireFormat sums) {
  return prepare_sums<SumOf, SumOfFp8>(shape, sums, sizeof(SumMemory));
}

}  // namespace moecomm::gpu
