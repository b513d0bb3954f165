// Arithmetic on elements of rows, and conversion to and from wire formats. Results are rounded as in the CPU
// kernels: products are rounded before they are added.
#pragma once

#include <cuda_fp8.h>

#include "kernels/element.cuh"
#include "layout/wire_format.hpp"

namespace moecomm::gpu {

using moecomm::Element;

__device__ inline float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }

/// Operations of a wire format with scales (layout/wire_format.hpp), on four values at a time.
template <WireFormat wire>
struct Wire;

/// What the wire formats with e4m3 values have in common.
template <WireFormat wire>
struct E4m3Wire {
  static constexpr int kScaleColumns = wire_entry(wire).scale_columns;

  /// Converts four values times `inverse` to e4m3, to nearest even, saturating. NaN stays NaN.
  __device__ static uint32_t write(const float* in, float inverse) {
    uint32_t out = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair = {__fmul_rn(in[2 * i], inverse), __fmul_rn(in[2 * i + 1], inverse)};
      out |= static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << (16 * i);
    }
    return out;
  }
  /// Converts four e4m3 values to float32, times `scale`.
  __device__ static void read(uint32_t in, float scale, float* out) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __half2_raw raw =
          __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(in >> (16 * i)), __NV_E4M3);
      const float2 pair = __half22float2(static_cast<__half2>(raw));
      out[2 * i] = __fmul_rn(pair.x, scale);
      out[2 * i + 1] = __fmul_rn(pair.y, scale);
    }
  }
};

template <>
struct Wire<WireFormat::fp8> : E4m3Wire<WireFormat::fp8> {
  using Scale = float;
  static_assert(sizeof(Scale) == wire_entry(WireFormat::fp8).scale_bytes);

  /// The scale of a block whose largest magnitude is `amax` (docs/data_formats.md); never zero.
  __device__ static Scale scale(float amax) {
    constexpr float kLargest = 448.0f;         // of e4m3
    constexpr float kLeast = 1.17549435e-38f;  // the smallest normal float
    return fmaxf(__fdiv_rn(amax, kLargest), kLeast);
  }
  /// The factor by which values are multiplied to quantise them.
  __device__ static float inverse(Scale scale) { return __fdiv_rn(1.0f, scale); }
  /// The factor by which values are multiplied when they are read.
  __device__ static float factor(Scale scale) { return scale; }
};

template <>
struct Wire<WireFormat::mxfp8> : E4m3Wire<WireFormat::mxfp8> {
  using Scale = uint8_t;  ///< e8m0: 2^(scale - 127); 255 is NaN
  static_assert(sizeof(Scale) == wire_entry(WireFormat::mxfp8).scale_bytes);

  /// The least power of two that is not below amax / 448; NaN for an infinity.
  __device__ static Scale scale(float amax) {
    const uint32_t bits = __float_as_uint(__fdiv_rn(amax, 448.0f));
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffff;
    return static_cast<Scale>(exponent + (exponent > 0 ? mantissa > 0 : mantissa > 0x400000));
  }
  /// The factor by which values are multiplied to quantise them; 0 for a scale of NaN.
  __device__ static float inverse(Scale scale) {
    return scale == 255 ? 0.0f : factor(static_cast<Scale>(254 - scale));
  }
  __device__ static float factor(Scale scale) {
    const uint32_t bits = scale == 0 ? 0x400000u : scale == 255 ? 0x7fffffffu : uint32_t{scale} << 23;
    return __uint_as_float(bits);
  }
};

}  // namespace moecomm::gpu
