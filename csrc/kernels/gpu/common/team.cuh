// Teams of warps that share a row, in the kernels for few tokens.
#pragma once

#include "kernels/gpu/common/pipe.cuh"
#include "ptx/grid.cuh"

namespace moecomm::gpu {

/// A thread's team among those of several blocks. Consecutive teams are in different blocks, so that few rows
/// occupy many SMs.
struct Team {
  int warps;       ///< of a team
  int first_warp;  ///< index in its block
  int number;      ///< -1: this warp is in no team, as the warps of a block do not divide evenly
  int count;       ///< teams in all blocks

  /// Divides the warps of block `block`, of `blocks` blocks, into teams.
  __device__ Team(int of_warps, int block, int blocks) : warps(of_warps) {
    const int within = warp_id() / warps, each = static_cast<int>(blockDim.x) / 32 / warps;
    first_warp = within * warps;
    number = within < each ? within * blocks + block : -1;
    count = each * blocks;
  }

  __device__ int thread() const { return static_cast<int>(threadIdx.x) - first_warp * 32; }
  __device__ int threads() const { return warps * 32; }
  /// True in the team's first warp.
  __device__ bool leads() const { return warp_id() == first_warp; }
  /// True in the team's last warp, which has the fewest columns of a row.
  __device__ bool trails() const { return warp_id() == first_warp + warps - 1; }
  /// A barrier among the team.
  __device__ void sync() const { all(true); }
  /// A barrier among the team; returns whether `value` is true for all of it.
  __device__ bool all(bool value) const {
    if (warps > 1) return ptx::barrier_and(1 + first_warp / warps, threads(), value);
    __syncwarp();  // orders memory, which a vote does not guarantee
    return __all_sync(0xffffffffu, value) != 0;
  }
};

}  // namespace moecomm::gpu
