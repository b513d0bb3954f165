// Code that the kernels inside a node share: shared memory, the start and end of an operation, and the
// launch.
#pragma once

#include <cuda_runtime.h>

#include "device/channel.cuh"
#include "device/rail.cuh"
#include "kernels/element.cuh"
#include "kernels/gpu/common/arguments.hpp"
#include "kernels/gpu/common/pipe.cuh"

namespace moecomm::gpu {

using device::Comm;
using device::failed_for_block;
using device::failed_for_warp;
using device::PlanView;

/// Cuts `total` bytes into nearly equal pieces of at most `most` bytes; their sizes are multiples of 16.
__device__ inline Pieces pieces_of(int64_t total, int32_t most) {
  const int32_t bytes = static_cast<int32_t>(total), count = (bytes + most - 1) / most;
  const int32_t each = (bytes / 16 + count - 1) / count * 16;
  return {(bytes + each - 1) / each, each, bytes};
}

/// Cuts `total` bytes into pieces of `each` bytes and a rest. If `each` is a multiple of a block of columns
/// with one scale, no such block is split.
__device__ inline Pieces full_pieces(int64_t total, int32_t each) {
  const int32_t bytes = static_cast<int32_t>(total);
  return {(bytes + each - 1) / each, each, bytes};
}

/// Bytes of the routing weights of `tokens` tokens, or of their gradients.
__device__ inline int64_t weights_bytes(const Comm& comm, int64_t tokens) {
  return tokens * comm.top_k() * weight_bytes(comm.window.shape.dtype);
}

/// Returns a token's output row for this lane's k; negative: none. The token has index `entry` in the plan's
/// [ranks][max_tokens]. In the rank layout its only row goes to lane 0. None: kRowElsewhere or kRowDropped.
__device__ inline int32_t planned_row(const PlanView& plan, RowLayout layout, int64_t entry, int top_k) {
  if (layout == RowLayout::rank) return lane_id() == 0 ? plan.at(plan.fields.rows)[entry] : kRowElsewhere;
  return lane_id() < top_k ? plan.at(plan.fields.positions)[entry * top_k + lane_id()] : kRowElsewhere;
}

/// Tells this node's ranks and other nodes that an operation along an existing plan begins. Whole block.
__device__ inline void signal_start(const Comm& comm, Operation operation, uint64_t epoch, int32_t* words,
                                    RowLayout layout, int64_t tokens, uint32_t carries) {
  const PlanView plan{words, comm.plan_fields};
  SignalRecord record{};
  record.epoch = epoch;
  record.operation = operation;
  record.capacity = -1;
  record.plan = plan.header().id;
  record.tokens = static_cast<int32_t>(tokens);
  record.layout = layout;
  record.carries = carries;
  if (threadIdx.x == 0) device::note_phase(comm, operation, Phase::announced);
  device::signal_records(comm, record);
  // In the backward of combine, rows go to other nodes as in the dispatch. In a combine they go the reverse
  // way: a node gets the sums of its tokens, and all gradients of their weights.
  const bool back = operation == Operation::combine;
  for (int32_t other = static_cast<int32_t>(threadIdx.x); other < comm.rail.others;
       other += static_cast<int32_t>(blockDim.x)) {
    int64_t rows = 0, parts = 0;
    if (record.plan != 0) {
      if ((carries & kCarriesRows) != 0)
        rows = plan.at(back ? plan.fields.relay_tokens : plan.fields.node_tokens)[other];
      parts = device::chunks_of(comm.rail, rows);
      if (back && (carries & kCarriesWeights) != 0)
        parts += WindowShape::pieces(weights_bytes(comm, plan.at(plan.fields.tokens)[comm.rail_rank(other)]));
    }
    device::send_head(comm, record, other, rows, parts, false);
  }
}

/// Waits for the records (announcements of an operation) of all ranks and compares them. For operations that
/// make no plan. Whole block; false if the wait fails or records differ. Block 0 reports a difference.
__device__ inline bool agree_on_operation(const Comm& comm, Operation operation, uint64_t epoch) {
  if (!device::wait_records(comm, operation, epoch)) return false;
  __shared__ bool agreed;
  if (threadIdx.x < 32) {
    HostStatus::Verdict verdict;
    const bool same = device::compare_records(comm, epoch, verdict);
    if (threadIdx.x == 0) {
      agreed = same;
      if (!same && blockIdx.x == 0) {
        device::report_verdict(comm, verdict, epoch);
        ptx::store_release_gpu(&comm.state().cancelled, epoch);
      }
    }
  }
  __syncthreads();
  return agreed;
}

/// Counts this block as ended, in a kernel that sends chunks while a concurrent one receives. Whole block.
__device__ inline void end_sending(const Comm& comm) {
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_acq_rel_gpu(&comm.state().send_done, 1);
}

/// Ends an operation; all blocks of its last kernel call it. The last block resets counters and sets the
/// epoch. `clocked`: notes the time of the end. `senders`: blocks that call end_sending; 0: none, since the
/// sending kernel precedes this one in the stream.
__device__ inline void end_operation(const Comm& comm, Operation operation, uint64_t epoch, bool clocked,
                                     int32_t senders = 0) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // The previous kernel, which sends, uses the counters too.
  ptx::wait_for_previous_kernel();
  if (senders > 0)
    device::wait_until(comm, {comm.rank, WaitPhase::blocks, operation, epoch, false},
                       device::BlockCount{&comm.state().send_done, static_cast<uint32_t>(senders)});
  DeviceState& state = comm.state();
  __threadfence();
  if (ptx::add_acq_rel_gpu(&state.receive_done, 1) + 1 != gridDim.x) return;
  state.send_next = 0;
  state.stage_next = 0;
  state.later_next = 0;
  state.receive_next = 0;
  state.item_next = 0;
  state.receive_done = 0;
  state.send_done = 0;
  state.route_counted = 0;
  state.route_done = 0;
  state.bad_id = ~uint64_t{0};
  state.relay_next = 0;
  state.relay_later_next = 0;
  state.relay_summed = 0;
  state.commands_before = state.commands;
  if (clocked) device::note_phase(comm, operation, Phase::ended);
  state.epoch = epoch;
}

