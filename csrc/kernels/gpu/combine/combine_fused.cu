// Combine of few tokens: both sides in one kernel, for one node and without gradients of routing weights.
// Ranks that run it can exchange sums with ranks that run combine_reduce.cu and combine_sum.cu.
//   - the first block announces the operation, and checks that all ranks run the same operation
//   - in the other blocks each team of warps takes a token of another rank, sums its rows here, and stores
//     the sum in this rank's slot at the token's own rank (its home). Once the sum has arrived the team sets
//     a flag there. Without token_weights a team waits for no other rank
//   - then each warp takes parts of the sums of this rank's own tokens: it sums a token's rows here, waits
//     for the sums of the ranks that own its other experts, and adds all sums by ascending rank
// Weights of tokens (token_weights), if there are any, go to all ranks first, in words that hold their epoch.
// Every second block sums rows of own tokens before it sends, so that the links and this GPU's memory are
// busy at once. With flags_late the other blocks begin own tokens before they set flags of their last sums.
#include "kernels/gpu/combine/combine_rows.cuh"
#include "kernels/gpu/common/route.cuh"
#include "kernels/gpu/common/team.cuh"

namespace moecomm::gpu {
namespace {

constexpr int kSteps = 2, kBatch = 4;  ///< sums of several rows: 512-byte steps, rows loaded at once
constexpr int kCopySteps = 4;          ///< a sum that is a single row: 512-byte steps
static_assert(kReduceWarps == kSumWarps);

constexpr int kOwnStrips = 8;  ///< strips of rows here that a warp sums before it waits for others' sums

struct FusedMemory {
  ReduceMemory reduce;
  SumMemory sum;
  alignas(16) std::byte own[kSumWarps][kOwnStrips][32 * sizeof(Strip<kSumSteps>)];
};
static_assert(sizeof(FusedMemory) <= kMostShared);

/// Pushes the weights of this rank's tokens to all ranks, in the words that hold routes in a dispatch. Whole
/// block, number `block` of the `blocks` that share the weights.
__device__ void push_weights(const Comm& comm, const CombineArguments& args, uint64_t epoch, int block,
                             int blocks) {
  const int64_t entries = args.tokens * comm.top_k(), step = int64_t{blocks} * blockDim.x;
  for (int64_t i = int64_t{block} * blockDim.x + threadIdx.x; i < entries; i += step)
    push_route(comm, comm.rank, epoch, i, route_word(epoch, 0, args.token_weights[i], 0));
}

/// The arrival of a word from push_weights.
struct WeightArrival {
  static constexpr unsigned kInterval = 32;
  const Route* word;
  uint64_t epoch;
  __device__ bool arrived() const { return EpochNumber::is_of(ptx::load_relaxed_sys_pair(word).high, epoch); }
};

/// Sends a team's share of the sums of other ranks' tokens. All lanes call every function.
template <DType dtype, WireFormat wire>
class SumSender {
 public:
  __device__ SumSender(const Comm& comm, const CombineArguments& args, uint64_t epoch, const Team& team,
                       ReduceMemory& memory)
      : comm_(comm), args_(args), epoch_(epoch), team_(team), memory_(memory) {}

  /// Stores all sums and sets their flags. The last flag is left to announce().
  __device__ void send_all() {
    const PlanView plan{args_.plan, comm_.plan_fields};
    const int32_t* const tokens_of = plan.at(plan.fields.tokens);
    const int32_t others = comm_.ranks() - 1;
    int most_chunks = 0;
    for (int32_t r = 0; r < comm_.ranks(); ++r)
      if (r != comm_.rank) most_chunks = max(most_chunks, static_cast<int>(chunk_count(tokens_of[r])));
    for (int i = team_.number; i < most_chunks * others; i += team_.count) {
      const auto [home, chunk] = comm_.turn_of_others(i);
      const int tokens = tokens_of[home], size = chunk_tokens(tokens);
      const int begin = chunk * size, end = min(begin + size, tokens);
      std::byte* const base = comm_.bases[home];
      announce();
      int sent = kNothing;
      for (int token = begin; token < end; ++token) sent |= send(base, home, token);
      if (sent != kNothing)
        stored_ = reinterpret_cast<uintptr_t>(comm_.arrival(base, comm_.rank, chunk)) | (sent & kLacking);
    }
  }
  /// Sets the last sum's flag after the team has stored the sum; not if a warp of the team lacked weights.
  __device__ void announce() {
    if (stored_ == 0) return;
    const bool whole = team_.all((stored_ & kLacking) == 0);
    if (whole && team_.thread() == 0) device::signal(reinterpret_cast<uint64_t*>(stored_), epoch_);
    stored_ = 0;
  }

 private:
  static constexpr int kNothing = 0, kLacking = 1, kStored = 2;  ///< results of send(), as bits

