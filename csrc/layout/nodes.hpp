// Placement of ranks: nodes of equal size, filled rank by rank. A rail is the set of ranks with the same
// local index, one per node; a rank talks to other nodes only over its rail.
//
// Example: 6 ranks, 2 a node: rank 3 has local index 1 in node 1, and its rail is ranks 1, 3, 5. Seen from
// node 1, the other nodes have numbers: node 0 has number 0, node 2 has number 1.
#pragma once

#include <cstdint>

#include "common/macros.hpp"

namespace moecomm {

struct NodeMap {
  int32_t ranks, local_ranks;

  /// Nodes of `ranks_per_node` ranks; 0: one node.
  MOECOMM_HD static constexpr NodeMap of(int32_t ranks, int32_t ranks_per_node) {
    return {ranks, ranks_per_node == 0 ? ranks : ranks_per_node};
  }
  MOECOMM_HD constexpr int32_t nodes() const { return ranks / local_ranks; }
  MOECOMM_HD constexpr int32_t node_of(int32_t rank) const { return rank / local_ranks; }
  MOECOMM_HD constexpr int32_t local_of(int32_t rank) const { return rank % local_ranks; }
  /// First rank of a node.
  MOECOMM_HD constexpr int32_t first(int32_t node) const { return node * local_ranks; }
  MOECOMM_HD constexpr int32_t rank_of(int32_t node, int32_t local) const { return first(node) + local; }
  MOECOMM_HD constexpr bool same_node(int32_t a, int32_t b) const { return node_of(a) == node_of(b); }
  /// The number of `node` among the nodes other than `own`; node_of_other() is the reverse.
  MOECOMM_HD static constexpr int32_t other(int32_t node, int32_t own) {
    return node < own ? node : node - 1;
  }
  MOECOMM_HD static constexpr int32_t node_of_other(int32_t other, int32_t own) {
    return other < own ? other : other + 1;
  }

  constexpr bool operator==(const NodeMap&) const = default;
};

}  // namespace moecomm
