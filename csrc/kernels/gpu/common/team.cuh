// Teams, in the kernels for few tokens: warps of a block that move or sum one row together.
#pragma once

#include "kernels/gpu/common/pipe.cuh"
#include "ptx/grid.cuh"

namespace moecomm::gpu {

/// The team of the calling thread. Teams of several blocks are numbered so that consecutive numbers are in
/// different blocks: few rows then occupy many SMs.
struct Team {
  int warps;       ///< warps of a team
  int first_warp;  ///< index, in its block, of this team's first warp
  int number;      ///< this team's number; -1: this warp is left over and in no team
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
  /// A barrier among the team; true if `value` is true in all its threads.
  __device__ bool all(bool value) const {
    if (warps > 1) return ptx::barrier_and(1 + first_warp / warps, threads(), value);
    __syncwarp();  // orders memory, which a vote does not guarantee
    return __all_sync(0xffffffffu, value) != 0;
  }
};

}  // namespace moecomm::gpu
