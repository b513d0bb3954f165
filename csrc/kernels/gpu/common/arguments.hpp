// Arguments of the kernels of one operation, and the functions that launch them. An operation of few tokens
// is "fused": one kernel does it. Other operations take several kernels.
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

inline constexpr int kReduceThreads = kReduceWarps * 32;
/// Warps and threads of a block that makes sums at the tokens' own rank, in a combine without a pipe.
inline constexpr int kSumWarps = 16, kSumThreads = kSumWarps * 32;
/// Threads of a block that makes sums by pipes: kSumUnits groups of eleven warps (sum_pipe.cuh).
inline constexpr int kPipeThreads = kSumUnits * 11 * 32;
static_assert(chunk_tokens(kMostFusedTokens) == 1, "kernels for few tokens have a chunk for each");

/// Arguments of the sending side of a dispatch, or of the backward of a combine, which follows a known plan.
struct SendArguments {
  Operation operation = Operation::none;  ///< dispatch, or redispatch (the backward of a combine)
  const std::byte* x = nullptr;           ///< rows [tokens]
  const std::byte* x_scales = nullptr;    ///< [tokens][scales a row] if x is in the wire format, else null
  const void* ids = nullptr;              ///< dispatch: [tokens][top_k]
  bool wide_ids = false;                  ///< ids are int64, else int32
  const std::byte* weights = nullptr;     ///< dispatch: weight type [tokens][top_k], or null
  int32_t* plan = nullptr;
  int64_t tokens = 0;
  int64_t alignment = 0;
  int64_t capacity = 0;  ///< -1: as many rows as needed
  /// Rank layout: room for (row, expert) pairs; fixed_groups(): rows of each group; -1: as many as needed.
  int64_t positions = 0;
  RowLayout layout = RowLayout::expert;
  uint16_t caller = 0;        ///< dispatch: number of the calling layer; 0: none (SignalRecord)
  uint64_t ticket = 0;        ///< dropless: number of this dispatch, written beside its row count
  int32_t route_blocks = 0;   ///< dispatch: blocks that compute routes
  int32_t plan_block = 0;     ///< dispatch: the block that makes the plan
  bool routes_first = false;  ///< dispatch: rows are sent only after all routes have been sent
  int32_t warps = 0;          ///< a block's shared memory for pieces of rows, in units of kWarpBytes
  int32_t relay_blocks = 0;   ///< further blocks, after those that send or route, which relay for other nodes
  bool later = false;  ///< sends only chunks (tokens with one flag) that reuse memory of earlier chunks
  uint32_t after = 0;  ///< kAfterGivenUp if this rank gave up the previous dispatch, else 0
  /// What is done to rows on their way. The sender quantises them, if x is in the communicator's dtype and
  /// the wire format is another; or the receiver multiplies them.
  RowWork work = RowWork::none;

  MOECOMM_HD bool quantises() const { return work == RowWork::quantised; }
  /// True if every expert's group has `positions` rows, enough for any routing.
  MOECOMM_HD bool fixed_groups() const { return layout == RowLayout::expert && positions >= 0; }
};

/// Arguments of the receiving side of an operation.
struct ReceiveArguments {
  int64_t rows = 0;       ///< rows of the output
  int64_t positions = 0;  ///< room for (row, expert) pairs; in the expert layout equal to `rows`
  std::byte* out = nullptr;
  std::byte* out_scales = nullptr;  ///< if the output is in the wire format: [rows][scales a row]
  std::byte* out_weights = nullptr;
  void* out_ids = nullptr;                 ///< rank layout: [rows][top_k], or null
  int32_t* out_index = nullptr;            ///< rank layout: [positions] output row of each position, or null
  std::byte* out_index_weights = nullptr;  ///< rank layout: weight type [positions], or null
  const std::byte* scales = nullptr;       ///< redispatch: weight type [rows], factors of the rows, or null
  const std::byte* other = nullptr;  ///< redispatch: [rows] for dot products with arriving rows, or null
  std::byte* dots = nullptr;         ///< these dot products: weight type [rows]
  Operation operation = Operation::none;
  const std::byte* x = nullptr;  ///< this rank's own rows, if they do not travel (Comm::own_rows_travel)
  int32_t* plan = nullptr;
  RowLayout layout = RowLayout::expert;
  bool wide_ids = false;  ///< out_ids are int64, else int32
  bool dequantise = false;
  bool offered = false;  ///< dropless: the output may be too small; it then stays unwritten
  int32_t senders = 0;   ///< blocks of a concurrent kernel that still sends, and is waited for; 0: none
};

