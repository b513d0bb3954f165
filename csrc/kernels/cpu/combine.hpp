// Combine on the CPU: each rank with experts of a token, an owner, sums their rows and pushes the sum to a
// slot at the token's own rank, its home, which adds up its slots. A rank's sums for its own tokens never
// enter the window. If the home is on another node, owners give their sums to the rank of their node that has
// the home's local number. That rank adds them up, so that one row leaves the node.
#pragma once

#include <vector>

#include "kernels/cpu/dispatch.hpp"

namespace moecomm::cpu {

struct CombineArguments {
  const std::byte* rows = nullptr;             ///< [plan.rows][hidden], in the order of the dispatch
  const std::byte* weights = nullptr;          ///< weight type [plan.rows], or null
  const std::byte* weight_grads = nullptr;     ///< weight type [plan.rows] (rank layout: [plan.rows][top_k]):
                                               ///< gradients to return
  std::vector<std::byte*> slots;               ///< combine slots in the windows of this node's ranks
  std::vector<const std::byte*> relayed_rows;  ///< [other node] sums that arrived from that node
  std::vector<std::byte*> home_weight_grads;   ///< [rank] where to write gradients of that rank's weights
};

/// For each token of another rank of this node: sums its rows on this rank in the order of k, rounds once,
/// and pushes the sum to this rank's slot at the token's home.
void combine_reduce(const Context& context, const Plan& plan, const CombineArguments& arguments);

/// For each token of `home`, a rank of another node, with a relay index in [first, end): sums its rows on
/// this rank. Sums go to partials [end - first][slots] in the window of the rank that adds them up.
void combine_reduce_relayed(const Context& context, const Plan& plan, const CombineArguments& arguments,
                            int32_t home, int64_t first, int64_t end, std::byte* partials);

/// For tokens of this rank's rail on the node `other`, with relay indices [first, end): adds up the sums of
/// this node's ranks by ascending rank, its own computed here, rounds once and writes to `out` [end - first].
void combine_sum_relayed(const Context& context, const Plan& plan, const CombineArguments& arguments,
                         int32_t other, int64_t first, int64_t end, const std::byte* partials,
                         std::byte* out);

/// Writes the gradient of each routing weight to (token, k) at the token's home; 0 for rows past capacity.
void push_weight_grads(const Context& context, const Plan& plan, const CombineArguments& arguments);

/// Writes y [tokens][hidden] for tokens [first, end): adds up the owners' sums by ascending rank. This rank's
/// own sum is computed here. All owners on another node count as one: as the node's first rank.
void combine_sum(const Context& context, const Plan& plan, const CombineArguments& arguments, std::byte* y,
                 int64_t first, int64_t end);

/// Collects gradients of weights [tokens][top_k] from sections[owner's node]; 0 where an id names no expert.
void collect_weight_grads(const Context& context, const Plan& plan,
                          const std::vector<const std::byte*>& sections, std::byte* out);

}  // namespace moecomm::cpu
