// Element types of rows.
#pragma once

#include <cstdint>

#include "common/macros.hpp"

namespace moecomm {

enum class DType : int32_t { float32 = 0, bfloat16 = 1, float16 = 2, float64 = 3 };
inline constexpr int kDTypes = 4;

MOECOMM_HD constexpr int64_t dtype_bytes(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

/// Bytes of a sum or a routing weight. For float64 rows (gradient checks) both are float64, else float32.
MOECOMM_HD constexpr int64_t weight_bytes(DType dtype) { return dtype == DType::float64 ? 8 : 4; }

}  // namespace moecomm
