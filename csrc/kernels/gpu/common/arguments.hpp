// Arguments of the kernels of one operation, and the functions that launch them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/gpu/common/heuristics.hpp"
#include "layout/control.hpp"
#include "layout/device_window.hpp"

namespace moecomm::device {
struct Comm;
}

namespace moecomm::gpu {

/// Warps of a block of the two sides of a combine.
inline constexpr int kReduceWarps = 16, kReduceThreads = kReduceWarps * 32;
inline constexpr int kSumWarps = 16, kSumThreads = kSumWarps * 32;
/// The same where sums are made by a pipe of warps (sum_pipe.cuh): units of a block, of eleven warps each.
inline constexpr int kPipeThreads = kSumUnits * 11 * 32;
/// Strips of a row that warps sum, of so many times 512 bytes each.
inline constexpr int kSumSteps = 2;
MOECOMM_HD constexpr int sum_strips(int64_t row_bytes) {
  return static_cast<int>((row_bytes + kSumSteps * 512 - 1) / (kSumSteps * 512));
}
static_assert(chunk_tokens(kMostFusedTokens) == 1, "kernels for few tokens have a chunk for each");

/// Rows that go out from their home: a dispatch, or (with a plan that is known) the backward of a combine.
struct SendArguments {
  Operation operation;        ///< dispatch or redispatch
  const std::byte* x;         ///< rows [tokens]
  const std::byte* x_scales;  ///< [tokens][scales a row] where x is in the wire format already, else null
  const void* ids;            ///< dispatch: [tokens][top_k]
  bool wide_ids;              ///< int64 ids
  const std::byte* weights;   ///< dispatch: weight type [tokens][top_k], or null
  int32_t* plan;
  int64_t tokens;
  int64_t alignment;
  int64_t capacity;   ///< -1: as many rows as needed
  int64_t positions;  ///< rank layout: capacity of the expert-major index; -1: as many as needed
  RowLayout layout;
  uint16_t caller;       ///< dispatch: as in SignalRecord
  uint64_t ticket;       ///< dropless: number under which the host waits for the row count
  int32_t route_blocks;  ///< dispatch: blocks that share the routes
  int32_t plan_block;    ///< dispatch: the block that makes the plan
  bool routes_first;     ///< dispatch: rows are sent only after all routes have been sent
  int32_t warps;         ///< of a block that move rows, at most; in a pipe, of so many the memory for stages
  int32_t relay_blocks;  ///< of the grid, behind those that send or route, which relay what other nodes send
  bool later;            ///< only what waits for room, and nothing else: the chunks that take another's place
  uint32_t after = 0;    ///< kAfterGivenUp, or 0
  /// What is done with rows besides: x is in the communicator's dtype and the wire is not, or they are
  /// multiplied where they arrive.
  RowWork work;

