// The wire formats of a dispatch's rows. wire_entry() has the properties of each format, which layout, memory
// plan and runtime use; Wire<format> in kernels/gpu/common/wire_element.cuh has the functions that write and
// read its values. A new format needs a name and an entry here, a place in kWireFormats, its functions there,
// the dtypes of its tensors in moecomm/types.py, and its name in CMakeLists.txt, where each format's sending
// kernels are a separate object.
#pragma once

#include <cstdint>

#include "common/macros.hpp"

namespace moecomm {

enum class WireFormat : int32_t {
  same = 0,   ///< rows in their dtype
  fp8 = 1,    ///< e4m3 with one float32 scale for each 128 columns
  mxfp8 = 2,  ///< e4m3 with one power of two, e8m0, for each 32 columns
};

inline constexpr WireFormat kWireFormats[] = {WireFormat::same, WireFormat::fp8, WireFormat::mxfp8};
inline constexpr int kWireFormatCount = sizeof(kWireFormats) / sizeof(kWireFormats[0]);

struct WireEntry {
  const char* name;
  int32_t scale_columns;  ///< columns that share a scale; 0: no scales
  int32_t scale_bytes;
};

MOECOMM_HD constexpr WireEntry wire_entry(WireFormat wire) {
  switch (wire) {
    case WireFormat::fp8:
      return {"fp8", 128, 4};
    case WireFormat::mxfp8:
      return {"mxfp8", 32, 1};
    case WireFormat::same:
      break;
  }
  return {"same", 0, 0};
}

/// Calls use.operator()<wire>(), with `wire` as its template argument, and returns the result.
template <int number = 0, class Use>
auto with_wire(WireFormat wire, const Use& use) {
  if constexpr (number + 1 < kWireFormatCount) {
    if (wire != kWireFormats[number]) return with_wire<number + 1>(wire, use);
  }
  return use.template operator()<kWireFormats[number]>();
}

}  // namespace moecomm
