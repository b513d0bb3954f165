// The window: one allocation a rank, the same layout on every rank, described once. All offsets and the total
// size come from the one field list in window.cpp; nobody else computes an offset into a window.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.hpp"
#include "layout/control.hpp"

namespace moecomm {

struct WindowShape {
  int32_t ranks;
  int32_t top_k;
  int64_t hidden;
  int64_t max_tokens;
  DType dtype;

  MOECOMM_HD int64_t row_bytes() const { return hidden * dtype_bytes(dtype); }
  /// Most ranks that one token can have as owners.
  MOECOMM_HD int32_t slots() const { return ranks < top_k ? ranks : top_k; }
};

/// Sections exist twice where their use alternates by epoch; the index is 0 or 1.
struct WindowLayout {
  WindowShape shape;
  int64_t peers;            ///< PeerLines[ranks]
  int64_t owner;            ///< OwnerLines
  int64_t error_text[2];    ///< char[kErrorText]
  int64_t ids[2];           ///< int32[max_tokens][top_k]
  int64_t weights[2];       ///< weight type [max_tokens][top_k]
  int64_t weight_grads[2];  ///< weight type [max_tokens][top_k], written by the owners of the experts
  int64_t rows[2];          ///< [max_tokens] rows
  int64_t slots[2];         ///< [max_tokens][slots] rows, written by the owners of the experts
  int64_t input[2];         ///< [max_tokens] rows, handed out by empty_input; memory is taken on first use
  int64_t committed_bytes;  ///< taken at construction: everything before input
  int64_t total_bytes;

  static WindowLayout make(const WindowShape& shape);
};

struct Section {
  std::string name;
  int64_t offset;
  int64_t bytes;
};

/// The same field list as WindowLayout::make, for people.
std::vector<Section> window_sections(const WindowShape& shape);

}  // namespace moecomm
