// The owners of a token: pure functions of its expert ids. Also divisors and sizes for host and kernels.
//
// Example: 8 experts on 4 ranks (2 a rank), ids {6, 1, 7, -1}: owners are ranks 3, 0, 3 and none. The token
// travels to 2 ranks; of its combine slots, slot 0 belongs to rank 0 and slot 1 to rank 3 (ascending ranks).
#pragma once

#include <cstdint>

#include "common/macros.hpp"

namespace moecomm {

inline constexpr int32_t kNoExpert = -1;

constexpr int32_t expert_owner(int32_t expert, int32_t local_experts) {
  return expert < 0 ? -1 : expert / local_experts;
}

/// Divides numbers from 0 to 2^31 - 1 in kernels, by a product and a shift. A division would take some thirty
/// dependent instructions (Granlund and Montgomery, "Division by invariant integers using multiplication",
/// PLDI 1994, figure 4.1).
struct Divisor {
  uint32_t factor;
  int32_t shift;

  /// `divisor` is at least 1.
  static constexpr Divisor of(int32_t divisor) {
    int32_t shift = 0;
    while (int64_t{1} << shift < divisor) ++shift;
    const uint64_t rest = (uint64_t{1} << shift) - static_cast<uint64_t>(divisor);
    return {static_cast<uint32_t>((rest << 32) / static_cast<uint64_t>(divisor) + 1), shift};
  }
  MOECOMM_HD constexpr int32_t quotient(int32_t number) const {
    const auto value = static_cast<uint32_t>(number);
    return static_cast<int32_t>((static_cast<uint32_t>(uint64_t{factor} * value >> 32) + value) >> shift);
  }
};

/// True if the owner of ids[k] owns none of the ids before it; false if ids[k] is no expert.
constexpr bool first_of_owner(const int32_t* ids, int32_t k, int32_t local_experts) {
  const int32_t owner = expert_owner(ids[k], local_experts);
  if (owner < 0) return false;
  for (int32_t j = 0; j < k; ++j)
    if (expert_owner(ids[j], local_experts) == owner) return false;
  return true;
}

/// How many of the ranks [first, rank) own experts of the token. If `first` is the first rank of the node of
/// `rank`, this is the slot of `rank`: its position among the token's owners on that node.
constexpr int32_t owners_between(const int32_t* ids, int32_t top_k, int32_t local_experts, int32_t first,
                                 int32_t rank) {
  int32_t owners = 0;
  for (int32_t k = 0; k < top_k; ++k) {
    const int32_t owner = expert_owner(ids[k], local_experts);
    owners += ids[k] >= 0 && owner >= first && owner < rank && first_of_owner(ids, k, local_experts);
  }
  return owners;
}

/// True if a rank in [first, end) has an expert of the token. If these are all ranks of a node, that node
/// needs the token's row.
constexpr bool owned_in(const int32_t* ids, int32_t top_k, int32_t local_experts, int32_t first,
                        int32_t end) {
  for (int32_t k = 0; k < top_k; ++k)
    if (ids[k] >= first * local_experts && ids[k] < end * local_experts) return true;
  return false;
}

/// Bytes of a page of host memory, and the alignment of a window's sections: each can be backed, registered
/// or dropped separately.
inline constexpr int64_t kPage = 4096;

MOECOMM_HD constexpr int64_t align_up(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace moecomm
