// The ring of stages (slots in shared memory, one piece each) through which a pipe of warps moves pieces of
// rows. sum_pipe.cuh adds the pieces up, move_pipe.cuh sends them on.
#pragma once

#include "kernels/gpu/common/kernel.cuh"

namespace moecomm::gpu {

inline constexpr int kMaxStages = 32;

/// How rows are cut into pieces, and how many stages there are.
struct PipeShape {
  Pieces pieces;
  int stage_bytes, stages;

  /// Pieces have at most `most` bytes. There are as many stages as fit `bytes`, but at least three.
  __device__ PipeShape(int64_t row_bytes, int most, int bytes) : pieces(pieces_of(row_bytes, most)) {
    stage_bytes = (pieces.bytes + 127) / 128 * 128;
    stages = min(kMaxStages, max(3, bytes / stage_bytes));
  }
};

/// A position in the ring of stages.
struct StageCursor {
  int stage = 0;
  uint32_t round = 0;
  __device__ void advance(int stages, int by = 1) {
    stage += by;
    if (stage < stages) return;
    stage -= stages;
    ++round;
  }
};

__device__ inline void wait_barrier(uint64_t* barrier, uint32_t phase) {
  while (!ptx::barrier_done(barrier, phase & 1)) {
  }
}

}  // namespace moecomm::gpu
