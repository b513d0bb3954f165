#include "kernels/cpu/dispatch.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/weights.hpp"
#include "layout/routing.hpp"

namespace moecomm::cpu {

int64_t dispatch_send(const Context& context, const std::byte* x, const int32_t* ids, int64_t tokens,
                      std::byte* rows) {
  const int64_t row_bytes = context.shape.row_bytes();
  const int32_t top_k = context.shape.top_k;
  const RowKernels& kernels = row_kernels();
  const bool stream = context.heuristics.stream(tokens * row_bytes);
  const NodeMap nodes = context.shape.nodes();
  std::atomic<int64_t> copied = 0;
  context.parallel(tokens, tokens * row_bytes, [&](int64_t begin, int64_t end) {
    int64_t here = 0;
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* token_ids = ids + t * top_k;
      const bool leaves = std::any_of(token_ids, token_ids + top_k, [&](int32_t id) {
        const int32_t owner = expert_owner(id, context.local_experts);
        return id >= 0 && owner != context.rank && nodes.same_node(owner, context.rank);
      });
      if (!leaves) continue;
      kernels.copy(rows + t * row_bytes, x + t * row_bytes, row_bytes, stream);
      ++here;
    }
    kernels.fence();
    copied += here;
  });
  return copied;
}

void dispatch_send_chunk(const Context& context, const std::byte* x, std::span<const int32_t> tokens,
                         std::byte* out) {
  const int64_t row_bytes = context.shape.row_bytes(), count = static_cast<int64_t>(tokens.size());
  const RowKernels& kernels = row_kernels();
  context.parallel(count, 2 * count * row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      kernels.copy(out + i * row_bytes, x + tokens[i] * row_bytes, row_bytes, false);
  });
}

EntryRange entries_between(const Plan& plan, int32_t rank, int64_t first, int64_t end) {
  const auto begin = plan.entry_place.begin() + plan.source_begin[rank],
             stop = plan.entry_place.begin() + plan.source_begin[rank + 1];
  return {std::lower_bound(begin, stop, first) - plan.entry_place.begin(),
          std::lower_bound(begin, stop, end) - plan.entry_place.begin()};
}

void dispatch_receive(const Context& context, const Plan& plan, const PullArguments& arguments,
                      EntryRange range) {
  const DType dtype = context.shape.dtype;
  const int64_t row_bytes = context.shape.row_bytes(), hidden = context.shape.hidden;
  const RowKernels& kernels = row_kernels();
  const RowVerbs& verbs = kernels.verbs[static_cast<int>(dtype)];
  const bool stream = context.heuristics.stream(plan.rows * row_bytes);
  // A rank starts with its own rows, so that ranks do not all read from one source at a time.
  const int64_t entries = range.end - range.begin;
  const int64_t own = plan.source_begin[context.rank];
  const int64_t first = range.begin <= own && own < range.end ? own - range.begin : 0;
  const int64_t touched = (plan.row_begin[range.end] - plan.row_begin[range.begin] + entries) * row_bytes;
  context.parallel(entries, touched, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t entry = range.begin + (i + first < entries ? i + first : i + first - entries);
      const auto source = std::upper_bound(plan.source_begin.begin(), plan.source_begin.end(), entry) - 1;
      const std::byte* row =
          arguments.rows[source - plan.source_begin.begin()] + plan.entry_place[entry] * row_bytes;
      for (int64_t j = plan.row_begin[entry]; j < plan.row_begin[entry + 1]; ++j) {
        const int32_t place = plan.row[j];
        if (place < 0) continue;
        std::byte* out = arguments.out + place * row_bytes;
        if (arguments.scales == nullptr)
          kernels.copy(out, row, row_bytes, stream);
        else
          verbs.scale(out, row, weight_at(arguments.scales, dtype, place), hidden, stream);
        if (arguments.dots != nullptr)
          set_weight(arguments.dots, dtype, place,
                     verbs.dot(row, arguments.other + place * row_bytes, hidden));
      }
    }
    kernels.fence();
  });
}

void zero_padding(const Context& context, const Plan& plan, const PullArguments& arguments) {
  const DType dtype = context.shape.dtype;
  const int64_t row_bytes = context.shape.row_bytes();
  for (const auto& [begin, end] : plan.padding) {
    std::memset(arguments.out + begin * row_bytes, 0, (end - begin) * row_bytes);
    if (arguments.dots != nullptr)
      for (int64_t row = begin; row < end; ++row) set_weight(arguments.dots, dtype, row, 0.0);
  }
}

void pull_metadata(const Context& context, const Plan& plan, const std::vector<const std::byte*>& weights,
                   std::byte* out_weights, int32_t* out_ids) {
  const DType dtype = context.shape.dtype;
  const int32_t top_k = context.shape.top_k;
  const bool by_rank = plan.shape.layout == RowLayout::rank;
  const int64_t places = plan.rows * (by_rank ? top_k : 1);
  if (out_weights != nullptr) std::memset(out_weights, 0, places * weight_bytes(dtype));
  if (out_ids != nullptr) std::fill(out_ids, out_ids + places, kNoExpert);
  for_each_weight(plan, [&](int32_t source, int64_t at_source, int64_t here, int32_t id) {
    if (here < 0) return;
    if (out_ids != nullptr) out_ids[here] = id;
    if (out_weights != nullptr)
      set_weight(out_weights, dtype, here, weight_at(weights[source], dtype, at_source));
  });
}

}  // namespace moecomm::cpu
