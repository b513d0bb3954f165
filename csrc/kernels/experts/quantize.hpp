// Quantises operands of fp8 products on the device: values in e4m3 with a float32 scale for each row or
// column (the arithmetic of docs/data_formats.md). Launches go to a stream and can be captured; they allocate
// nothing and wait for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.hpp"
#include "common/macros.hpp"

namespace moecomm::experts {

/// The number of columns is a multiple of this; so is a group's number of rows if a product sums over rows.
inline constexpr int32_t kQuantum = 16;

/// Padded number of rows of a group of `count` rows: at least one quantum, also for an empty group.
MOECOMM_HD constexpr int32_t padded_rows(int32_t count) {
  return count <= 0 ? kQuantum : (count + kQuantum - 1) / kQuantum * kQuantum;
}

/// Arguments of a quantisation with one scale per row. Addresses of values are multiples of 16 bytes.
struct QuantizeRows {
  const std::byte* x;        ///< (rows, columns), not of float64
  std::byte* values;         ///< (rows, columns) of e4m3
  float* scales;             ///< (rows)
  const int32_t* real_rows;  ///< if present, rows from *real_rows on are neither read nor written
  int32_t rows;
  int32_t columns;  ///< a multiple of kQuantum
  DType dtype;
};

/// Arguments of a transposing quantisation with one scale per group and column. Addresses of values are
/// multiples of 16 bytes.
///
/// With `ends`, group g has rows ends[g-1] to ends[g]-1 of x (rows, columns). The result is (columns,
/// out_rows), a line for each column of x. A line holds the groups one after the other, each padded with
/// zeros to padded_rows() values. Values past the last group are not written. Example, groups of 3, 0 and 17
/// rows: padded_ends is 16, 32, 64; values 3..15, 16..31 and 49..63 of each line are zero.
///
/// Without `ends`, x is (groups, rows, columns) and the result (groups, columns, rows).
struct QuantizeColumns {
  const std::byte* x;    ///< any dtype but float64
  const int32_t* ends;   ///< (groups) or absent
  std::byte* values;     ///< e4m3
  float* scales;         ///< (groups, columns)
  int32_t* padded_ends;  ///< (groups), output with `ends`: where each group ends in a line of the result
  int32_t groups;        ///< at least 1
  int32_t rows;          ///< rows of x; without ends: rows of a group, a multiple of kQuantum
  int32_t columns;       ///< a multiple of kQuantum
  int32_t out_rows;      ///< with ends: at least the last of padded_ends, a multiple of kQuantum
  DType dtype;
};

cudaError_t launch_quantize_rows(const QuantizeRows& rows, cudaStream_t stream);

cudaError_t launch_quantize_columns(const QuantizeColumns& columns, cudaStream_t stream);

/// Loads the kernels for a dtype onto the current device. Call it before their first launch, which might
/// otherwise wait for running kernels to end.
cudaError_t prepare_quantize(DType dtype);

}  // namespace moecomm::experts
