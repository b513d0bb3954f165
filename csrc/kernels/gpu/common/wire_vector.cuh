// Converts 16 bytes of a row per lane to a wire format and back. Consecutive lanes hold consecutive bytes,
// and the lanes that share a block of columns find its scale together.
#pragma once

#include <type_traits>

#include "kernels/gpu/common/pipe.cuh"
#include "kernels/gpu/common/wire_element.cuh"

namespace moecomm::gpu {

template <DType dtype, WireFormat wire>
struct WireVector {
  using E = Element<dtype>;
  using W = Wire<wire>;
  using Scale = typename W::Scale;
  static constexpr int kBlockLanes = W::kScaleColumns / E::kVector;     ///< lanes that share a scale
  using Values = std::conditional_t<E::kVector == 8, uint2, uint32_t>;  ///< 8-bit values of one vector
  static_assert(kBlockLanes >= 2 && kBlockLanes <= 32 && sizeof(Values) == E::kVector);

  /// Returns the scale of the block of columns that holds `raw`. All lanes; `raw` is zero past the row's end.
  __device__ static Scale block_scale(const uint4& raw) {
    // Bits of magnitudes are in the same order as the magnitudes.
    uint32_t most = __float_as_uint(E::largest(raw));
#pragma unroll
    for (int width = kBlockLanes / 2; width > 0; width /= 2)
      most = max(most, __shfl_xor_sync(0xffffffffu, most, width));
    return W::scale(__uint_as_float(most));
  }
  __device__ static Values write(const uint4& raw, float inverse) {
    float values[E::kVector];
    E::widen(raw, values);
    Values packed;
    auto* const words = reinterpret_cast<uint32_t*>(&packed);
#pragma unroll
    for (int e = 0; e < E::kVector; e += 4) words[e / 4] = W::write(values + e, inverse);
    return packed;
  }
  __device__ static uint4 read(const Values& packed, float factor) {
    float values[E::kVector];
    const auto* const words = reinterpret_cast<const uint32_t*>(&packed);
#pragma unroll
    for (int e = 0; e < E::kVector; e += 4) W::read(words[e / 4], factor, values + e);
    return E::narrow(values);
  }
};

}  // namespace moecomm::gpu
