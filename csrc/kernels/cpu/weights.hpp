// Reads and writes arrays of the weight type: float32, or float64 for float64 rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.hpp"

namespace moecomm::cpu {

inline double weight_at(const std::byte* weights, DType dtype, int64_t index) {
  return dtype == DType::float64 ? reinterpret_cast<const double*>(weights)[index]
                                 : static_cast<double>(reinterpret_cast<const float*>(weights)[index]);
}

inline void set_weight(std::byte* weights, DType dtype, int64_t index, double value) {
  if (dtype == DType::float64)
    reinterpret_cast<double*>(weights)[index] = value;
  else
    reinterpret_cast<float*>(weights)[index] = static_cast<float>(value);
}

}  // namespace moecomm::cpu