/// Arguments of a dispatch, or of the backward of a combine, in one kernel.
struct FusedArguments {
  SendArguments send;
  ReceiveArguments receive;
  int32_t team_warps = 0;  ///< warps that share a row
  int32_t senders = 0;     ///< blocks that only send, while the others receive; 0: each does both
  bool again = false;      ///< a second launch: only receives rows for which the first had no room
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
  WireFormat wire = WireFormat::same;  ///< format in which sums travel; same: their dtype
  int32_t relay_blocks = 0;            ///< last blocks of the reducing kernel; they relay for other nodes
  int32_t team_warps = 0;              ///< one kernel: warps that share a sum for another rank
  int32_t parts = 0;                   ///< one kernel: parts that a sum at a token's own rank is divided into
  uint32_t after = 0;                  ///< kAfterGivenUp (see SendArguments), or 0
  /// One kernel: weights [tokens][top_k] of this rank's own tokens, used in place of `weights`; or null.
  const float* token_weights = nullptr;
  bool flags_late = false;  ///< one kernel: sums of own tokens begin before the last sums sent get flags
  int32_t reduce_list = 0, sum_list = 0;  ///< two kernels: see CombineBlocks

  MOECOMM_HD bool weighted() const { return weights != nullptr || token_weights != nullptr; }
};

/// prepare_X loads the kernels of launch_X that a communicator of `shape` may need onto the current device.
/// `wire`: the format in which they send rows.
cudaError_t prepare_dispatch_route(const DeviceShape& shape);
template <WireFormat wire>
cudaError_t prepare_dispatch_send(const DeviceShape& shape);
cudaError_t prepare_dispatch_receive(const DeviceShape& shape);
template <WireFormat wire>
cudaError_t prepare_dispatch_fused(const DeviceShape& shape);
/// `sums`: a format in which sums may travel instead of in their dtype; same: there is none.
cudaError_t prepare_combine_reduce(const DeviceShape& shape, WireFormat sums);
cudaError_t prepare_combine_sum(const DeviceShape& shape, WireFormat sums);
cudaError_t prepare_combine_fused(const DeviceShape& shape, WireFormat sums);
cudaError_t prepare_announce();

/// A launch on a stream. `overlapped`: the kernel may start while the previous one in the stream runs.
/// `paired`: its blocks are in clusters of two, if their number is even.
struct Launch {
  cudaStream_t stream;
  int blocks;
  bool overlapped;
  bool paired;
};

cudaError_t launch_dispatch_route(const Launch& launch, const device::Comm& comm,
                                  const SendArguments& arguments);
/// `wire`: the format in which rows travel; `same`: unchanged.
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
/// Ends a dispatch, or the backward of a combine, of `tokens` tokens whose rows the caller will not receive.
/// `offered`: a receiving kernel was launched already with outputs that might be too small. If they were
/// large enough it has ended the dispatch, and this launch does nothing.
cudaError_t launch_abandon(const Launch& launch, const device::Comm& comm, Operation operation,
                           int64_t tokens, bool offered);
/// Tells all ranks of an error that the host found. `text`: kErrorText bytes in device or pinned memory.
cudaError_t launch_announce(const Launch& launch, const device::Comm& comm, uint32_t error, const char* text);

}  // namespace moecomm::gpu
