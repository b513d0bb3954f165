// Arithmetic on elements of rows, and the formats in which they travel. The same rounding as the CPU kernels:
// products are rounded before they are added.
#pragma once

#include <cuda_fp8.h>

#include "kernels/e4m3.cuh"
#include "kernels/element.cuh"
#include "layout/wire_format.hpp"

namespace moecomm::gpu {

using moecomm::Element;

__device__ inline float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }

/// The verbs of a format in which values travel with scales (layout/wire_format.hpp), four values at a time.
/// `row`: the scale of the whole row, in a format that has one, else nothing.
template <WireFormat wire>
struct Wire;

/// What the formats have in common whose values are e4m3.
template <WireFormat wire>
struct E4m3Wire {
  static constexpr int kScaleColumns = wire_entry(wire).scale_columns, kValueBits = 8;
  static constexpr bool kRowScale = false;
  using Four = uint32_t;  ///< four values
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
  __device__ static Scale scale(float amax, float) { return e4m3::scale(amax); }
  /// What values are multiplied by to quantise them.
  __device__ static float inverse(Scale scale, float) { return e4m3::inverse(scale); }
  /// What they are multiplied by when they are read.
  __device__ static float factor(Scale scale, float) { return scale; }
};

template <>
struct Wire<WireFormat::mxfp8> : E4m3Wire<WireFormat::mxfp8> {
  using Scale = uint8_t;  ///< e8m0: 2^(scale - 127); 255 is NaN
  static_assert(sizeof(Scale) == wire_entry(WireFormat::mxfp8).scale_bytes);

  /// The least power of two that is no less than amax / 448; NaN for an infinity.
  __device__ static Scale scale(float amax, float) {
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

  /// The scale of a row whose largest finite magnitude is `amax`: it becomes 448 * 6.
  __device__ static float row_scale(float amax) {
    constexpr float kLargest = 2688.0f,
                    kLeast = 7.888609052210118e-31f;  // 2^-100: what is below it, has room
    return fmaxf(__fdiv_rn(amax, kLargest), kLeast);
  }
  /// The scale of a block whose largest magnitude is `amax`: NaN if that is one.
  __device__ static Scale scale(float amax, float row) {
    if (isnan(amax)) return 0x7f;
    const float quotient = __fdiv_rn(amax, __fmul_rn(6.0f, row));
    const auto code = static_cast<Scale>(__nv_cvt_float_to_fp8(quotient, __NV_SATFINITE, __NV_E4M3));
    return code > 0 ? code : 1;
  }
  /// 0 for NaN.
  __device__ static float inverse(Scale scale, float row) {
    return scale == 0x7f ? 0.0f : __fdiv_rn(1.0f, factor(scale, row));
  }
  __device__ static float factor(Scale scale, float row) {
    const __half_raw raw = __nv_cvt_fp8_to_halfraw(scale, __NV_E4M3);
    return __fmul_rn(__half2float(static_cast<__half>(raw)), row);
  }
  /// Values times `inverse` as e2m1, to nearest even, saturating; NaN becomes 0.
  __device__ static Four write(const float* in, float inverse) {
    uint32_t out = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float value = __fmul_rn(in[i], inverse), size = fabsf(value);
      // Borders between 0, 0.5, 1, 1.5, 2, 3, 4 and 6; one that is met goes to the number with an even code.
      const uint32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                            (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
      const uint32_t sign = isnan(value) ? 0 : __float_as_uint(value) >> 31;
      out |= (code | sign << 3) << (4 * i);
    }
    return static_cast<Four>(out);
  }
  /// e2m1 values times `factor`.
  __device__ static void read(Four in, float factor, float* out) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // The three bits of a magnitude, where a half has them, are 2^-14 of it.
      const uint32_t code = in >> (4 * i);
      __half_raw raw;
      raw.x = static_cast<uint16_t>((code & 7) << 9 | (code & 8) << 12);
      out[i] = __fmul_rn(__half2float(static_cast<__half>(raw)) * 16384.0f, factor);
    }
  }
};

}  // namespace moecomm::gpu
