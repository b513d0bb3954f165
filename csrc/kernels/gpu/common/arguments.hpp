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

inline constexpr int kReduceThreads = kReduceWarps * 32;
/// Warps per block on the side of a combine that sums at the tokens' home.
inline constexpr int kSumWarps = 16, kSumThreads = kSumWarps * 32;
/// The same where a pipe of warps makes the sums (sum_pipe.cuh): units per block, of eleven warps each.
inline constexpr int kPipeThreads = kSumUnits * 11 * 32;
static_assert(chunk_tokens(kMostFusedTokens) == 1, "kernels for few tokens have a chunk for each");

/// Rows that leave their home: a dispatch, or (along a known plan) the backward of a combine.
struct SendArguments {
  Operation operation = Operation::none;  ///< dispatch or redispatch
  const std::byte* x = nullptr;           ///< rows [tokens]
  const std::byte* x_scales = nullptr;    ///< [tokens][scales a row] of an x in the wire format, or null
  const void* ids = nullptr;              ///< dispatch: [tokens][top_k]
  bool wide_ids = false;                  ///< int64 ids
  const std::byte* weights = nullptr;     ///< dispatch: weight type [tokens][top_k], or null
  int32_t* plan = nullptr;
  int64_t tokens = 0;
  int64_t alignment = 0;
  int64_t capacity = 0;   ///< -1: as many rows as needed
  int64_t positions = 0;  ///< capacity of the rank layout's expert-major index, or (fixed_groups) rows of
                          ///< each expert's group; -1: as many as needed
  RowLayout layout = RowLayout::expert;
  uint16_t caller = 0;        ///< dispatch: as in SignalRecord
  uint64_t ticket = 0;        ///< dropless: ticket number of the host's wait for the row count
  int32_t route_blocks = 0;   ///< dispatch: blocks that share the routes
  int32_t plan_block = 0;     ///< dispatch: the block that makes the plan
  bool routes_first = false;  ///< dispatch: rows are sent only after all routes have been sent
  int32_t warps = 0;          ///< at most so many warps of a block move rows; a pipe has stages for so many
  int32_t relay_blocks = 0;   ///< blocks after those that send or route, which relay rows from other nodes
  bool later = false;         ///< sends only the chunks that wait for memory of earlier ones
  uint32_t after = 0;         ///< kAfterGivenUp, or 0
  /// What else happens to rows: quantisation, where x is in the communicator's dtype and the wire format is
  /// not, or multiplication where they arrive.
  RowWork work = RowWork::none;

  MOECOMM_HD bool quantises() const { return work == RowWork::quantised; }
  /// True where all experts' groups have as many rows, in which any routing fits.
  MOECOMM_HD bool fixed_groups() const { return layout == RowLayout::expert && positions >= 0; }
};

/// Arguments of the receiving side of an operation.
struct ReceiveArguments {
  int64_t rows = 0;       ///< rows of the output
  int64_t positions = 0;  ///< rows in expert-major order; in the expert layout equal to `rows`
  std::byte* out = nullptr;
  std::byte* out_scales = nullptr;  ///< where the output is in the wire format: [rows][scales a row]
  std::byte* out_weights = nullptr;
  void* out_ids = nullptr;                 ///< rank layout: [rows][top_k], or null
  int32_t* out_index = nullptr;            ///< rank layout: [positions] the row of each, or null
  std::byte* out_index_weights = nullptr;  ///< rank layout: weight type [positions], or null
  const std::byte* scales = nullptr;       ///< redispatch: weight type [rows], factors of the rows, or null
  const std::byte* other = nullptr;  ///< redispatch: rows for dot products with the arriving ones, or null
  std::byte* dots = nullptr;         ///< weight type [rows]
  Operation operation = Operation::none;
  const std::byte* x = nullptr;  ///< this rank's own rows, where they do not travel
  int32_t* plan = nullptr;
  RowLayout layout = RowLayout::expert;
  bool wide_ids = false;  ///< out_ids are int64, else int32
  bool dequantise = false;
  bool offered = false;  ///< dropless: the output may be too small, and is then left unwritten
  int32_t senders = 0;   ///< blocks of the kernel that sends later, which may outlast this one; 0: none
};

/// Arguments of a dispatch, or of the backward of a combine, in one kernel.
struct FusedArguments {
  SendArguments send;
  ReceiveArguments receive;
  int32_t team_warps = 0;  ///< warps that share a row
  int32_t senders = 0;     ///< blocks that only send, while the others receive; 0: each does both
  bool again = false;      ///< only receives what had no room before
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
  WireFormat wire = WireFormat::same;  ///< wire format of sums, or same
  int32_t relay_blocks = 0;            ///< as in SendArguments
  int32_t team_warps = 0;              ///< as in FusedArguments
  int32_t parts = 0;                   ///< parts of a token's sum at its home, in one kernel
  uint32_t after = 0;                  ///< as in SendArguments
  /// In one kernel, in place of weights: [tokens][top_k] of this rank's tokens, or null.
  const float* token_weights = nullptr;
  bool flags_late = false;  ///< makes own sums before it sets the flags of the last sent ones
  int32_t reduce_list = kListTokens, sum_list = kListTokens;  ///< as in CombineBlocks

  MOECOMM_HD bool weighted() const { return weights != nullptr || token_weights != nullptr; }
};

/// Loads onto the current device all kernels that a communicator of `shape` may launch: those that send rows
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
/// `wire`: `same` for rows that travel unchanged.
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
/// Ends a dispatch, or the backward of a combine, of `tokens` tokens that the caller does not receive.
/// `offered`: only if the kernel left it for lack of room; else it has ended.
cudaError_t launch_abandon(const Launch& launch, const device::Comm& comm, Operation operation,
                           int64_t tokens, bool offered);
/// `text`: kErrorText bytes in device or pinned memory.
cudaError_t launch_announce(const Launch& launch, const device::Comm& comm, uint32_t error, const char* text);

}  // namespace moecomm::gpu
