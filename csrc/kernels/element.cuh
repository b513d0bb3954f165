// Element types on the device: 16 bytes of a row to float32, in which sums are made, and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/dtype.hpp"

namespace moecomm {

template <DType dtype>
struct Element;

template <>
struct Element<DType::float32> {
  static constexpr int kVector = 4;  ///< elements in 16 bytes
  __device__ static void widen(const uint4& raw, float* out) {
    out[0] = __uint_as_float(raw.x);
    out[1] = __uint_as_float(raw.y);
    out[2] = __uint_as_float(raw.z);
    out[3] = __uint_as_float(raw.w);
  }
  __device__ static uint4 narrow(const float* in) {
    return {__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3])};
  }
  /// The largest magnitude, of numbers: NaN counts as zero.
  __device__ static float largest(const uint4& raw) {
    float values[kVector], most = 0;
    widen(raw, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) most = fmaxf(most, fabsf(values[i]));
    return most;
  }
  /// The largest magnitude, or NaN if there is one.
  __device__ static float largest_or_nan(const uint4& raw) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t most = 0;  // bits of magnitudes are in their order, and NaN behind all
#pragma unroll
    for (int i = 0; i < kVector; ++i) most = max(most, words[i] & 0x7fffffffu);
    return __uint_as_float(most);
  }
};

/// The larger magnitudes of two pairs, place by place. NaN counts as zero.
struct LargerPair {
  template <class Pair>
  __device__ Pair operator()(const Pair& a, const Pair& b) const {
    return __hmax2(a, b);
  }
};
/// The same, or NaN where there is one.
struct LargerPairOrNan {
  template <class Pair>
  __device__ Pair operator()(const Pair& a, const Pair& b) const {
    return __hmax2_nan(a, b);
  }
};
/// The largest magnitudes in a vector of pairs, place by place, by one of these.
template <class Pair, class Larger>
__device__ inline Pair largest_pair(const uint4& raw, const Larger& larger) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  Pair most{};
#pragma unroll
  for (int i = 0; i < 4; ++i) most = larger(most, __habs2(reinterpret_cast<const Pair&>(words[i])));
  return most;
}
/// The larger of two magnitudes, or NaN if there is one.
__device__ inline float larger_or_nan(const float2& pair) {
  return __uint_as_float(max(__float_as_uint(pair.x), __float_as_uint(pair.y)) & 0x7fffffffu);
}

template <>
struct Element<DType::bfloat16> {
  static constexpr int kVector = 8;
  __device__ static void widen(const uint4& raw, float* out) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 narrow(const float* in) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ static float largest(const uint4& raw) {
    const float2 most = __bfloat1622float2(largest_pair<__nv_bfloat162>(raw, LargerPair{}));
    return fmaxf(most.x, most.y);
  }
  __device__ static float largest_or_nan(const uint4& raw) {
    return larger_or_nan(__bfloat1622float2(largest_pair<__nv_bfloat162>(raw, LargerPairOrNan{})));
  }
};

template <>
struct Element<DType::float16> {
  static constexpr int kVector = 8;
  __device__ static void widen(const uint4& raw, float* out) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(words[i]));
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
  __device__ static uint4 narrow(const float* in) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 pair = __floats2half2_rn(in[2 * i], in[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ static float largest(const uint4& raw) {
    const float2 most = __half22float2(largest_pair<__half2>(raw, LargerPair{}));
    return fmaxf(most.x, most.y);
  }
  __device__ static float largest_or_nan(const uint4& raw) {
    return larger_or_nan(__half22float2(largest_pair<__half2>(raw, LargerPairOrNan{})));
  }
};

}  // namespace moecomm
