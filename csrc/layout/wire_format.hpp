// The formats in which rows of a dispatch travel, a line of a table each. Layout, memory plan and runtime
// take what they know of a format from its line; how values are written and read is the format's verbs,
// Wire<format> in kernels/gpu/wire_element.cuh. A new format is a line here and its verbs there.
#pragma once

#include <cstdint>

#include "common/macros.hpp"

namespace moecomm {

enum class WireFormat : int32_t {
  same = 0,  ///< in its dtype
  fp8 = 1,   ///< e4m3 with one float32 scale for each 128 columns
};

struct WireEntry {
  int32_t value_bytes;    ///< 0: those of dtype
  int32_t scale_columns;  ///< columns that share a float32 scale, behind the values; 0: there are none
};

MOECOMM_HD constexpr WireEntry wire_entry(WireFormat wire) {
  switch (wire) {
    case WireFormat::fp8:
      return {1, 128};
    case WireFormat::same:
      break;
  }
  return {0, 0};
}

}  // namespace moecomm
