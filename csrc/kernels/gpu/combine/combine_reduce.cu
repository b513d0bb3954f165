// Combine, owner's side: sums a token's rows on this rank in top-k order in float32 (times their weights),
// rounds or quantises once, and sends the sum to this rank's slot at the token's own rank (its home).
//   - chunks (tokens with one arrival flag) of one home go in order, and homes alternate. A pipe of warps
//     takes a few tokens at a time (sum_pipe.cuh)
//   - sums of short rows, and quantised sums, are made by all warps without a pipe: a warp loads one strip of
//     all rows of a token, sums it in registers, and stores it over the link
//   - when all sums of a chunk have arrived, its arrival flag at the home is set
//
// Gradients of routing weights go first, each to its (token, k) at the home, with one flag for all of them.
// For a home on another node, sums and gradients go in their dtype to a relay: the rank of this node with the
// home's local number. The last blocks of this kernel on the relay send them on (relay_sums.cuh).
#include "kernels/gpu/combine/combine_rows.cuh"
#include "kernels/gpu/combine/sum_pipe.cuh"
#include "kernels/gpu/common/token_order.cuh"
#include "kernels/gpu/internode/relay_sums.cuh"

namespace moecomm::gpu {
namespace {

constexpr int kSteps = 4, kBatch = 2;

/// Sends each other rank the gradients of its tokens' weights; the last block sets their flags. Whole block.
__device__ void send_weight_grads(const Comm& comm, const CombineArguments& args, uint64_t epoch, int blocks,
                                  int32_t* shared_word) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int top_k = comm.top_k(), lane = lane_id(), warps = static_cast<int>(blockDim.x) / 32;
  for (int32_t i = 1; i < comm.ranks(); ++i) {
    const int32_t home = (comm.rank + i) % comm.ranks();
    std::byte* section = comm.bases[comm.relay_rank(home)];
    if (comm.is_local(home))
      section += comm.window.weight_grads[epoch & 1];
    else
      section += comm.window.relay_grads[epoch & 1] +
                 comm.other_of(home) * weights_bytes(comm, comm.window.shape.max_tokens);
    const int64_t tokens = plan.at(plan.fields.tokens)[home];
    for (int64_t token = int64_t{blockIdx.x} * warps + warp_id(); token < tokens;
         token += int64_t{blocks} * warps) {
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
  for (int32_t home = static_cast<int32_t>(threadIdx.x); home < comm.ranks();
       home += static_cast<int32_t>(blockDim.x))
    device::signal(device::sums_flag(comm, home, comm.gradients_number()), epoch);
}

/// Waits until the relay has read earlier chunks for `home` in `chunk`'s memory; false: failed. All lanes.
__device__ bool wait_for_place(const Comm& comm, uint64_t epoch, int32_t home, int64_t tokens,
                               int64_t chunk) {
  const int64_t places = comm.window.partial_tokens / chunk_tokens(tokens);
  bool free = true;
  for (int64_t before = chunk - places * (1 + lane_id()); free && before >= 0; before -= places * 32)
    free = device::wait_until(comm, {comm.relay_rank(home), WaitPhase::credit, Operation::combine, epoch},
                              device::EpochFlag{device::sums_credit_here(comm, home, before), epoch});
  __syncwarp();  // all lanes may write once one lane has found the memory free
  return __all_sync(0xffffffffu, free);
}

/// The work of the blocks that relay for other nodes. `moving`: the plan is valid, so that rows move.
template <DType dtype, WireFormat wire>
__device__ void relay(const Comm& comm, const CombineArguments& args, uint64_t epoch, gpu::RelayBlocks relay,
                      bool moving) {
  if (!gpu::relay_records(comm, Operation::combine, nullptr, epoch, relay)) return;
  if (moving) {
    if (args.weight_grads != nullptr) gpu::relay_weight_grads(comm, args.plan, epoch, relay);
    if (args.rows != nullptr) gpu::relay_sums<dtype, wire>(comm, args.plan, epoch);
  }
  if (relay.block != 0) return;
  __syncthreads();
  device::wait_all_here(comm, Operation::combine, epoch);
}

/// Hands out spans of other ranks' tokens, in the order in which they are summed. All warps of the grid that
/// have an OwnedSpans share the spans. For a home with `tokens` tokens a span has span(tokens) tokens: one
/// chunk or several. All lanes call every function.
template <class Span>
class OwnedSpans {
 public:
  int32_t home = 0;
  int tokens = 0, begin = 0, end = 0;  ///< tokens of the home; range of the span

  __device__ OwnedSpans(const Comm& comm, int32_t* plan_words, const Span& span)
      : comm_(comm),
        tokens_of_(plan_words + comm.plan_fields.tokens),
        span_(span),
        first_tokens_(lane_id() < comm.ranks() ? tokens_of_[lane_id()] : 0),
        claims_(&comm.state().item_next) {
    uint32_t most = 0;
    for (int32_t r = lane_id(); r < comm.ranks(); r += 32) {
      const int32_t its = tokens_of_[r];
      if (r != comm.rank && its > 0) most = max(most, static_cast<uint32_t>((its - 1) / span_(its) + 1));
    }
    claims_end_ = __reduce_max_sync(0xffffffffu, most) * static_cast<uint32_t>(comm.ranks() - 1);
  }
  /// Goes to the next span with tokens; false if there is none.
  __device__ bool next() {
    while (true) {
      const auto claim = static_cast<int32_t>(claims_.take());
      if (static_cast<uint32_t>(claim) >= claims_end_) return false;
      const auto [whose, number] = comm_.turn_of_others(claim);
      home = whose;
      tokens = home < 32 ? __shfl_sync(0xffffffffu, first_tokens_, home) : tokens_of_[home];
      const int size = span_(tokens);
      begin = number * size;
      end = min(begin + size, tokens);
      if (begin < end) return true;
    }
  }

 private:
  const Comm& comm_;
  const int32_t* const tokens_of_;
  const Span span_;
  const int32_t first_tokens_;  ///< tokens of rank lane_id()
  uint32_t claims_end_;
  Claims claims_;
};

/// Makes OwnedSpans hand out spans of one chunk each.
struct ByChunk {
  __device__ int operator()(int tokens) const { return chunk_tokens(tokens); }
};

/// Between nodes: waits until the relay has read any earlier chunks whose memory `chunk` reuses.
/// All lanes; false if the wait fails.
template <Way way>
__device__ bool wait_for_room(const Comm& comm, uint64_t epoch, int32_t home, int64_t tokens, int64_t chunk) {
  return way == Way::whole || comm.is_local(home) || tokens <= comm.window.partial_tokens ||
         wait_for_place(comm, epoch, home, tokens, chunk);
}

/// Makes all sums with all warps, without a pipe: a warp takes one chunk at a time.
template <DType dtype, Way way, WireFormat wire>
__device__ void reduce_by_warps(const Comm& comm, const CombineArguments& args, uint64_t epoch,
                                ReduceMemory& block) {
  const int top_k = comm.top_k();
  int32_t* const sources = block.sources[warp_id()];
  int32_t* const counts = block.counts[warp_id()];
  int32_t* const slots = block.slots[warp_id()];
  float* const weights = block.weights[warp_id()];
  const int64_t row_bytes = comm.window.shape.row_bytes(), scales_at = sum_scales_at(comm, wire);
  const int vectors = static_cast<int>(row_bytes / 16);
  for (OwnedSpans chunks(comm, args.plan, ByChunk{}); chunks.next();) {
    const int32_t home = chunks.home;
    const int chunk = chunks.begin / chunk_tokens(chunks.tokens);
    const uint32_t owned =
        list_owned<kMaxChunk>(comm, args, home, chunks.begin, chunks.end - chunks.begin, sources, weights,
                              counts, slots, [&](int32_t row) { return factor_of(args, row); });
    if (owned == 0) continue;
    if (!wait_for_room<way>(comm, epoch, home, chunks.tokens, chunk)) return;
    const auto places = device::SumPlaces::of<way == Way::whole>(comm, epoch, home, chunks.begin);
    for (uint32_t left = owned; left != 0; left &= left - 1) {
      const int i = __ffs(static_cast<int>(left)) - 1, count = counts[i];
      std::byte* const to = places.at(i, slots[i]);
      const int32_t* const rows = sources + i * top_k;
      const float* const factors = args.weights != nullptr ? weights + i * top_k : nullptr;
      const auto row = [&](int j) { return args.rows + rows[j] * row_bytes; };
      for (int first = 0; first < vectors; first += kSteps * 32) {
        const auto sum = sum_rows<dtype, kSteps, kBatch>(count, row, factors, first, vectors);
        if (way == Way::whole || comm.is_local(home))
          sum.template travelling<wire>(first, vectors).store(to, first, vectors, scales_at);
        else  // the relay adds it to other sums before it leaves the node
          sum.rounded().store(to, first, vectors);
      }
    }
    __syncwarp();
    if (lane_id() == 0) device::signal(device::sums_flag<way == Way::whole>(comm, home, chunk), epoch);
  }
}

/// Makes each span of OwnedSpans one list (tokens that a pipe takes at a time), or one chunk if a chunk is
/// longer. With several nodes a span is a chunk, since each chunk may have to wait for its memory.
struct ByList {
  int top_k;
  int most;  ///< tokens of a list, unless chunks are longer
  bool nodes;
  /// Tokens in a list, for a home with `tokens` tokens: whole chunks, if a list has room for a chunk.
  __device__ int list(int tokens) const {
    return list_tokens(top_k, tokens, max(most, chunk_tokens(tokens)));
  }
  __device__ int operator()(int tokens) const {
    const int chunk = chunk_tokens(tokens);
    return nodes ? chunk : max(chunk, list(tokens));
  }
};

/// A list of tokens of one home. Row numbers are loaded first, and then the factors of these rows.
struct OwnedList {
  int32_t home;
  int tokens, begin;  ///< tokens of the home; the first token of the list
  int count = 0;      ///< 0: the lists have ended
  bool opens;         ///< the list begins a span, and so a chunk
  int32_t slot;       ///< slot of this lane's token; -1: this rank owns no expert of it
  ListedRows rows;
};

/// Cuts the tokens of all other ranks (homes) into lists for a pipe. All lanes call every function.
class OwnedLister {
 public:
  __device__ OwnedLister(const Comm& comm, const CombineArguments& args, const ListMap& map, bool nodes)
      : comm_(comm),
        plan_{args.plan, comm.plan_fields},
        rows_(plan_.at(args.layout == RowLayout::rank ? plan_.fields.rows : plan_.fields.positions)),
        map_(map),
        size_{comm.top_k(), args.reduce_list, nodes},
        spans_(comm, args.plan, size_) {}

  /// Returns the next list, whose row numbers may still be on their way.
  __device__ OwnedList next() {
    OwnedList list{};
    list.rows.fetch(map_, rows_, 0);
    list.slot = -1;
    if (at_ == spans_.end) {
      if (ended_ || !spans_.next()) {
        ended_ = true;
        return list;
      }
      at_ = spans_.begin;
    }
    list.home = spans_.home;
    list.tokens = spans_.tokens;
    list.begin = at_;
    list.opens = at_ == spans_.begin;
    list.count = min(spans_.end - at_, size_.list(list.tokens));
    at_ += list.count;
    const int64_t entry = list.home * comm_.window.shape.max_tokens + list.begin;
    if (lane_id() < list.count) list.slot = plan_.at(plan_.fields.slots)[entry + lane_id()];
    list.rows.fetch(map_, rows_ + entry * map_.each(), list.count);
    return list;
  }

 private:
  const Comm& comm_;
  const PlanView plan_;
  const int32_t* const rows_;
  const ListMap& map_;
  const ByList size_;
  OwnedSpans<ByList> spans_;
  int at_ = 0;
  bool ended_ = false;
};

/// The work of a pipe's listing warp (sum_pipe.cuh): hands the pipe all sums for other ranks.
template <Way way>
__device__ void list_sums(const Comm& comm, const CombineArguments& args, uint64_t epoch, SumLister& sums) {
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const int lane = lane_id();
  const ListMap map(args.layout == RowLayout::rank ? 1 : comm.top_k());
  OwnedLister lister(comm, args, map, way == Way::nodes);
  OwnedList known = lister.next();
  known.rows.weigh(args.weights);
  OwnedList later = lister.next();
  bool owned_before = false;  // an earlier list of the same chunk had a sum
  while (known.count > 0) {
    const OwnedList list = known;
    known = later;
    known.rows.weigh(args.weights);
    later = lister.next();

    const int shift = chunk_shift(list.tokens), first_chunk = list.begin >> shift;
    const uint32_t owned = __ballot_sync(0xffffffffu, list.slot >= 0);
    if (owned != 0 && !wait_for_room<way>(comm, epoch, list.home, list.tokens, first_chunk)) return;
    const auto places = device::SumPlaces::of<way == Way::whole>(comm, epoch, list.home, list.begin);
    SumItem item{};
    if (list.slot >= 0) item.to = places.at(lane, list.slot);

    // In each chunk that ends in the list, the last token with a sum carries the chunk's flag.
    const int chunk = (list.begin + lane) >> shift;
    const int ends = min((chunk + 1) << shift, list.tokens) - list.begin;  // as positions in the list
    const uint32_t above = owned & ~((2u << lane) - 1) & (ends < 32 ? (1u << ends) - 1 : ~0u);
    if (list.slot >= 0 && above == 0 && ends <= list.count)
      item.flag = device::sums_flag<way == Way::whole>(comm, list.home, chunk);
    // If a chunk spans several lists and the last list has no sum, the flag takes an item of its own.
    if (list.opens) owned_before = false;
    const int first_end = min((first_chunk + 1) << shift, list.tokens) - list.begin;
    const bool alone = owned_before && owned == 0 && first_end <= list.count;
    owned_before = owned_before || owned != 0;

    if (owned != 0) {
      ListedToken mine{list.slot >= 0, 0};
      sums.list(map, list.rows, list.count, args.rows, row_bytes, mine);
      sums.hand_over(mine, item);
    }
    if (alone) sums.add_flag(device::sums_flag<way == Way::whole>(comm, list.home, first_chunk));
  }
}

/// The work of a block: it sends weight gradients and sums, or relays for other nodes.
template <DType dtype, Way way, WireFormat wire, bool piped>
__device__ void reduce(const Comm& comm, const CombineArguments& args, std::byte* shared) {
  using Memory = SumMemoryOf<ReduceMemory, piped>;
  auto& block = *reinterpret_cast<Memory*>(shared);
  constexpr bool kNodes = way == Way::nodes;
  if (failed_for_block(comm)) return;
  const uint64_t epoch = comm.state().epoch + 1;
  const PlanView plan{args.plan, comm.plan_fields};
  const uint64_t id = plan.header().id;
  const int blocks = static_cast<int>(gridDim.x) - (kNodes ? args.relay_blocks : 0);
  if constexpr (kNodes) {
    if (!device::wait_sent(comm, Operation::combine, epoch)) return;
    if (static_cast<int>(blockIdx.x) >= blocks) {
      relay<dtype, wire>(comm, args, epoch, {static_cast<int>(blockIdx.x) - blocks, args.relay_blocks},
                         id != 0);
      return;
    }
  }
  if (blockIdx.x == 0)
    signal_start(comm, Operation::combine, epoch, args.plan, args.layout, args.tokens,
                 args.after | (args.rows != nullptr ? kCarriesRows : 0u) |
                     (args.weight_grads != nullptr ? kCarriesWeights : 0u) |
                     (wire != WireFormat::same ? kCarriesQuantised : 0u));
  if (id == 0 || comm.ranks() == 1) return;
  if (args.weight_grads != nullptr) send_weight_grads(comm, args, epoch, blocks, &block.shared_word);
  if (args.rows == nullptr) return;
  if constexpr (piped) {
    run_sum_pipe<dtype, false>(
        comm, block, epoch, args.weights != nullptr,
        [&](SumLister& sums, SumUnit&) { list_sums<way>(comm, args, epoch, sums); },
        args.tokens * (comm.ranks() - 1), blocks);
  } else {
    reduce_by_warps<dtype, way, wire>(comm, args, epoch, block);
  }
}

template <DType dtype, Way way, WireFormat wire, bool piped>
__global__ void __launch_bounds__(piped ? kPipeThreads : kReduceThreads, 1)
    combine_reduce_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  ptx::launch_dependents();
  device::start_clock(comm, Operation::combine);
  reduce<dtype, way, wire, piped>(comm, args, shared);
  device::note_sent(comm, Operation::combine);
}

/// Calls use.operator()<kernel>() with the kernel for the wire format of sums.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, WireFormat wire, bool piped, const Use& use) {
  return with_pipes(shape, wire, piped, [&]<DType dtype, Way way, WireFormat travels, bool pipes>() {
    return use.template operator()<&combine_reduce_kernel<dtype, way, travels, pipes>>(
        pipes ? kPipeThreads : kReduceThreads, sizeof(SumMemoryOf<ReduceMemory, pipes>));
  });
}

}  // namespace

cudaError_t launch_combine_reduce(const Launch& launch, const Comm& comm, const CombineArguments& args) {
  return with_kernel(comm.window.shape, args.wire, args.reduce_list > 0, Start(launch, comm, args));
}

cudaError_t prepare_combine_reduce(const DeviceShape& shape, WireFormat sums) {
  return prepare_pipes(
      sums, [&](WireFormat wire, bool piped) { return with_kernel(shape, wire, piped, Prepare{}); });
}

}  // namespace moecomm::gpu
