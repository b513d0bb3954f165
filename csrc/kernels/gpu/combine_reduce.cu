// Combine, owner's side: a token's rows here are summed in the order of k in float32 (times their weights),
// rounded once, or quantised where sums travel in another format, and the sum goes to this rank's slot at the
// token's home.
//   - warps take items in order: a chunk of one home's tokens, the other ranks in turn
//   - a strip of all rows of a token is loaded at once, summed in registers, and stored over the link
//   - when all sums of a chunk are in place, its arrival flag at the home is set
// Where the copy engine moves the sums (`copied`), they stay here, in order of the home and its token, and
// the kernel ends when the windows of others may be written.
//
// Gradients of routing weights go first, each to its (token, k) at the home, with one flag for all of them.
// Sums and gradients for homes on other nodes go to the rank of the home's rail on this node; the last blocks
// relay them (relay_sums.cuh).
#include "kernels/gpu/announcer.cuh"
#include "kernels/gpu/combine_rows.cuh"
#include "kernels/gpu/relay_sums.cuh"

namespace moecomm::gpu {
namespace {

constexpr int kSteps = 4, kBatch = 2;

/// Sends the gradients of the weights of all other ranks' tokens. Whole block.
__device__ void send_weight_grads(const Comm& comm, const CombineArguments& args, uint64_t epoch, int blocks,
                                  int32_t* shared_word) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  for (int32_t i = 1; i < comm.ranks(); ++i) {
    const int32_t home = (comm.rank + i) % comm.ranks();
    std::byte* section = comm.bases[comm.relay_rank(home)];
    if (comm.is_local(home))
      section += comm.window.weight_grads[epoch & 1];
    else
      section += comm.window.relay_grads[epoch & 1] +
                 comm.other_of(home) * weights_bytes(comm, comm.window.shape.max_tokens);
    const int64_t tokens = plan.at(plan.fields.tokens)[home];
    for (int64_t token = int64_t{blockIdx.x} * kReduceWarps + warp_id(); token < tokens;
         token += int64_t{blocks} * kReduceWarps) {
      if (lane >= top_k) continue;
      const int32_t row = weight_grad_row(comm, args, home, token);
      if (row != kRowElsewhere) put_weight_grad(comm, args, section, token, row);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_sys();
    *shared_word = ptx::add_acq_rel_gpu(&comm.state().route_done, 1) + 1 == static_cast<uint32_t>(blocks);
  }
  __syncthreads();
  if (*shared_word == 0) return;
  for (int32_t home = static_cast<int32_t>(threadIdx.x); home < comm.ranks(); home += kReduceThreads)
    ptx::store_release_sys(comm.is_local(home)
                               ? comm.arrival(comm.bases[home], comm.rank, comm.gradients_number())
                               : comm.flag(comm.bases[comm.relay_rank(home)], comm.window.partial_arrived,
                                           comm.pair(home, comm.rank), comm.window.max_chunks),
                           epoch);
}

/// Waits until the relay has read all chunks of a home that had this one's place before. All lanes.
__device__ bool wait_for_place(const Comm& comm, uint64_t epoch, int32_t home, int64_t tokens,
                               int64_t chunk) {
  const int64_t places = comm.window.partial_tokens / chunk_tokens(tokens);
  bool free = true;
  for (int64_t before = chunk - places * (1 + lane_id()); free && before >= 0; before -= places * 32)
    free = device::wait_until(
        comm, {comm.relay_rank(home), WaitPhase::credit, Operation::combine, epoch},
        device::EpochFlag{comm.flag(comm.own, comm.window.partial_credits, home, before), epoch});
  __syncwarp();  // where a lane has found the place free, all lanes write
  return __all_sync(0xffffffffu, free);
}

/// The work of the blocks that relay. `moving`: the plan is one along which something moves.
template <DType dtype>
__device__ void relay(const Comm& comm, const CombineArguments& args, uint64_t epoch, gpu::RelayBlocks relay,
                      bool moving) {
  if (!gpu::relay_records(comm, Operation::combine, nullptr, epoch, relay)) return;
  if (moving) {
    if (args.weight_grads != nullptr) gpu::relay_weight_grads(comm, args.plan, epoch, relay);
    if (args.rows != nullptr) gpu::relay_sums<dtype>(comm, args.plan, epoch);
  }
  if (relay.block != 0) return;
  __syncthreads();
  device::wait_all_here(comm, Operation::combine, epoch);
}

/// The work of a block.
template <DType dtype, Way way, WireFormat wire>
__device__ void reduce(const Comm& comm, const CombineArguments& args, ReduceMemory& block) {
  constexpr bool kNodes = way == Way::nodes;
  if (failed_for_block(comm)) return;
  const uint64_t epoch = comm.state().epoch + 1;
  const PlanView plan{args.plan, comm.plan_fields};
  const uint64_t id = plan.header().id;
  const int blocks = static_cast<int>(gridDim.x) - (kNodes ? args.relay_blocks : 0);
  if constexpr (kNodes) {
    if (!device::wait_sent(comm, Operation::combine, epoch)) return;
    if (static_cast<int>(blockIdx.x) >= blocks) {
      relay<dtype>(comm, args, epoch, {static_cast<int>(blockIdx.x) - blocks, args.relay_blocks}, id != 0);
      return;
    }
  }
  if (blockIdx.x == 0)
    signal_start(
        comm, Operation::combine, epoch, args.plan, args.layout, args.tokens,
        (args.rows != nullptr ? kCarriesRows : 0u) | (args.weight_grads != nullptr ? kCarriesWeights : 0u) |
            (args.copied ? kCarriedByCopies : 0u) | (wire != WireFormat::same ? kCarriesQuantised : 0u),
        args.landing);
  if (id == 0 || comm.ranks() == 1) return;
  if (args.weight_grads != nullptr) send_weight_grads(comm, args, epoch, blocks, &block.shared_word);
  if (args.rows == nullptr) return;

  const int top_k = comm.top_k();
  int32_t* const sources = block.sources[warp_id()];
  int32_t* const counts = block.counts[warp_id()];
  int32_t* const slots = block.slots[warp_id()];
  float* const weights = block.weights[warp_id()];
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const int vectors = static_cast<int>(row_bytes / 16);
  const int64_t scales_at = sum_scales_at(comm, wire);
  Claims claims(&comm.state().item_next);

  const int32_t* const tokens_of = plan.at(plan.fields.tokens);
  const int32_t others = comm.ranks() - 1;
  int64_t most_chunks = 0;
  for (int32_t r = 0; r < comm.ranks(); ++r)
    if (r != comm.rank) most_chunks = max(most_chunks, chunk_count(tokens_of[r]));
  for (int64_t claim = claims.take(); claim < most_chunks * others; claim = claims.take()) {
    const int64_t chunk = claim / others;
    const int32_t home = static_cast<int32_t>((comm.rank + 1 + claim % others) % comm.ranks());
    const int64_t tokens = tokens_of[home], size = chunk_tokens(tokens);
    const int64_t begin = chunk * size, end = min(begin + size, tokens);
    if (begin >= end) continue;
    const uint32_t owned = list_owned<kMaxChunk>(comm, args, home, begin, static_cast<int>(end - begin),
                                                 sources, weights, counts, slots);
    if (owned == 0) continue;
    const bool local = !kNodes || comm.is_local(home);
    if constexpr (kNodes)
      if (!local && tokens > comm.window.partial_tokens && !wait_for_place(comm, epoch, home, tokens, chunk))
        return;
    std::byte* const first_slot =
        args.copied ? comm.outgoing_row(home, begin)
        : local ? comm.slot_row(comm.bases[home], epoch, begin, 0)
                : comm.partial_row(comm.bases[comm.relay_rank(home)], epoch, comm.other_of(home), begin, 0);
    const int slots_of_token = args.copied ? 1
                               : local     ? comm.window.shape.slots()
                                           : comm.window.shape.node_slots();
    for (uint32_t left = owned; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1, count = counts[i];
      std::byte* const to = first_slot + (i * slots_of_token + (args.copied ? 0 : slots[i])) * row_bytes;
      const int32_t* const rows = sources + i * top_k;
      const float* const factors = args.weights != nullptr ? weights + i * top_k : nullptr;
      const auto row = [&](int j) { return args.rows + rows[j] * row_bytes; };
      for (int first = 0; first < vectors; first += kSteps * 32)
        sum_rows<dtype, kSteps, kBatch>(count, row, factors, first, vectors)
            .template travelling<wire>(first, vectors)
            .store(to, first, vectors, scales_at);
    }
    if (args.copied) continue;
    __syncwarp();
    if (lane_id() == 0)
      ptx::store_release_sys(local ? comm.arrival(comm.bases[home], comm.rank, chunk)
                                   : comm.flag(comm.bases[comm.relay_rank(home)], comm.window.partial_arrived,
                                               comm.pair(home, comm.rank), chunk),
                             epoch);
  }
}

template <DType dtype, Way way, WireFormat wire>
__global__ void __launch_bounds__(kReduceThreads, 1)
    combine_reduce_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  ptx::launch_dependents();
  device::start_clock(comm, Operation::combine);
  reduce<dtype, way, wire>(comm, args, *reinterpret_cast<ReduceMemory*>(shared));
  if (args.copied && blockIdx.x == 0 && !failed_for_block(comm))
    await_landing(comm, Operation::combine, comm.state().epoch + 1, args.landing);
  device::note_sent(comm, Operation::combine);
  if (args.senders > 0) end_sending(comm);
}

template <Way way>
struct Reduce {
  template <DType dtype>
  struct Kernel {
    static constexpr auto kernel = &combine_reduce_kernel<dtype, way, WireFormat::same>;
  };
};
template <DType dtype>
struct ReduceToFp8 {
  static constexpr auto kernel = &combine_reduce_kernel<dtype, Way::whole, WireFormat::fp8>;
};

}  // namespace

cudaError_t launch_combine_reduce(const Launch& launch, const Comm& comm, const CombineArguments& args) {
  return with_sums<Reduce, ReduceToFp8>(comm.window.shape, args.wire, [&]<auto kernel>() {
    return launch_kernel<kernel>(launch, kReduceThreads, sizeof(ReduceMemory), comm, args);
  });
}

cudaError_t prepare_combine_reduce(const DeviceShape& shape, WireFormat sums) {
  return prepare_sums<Reduce, ReduceToFp8>(shape, sums, sizeof(ReduceMemory));
}

}  // namespace moecomm::gpu
