// The arguments of a dispatch that CPU and GPU communicators share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/control.hpp"

namespace moecomm {

struct DispatchArguments {
  const std::byte* x;  ///< [tokens][hidden]
  const void* ids;     ///< [tokens][top_k], int64 if wide_ids, else int32
  bool wide_ids;
  const std::byte* weights;  ///< weight type [tokens][top_k], or null
  int64_t tokens;
  RowLayout layout;
  int64_t alignment;
  int64_t capacity;        ///< -1: as many rows as needed
  int64_t positions = -1;  ///< rank layout: capacity of the expert-major index; expert layout: rows of each
                           ///< expert's group, at least as many as can arrive; -1: as many as needed
  uint16_t caller = 0;     ///< as in SignalRecord
};

}  // namespace moecomm
