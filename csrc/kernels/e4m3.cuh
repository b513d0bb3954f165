// Converts float32 to e4m3 with a float32 scale, for all quantisation, as docs/data_formats.md says.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

namespace moecomm::e4m3 {

/// The scale of values whose largest magnitude is `amax`; never zero.
__device__ inline float scale(float amax) {
  constexpr float kLargest = 448.0f, kLeast = 1.17549435e-38f;  // the largest e4m3; the smallest normal float
  return fmaxf(__fdiv_rn(amax, kLargest), kLeast);
}

/// The factor by which values are multiplied to quantise them with `scale`: 1 / scale.
__device__ inline float inverse(float scale) { return __fdiv_rn(1.0f, scale); }

/// Returns four values, each times `inverse`, in e4m3: rounded to nearest even, saturating. NaN stays NaN.
__device__ inline uint32_t write(const float* in, float inverse) {
  uint32_t out = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = {__fmul_rn(in[2 * i], inverse), __fmul_rn(in[2 * i + 1], inverse)};
    out |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << (16 * i);
  }
  return out;
}

}  // namespace moecomm::e4m3