  MOECOMM_HD bool quantises() const { return work == RowWork::quantised; }
};

/// Arguments of the side of an operation where rows arrive.
struct ReceiveArguments {
  Operation operation;
  const std::byte* x;  ///< this rank's own rows, where they do not travel
  int32_t* plan;
  int64_t rows;       ///< of the output
  int64_t positions;  ///< in expert-major order; in the expert layout the rows
  std::byte* out;
  std::byte* out_scales;  ///< where rows are handed on in the wire format: [rows][scales a row]
  std::byte* out_weights;
  int32_t* out_ids;              ///< rank layout: [rows][top_k]
  int32_t* out_index;            ///< rank layout: [positions] the row of each, or null
  std::byte* out_index_weights;  ///< rank layout: weight type [positions], or null
  const std::byte* scales;       ///< redispatch: weight type [rows], factors of the rows, or null
  const std::byte* other;  ///< redispatch: rows whose products with the arriving ones are wanted, or null
  std::byte* dots;         ///< weight type [rows]
  RowLayout layout;
  bool dequantise;
  bool offered;     ///< the output may be too small for a dropless dispatch, which is left as it is then
  int32_t senders;  ///< blocks of the kernel that sends later, which may run longer than this one; 0: none
};

/// Arguments of a dispatch, or of the backward of a combine, in one kernel.
struct FusedArguments {
  SendArguments send;
  ReceiveArguments receive;
  int32_t team_warps = 0;  ///< that work on a row
  int32_t senders = 0;     ///< blocks that send, the others receive; 0: each does both
  bool again = false;      ///< only receives what was left, since there was no room for it
};

/// Arguments of both sides of a combine.
struct CombineArguments {
  const std::byte* rows;          ///< [rows], or null
  const std::byte* weights;       ///< weight type [rows], or null
  const std::byte* weight_grads;  ///< weight type [rows] (rank layout: [rows][top_k]), or null
  std::byte* y;                   ///< [tokens]
  std::byte* out_weight_grads;    ///< weight type [tokens][top_k]
  int32_t* plan;
  int64_t tokens;
  RowLayout layout;
  WireFormat wire = WireFormat::same;  ///< in which sums travel, or same
  int32_t relay_blocks = 0;            ///< as in SendArguments
  int32_t team_warps = 0;              ///< as in FusedArguments
  int32_t parts = 0;                   ///< of a token's sum at its home, in one kernel
  uint32_t after = 0;                  ///< as in SendArguments
  bool flags_late = false;             ///< own sums come before the flags of the last that were sent
  int32_t reduce_list = kListTokens, sum_list = kListTokens;  ///< as in CombineBlocks
};

/// True where one block works out the routes of a dispatch of `tokens` tokens, with `words` of shared memory.
MOECOMM_HD inline bool routes_few(const DeviceShape& shape, int64_t tokens, int64_t words) {
  return shape.other_nodes() == 0 && tokens <= kFewRoutes && shape.ranks <= kMostFusedRanks &&
         route_few_words(shape.counts(), tokens) <= words;
}

/// Loads all kernels that a communicator of `shape` may launch onto the current device: those that send rows
/// in `wire`, and so on.
cudaError_t prepare_dispatch_route(const DeviceShape& shape);
template <WireFormat wire>
cudaError_t prepare_dispatch_send(const DeviceShape& shape);
cudaError_t prepare_dispatch_receive(const DeviceShape& shape);
template <WireFormat wire>
cudaError_t prepare_dispatch_fused(const DeviceShape& shape);
/// `sums`: the format in which sums may travel, or same.
cudaError_t prepare_combine_reduce(const DeviceShape& shape, WireFormat sums);
cudaError_t prepare_combine_sum(const DeviceShape& shape, WireFormat sums);
cudaError_t prepare_combine_fused(const DeviceShape& shape, WireFormat sums);
cudaError_t prepare_announce();

/// A launch on a stream. `overlapped`: the kernel may start while the one before it in the stream runs.
/// `paired`: its blocks are in clusters of two, if they are even.
struct Launch {
  cudaStream_t stream;
  int blocks;
  bool overlapped;
  bool paired;
};

cudaError_t launch_dispatch_route(const Launch& launch, const device::Comm& comm,
                                  const SendArguments& arguments);
/// `wire`: same for rows that go out as they are.
template <WireFormat wire>
cudaError_t launch_dispatch_send(const Launch& launch, const device::Comm& comm,
                                 const SendArguments& arguments);
cudaError_t launch_dispatch_receive(const Launch& launch, const device::Comm& comm,
                                    const ReceiveArguments& arguments);
template <WireFormat wire>
cudaError_t launch_dispatch_fused(const Launch& launch, const device::Comm& comm,
                                  const FusedArguments& arguments);
cudaError_t launch_combine_reduce(const Launch& launch, const device::Comm& comm,
                                  const CombineArguments& arguments);
cudaError_t launch_combine_sum(const Launch& launch, const device::Comm& comm,
                               const CombineArguments& arguments);
cudaError_t launch_combine_fused(const Launch& launch, const device::Comm& comm,
                                 const CombineArguments& arguments);
/// Ends a dispatch, or the backward of a combine, of `tokens` tokens that is not received.
/// `offered`: only if it was left for want of room, else it has ended.
cudaError_t launch_abandon(const Launch& launch, const device::Comm& comm, Operation operation,
                           int64_t tokens, bool offered);
/// `text` (kErrorText bytes) in device or pinned memory.
cudaError_t launch_announce(const Launch& launch, const device::Comm& comm, uint32_t error, const char* text);

}  // namespace moecomm::gpu
