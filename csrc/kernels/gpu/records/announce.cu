// Two kernels of one block each, for errors. announce_kernel tells all ranks that the arguments here are bad:
// the error goes into this rank's record (what it announces), the text into its window. It waits for all
// records, so that ranks stay in step. abandon_kernel ends an operation whose rows are not received here.
#include "kernels/gpu/common/kernel.cuh"
#include "kernels/gpu/internode/relay_records.cuh"

namespace moecomm::gpu {
namespace {

struct AnnounceArguments {
  uint32_t error;
  const char* text;
};

__global__ void __launch_bounds__(kThreads, 1)
    announce_kernel(const __grid_constant__ Comm comm, const __grid_constant__ AnnounceArguments args) {
  const uint64_t epoch = comm.state().epoch + 1;
  if (!failed_for_block(comm) && (comm.rail.others == 0 || device::wait_sent(comm, Operation::none, epoch))) {
    char* const text = comm.mine<char>(comm.window.error_text[epoch & 1]);
    for (int i = static_cast<int>(threadIdx.x); i < kErrorText; i += kThreads) text[i] = args.text[i];
    __syncthreads();
    if (threadIdx.x == 0) ptx::fence_sys();
    __syncthreads();
    SignalRecord record{};
    record.epoch = epoch;
    record.operation = Operation::none;
    record.error = args.error;
    record.capacity = -1;
    device::signal_records(comm, record);
    for (int32_t other = 0; other < comm.rail.others; ++other) {
      char* const copy = device::outgoing_head(comm, epoch, other).text;
      for (int i = static_cast<int>(threadIdx.x); i < kErrorText; i += kThreads) copy[i] = args.text[i];
      __syncthreads();
      if (threadIdx.x == 0) device::send_head(comm, record, other, 0, 0, true);
    }
    if (comm.rail.others > 0 && gpu::relay_records(comm, Operation::none, nullptr, epoch, {0, 1}))
      device::wait_all_here(comm, Operation::none, epoch);
    // Records are not compared: the host here raises its own error, whatever other ranks announce.
    device::wait_records(comm, Operation::none, epoch);
  }
  end_operation(comm, Operation::none, epoch, false);
}

struct AbandonArguments {
  Operation operation;
  int64_t tokens;
  bool offered;
};

/// Releases peers that wait for this rank in the abandoned operation. Sets arrival flags of chunks that were
/// not sent: owners then read whatever is there. Sets the credits of all chunks: senders then have room.
__device__ void release_peers(const Comm& comm, const AbandonArguments& args, uint64_t epoch) {
  const auto thread = static_cast<int64_t>(threadIdx.x), threads = static_cast<int64_t>(blockDim.x);
  const auto say_arrived = [&](int32_t source, int64_t tokens) {
    const int64_t first = comm.window.chunks_at_once(tokens), left = chunk_count(tokens) - first;
    for (int64_t i = thread; i < left * comm.local_ranks; i += threads)
      device::signal(device::arrival_flag(comm, static_cast<int32_t>(comm.first_rank + i / left), source,
                                          first + i % left),
                     epoch);
  };
  say_arrived(comm.rank, args.tokens);
  if (comm.rail.others > 0 && gpu::wait_forwarded(comm, args.operation, epoch))
    for (int32_t other = 0; other < comm.rail.others; ++other)
      say_arrived(comm.rail_rank(other),
                  __ldcg(&comm.mine<RelayState>(comm.window.relay_state)[other].tokens));
  const int64_t chunks = comm.window.shape.max_chunks();
  for (int64_t i = thread; i < chunks * comm.ranks(); i += threads) {
    const auto source = static_cast<int32_t>(i / chunks);
    device::signal(device::credit_flag(comm, source, i % chunks), epoch);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    abandon_kernel(const __grid_constant__ Comm comm, const __grid_constant__ AbandonArguments args) {
  const DeviceState& state = comm.state();
  const uint64_t epoch = args.offered ? state.left : state.epoch + 1;
  const bool ended = epoch <= state.epoch;  // a fused kernel has ended the operation already
  if (args.offered && epoch != state.epoch && epoch != state.epoch + 1) return;
  if (!failed_for_block(comm)) {
    if (comm.window.stage_tokens < comm.window.shape.max_tokens) release_peers(comm, args, epoch);
    // Every operation waits for all records: the next operation (epoch + 1) writes to where peers read in
    // epoch - 1. Records of a dispatch are not compared here; the block that makes the plan does it.
    if (args.operation == Operation::dispatch)
      device::wait_records(comm, args.operation, epoch, false);
    else
      agree_on_operation(comm, args.operation, epoch);
  }
  if (!ended) end_operation(comm, args.operation, epoch, false);
}

}  // namespace

cudaError_t launch_abandon(const Launch& launch, const Comm& comm, Operation operation, int64_t tokens,
                           bool offered) {
  return launch_kernel<abandon_kernel>(launch, kThreads, 0, comm,
                                       AbandonArguments{operation, tokens, offered});
}

cudaError_t launch_announce(const Launch& launch, const Comm& comm, uint32_t error, const char* text) {
  return launch_kernel<announce_kernel>(launch, kThreads, 0, comm, AnnounceArguments{error, text});
}

cudaError_t prepare_announce() {
  const cudaError_t error = prepare_kernel<announce_kernel>(0);
  return error != cudaSuccess ? error : prepare_kernel<abandon_kernel>(0);
}

}  // namespace moecomm::gpu