  /// Waits until `home` has sent the weight of this lane's k, and returns it. `here`: false if that fails.
  __device__ float announced_weight(int32_t home, int token, bool& here) const {
    const Route* const word =
        comm_.routes(comm_.own, home, epoch_) + int64_t{token} * comm_.top_k() + lane_id();
    here = device::wait_until(comm_, {home, WaitPhase::records, Operation::combine, epoch_},
                              WeightArrival{word, epoch_});
    return __uint_as_float(static_cast<uint32_t>(ptx::load_relaxed_sys_pair(word).low >> 32));
  }
  /// Stores a token's sum at its home, and returns kStored. kNothing: this rank owns none of the token's
  /// experts. kLacking: weights did not reach this warp, but may have reached other warps of the team.
  __device__ int send(std::byte* base, int32_t home, int token) {
    const int warp = warp_id();
    bool here = true;
    const auto factor = [&](int32_t row) {
      const bool by_token = args_.token_weights != nullptr && row >= 0;
      return by_token ? announced_weight(home, token, here) : factor_of(args_, row);
    };
    const uint32_t owned =
        list_owned<1>(comm_, args_, home, token, 1, memory_.sources[warp], memory_.weights[warp],
                      memory_.counts[warp], memory_.slots[warp], factor);
    if (owned == 0) return kNothing;
    if (!__all_sync(0xffffffffu, here)) return kLacking;
    std::byte* const to = comm_.slot_row(base, epoch_, token, memory_.slots[warp][0]);
    const int count = memory_.counts[warp][0];
    const float* const factors = args_.weighted() ? memory_.weights[warp] : nullptr;
    const int64_t row_bytes = comm_.window.shape.row_bytes();
    const int vectors = static_cast<int>(row_bytes / 16);
    const auto row = [&](int j) { return args_.rows + memory_.sources[warp][j] * row_bytes; };
    if (wire == WireFormat::same && count == 1 && factors == nullptr) {
      each_strip<kCopySteps>(vectors, [&](int first) {
        Strip<kCopySteps> strip;
        strip.load(row(0), first, vectors);
        strip.store(to, first, vectors);
      });
    } else {
      each_strip<kSteps>(vectors, [&](int first) {
        sum_rows<dtype, kSteps, kBatch>(count, row, factors, first, vectors)
            .template travelling<wire>(first, vectors)
            .store(to, first, vectors, sum_scales_at(comm_, wire));
      });
    }
    return kStored;
  }
  /// Calls use(first vector) for this warp's strips of a row.
  template <int steps, class Use>
  __device__ void each_strip(int vectors, const Use& use) const {
    constexpr int kWidth = steps * 32;
    for (int first = (warp_id() - team_.first_warp) * kWidth; first < vectors; first += team_.warps * kWidth)
      use(first);
  }

  const Comm& comm_;
  const CombineArguments& args_;
  const uint64_t epoch_;
  const Team& team_;
  ReduceMemory& memory_;
  uintptr_t stored_ = 0;  ///< address of the last sum's flag, plus kLacking if weights lacked; 0: none
};

/// Makes a warp's share of the sums of this rank's own tokens: one part of a token's sum after another, and
/// in a part up to kOwnStrips strips at once. All lanes call every function.
template <DType dtype, WireFormat wire>
class HomeSums {
  using Own = SumStrip<dtype, wire, kSumSteps>;
  static_assert(sizeof(Own) <= sizeof(Strip<kSumSteps>));

 public:
  __device__ HomeSums(const Comm& comm, const CombineArguments& args, uint64_t epoch, const Team& warp,
                      FusedMemory& memory)
      : comm_(comm),
        args_(args),
        epoch_(epoch),
        memory_(memory),
        own_(reinterpret_cast<Own*>(memory.own[warp_id()]) + lane_id()),
        parts_(comm, args.parts),
        step_(warp.count),
        number_(warp.number) {}

  /// Sums this rank's rows for the first strips of the next part. Waits for nothing.
  __device__ void begin() {
    if (number_ >= args_.tokens * parts_.count) return;
    part_ = HomePart::list<Way::whole>(comm_, args_, parts_, number_, memory_.sum);
    sum_own();
  }
  /// Makes all sums of this warp; stops at the first failed wait.
  __device__ void finish() {
    bool here = false;
    while (number_ < args_.tokens * parts_.count) {
      if (!here)
        here =
            wait_sums<device::EagerFlag>(comm_, epoch_, part_.token >> chunk_shift(args_.tokens), part_.sum);
      if (!here) return;
      add_up();
      first_ += kOwnStrips;
      if (first_ < part_.strips()) {
        sum_own();
        continue;
      }
      number_ += step_;
      first_ = 0;
      here = false;
      begin();
    }
  }

