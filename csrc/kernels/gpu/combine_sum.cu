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
#include "device/rail.cuh"
#include "kernels/gpu/announcer.cuh"
#include "kernels/gpu/strip.cuh"
#include "layout/routing.hpp"

namespace moecomm::gpu {
namespace {

constexpr int kSteps = 2, kBatch = 4;

/// Shared memory of a block: the own rows of each warp's token and their factors.
struct SumMemory {
  float weights[kSumWarps][kMaxTopK];
  int32_t sources[kSumWarps][kMaxTopK];
  const std::byte* slots[kSumWarps][kMaxTopK];  ///< with several nodes, or after copies
};

/// The parts of a token's sum: `slots` sums of owners, of which number `own_slot` is made here of
/// `own_rows` rows.
struct TokenSum {
  int32_t slots, own_slot, own_rows;
  int32_t owner;  ///< of each lane: whose sum it waits for, -1: none
};

/// Fills sources with the own rows of a token and weights with their factors.
template <Way way>
__device__ TokenSum list_rows(const Comm& comm, const CombineArguments& args, int64_t token, int32_t* sources,
                              float* weights) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  const int32_t home = plan.at(plan.fields.home)[token];
  const int32_t id = lane < top_k ? plan.at(plan.fields.local_topk_idx)[token * top_k + lane] : kNoExpert;
  const int32_t owner = expert_owner(id, comm.local_experts);
  const int32_t row = planned_row(plan, args.layout, comm.rank * comm.window.shape.max_tokens + token, top_k);
  const float weight =
      args.weights != nullptr && row >= 0 ? reinterpret_cast<const float*>(args.weights)[row] : 1.0f;
  const bool sends = owner >= 0 && owner != comm.rank && (way != Way::nodes || comm.is_local(owner));
  const int32_t sender = sends ? owner : -1;
  const bool keep = row >= 0;
  __syncwarp();  // of the token before
  compact(weights, weight, keep);
  const int count = compact(sources, row, keep);
  __syncwarp();
  return {home & 0xffff, home >> 16 & 0xffff, count, first_with(sender) ? sender : -1};
}

/// Waits for the sums of all owners of a token in `chunk`. All lanes; false if it waits in vain.
__device__ bool wait_sums(const Comm& comm, uint64_t epoch, int64_t chunk, const TokenSum& token) {
  bool here = true;
  if (token.owner >= 0)
    here = device::wait_until(comm, {token.owner, WaitPhase::rows, Operation::combine, epoch},
                              device::EpochFlag{comm.arrival(comm.own, token.owner, chunk), epoch});
  __syncwarp();  // what a lane has acquired, all lanes load
  return __all_sync(0xffffffffu, here);
}

/// Returns the slot of this lane's sender among a token's: the number of senders below it, each of which one
/// lane leads. All lanes.
__device__ int slot_of(int32_t sender, bool leads) {
  int slot = 0;
  for (uint32_t left = __ballot_sync(0xffffffffu, leads); left != 0; left &= left - 1)
    slot += __shfl_sync(0xffffffffu, sender, __ffs(static_cast<int>(left)) - 1) < sender;
  return slot;
}

/// Fills `slots` with where the sums of a token lie, and waits for those that come from other nodes. All
/// lanes; false if it waits in vain.
__device__ bool find_slots(const Comm& comm, const CombineArguments& args, uint64_t epoch, int64_t token,
                           const std::byte** slots) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  const int32_t id = lane < top_k ? plan.at(plan.fields.local_topk_idx)[token * top_k + lane] : kNoExpert;
  const int32_t owner = expert_owner(id, comm.local_experts);
  const int32_t sender = comm.sender(owner);
  const bool leads = first_with(sender);
  const int slot = slot_of(sender, leads);
  bool here = true;
  if (leads) {
    const std::byte* at = comm.slot_row(comm.own, epoch, token, slot);
    if (!comm.is_local(owner)) {
      const int32_t other = comm.other_of(owner);
      const int32_t number = plan.at(plan.fields.home_index)[other * comm.window.shape.max_tokens + token];
      at = comm.rail.arrived(epoch, other, number, comm.window.shape.row_bytes());
      here = device::RailChunk{comm, epoch, other, number / comm.rail.chunk_rows}.wait(
          {comm.rail_rank(other), WaitPhase::rows, Operation::combine, epoch});
    }
    slots[slot] = at;
  }
  __syncwarp();
  return __all_sync(0xffffffffu, here);
}

/// Fills `slots` with where the copy engine has brought the sums of a token's owners.
__device__ void find_landed(const Comm& comm, const CombineArguments& args, uint64_t epoch, int64_t token,
                            const std::byte** slots) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  const int32_t id = lane < top_k ? plan.at(plan.fields.local_topk_idx)[token * top_k + lane] : kNoExpert;
  const int32_t owner = expert_owner(id, comm.local_experts);
  const bool leads = first_with(owner);
  const int slot = slot_of(owner, leads);
  if (leads)
    slots[slot] =
        comm.landed_row(landing_of(comm, epoch, owner), owner, token, comm.window.shape.row_bytes());
  __syncwarp();
}

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

