// Programmatic dependent launch, barriers among some of a block's warps, and the clock.
#pragma once

#include <cstdint>

namespace moecomm::ptx {

/// Lets the next kernel of the stream start once all blocks have called this.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

/// Waits for the end of the stream's previous kernel, which this kernel may overlap, and sees its writes.
__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

/// A barrier for `threads` threads of a block (a multiple of 32). `number`, 1 to 15, identifies the barrier.
/// True if `value` is true for all of these threads.
__device__ __forceinline__ bool barrier_and(int number, int threads, bool value) {
  int all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.s32 p, %3, 0; bar.red.and.pred q, %1, %2, p; selp.s32 %0, 1, 0, q; }"
      : "=r"(all)
      : "r"(number), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return all != 0;
}

/// Nanoseconds; ticks about every microsecond.
__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

}  // namespace moecomm::ptx
