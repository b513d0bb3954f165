// The clock of an operation: when it began on this GPU, and when it passed its phases.
#pragma once

#include "device/comm.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"

namespace moecomm::device {

/// Starts the clock of an operation, and adds the duration of the last operation of its kind to clocked_ns.
/// All blocks call it; block `block` does the work. Choose a block for which no other block waits.
__device__ inline void start_clock(const Comm& comm, Operation operation, uint32_t block) {
  if (blockIdx.x != block || threadIdx.x != blockDim.x - 1) return;
  const int kind = clock_of(operation);
  PhaseClock& clock = comm.state().clocks[kind];
  comm.state().clocked_ns[kind] += clock.nanoseconds();
  clock.started = ptx::global_nanoseconds();
}

/// Starts the clock in the last block: all blocks wait for block 0, and the next blocks have the first rows.
__device__ inline void start_clock(const Comm& comm, Operation operation) {
  start_clock(comm, operation, gridDim.x - 1);
}

/// Stores the time at which an operation passes `phase`: now, unless a block has stored a later time.
/// One thread of a block calls it. Returns nothing, so that no thread waits for the atomic operation.
__device__ inline void note_phase(const Comm& comm, Operation operation, Phase phase) {
  uint64_t* const passed = &comm.state().clocks[clock_of(operation)].passed[static_cast<int>(phase)];
  atomicMax(reinterpret_cast<unsigned long long*>(passed),
            static_cast<unsigned long long>(ptx::global_nanoseconds()));
}

/// Stores the time at which this block has sent all its rows or sums (Phase::sent). Whole block.
__device__ inline void note_sent(const Comm& comm, Operation operation) {
  __syncthreads();
  if (threadIdx.x == 0) note_phase(comm, operation, Phase::sent);
}

}  // namespace moecomm::device