/// The result where the dispatch of the plan has failed: zero.
__device__ void write_nothing(const Comm& comm, const CombineArguments& args) {
  const int64_t first = int64_t{blockIdx.x} * kSumThreads + threadIdx.x,
                stride = int64_t{gridDim.x} * kSumThreads;
  if (args.y != nullptr)
    for (int64_t i = first; i < args.tokens * comm.window.shape.row_bytes() / 16; i += stride)
      reinterpret_cast<uint4*>(args.y)[i] = {};
  if (args.out_weight_grads != nullptr)
    for (int64_t i = first; i < args.tokens * comm.top_k() * weight_bytes(comm.window.shape.dtype) / 4;
         i += stride)
      reinterpret_cast<uint32_t*>(args.out_weight_grads)[i] = 0;
}

/// Sums one token's strip: its slots in order, with this rank's own sum, as if it had travelled, at its turn.
/// slot(s) is the address of a slot.
template <DType dtype, WireFormat wire, class Slot, class Row>
__device__ Strip<kSteps> sum_token(const TokenSum& token, const Slot& slot, const Row& row,
                                   const float* weights, int first, int vectors, int64_t scales_at) {
  if (token.slots == 0) return {};
  SumStrip<dtype, wire, kSteps> own;
  StripSum<dtype, kSteps> sum;
  for (int base = 0; base < token.slots; base += kBatch) {
    SumStrip<dtype, wire, kSteps> strips[kBatch];
#pragma unroll
    for (int s = 0; s < kBatch; ++s)
      if (base + s < token.slots && base + s != token.own_slot)
        strips[s].load(slot(base + s), first, vectors, scales_at);
    // The own rows are loaded while the slots are on their way.
    if (base <= token.own_slot && token.own_slot < base + kBatch)
      own = sum_rows<dtype, kSteps, kBatch>(token.own_rows, row, weights, first, vectors)
                .template travelling<wire>(first, vectors);
#pragma unroll
    for (int s = 0; s < kBatch; ++s) {
      if (base + s == token.own_slot) strips[s] = own;
      if (base + s < token.slots) sum.add_strip(strips[s], base + s == 0);
    }
  }
  return sum.rounded();
}

template <DType dtype, Way way, WireFormat wire>
__device__ void sum_tokens(const Comm& comm, const CombineArguments& args, uint64_t epoch, SumMemory& block) {
  constexpr bool kNodes = way == Way::nodes;
  int32_t* const rows = block.sources[warp_id()];
  float* const weights = block.weights[warp_id()];
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const int vectors = static_cast<int>(row_bytes / 16);
  const int64_t scales_at = sum_scales_at(comm, wire);
  const int64_t size = chunk_tokens(args.tokens);
  // Few tokens are shared by more warps each, so that the last ones do not take long.
  const int strips = (vectors + kSteps * 32 - 1) / (kSteps * 32);
  const int64_t sharing = int64_t{8} * gridDim.x * kSumWarps / max(args.tokens, int64_t{1});
  const int parts =
      static_cast<int>(max(min(min(sharing, int64_t{8}), static_cast<int64_t>(strips)), int64_t{1}));
  const int each = (strips + parts - 1) / parts * kSteps * 32;
  Claims claims(&comm.state().receive_next);
  for (int64_t claim = claims.take(); claim < args.tokens * parts; claim = claims.take()) {
    const int64_t t = claim / parts;
    const int begin = static_cast<int>(claim % parts) * each, end = min(begin + each, vectors);
    const TokenSum token = list_rows<way>(comm, args, t, rows, weights);
    const std::byte** const places = block.slots[warp_id()];
    if constexpr (kNodes)
      if (!find_slots(comm, args, epoch, t, places)) return;
    if (!kNodes && args.copied) find_landed(comm, args, epoch, t, places);
    if (!wait_sums(comm, epoch, args.copied ? kCopiesChunk : t / size, token)) return;
    const float* const factors = args.weights != nullptr ? weights : nullptr;
    const auto row = [&](int j) { return args.rows + rows[j] * row_bytes; };
    const std::byte* const slots = comm.slot_row(comm.own, epoch, t, 0);
    const auto slot = [&](int s) { return kNodes || args.copied ? places[s] : slots + s * row_bytes; };
    for (int first = begin; first < end; first += kSteps * 32)
      sum_token<dtype, wire>(token, slot, row, factors, first, vectors, scales_at)
          .store(args.y + t * row_bytes, first, vectors);
  }
}

template <DType dtype, Way way, WireFormat wire>
__global__ void __launch_bounds__(kSumThreads, 1)
    combine_sum_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  if (!failed_for_block(comm) && agree_on_operation(comm, Operation::combine, epoch)) {
    if (PlanView{args.plan, comm.plan_fields}.header().id == 0) {
      write_nothing(comm, args);
    } else {
      if (args.rows != nullptr)
        sum_tokens<dtype, way, wire>(comm, args, epoch, *reinterpret_cast<SumMemory*>(shared));
      if (args.weight_grads != nullptr) collect_weight_grads(comm, args, epoch);
    }
  }
  end_operation(comm, Operation::combine, epoch, args.senders, &comm.state().combine_ns, args.copied);
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
