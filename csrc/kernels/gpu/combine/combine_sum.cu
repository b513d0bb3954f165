// Combine, at a token's own rank (its home): adds the sums that the owners of the token's experts sent, by
// ascending owner rank in float32, and rounds once.
//   - the listing warps of pipes (sum_pipe.cuh) take this rank's tokens in order and wait until the owners'
//     sums have arrived. Short rows and quantised sums have no pipe: a warp takes part of a token, and waits
//   - a token's slots are in ascending order of owner rank, and are added in that order. This rank's own sum
//     never travels: it is made here when its slot's turn comes, and rounded as if it had travelled
//   - another node has one slot, however many of its ranks own experts of the token. Its sum is the row that
//     came over the network, read from the memory where it arrived
#include "kernels/gpu/combine/combine_rows.cuh"
#include "kernels/gpu/combine/sum_pipe.cuh"
#include "kernels/gpu/common/token_order.cuh"

namespace moecomm::gpu {
namespace {

/// Writes the gradients of routing weights. Those for experts on this rank come with its rows; the others
/// are sent by their owners, and waited for. A (token, k) without expert gets zero. Whole block.
__device__ void collect_weight_grads(const Comm& comm, const CombineArguments& args, uint64_t epoch) {
  const PlanView plan{args.plan, comm.plan_fields};
  bool here = true;
  for (int32_t peer = static_cast<int32_t>(threadIdx.x); here && peer < comm.ranks();
       peer += static_cast<int32_t>(blockDim.x))
    if (peer != comm.rank && comm.is_local(peer))
      here = device::wait_arrival(comm, {peer, WaitPhase::rows, Operation::combine, epoch},
                                  comm.gradients_number());
  const int64_t pieces = WindowShape::pieces(weights_bytes(comm, args.tokens));
  for (int64_t i = threadIdx.x; here && i < pieces * comm.rail.others; i += blockDim.x) {
    const auto other = static_cast<int32_t>(i / pieces);
    here = device::wait_until(
        comm, {comm.rail_rank(other), WaitPhase::rows, Operation::combine, epoch},
        device::HostWord{{comm.rail.arrival(epoch, other, comm.rail.chunks + i % pieces), epoch}});
  }
  if (!__syncthreads_and(here)) return;
  const float* const section = comm.mine<float>(comm.window.weight_grads[epoch & 1]);
  const int top_k = comm.top_k(), lane = lane_id(), warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t token = int64_t{blockIdx.x} * warps + warp_id(); token < args.tokens;
       token += int64_t{gridDim.x} * warps) {
    if (lane >= top_k) continue;
    const int64_t i = token * top_k + lane;
    const int32_t id = plan.at(plan.fields.local_topk_idx)[i];
    const int32_t owner = comm.owner(id);
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

/// Some of this rank's own tokens. Row numbers are loaded first, and then the factors of these rows.
struct HomeList {
  int64_t begin;
  int count = 0;            ///< 0: the lists have ended
  int32_t home;             ///< this lane's token: number of its slots, and from bit 16 this rank's own slot
  int32_t id[kListRounds];  ///< expert id of each (token, k)
  ListedRows rows;
};

/// Cuts this rank's tokens into lists; all pipes of the grid share them. All lanes call every function.
class HomeLister {
 public:
  __device__ HomeLister(const Comm& comm, const CombineArguments& args, const ListMap& ids,
                        const ListMap& rows)
      : comm_(comm),
        args_(args),
        plan_{args.plan, comm.plan_fields},
        ids_(ids),
        rows_(rows),
        most_(list_tokens(comm.top_k(), args.tokens, args.sum_list)),
        claims_(&comm.state().receive_next) {}

  __device__ HomeList next() {
    HomeList list{};
    list.begin = claims_.take() * most_;
    list.count = static_cast<int>(max(min(args_.tokens - list.begin, int64_t{most_}), int64_t{0}));
    if (lane_id() < list.count) list.home = plan_.at(plan_.fields.home)[list.begin + lane_id()];
#pragma unroll
    for (int j = 0; j < kListRounds; ++j) list.id[j] = kNoExpert;
    const int32_t* const ids = plan_.at(plan_.fields.local_topk_idx) + list.begin * comm_.top_k();
    ids_.each_word(list.count, [&](int j, int index) { list.id[j] = ids[index]; });
    const int64_t entry = comm_.rank * comm_.window.shape.max_tokens + list.begin;
    const int64_t field = args_.layout == RowLayout::rank ? plan_.fields.rows : plan_.fields.positions;
    list.rows.fetch(rows_, plan_.at(field) + entry * rows_.each(), list.count);
    return list;
  }

 private:
  const Comm& comm_;
  const CombineArguments& args_;
  const PlanView plan_;
  const ListMap &ids_, &rows_;
  const int most_;
  Claims claims_;
};

/// Waits until the owners on this node have sent a list's sums. All lanes; false if the wait fails.
template <Way way>
__device__ bool wait_for_list(const Comm& comm, const CombineArguments& args, uint64_t epoch,
                              const ListMap& ids, const HomeList& list) {
  const int shift = chunk_shift(args.tokens);
  const int64_t first = list.begin >> shift, last = (list.begin + list.count - 1) >> shift;
  bool here = true;
  for (int32_t ranks = comm.first_rank; ranks < comm.first_rank + comm.local_ranks; ranks += 32)
    for (int64_t chunk = first; chunk <= last; ++chunk) {
      uint32_t senders = 0;
#pragma unroll
      for (int j = 0; j < kListRounds; ++j) {
        if (j * 32 >= list.count * ids.each()) continue;
        const int32_t owner = comm.owner(list.id[j]);
        const bool of_chunk = (list.begin + ids.token(j)) >> shift == chunk;
        if (owner >= ranks && owner < ranks + 32 && owner != comm.rank && of_chunk &&
            (way == Way::whole || comm.is_local(owner)))
          senders |= 1u << (owner - ranks);
      }
      senders = __reduce_or_sync(0xffffffffu, senders);
      const int32_t sender = ranks + lane_id();
      if ((senders >> lane_id() & 1) != 0)
        here = here && device::wait_arrival<device::EagerFlag>(
                           comm, {sender, WaitPhase::rows, Operation::combine, epoch}, chunk);
    }
  __syncwarp();  // all lanes load what one lane has acquired
  return __all_sync(0xffffffffu, here);
}

/// The work of a pipe's listing warp (sum_pipe.cuh): hands the pipe the sums of this rank's tokens.
template <Way way>
__device__ void list_sums(const Comm& comm, const CombineArguments& args, uint64_t epoch, SumLister& sums,
                          SumUnit& unit) {
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const int lane = lane_id();
  const ListMap ids(comm.top_k()), rows(args.layout == RowLayout::rank ? 1 : comm.top_k());
  HomeLister lister(comm, args, ids, rows);
  HomeList known = lister.next();
  known.rows.weigh(args.weights);
  HomeList later = lister.next();
  while (known.count > 0) {
    const HomeList list = known;
    known = later;
    known.rows.weigh(args.weights);
    later = lister.next();

    SumItem item{};
    item.to = args.y + (list.begin + lane) * row_bytes;
    item.slots = static_cast<uint16_t>(list.home & 0xffff);
    item.own_slot = static_cast<uint16_t>(list.home >> 16);
    const bool own = item.own_slot < item.slots;
    ListedToken mine{lane < list.count, item.slots - own};
    sums.list(rows, list.rows, list.count, args.rows, row_bytes, mine);
    if (!wait_for_list<way>(comm, args, epoch, ids, list)) return;
    const int first = mine.first + mine.rows;
    if constexpr (way == Way::whole) {
      if (mine.wanted) {
        const std::byte* const slots = comm.slot_row(comm.own, epoch, list.begin + lane, 0);
        for (int i = 0; i < mine.others; ++i)
          sums.sources()[first + i] = slots + (i + (i >= item.own_slot)) * row_bytes;
      }
    } else {
      for (int i = 0; i < list.count; ++i) {
        if (!find_slots(comm, args, epoch, list.begin + i, row_bytes, unit.slots)) return;
        const int others = __shfl_sync(0xffffffffu, mine.others, i), at = __shfl_sync(0xffffffffu, first, i);
        const int own_slot = __shfl_sync(0xffffffffu, int{item.own_slot}, i);
        if (lane < others) sums.sources()[at + lane] = unit.slots[lane + (lane >= own_slot)];
        __syncwarp();
      }
    }
    sums.hand_over(mine, item);
  }
}

template <DType dtype, Way way, WireFormat wire>
__device__ void sum_tokens(const Comm& comm, const CombineArguments& args, uint64_t epoch, SumMemory& block) {
  // Where tokens are few, more warps share each of them, so that the last warps end sooner.
  const int64_t sharing = int64_t{8} * gridDim.x * kSumWarps / max(args.tokens, int64_t{1});
  const SumParts parts(comm, min(sharing, int64_t{8}));
  Claims claims(&comm.state().receive_next);
  for (int64_t claim = claims.take(); claim < args.tokens * parts.count; claim = claims.take()) {
    const HomePart part = HomePart::list<way>(comm, args, parts, claim, block);
    const auto own = [&](int strip) { return sum_own_rows<dtype, wire>(comm, args, part, strip, block); };
    if (!sum_part<dtype, way, wire, device::EpochFlag>(comm, args, epoch, part, own, block)) return;
  }
}

/// Makes the sums of all tokens. Whole block.
template <DType dtype, Way way, WireFormat wire, bool piped>
__device__ void sum_all(const Comm& comm, const CombineArguments& args, uint64_t epoch, std::byte* shared) {
  auto& block = *reinterpret_cast<SumMemoryOf<SumMemory, piped>*>(shared);
  if constexpr (piped) {
    run_sum_pipe<dtype, true>(
        comm, block, epoch, args.weights != nullptr,
        [&](SumLister& sums, SumUnit& unit) { list_sums<way>(comm, args, epoch, sums, unit); });
  } else {
    sum_tokens<dtype, way, wire>(comm, args, epoch, block);
  }
}

template <DType dtype, Way way, WireFormat wire, bool piped>
__global__ void __launch_bounds__(piped ? kPipeThreads : kSumThreads, 1)
    combine_sum_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  if (!failed_for_block(comm) && agree_on_operation(comm, Operation::combine, epoch)) {
    if (PlanView{args.plan, comm.plan_fields}.header().id == 0) {
      write_nothing(comm, args, blockIdx.x, gridDim.x);
    } else {
      if (args.rows != nullptr) sum_all<dtype, way, wire, piped>(comm, args, epoch, shared);
      if (args.weight_grads != nullptr) collect_weight_grads(comm, args, epoch);
    }
  }
  end_operation(comm, Operation::combine, epoch, true);
}

/// Calls use.operator()<kernel>() with the kernel for the wire format of sums.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, WireFormat wire, bool piped, const Use& use) {
  return with_pipes(shape, wire, piped, [&]<DType dtype, Way way, WireFormat travels, bool pipes>() {
    return use.template operator()<&combine_sum_kernel<dtype, way, travels, pipes>>(
        pipes ? kPipeThreads : kSumThreads, sizeof(SumMemoryOf<SumMemory, pipes>));
  });
}

}  // namespace

cudaError_t launch_combine_sum(const Launch& launch, const Comm& comm, const CombineArguments& args) {
  return with_kernel(comm.window.shape, args.wire, args.sum_list > 0, Start(launch, comm, args));
}

cudaError_t prepare_combine_sum(const DeviceShape& shape, WireFormat sums) {
  return prepare_pipes(
      sums, [&](WireFormat wire, bool piped) { return with_kernel(shape, wire, piped, Prepare{}); });
}

}  // namespace moecomm::gpu
