// Element types on the device: converts 16 bytes of a row to float32, the type of sums, and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.hpp"

namespace moecomm {

template <DType dtype>
struct Element;

template <>
struct Element<DType::float32> {
  static constexpr int kVector = 4;  ///< elements in 16 bytes
  /// Converts the one or two elements in four bytes.
  __device__ static void widen_word(uint32_t word, float* out) { out[0] = __uint_as_float(word); }
  __device__ static void widen(const uint4& raw, float* out) {
    out[0] = __uint_as_float(raw.x);
    out[1] = __uint_as_float(raw.y);
    out[2] = __uint_as_float(raw.z);
    out[3] = __uint_as_float(raw.w);
  }
  __device__ static uint4 narrow(const float* in) {
    return {__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3])};
  }
  /// The largest magnitude in 16 bytes; NaN counts as zero.
  __device__ static float largest(const uint4& raw) {
    float values[kVector], most = 0;
    widen(raw, values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) most = fmaxf(most, fabsf(values[i]));
    return most;
  }
};

/// The largest magnitudes of the pairs' first elements and of their second elements. NaN counts as zero.
template <class Pair>
__device__ inline Pair largest_pair(const uint4& raw) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  Pair most{};
#pragma unroll
  for (int i = 0; i < 4; ++i) most = __hmax2(most, __habs2(reinterpret_cast<const Pair&>(words[i])));
  return most;
}

/// Elements of 16 bits. `Pairs` has the functions that convert two elements.
template <class Pairs>
struct HalfElement : Pairs {
  using Pair = typename Pairs::Pair;
  static constexpr int kVector = 8;
  __device__ static void widen(const uint4& raw, float* out) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) Pairs::widen_word(words[i], out + 2 * i);
  }
  __device__ static uint4 narrow(const float* in) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Pair pair = Pairs::narrow(in[2 * i], in[2 * i + 1]);
      words[i] = reinterpret_cast<const uint32_t&>(pair);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ static float largest(const uint4& raw) {
    const float2 most = Pairs::floats(largest_pair<Pair>(raw));
    return fmaxf(most.x, most.y);
  }
};

struct Bfloat16Pairs {
  using Pair = __nv_bfloat162;
  __device__ static float2 floats(const Pair& pair) { return __bfloat1622float2(pair); }
  __device__ static Pair narrow(float low, float high) { return __floats2bfloat162_rn(low, high); }
  __device__ static void widen_word(uint32_t word, float* out) {
    out[0] = __uint_as_float(word << 16);
    out[1] = __uint_as_float(word & 0xffff0000u);
  }
};

struct Float16Pairs {
  using Pair = __half2;
  __device__ static float2 floats(const Pair& pair) { return __half22float2(pair); }
  __device__ static Pair narrow(float low, float high) { return __floats2half2_rn(low, high); }
  __device__ static void widen_word(uint32_t word, float* out) {
    const float2 pair = floats(reinterpret_cast<const Pair&>(word));
    out[0] = pair.x;
    out[1] = pair.y;
  }
};

template <>
struct Element<DType::bfloat16> : HalfElement<Bfloat16Pairs> {};
template <>
struct Element<DType::float16> : HalfElement<Float16Pairs> {};

/// Calls use.operator()<dtype>() and returns its result. float64, which GPU rows do not have, is an error.
template <class Use>
cudaError_t with_dtype(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::float32:
      return use.template operator()<DType::float32>();
    case DType::bfloat16:
      return use.template operator()<DType::bfloat16>();
    case DType::float16:
      return use.template operator()<DType::float16>();
    case DType::float64:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace moecomm
