// Combine on the CPU at the owners of experts: sums a token's rows on this rank and sends the sum towards the
// token's home.
#include "kernels/cpu/combine.hpp"
#include "kernels/cpu/entry_sum.hpp"
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/weights.hpp"

namespace moecomm::cpu {

void combine_reduce(const Context& context, const Plan& plan, const CombineArguments& arguments) {
  const int64_t row_bytes = context.shape.row_bytes(), slots = context.shape.slots();
  const bool stream = context.heuristics.stream(plan.entries() * row_bytes);
  const NodeMap nodes = context.shape.nodes();
  const int32_t node = nodes.node_of(context.rank), local = nodes.local_of(context.rank);
  for (int32_t i = 1; i < nodes.local_ranks; ++i) {
    const int32_t index = (local + i) % nodes.local_ranks;  // ranks start at different homes
    const int32_t home = nodes.rank_of(node, index);
    const int64_t first = plan.source_begin[home];
    const int64_t entries = plan.source_begin[home + 1] - first;
    context.pool.parallel(entries, context.heuristics.parallel(entries * row_bytes),
                          [&](int64_t begin, int64_t end) {
                            EntrySum sum(context, plan, arguments);
                            for (int64_t entry = first + begin; entry < first + end; ++entry) {
                              const int64_t slot = plan.entry_token[entry] * slots + plan.entry_slot[entry];
                              sum.write(entry, arguments.slots[index] + slot * row_bytes, stream);
                            }
                            row_kernels().fence();
                          });
  }
}

void combine_reduce_relayed(const Context& context, const Plan& plan, const CombineArguments& arguments,
                            int32_t home, int64_t first, int64_t end, std::byte* partials) {
  const int64_t row_bytes = context.shape.row_bytes(), slots = context.shape.slots();
  const EntryRange range = entries_between(plan, home, first, end);
  const int64_t entries = range.end - range.begin;
  context.pool.parallel(
      entries, context.heuristics.parallel(entries * row_bytes), [&](int64_t begin, int64_t stop) {
        EntrySum sum(context, plan, arguments);
        for (int64_t entry = range.begin + begin; entry < range.begin + stop; ++entry) {
          const int64_t slot = (plan.entry_place[entry] - first) * slots + plan.entry_slot[entry];
          sum.write(entry, partials + slot * row_bytes, false);
        }
      });
}

void push_weight_grads(const Context& context, const Plan& plan, const CombineArguments& arguments) {
  const DType dtype = context.shape.dtype;
  for_each_weight(plan, [&](int32_t home, int64_t at_home, int64_t here, int32_t) {
    set_weight(arguments.home_weight_grads[home], dtype, at_home,
               here < 0 ? 0.0 : weight_at(arguments.weight_grads, dtype, here));
  });
}

}  // namespace moecomm::cpu
