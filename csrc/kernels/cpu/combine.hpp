// Combine on the CPU: the owner of a token's experts sums their rows and pushes one row to the token's home;
// the home sums what its slots hold. A rank's rows for its own tokens never touch the window.
#pragma once

#include <vector>

#include "kernels/cpu/dispatch.hpp"

namespace moecomm::cpu {

struct CombineArguments {
  const std::byte* rows = nullptr;     ///< [plan.rows][hidden], in the order of the dispatch
  const std::byte* weights = nullptr;  ///< weight type [plan.rows], or null
  const std::byte* weight_grads =
      nullptr;                    ///< weight type [plan.rows] (rank layout: [plan.rows][top_k]) to send home
  std::vector<std::byte*> slots;  ///< rank r's combine slots
  std::vector<std::byte*> home_weight_grads;  ///< rank r's weight gradient section
};

/// Sums a token's rows here in the order of k, rounds once, and pushes the result to its home's slot (other
/// ranks' tokens).
void reduce_and_push(const Context& context, const Plan& plan, const CombineArguments& arguments);

/// Writes the gradient of each routing weight to its place (token, k) at the token's home; 0 for rows past
/// capacity.
void push_weight_grads(const Context& context, const Plan& plan, const CombineArguments& arguments);

/// y [tokens][hidden] = sum over owners in ascending rank, this rank's own share computed on the way.
void sum_home(const Context& context, const Plan& plan, const CombineArguments& arguments, std::byte* y);

/// Collects [tokens][top_k] gradients of the weights; 0 where a token has no expert.
void collect_weight_grads(const Context& context, const Plan& plan, const std::byte* section, std::byte* out);

}  // namespace moecomm::cpu
