// Combine, home's side: what the owners of a token sent is added by ascending owner rank in float32 and
// rounded once.
//   - warps take chunks of this rank's tokens in order, and wait until their owners' sums have arrived
//   - a slot is the number of an owner among the token's owners in ascending order, so slots are added in
//   their order;
//     this rank's own share never travels: it is summed here at its turn, and rounded as if it had
#include "kernels/intranode/announcer.cuh"
#include "kernels/intranode/element.cuh"
#include "kernels/intranode/kernel.cuh"
#include "kernels/intranode/sum.cuh"
#include "layout/routing.hpp"

namespace moecomm::intranode {
namespace {

/// A source of a token's sum: an own row, or a slot as -1 - slot.
__device__ int32_t slot_source(int32_t slot) { return -1 - slot; }

/// Fills meta[i * stride ...] with the sources of token i in order and counts[i] with their number. `owners`
/// gets the ranks whose sums the chunk needs. Gradients of the weights whose experts are here go straight to
/// the result.
__device__ void list_sources(const Comm& comm, const CombineArguments& args, int64_t begin, int64_t end,
                             int stride, int32_t* meta, int32_t* counts, PeerSet& owners) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  for (int64_t token = begin; token < end; ++token) {
    const int i = static_cast<int>(token - begin);
    const int32_t home = plan.at(plan.fields.home)[token];
    const int32_t slots = home & 0xffff, own_slot = home >> 16 & 0xffff;
    const int32_t id = lane < top_k ? plan.at(plan.fields.home_ids)[token * top_k + lane] : kNoExpert;
    const int32_t owner = id < 0 ? -1 : id / comm.local_experts;
    for (uint32_t left = __ballot_sync(0xffffffffu, owner >= 0 && owner != comm.rank); left != 0;
         left &= left - 1)
      owners.insert(__shfl_sync(0xffffffffu, owner, __ffs(static_cast<int>(left)) - 1));
    int32_t row = kRowElsewhere;
    if (owner == comm.rank)
      row = plan.at(plan.fields.rows)[(comm.rank * comm.window.shape.max_tokens + token) * top_k + lane];
    const bool keep = counts_in_sum(args.layout, row);
    const int own_rows = __popc(__ballot_sync(0xffffffffu, keep));
    const bool has_own = own_slot != kNoOwnSlot;
    int32_t* const list = meta + i * stride;
    // Slots below the own one, the own rows, slots above it.
    if (lane < slots && !(has_own && lane == own_slot))
      list[has_own && lane > own_slot ? lane - 1 + own_rows : lane] = slot_source(lane);
    compact(list + own_slot, row, keep);
    if (lane == 0) counts[i] = has_own ? slots - 1 + own_rows : slots;
  }
  __syncwarp();
}

/// Waits for the sums of all `owners` of a chunk. All lanes; false if it waits in vain.
__device__ bool wait_sums(const Comm& comm, uint64_t epoch, int64_t chunk, const PeerSet& owners) {
  bool here = true;
  owners.for_each([&](int32_t owner) {
    here =
        here && device::wait_until(comm, {owner, WaitPhase::rows, Operation::combine, epoch},
                                   device::EpochFlag{comm.flag(comm.own, comm.window.arrived, owner, chunk),
                                                     static_cast<uint32_t>(epoch)});
  });
  here = __all_sync(0xffffffffu, here);
  open_for_loads();
  return here;
}

/// Gradients of the weights: those of experts here, those that owners sent, and zero where a token names no
/// expert. Whole block.
__device__ void collect_weight_grads(const Comm& comm, const CombineArguments& args, uint64_t epoch) {
  const PlanView plan{args.plan, comm.plan_fields};
  bool here = true;
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); here && peer < comm.ranks(); peer += kThreads)
    if (peer != comm.rank)
      here = device::wait_until(
          comm, {peer, WaitPhase::rows, Operation::combine, epoch},
          device::EpochFlag{comm.flag(comm.own, comm.window.arrived, peer, comm.window.shape.max_chunks()),
                            static_cast<uint32_t>(epoch)});
  if (!__syncthreads_and(here)) return;
  const std::byte* const section = comm.own + comm.window.weight_grads[epoch & 1];
  const int top_k = comm.top_k(), lane = lane_id();
  for (int64_t token = int64_t{blockIdx.x} * kWarps + warp_id(); token < args.tokens;
       token += int64_t{gridDim.x} * kWarps) {
    if (lane >= top_k) continue;
    const int64_t i = token * top_k + lane;
    const int32_t id = plan.at(plan.fields.home_ids)[i];
    if (id >= 0 && id / comm.local_experts == comm.rank)
      put_weight_grad(
          comm, args, args.out_weight_grads, token,
          plan.at(plan.fields.rows)[(comm.rank * comm.window.shape.max_tokens + token) * top_k + lane]);
    else if (comm.window.shape.dtype == DType::float64)
      reinterpret_cast<double*>(args.out_weight_grads)[i] =
          id < 0 ? 0.0 : __ldcg(reinterpret_cast<const double*>(section) + i);
    else
      reinterpret_cast<float*>(args.out_weight_grads)[i] =
          id < 0 ? 0.0f : __ldcg(reinterpret_cast<const float*>(section) + i);
  }
}

