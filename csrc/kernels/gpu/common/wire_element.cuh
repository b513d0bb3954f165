// Arithmetic on elements of rows, and their wire formats. Rounding is that of the CPU kernels: products are
// rounded before they are added.
#pragma once

#include <cuda_fp8.h>

#include "kernels/e4m3.cuh"
#include "kernels/element.cuh"
#include "layout/wire_format.hpp"

namespace moecomm::gpu {

using moecomm::Element;

__device__ inline float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }

/// Operations of a wire format with scales (layout/wire_format.hpp), on four values at a time. `row`: the
/// scale of the whole row, in formats that have one.
template <WireFormat wire>
struct Wire;

/// What the formats with e4m3 values have in common.
template <WireFormat wire>
struct E4m3Wire {
  static constexpr int kScaleColumns = wire_entry(wire).scale_columns, kValueBits = 8;
  static constexpr bool kRowScale = false;
  using Four = uint32_t;  ///< four values
  /// Per-row constants for finding the scales of blocks: none.
  struct Blocks {};
  __device__ static Blocks blocks(float) { return {}; }
  static_assert(wire_entry(wire).value_bits == kValueBits && !wire_entry(wire).row_scale);

  /// Values times `inverse` as e4m3, to nearest even, saturating.
  __device__ static uint32_t write(const float* in, float inverse) { return e4m3::write(in, inverse); }
  /// e4m3 values times `scale`.
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

  /// The scale of a block whose largest magnitude is `amax` (docs/data_formats.md).
  __device__ static Scale scale(float amax, Blocks) { return e4m3::scale(amax); }
  /// The factor by which values are multiplied to quantise them.
  __device__ static float inverse(Scale scale, float) { return e4m3::inverse(scale); }
  /// The factor by which values are multiplied when they are read.
  __device__ static float factor(Scale scale, float) { return scale; }
};

template <>
struct Wire<WireFormat::mxfp8> : E4m3Wire<WireFormat::mxfp8> {
  using Scale = uint8_t;  ///< e8m0: 2^(scale - 127); 255 is NaN
  static_assert(sizeof(Scale) == wire_entry(WireFormat::mxfp8).scale_bytes);

  /// The least power of two that is not below amax / 448; NaN for an infinity.
  __device__ static Scale scale(float amax, Blocks) {
    const uint32_t bits = __float_as_uint(__fdiv_rn(amax, 448.0f));
    const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffff;
    return static_cast<Scale>(exponent + (exponent > 0 ? mantissa > 0 : mantissa > 0x400000));
  }
  /// 0 for NaN.
  __device__ static float inverse(Scale scale, float row) {
    return scale == 255 ? 0.0f : factor(static_cast<Scale>(254 - scale), row);
  }
  __device__ static float factor(Scale scale, float) {
    const uint32_t bits = scale == 0 ? 0x400000u : scale == 255 ? 0x7fffffffu : uint32_t{scale} << 23;
    return __uint_as_float(bits);
  }
};

template <>
struct Wire<WireFormat::nvfp4> {
  static constexpr int kScaleColumns = wire_entry(WireFormat::nvfp4).scale_columns, kValueBits = 4;
  static constexpr bool kRowScale = true;
  using Four = uint16_t;  ///< the first value in the lowest bits
  using Scale = uint8_t;  ///< e4m3, above 0; 0x7f is NaN
  static_assert(wire_entry(WireFormat::nvfp4).value_bits == kValueBits);
  static_assert(wire_entry(WireFormat::nvfp4).row_scale);
  static_assert(sizeof(Scale) == wire_entry(WireFormat::nvfp4).scale_bytes);

  /// The scale of a row whose largest finite magnitude is `amax`: maps it to 448 * 6.
  __device__ static float row_scale(float amax) {
    constexpr float kLargest = 2688.0f,
                    kLeast = 7.888609052210118e-31f;  // 2^-100: lower magnitudes leave enough range
    return fmaxf(__fdiv_rn(amax, kLargest), kLeast);
  }
  /// Per-row constants for finding the scales of blocks.
  struct Blocks {
    float divisor, reciprocal;
  };
  __device__ static Blocks blocks(float row) {
    const float divisor = __fmul_rn(6.0f, row);
    return {divisor, __frcp_rn(divisor)};
  }
  /// The scale of a block whose largest magnitude is `amax`; NaN for NaN.
  __device__ static Scale scale(float amax, const Blocks& blocks) {
    if (isnan(amax)) return 0x7f;
    // amax / (6 row), rounded once: a quotient from the rounded reciprocal, corrected by its remainder
    // (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
    const float near = __fmul_rn(amax, blocks.reciprocal);
    const float quotient = __fmaf_rn(__fmaf_rn(-near, blocks.divisor, amax), blocks.reciprocal, near);
    const auto code = static_cast<Scale>(__nv_cvt_float_to_fp8(quotient, __NV_SATFINITE, __NV_E4M3));
    return code > 0 ? code : 1;
  }
  /// 0 for NaN.
  __device__ static float inverse(Scale scale, float row) {
    return scale == 0x7f ? 0.0f : __frcp_rn(factor(scale, row));
  }
  __device__ static float factor(Scale scale, float row) {
    const __half_raw raw = __nv_cvt_fp8_to_halfraw(scale, __NV_E4M3);
    return __fmul_rn(__half2float(static_cast<__half>(raw)), row);
  }
  /// Values times `inverse` as e2m1, to nearest even, saturating. NaN becomes 0: products that are NaN have
  /// no defined sign on a GPU.
  __device__ static Four write(const float* in, float inverse) {
    uint32_t out = 0;
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      const float value = __fmul_rn(in[i], inverse);
      const float size = fminf(fmaxf(fabsf(value), 0.0f), 6.0f);  // 0 for NaN
      // e2m1 numbers are 1/2 apart below 2, 1 apart below 4, then 2 apart: half of the power of two below
      // `size` (at least 1). Adding 2^22 times that step rounds to it, ties to even, and the lowest bits of
      // the sum then count the steps; the codes of lower ranges are added.
      const uint32_t power = max(__float_as_uint(size), 0x3f800000u) & 0x7f800000u;
      const float sum = __fmaf_rn(__uint_as_float(power), 4194304.0f, size);
      const uint32_t code = (__float_as_uint(sum) - (power + (22u << 23))) + ((power >> 22) - 254);
      out = out << 4 | code | (__float_as_uint(value) >> 28 & 8);
    }
    return static_cast<Four>(out);
  }
  /// e2m1 values times `factor`.
  __device__ static void read(Four in, float factor, float* out) {
    const __half2 unit = __float2half2_rn(16384.0f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Two values, one in each half of a word. A magnitude's three bits, at their place in a half, represent
      // 2^-14 of it.
      const uint32_t both = (uint32_t{in} >> 8 * i & 0xff) * 0x1001;
      const uint32_t bits = (both & 0x00070007) << 9 | (both & 0x00080008) << 12;
      const float2 pair = __half22float2(__hmul2(reinterpret_cast<const __half2&>(bits), unit));
      out[2 * i] = __fmul_rn(pair.x, factor);
      out[2 * i + 1] = __fmul_rn(pair.y, factor);
    }
  }
};

}  // namespace moecomm::gpu