/// True if an output has room for the rows of a dispatch.
__device__ inline bool has_room(const PlanHeader& header, const ReceiveArguments& args) {
  return header.needed_rows <= args.rows && header.needed_positions <= args.positions;
}

/// Ends a kernel of a dropless dispatch whose output has turned out too small: rows stay in the window, and
/// the state's `left` says so. Whole block.
__device__ inline void leave_rows(const Comm& comm, uint64_t epoch) {
  if (threadIdx.x != 0) return;
  ptx::wait_for_previous_kernel();  // so that it precedes a later kernel that receives the rows
  if (blockIdx.x + 1 == gridDim.x) comm.state().left = epoch;
}

/// Replaces end_operation for an operation in one kernel, with no counters to reset. The last block to call
/// it sets the epoch: all blocks have then read the old epoch. Whole block, after a barrier; one thread acts.
__device__ inline void pass_epoch(const Comm& comm, uint64_t epoch) {
  if (threadIdx.x != blockDim.x - 1) return;
  DeviceState& state = comm.state();
  if (ptx::add_acq_rel_gpu(&state.begun, 1) + 1 != gridDim.x) return;
  state.begun = 0;
  state.epoch = epoch;
}

/// Loads a kernel onto the current device and raises its limit of shared memory. Call it before the first
/// launch: a launch that loads may wait for running kernels, which may wait for this one.
template <auto kernel>
cudaError_t prepare_kernel(size_t shared_bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

/// Launches `kernel(comm, arguments)`.
template <auto kernel, class Arguments>
cudaError_t launch_kernel(const Launch& launch, int threads, size_t shared_bytes, const Comm& comm,
                          const Arguments& arguments) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.attrs = attributes;
  if (launch.overlapped) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.paired && launch.blocks % 2 == 0) {
    cudaLaunchAttribute& pairs = attributes[config.numAttrs++];
    pairs.id = cudaLaunchAttributeClusterDimension;
    pairs.val.clusterDim.x = 2;
    pairs.val.clusterDim.y = pairs.val.clusterDim.z = 1;
  }
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = launch.stream;
  return cudaLaunchKernelEx(&config, kernel, comm, arguments);
}

/// A function object: operator()<kernel>(threads, bytes of shared memory) loads the kernel.
struct Prepare {
  template <auto kernel>
  cudaError_t operator()(int, size_t shared_bytes) const {
    return prepare_kernel<kernel>(shared_bytes);
  }
};

/// A function object: operator()<kernel>(threads, bytes of shared memory) launches the kernel.
template <class Arguments>
struct Start {
  Start(const Launch& how, const Comm& own, const Arguments& given)
      : launch(how), comm(own), arguments(given) {}
  template <auto kernel>
  cudaError_t operator()(int threads, size_t shared_bytes) const {
    return launch_kernel<kernel>(launch, threads, shared_bytes, comm, arguments);
  }
  const Launch& launch;
  const Comm& comm;
  const Arguments& arguments;
};

/// Whether a kernel is for one node (whole) or for several (nodes). Chosen at compile time, so that kernels
/// for one node contain no code for other nodes.
enum class Way { whole, nodes };

/// Calls use.operator()<way>() with the Way for a shape.
template <class Use>
cudaError_t with_way(const DeviceShape& shape, const Use& use) {
  return shape.other_nodes() > 0 ? use.template operator()<Way::nodes>()
                                 : use.template operator()<Way::whole>();
}

/// Calls use.operator()<dtype, way, wire>() with the dtype and Way of a shape. `wire`: the format in which
/// the sums of a combine travel.
template <class Use>
cudaError_t with_sums(const DeviceShape& shape, WireFormat wire, const Use& use) {
  return with_dtype(shape.dtype, [&]<DType dtype>() {
    return with_way(shape, [&]<Way way>() {
      return wire == WireFormat::fp8 ? use.template operator()<dtype, way, WireFormat::fp8>()
                                     : use.template operator()<dtype, way, WireFormat::same>();
    });
  });
}

/// Calls prepare(WireFormat::same) and, if `sums` is another format, prepare(sums).
template <class PrepareIn>
cudaError_t prepare_sums(WireFormat sums, const PrepareIn& prepare) {
  const cudaError_t error = prepare(WireFormat::same);
  return error != cudaSuccess || sums == WireFormat::same ? error : prepare(sums);
}

/// Calls use.operator()<dtype, wire>() for a shape; returns an error if its rows travel in their dtype.
template <class Use>
cudaError_t with_conversion(const DeviceShape& shape, const Use& use) {
  return with_wire(shape.wire, [&]<WireFormat wire>() {
    if constexpr (wire == WireFormat::same)
      return cudaErrorInvalidValue;
    else
      return with_dtype(shape.dtype, [&]<DType dtype>() { return use.template operator()<dtype, wire>(); });
  });
}

}  // namespace moecomm::gpu
