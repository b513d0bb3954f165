// Combine, owner's side: a token's rows here are summed in the order of k in float32 (times their weights),
// rounded once, and the sum goes to this rank's slot at the token's home.
//   - warps take items in order: a chunk of one home's tokens, the other ranks in turn
//   - rows are loaded piece by piece into shared memory, several ahead, and added up in registers
//   - when all sums of a chunk are in place, its arrival flag at the home is set
// Gradients of routing weights go first, each to its (token, k) at the home, with one flag for all of them.
#include "kernels/intranode/announcer.cuh"
#include "kernels/intranode/element.cuh"
#include "kernels/intranode/kernel.cuh"
#include "kernels/intranode/sum.cuh"

namespace moecomm::intranode {
namespace {

/// Fills meta[i * top_k ...] with the rows of token i and counts[i] with their number; slots[i] is where its
/// sum goes. Sends the gradients of its weights. Returns the tokens that this rank owns experts of, as bits:
/// their sums go home.
__device__ uint32_t list_rows(const Comm& comm, const CombineArguments& args, uint64_t epoch, int32_t home,
                              int64_t begin, int64_t end, int32_t* meta, int32_t* counts, int32_t* slots) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  uint32_t owned = 0;
  for (int64_t token = begin; token < end; ++token) {
    const int i = static_cast<int>(token - begin);
    const int64_t at = home * comm.window.shape.max_tokens + token;
    const int32_t slot = plan.at(plan.fields.slots)[at];
    if (slot < 0) continue;
    owned |= 1u << i;
    const int32_t row = lane < top_k ? plan.at(plan.fields.rows)[at * top_k + lane] : kRowElsewhere;
    const int count = compact(meta + i * top_k, row, counts_in_sum(args.layout, row));
    if (lane == 0) {
      counts[i] = count;
      slots[i] = slot;
    }
  }
  __syncwarp();
  return owned;
}

/// Sends the gradients of the weights of all other ranks' tokens. Whole block.
__device__ void send_weight_grads(const Comm& comm, const CombineArguments& args, uint64_t epoch,
                                  int32_t* shared_word) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id();
  for (int32_t i = 1; i < comm.ranks(); ++i) {
    const int32_t home = (comm.rank + i) % comm.ranks();
    std::byte* const section = comm.bases[home] + comm.window.weight_grads[epoch & 1];
    const int64_t tokens = plan.at(plan.fields.tokens)[home];
    for (int64_t token = int64_t{blockIdx.x} * kWarps + warp_id(); token < tokens;
         token += int64_t{gridDim.x} * kWarps) {
      if (lane >= top_k) continue;
      const int32_t row =
          plan.at(plan.fields.rows)[(home * comm.window.shape.max_tokens + token) * top_k + lane];
      if (row != kRowElsewhere) put_weight_grad(comm, args, section, token, row);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_sys();
    *shared_word = ptx::add_acq_rel_gpu(&comm.state().route_done, 1) + 1 == gridDim.x;
    ptx::fence_sys();
  }
  __syncthreads();
  if (*shared_word == 0) return;
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); peer < comm.ranks(); peer += kThreads)
    ptx::store_release_sys(
        comm.flag(comm.bases[peer], comm.window.arrived, comm.rank, comm.window.shape.max_chunks()),
        static_cast<uint32_t>(epoch));
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads, 1)
    reduce_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  BlockMemory& block = *reinterpret_cast<BlockMemory*>(shared);
  ptx::launch_dependents();
  if (already_failed(comm)) return;
  const uint64_t epoch = comm.state().epoch + 1;
  const PlanView plan{args.plan, comm.plan_fields};
  const uint64_t id = plan.header().id;
  if (blockIdx.x == 0)
    signal_start(
        comm, Operation::combine, epoch, id, args.layout, args.tokens,
        (args.rows != nullptr ? kCarriesRows : 0u) | (args.weight_grads != nullptr ? kCarriesWeights : 0u));
  if (id == 0 || comm.ranks() == 1) return;
  if (args.weight_grads != nullptr) send_weight_grads(comm, args, epoch, &block.shared_word);
  if (args.rows == nullptr) return;

  int32_t* const meta = block.meta[warp_id()];
  int32_t* const counts = block.counts[warp_id()];
  int32_t* const slots = block.slots[warp_id()];
  const WarpMemory memory = warp_memory(block);
  LoadRing<kSumStages, kSumPiece> ring(memory.pieces, memory.barriers);
  OutRing out(memory.pieces + kSumStages * kSumPiece);
  const Pieces pieces = full_pieces(comm.window.shape.row_bytes());
  Announcer announcer(comm, epoch);
  Claims claims(&comm.state().send_next);

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
    const uint32_t owned = list_rows(comm, args, epoch, home, begin, end, meta, counts, slots);
    if (owned == 0) continue;
    {
      std::byte* const section = comm.bases[home] + comm.window.rows[epoch & 1];
      const auto source = [&](int i, int j) {
        return args.rows + int64_t{meta[i * comm.top_k() + j]} * pieces.total;
      };
      SourceCursor load{owned, counts};
      load.skip_empty();
      for (PieceCursor store{owned}; !store.done(); store.advance(pieces.count)) {
        const int i = store.token();
        RowSum<dtype> sum;
        for (int j = 0; j < counts[i]; ++j) {
          load_ahead(ring, load, pieces, source);
          sum.add_row(ring.wait(), pieces.size(store.piece), args.weights, meta[i * comm.top_k() + j]);
          ring.release();
        }
        std::byte* const result = out.next();
        sum.write(result, pieces.size(store.piece));
        publish_piece();
        store_piece(section + ((begin + i) * comm.window.shape.slots() + slots[i]) * pieces.total +
                        pieces.offset(store.piece),
                    result, pieces.size(store.piece));
        commit_stores();
        announcer.group_committed();
      }
    }
    PeerSet home_only;
    home_only.insert(home);
    announcer.chunk_stored(chunk, home_only);
  }
  announcer.flush();
}

/// Calls use.operator()<kernel>() with the kernel for rows of `dtype`.
template <class Use>
cudaError_t with_kernel(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::float32:
      return use.template operator()<reduce_kernel<DType::float32>>();
    case DType::bfloat16:
      return use.template operator()<reduce_kernel<DType::bfloat16>>();
    case DType::float16:
      return use.template operator()<reduce_kernel<DType::float16>>();
    case DType::float64:
      return use.template operator()<reduce_kernel<DType::float64>>();
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t launch_reduce(const Launch& launch, const Comm& comm, const CombineArguments& args) {
  return with_kernel(comm.window.shape.dtype, [&]<auto kernel>() {
    return launch_kernel<kernel>(launch, sizeof(BlockMemory), comm, args);
  });
}

cudaError_t prepare_reduce(const DeviceShape& shape) { return with_kernel(shape.dtype, PrepareRows{}); }

}  // namespace moecomm::intranode
