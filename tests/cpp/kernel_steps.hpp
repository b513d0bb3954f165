// What the ranks of test_kernels.cpp play: random tokens, choices and rows of one step, where each row
// belongs, and the sums that a combine has to bring.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "kernels/gpu/common/arguments.hpp"
#include "layout/routing.hpp"

namespace moecomm::steps {

using Random = std::mt19937_64;

inline int draw(Random& random, int least, int most) {
  return std::uniform_int_distribution(least, most)(random);
}

/// A bfloat16 as bits.
inline uint16_t rounded(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float widened(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

using Rows = std::vector<uint16_t>;  // bfloat16

inline Rows random_rows(Random& random, int64_t rows, int64_t hidden) {
  std::normal_distribution<float> normal;
  Rows out(static_cast<size_t>(rows * hidden));
  for (uint16_t& value : out) value = rounded(normal(random));
  return out;
}

inline std::vector<float> random_factors(Random& random, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count));
  for (float& value : out) value = std::uniform_real_distribution<float>(-1, 1)(random);
  return out;
}

struct Shape {
  int ranks, experts_each, top_k;
  int64_t hidden;
  int most_tokens;
  int steps;
  int least_tokens = 0;  ///< if more, no rank is without tokens
  int max_tokens = 0;    ///< of the window; 0: as many as come
  int nodes = 1;
};

/// What a rank brings to a step, and what its experts answer.
struct Input {
  int tokens = 0;
  std::vector<int64_t> ids;             ///< [tokens][top_k], -1: none
  Rows x, answers, grads;               ///< answers: of each output row; grads: of y
  std::vector<float> weights, factors;  ///< of each (token, k); of each output row
  int64_t capacity = 0;
};

/// Where an output row of a rank comes from; in the rank layout k is -1. Source -1: it is padding.
struct Origin {
  int source, token, k;
};

struct Step {
  std::vector<Input> inputs;                 ///< by rank
  std::vector<std::vector<Origin>> origins;  ///< by rank, of all rows that want to come
  bool weighted = false;
  int combines = 0;
  int alignment = 1;
  int64_t groups = 0;  ///< above 0: the rows of each expert's group, of which the last keep what they held
  bool dropless = false;
  int odd = -1;           ///< the rank whose dispatch has another caller than those of the others,
  bool after = false;     ///< or instead has given up what was before
  bool given_up = false;  ///< nobody takes what has come, and what was left is abandoned
  RowLayout layout = RowLayout::expert;
  bool sums_in_fp8 = false;  ///< of the combines
  bool by_token = false;     ///< a combine's factors are those of the tokens, which travel with it

