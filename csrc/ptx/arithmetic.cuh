// Approximate arithmetic of the special function unit.
#pragma once

namespace moecomm::ptx {

/// 1/x within one unit in the last place; zero where the result would be subnormal.
__device__ __forceinline__ float reciprocal(float x) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

}  // namespace moecomm::ptx