/// The result where the dispatch of the plan has failed: zero.
__device__ void write_nothing(const Comm& comm, const CombineArguments& args) {
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x, stride = int64_t{gridDim.x} * kThreads;
  if (args.y != nullptr)
    for (int64_t i = first; i < args.tokens * comm.window.shape.row_bytes() / 16; i += stride)
      reinterpret_cast<uint4*>(args.y)[i] = {};
  if (args.out_weight_grads != nullptr)
    for (int64_t i = first; i < args.tokens * comm.top_k() * weight_bytes(comm.window.shape.dtype) / 4;
         i += stride)
      reinterpret_cast<uint32_t*>(args.out_weight_grads)[i] = 0;
}

template <DType dtype>
__device__ void sum_chunks(const Comm& comm, const CombineArguments& args, uint64_t epoch,
                           BlockMemory& block) {
  int32_t* const meta = block.meta[warp_id()];
  int32_t* const counts = block.counts[warp_id()];
  const int stride = comm.top_k();
  const WarpMemory memory = warp_memory(block);
  LoadRing<kSumStages, kSumPiece> ring(memory.pieces, memory.barriers);
  OutRing out(memory.pieces + kSumStages * kSumPiece);
  const Pieces pieces = full_pieces(comm.window.shape.row_bytes());
  const int64_t slots = comm.window.shape.slots();
  const std::byte* const section = comm.own + comm.window.rows[epoch & 1];
  Claims claims(&comm.state().receive_next);

  const int64_t chunks = chunk_count(args.tokens), size = chunk_tokens(args.tokens);
  for (int64_t chunk = claims.take(); chunk < chunks; chunk = claims.take()) {
    const int64_t begin = chunk * size, end = min(begin + size, args.tokens);
    PeerSet owners;
    list_sources(comm, args, begin, end, stride, meta, counts, owners);
    if (!wait_sums(comm, epoch, chunk, owners)) break;
    const auto source = [&](int i, int j) {
      const int32_t from = meta[i * stride + j];
      return from >= 0 ? args.rows + int64_t{from} * pieces.total
                       : section + ((begin + i) * slots + (-1 - from)) * pieces.total;
    };
    const uint32_t all = (1u << (end - begin)) - 1;
    SourceCursor load{all, counts};
    load.skip_empty();
    for (PieceCursor store{all}; !store.done(); store.advance(pieces.count)) {
      const int i = store.token(), count = counts[i];
      const uint32_t bytes = pieces.size(store.piece);
      RowSum<dtype> total, own;
      for (int j = 0; j < count; ++j) {
        load_ahead(ring, load, pieces, source);
        const int32_t from = meta[i * stride + j];
        const std::byte* const piece = ring.wait();
        if (from < 0) {
          total.add_row(piece, bytes, nullptr, 0);
        } else {
          own.add_row(piece, bytes, args.weights, from);
          if (j + 1 == count || meta[i * stride + j + 1] < 0) total.add_rounded(own, bytes);
        }
        ring.release();
      }
      std::byte* const result = out.next();
      total.write(result, bytes);
      publish_piece();
      store_piece(args.y + (begin + i) * pieces.total + pieces.offset(store.piece), result, bytes);
      commit_stores();
    }
  }
  wait_stores<0>();
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads, 1)
    sum_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  if (!already_failed(comm) && meet(comm, Operation::combine, epoch)) {
    if (PlanView{args.plan, comm.plan_fields}.header().id == 0) {
      write_nothing(comm, args);
    } else {
      if (args.rows != nullptr) sum_chunks<dtype>(comm, args, epoch, *reinterpret_cast<BlockMemory*>(shared));
      if (args.weight_grads != nullptr) collect_weight_grads(comm, args, epoch);
    }
  }
  end_operation(comm, epoch);
}

/// Calls use.operator()<kernel>() with the kernel for rows of `dtype`.
template <class Use>
cudaError_t with_kernel(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::float32:
      return use.template operator()<sum_kernel<DType::float32>>();
    case DType::bfloat16:
      return use.template operator()<sum_kernel<DType::bfloat16>>();
    case DType::float16:
      return use.template operator()<sum_kernel<DType::float16>>();
    case DType::float64:
      return use.template operator()<sum_kernel<DType::float64>>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_sum(const Launch& launch, const Comm& comm, const CombineArguments& args) {
  return with_kernel(comm.window.shape.dtype, [&]<auto kernel>() {
    return launch_kernel<kernel>(launch, sizeof(BlockMemory), comm, args);
  });
}

cudaError_t prepare_sum(const DeviceShape& shape) { return with_kernel(shape.dtype, PrepareRows{}); }

}  // namespace moecomm::intranode