  bool disagrees() const { return odd >= 0; }
  bool by_rank() const { return layout == RowLayout::rank; }
  /// The output row of a (source, token, k) on a rank; negative: it was dropped, or is elsewhere.
  int64_t row_of(int rank, int source, int token, int k) const {
    const auto& all = origins[static_cast<size_t>(rank)];
    const auto found = std::find_if(all.begin(), all.end(), [&](const Origin& o) {
      return o.source == source && o.token == token && (o.k == k || o.k < 0);
    });
    const int64_t row = found - all.begin();
    return found == all.end() || row >= inputs[static_cast<size_t>(rank)].capacity ? -1 : row;
  }
};

inline Step make_step(const Shape& shape, Random& random) {
  Step step;
  step.layout = draw(random, 0, 2) == 0 ? RowLayout::rank : RowLayout::expert;
  step.weighted = !step.by_rank() && draw(random, 0, 1) == 1;
  step.combines = draw(random, 1, 2);
  step.sums_in_fp8 = shape.hidden % 16 == 0 && draw(random, 0, 1) == 1;
  if (!step.by_rank()) step.alignment = std::vector<int>{1, 1, 4, 5}[static_cast<size_t>(draw(random, 0, 3))];
  const int experts = shape.ranks * shape.experts_each;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Input input;
    const bool none = shape.least_tokens == 0 && draw(random, 0, 3) == 0;
    input.tokens = none ? 0 : draw(random, std::max(shape.least_tokens, 1), shape.most_tokens);
    std::vector<int64_t> all(static_cast<size_t>(experts));
    std::iota(all.begin(), all.end(), 0);
    for (int token = 0; token < input.tokens; ++token) {
      std::shuffle(all.begin(), all.end(), random);
      for (int k = 0; k < shape.top_k; ++k)
        input.ids.push_back(draw(random, 0, 9) == 0 ? -1 : all[static_cast<size_t>(k)]);
    }
    input.x = random_rows(random, input.tokens, shape.hidden);
    input.grads = random_rows(random, input.tokens, shape.hidden);
    input.weights = random_factors(random, input.tokens * shape.top_k);
    step.inputs.push_back(std::move(input));
  }
  const auto fits = [](const Input& each) { return each.tokens > 0 && each.tokens <= gpu::kMostFusedTokens; };
  step.by_token = step.weighted && shape.nodes == 1 &&
                  std::all_of(step.inputs.begin(), step.inputs.end(), fits) && draw(random, 0, 1);
  if (!step.by_rank() && draw(random, 0, 2) == 0) step.groups = step.alignment = 1;
  for (const Input& input : step.inputs) step.groups += step.groups > 0 ? input.tokens : 0;
  for (int rank = 0; rank < shape.ranks; ++rank) {
    std::vector<Origin> origins;
    const auto is_here = [&](int64_t id) { return id >= 0 && id / shape.experts_each == rank; };
    for (int source = 0; step.by_rank() && source < shape.ranks; ++source) {
      const Input& input = step.inputs[static_cast<size_t>(source)];
      for (int token = 0; token < input.tokens; ++token) {
        const auto ids = input.ids.begin() + token * shape.top_k;
        if (std::any_of(ids, ids + shape.top_k, is_here)) origins.push_back({source, token, -1});
      }
    }
    for (int expert = step.by_rank() ? experts : rank * shape.experts_each;
         expert < (rank + 1) * shape.experts_each; ++expert) {
      for (int source = 0; source < shape.ranks; ++source) {
        const Input& input = step.inputs[static_cast<size_t>(source)];
        for (int token = 0; token < input.tokens; ++token)
          for (int k = 0; k < shape.top_k; ++k)
            if (input.ids[static_cast<size_t>(token * shape.top_k + k)] == expert)
              origins.push_back({source, token, k});
      }
      int64_t end = align_up(static_cast<int64_t>(origins.size()), step.alignment);
      if (step.groups > 0) end = (expert % shape.experts_each + 1) * step.groups;
      origins.resize(static_cast<size_t>(end), {-1, -1, -1});
    }
    step.origins.push_back(std::move(origins));
  }
  // A capacity is the same on all ranks: of most steps, enough.
  size_t most = 0;
  for (const auto& origins : step.origins) most = std::max(most, origins.size());
  const int more = step.groups > 0 ? 0 : draw(random, 0, 3) == 0 ? -draw(random, 0, 5) : 3;
  const int64_t capacity = static_cast<int64_t>(most) + more;
  step.dropless = step.groups == 0 && draw(random, 0, 2) == 0;
  step.given_up = step.dropless && draw(random, 0, 3) == 0;
  step.after = draw(random, 0, 1) == 0;
  if (!step.dropless && shape.ranks > 1 && draw(random, 0, 5) == 0)
    step.odd = draw(random, 0, shape.ranks - 1);
  for (int rank = 0; rank < shape.ranks; ++rank) {
    Input& input = step.inputs[static_cast<size_t>(rank)];
    input.capacity = step.dropless ? static_cast<int64_t>(step.origins[static_cast<size_t>(rank)].size())
                                   : std::max<int64_t>(capacity, 0);
    input.answers = random_rows(random, input.capacity, shape.hidden);
    input.factors = random_factors(random, input.capacity);
    for (size_t row = 0; step.by_token && row < input.factors.size(); ++row) {
      const auto& origins = step.origins[static_cast<size_t>(rank)];
      if (row >= origins.size() || origins[row].source < 0) continue;
      const auto [source, token, k] = origins[row];
      input.factors[row] =
          step.inputs[static_cast<size_t>(source)].weights[static_cast<size_t>(token * shape.top_k + k)];
    }
  }
  return step;
}

/// The sum of a token's answers: of each rank first, rounded, then of the ranks of each other node, rounded,
/// then of these and of the ranks here in their order. `bounds`: how far from it the sum is at most, if those
/// of ranks and nodes travel in fp8.
inline Rows expected_sum(const Shape& shape, const Step& step, int home, int token,
                         std::vector<float>* bounds = nullptr) {
  const Input& input = step.inputs[static_cast<size_t>(home)];
  const int local = shape.ranks / shape.nodes;
  Rows out(static_cast<size_t>(shape.hidden));
  if (bounds != nullptr) bounds->assign(static_cast<size_t>(shape.hidden), 0);
  for (int64_t column = 0; column < shape.hidden; ++column) {
    std::optional<float> total, of_node;  // the first value keeps the sign of its zero
    const auto add = [&](std::optional<float>& to, float value) {
      to = to ? *to + value : value;
      // Three bits of a value are kept, or of small ones a step of 2^-9 / 448 of the largest in the block.
      if (bounds != nullptr) (*bounds)[static_cast<size_t>(column)] += std::abs(value) / 12 + 0.05f;
    };
    for (int owner = 0; owner < shape.ranks; ++owner) {
      std::optional<float> sum;
      bool owns = false;
      for (int k = 0; k < shape.top_k; ++k) {
        const int64_t id = input.ids[static_cast<size_t>(token * shape.top_k + k)];
        if (id < 0 || id / shape.experts_each != owner) continue;
        owns = true;
        const int64_t row = step.row_of(owner, home, token, k);
        if (row < 0) continue;
        const Input& at = step.inputs[static_cast<size_t>(owner)];
        float value = widened(at.answers[static_cast<size_t>(row * shape.hidden + column)]);
        if (step.weighted) value = value * at.factors[static_cast<size_t>(row)];
        sum = sum ? *sum + value : value;
        if (step.by_rank()) break;
      }
      if (owns) add(owner / local == home / local ? total : of_node, widened(rounded(sum.value_or(0))));
      if (of_node && (owner + 1) % local == 0) add(total, widened(rounded(*std::exchange(of_node, {}))));
    }
    out[static_cast<size_t>(column)] = rounded(total.value_or(0));
  }
  return out;
}

}  // namespace moecomm::steps
