// Arithmetic on elements of rows, and the e4m3 wire format. The same rounding as the CPU kernels: products
// are rounded before they are added.
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
template <WireFormat wire>
struct Wire;

template <>
struct Wire<WireFormat::fp8> {
  static constexpr int kScaleColumns = wire_entry(WireFormat::fp8).scale_columns;
  static_assert(wire_entry(WireFormat::fp8).value_bytes == 1);

  /// The scale of a block whose largest magnitude is `amax` (docs/data_formats.md).
  __device__ static float scale(float amax) { return e4m3::scale(amax); }
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

}  // namespace moecomm::gpu
