// Operations on rows: copy, scale, sum, dot. One source (rows_isa.cpp) is compiled for several instruction
// sets; the best one for this processor is chosen once. All give the same bits: products are rounded before
// they are added, sums run in the given order, and dot products have the same partial sums in every set.
#pragma once

#include <cstdint>
#include <vector>

#include "common/dtype.hpp"

namespace moecomm::cpu {

/// Operations for one element type. Rows have `hidden` elements; scales and dots are of the weight type
/// (float32, or float64 for float64 rows). `stream` writes past the caches and needs dst aligned to 16 bytes;
/// call fence() after the last such call.
struct RowVerbs {
  /// dst = round(scale * src)
  void (*scale)(void* dst, const void* src, double scale, int64_t hidden, bool stream);
  /// dst = round(sum of round(scales[i] * src[i])), left to right; scales may be null (1); n >= 1
  void (*sum)(void* dst, const void* const* src, const double* scales, int n, int64_t hidden, bool stream);
  /// sum of a * b: term j goes to partial sum j mod 64; then the 64 are added pairwise
  double (*dot)(const void* a, const void* b, int64_t hidden);
};

struct RowKernels {
  const char* isa;
  RowVerbs verbs[kDTypes];
  /// dst = src for `bytes`, a multiple of 16
  void (*copy)(void* dst, const void* src, int64_t bytes, bool stream);
  /// Makes streamed stores visible before later stores.
  void (*fence)();
};

/// Row kernels that this processor can run, slowest first. row_kernels() returns the last, so the fastest.
const std::vector<const RowKernels*>& available_row_kernels();
const RowKernels& row_kernels();

}  // namespace moecomm::cpu