 private:
  __device__ int end() const { return min(first_ + kOwnStrips, part_.strips()); }
  __device__ void sum_own() {
    if (part_.sum.own_slot >= part_.sum.slots) return;
    for (int strip = first_; strip < end(); ++strip)
      own_[(strip - first_) * 32] = sum_own_rows<dtype, wire>(comm_, args_, part_, strip, memory_.sum);
  }
  /// Adds this rank's sums of the current strips to those of other ranks, and stores the results.
  __device__ void add_up() const {
    const int64_t row_bytes = comm_.window.shape.row_bytes();
    const std::byte* const slots = comm_.slot_row(comm_.own, epoch_, part_.token, 0);
    const auto slot = [&](int s) { return slots + s * row_bytes; };
    const auto own = [&](int strip) { return own_[(strip - first_) * 32]; };
    store_sums<dtype, wire>(comm_, args_, part_, slot, own, first_, end());
  }

  const Comm& comm_;
  const CombineArguments& args_;
  const uint64_t epoch_;
  FusedMemory& memory_;
  Own* const own_;  ///< this lane's columns of the sums of own rows, for strips from first_ on
  const SumParts parts_;
  const int step_;
  int64_t number_;
  HomePart part_{};
  int first_ = 0;
};

/// The work of the first block: it announces the operation and compares the ranks' announcements.
__device__ void lead(const Comm& comm, const CombineArguments& args, WireFormat wire, uint64_t epoch) {
  const bool failed = failed_for_block(comm);
  if (!failed)
    signal_start(comm, Operation::combine, epoch, args.plan, args.layout, args.tokens,
                 args.after | (args.rows != nullptr ? kCarriesRows : 0u) |
                     (args.token_weights != nullptr ? kCarriesTokenWeights : 0u) |
                     (wire != WireFormat::same ? kCarriesQuantised : 0u));
  pass_epoch(comm, epoch);
  if (!failed) agree_on_operation(comm, Operation::combine, epoch);
}

/// The work of the other blocks: they send sums to other ranks, and make the sums of own tokens.
template <DType dtype, WireFormat wire>
__device__ void work(const Comm& comm, const CombineArguments& args, uint64_t epoch, FusedMemory& memory) {
  const int block = static_cast<int>(blockIdx.x) - 1, blocks = static_cast<int>(gridDim.x) - 1;
  const uint64_t id = PlanView{args.plan, comm.plan_fields}.header().id;
  const bool failed = failed_for_block(comm), moves = !failed && id != 0;
  const bool sums = moves && args.rows != nullptr;
  // Parts are given out in reverse order of blocks: the last blocks have sent least.
  HomeSums<dtype, wire> home(comm, args, epoch, Team(1, blocks - 1 - block, blocks), memory);
  const Team team(args.team_warps, block, blocks);
  SumSender<dtype, wire> sender(comm, args, epoch, team, memory.reduce);
  const bool own_first = (block & 1) != 0;
  if (sums && args.token_weights != nullptr) push_weights(comm, args, epoch, block, blocks);
  if (sums && own_first) home.begin();
  if (sums && comm.ranks() > 1) sender.send_all();
  if (own_first || !args.flags_late) sender.announce();
  // Warps do not wait for each other here, since some wait for the links.
  if (lane_id() == 0) device::note_phase(comm, Operation::combine, Phase::sent);
  pass_epoch(comm, epoch);
  if (failed) return;
  if (!moves) return write_nothing(comm, args, block, blocks);
  if (!sums) return;
  if (!own_first) home.begin();
  sender.announce();
  home.finish();
}

template <DType dtype, WireFormat wire>
__global__ void __launch_bounds__(kReduceThreads, 1)
    combine_fused_kernel(const __grid_constant__ Comm comm, const __grid_constant__ CombineArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  const uint64_t epoch = comm.state().epoch + 1;
  device::start_clock(comm, Operation::combine, gridDim.x / 2);  // a middle block: nothing waits for it
  if (blockIdx.x == 0)
    lead(comm, args, wire, epoch);
  else
    work<dtype, wire>(comm, args, epoch, *reinterpret_cast<FusedMemory*>(shared));
  __syncthreads();
  if (threadIdx.x == 0) device::note_phase(comm, Operation::combine, Phase::ended);
}

/// Calls use.operator()<kernel>() with the kernel for the wire format of sums.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, WireFormat wire, const Use& use) {
  return with_dtype(shape.dtype, [&]<DType dtype>() {
    const auto in = [&]<WireFormat travels>() {
      return use.template operator()<&combine_fused_kernel<dtype, travels>>(kReduceThreads,
                                                                            sizeof(FusedMemory));
    };
    return wire == WireFormat::fp8 ? in.template operator()<WireFormat::fp8>()
                                   : in.template operator()<WireFormat::same>();
  });
}

}  // namespace

cudaError_t launch_combine_fused(const Launch& launch, const Comm& comm, const CombineArguments& args) {
  if (comm.window.shape.other_nodes() > 0) return cudaErrorInvalidValue;
  return with_kernel(comm.window.shape, args.wire, Start(launch, comm, args));
}

cudaError_t prepare_combine_fused(const DeviceShape& shape, WireFormat sums) {
  return prepare_sums(sums, [&](WireFormat wire) { return with_kernel(shape, wire, Prepare{}); });
}

}  // namespace moecomm::gpu
