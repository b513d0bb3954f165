#include "kernels/cpu/combine.hpp"

#include <cstring>

#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/weights.hpp"

namespace moecomm::cpu {
namespace {

/// Sums the rows of one entry; holds the scratch that this takes, one a thread.
class EntrySum {
 public:
  EntrySum(const Context& context, const Plan& plan, const CombineArguments& arguments)
      : plan_(plan),
        arguments_(arguments),
        dtype_(context.shape.dtype),
        hidden_(context.shape.hidden),
        row_bytes_(context.shape.row_bytes()),
        sources_(static_cast<size_t>(context.shape.top_k)),
        scales_(static_cast<size_t>(context.shape.top_k)) {}

  void write(int64_t entry, std::byte* out, bool stream) {
    int count = 0;
    for (int64_t j = plan_.row_begin[entry]; j < plan_.row_begin[entry + 1]; ++j) {
      const int32_t place = plan_.row[j];
      if (place < 0) continue;
      sources_[count] = arguments_.rows + place * row_bytes_;
      if (arguments_.weights != nullptr) scales_[count] = weight_at(arguments_.weights, dtype_, place);
      ++count;
    }
    const RowKernels& kernels = row_kernels();
    if (count == 0)
      std::memset(out, 0, static_cast<size_t>(row_bytes_));
    else if (count == 1 && arguments_.weights == nullptr)
      kernels.copy(out, sources_[0], row_bytes_, stream);
    else
      kernels.verbs[static_cast<int>(dtype_)].sum(
          out, sources_.data(), arguments_.weights ? scales_.data() : nullptr, count, hidden_, stream);
  }

 private:
  const Plan& plan_;
  const CombineArguments& arguments_;
  const DType dtype_;
  const int64_t hidden_, row_bytes_;
  std::vector<const void*> sources_;
  std::vector<double> scales_;
};

}  // namespace

void reduce_and_push(const Context& context, const Plan& plan, const CombineArguments& arguments) {
  const int64_t row_bytes = context.shape.row_bytes(), slots = context.shape.slots();
  const bool stream = context.heuristics.stream(plan.entries() * row_bytes);
  for (int32_t i = 1; i < plan.shape.ranks; ++i) {
    const int32_t home = (context.rank + i) % plan.shape.ranks;  // ranks start at different homes
    const int64_t first = plan.source_begin[home];
    const int64_t entries = plan.source_begin[home + 1] - first;
    context.pool.parallel(entries, context.heuristics.parallel(entries * row_bytes),
                          [&](int64_t begin, int64_t end) {
                            EntrySum sum(context, plan, arguments);
                            for (int64_t entry = first + begin; entry < first + end; ++entry) {
                              const int64_t slot = plan.entry_token[entry] * slots + plan.entry_slot[entry];
                              sum.write(entry, arguments.slots[home] + slot * row_bytes, stream);
                            }
                            row_kernels().fence();
                          });
  }
}

void push_weight_grads(const Context& context, const Plan& plan, const CombineArguments& arguments) {
  const DType dtype = context.shape.dtype;
  const int32_t top_k = context.shape.top_k;
  for (int32_t home = 0; home < plan.shape.ranks; ++home)
    for (int64_t entry = plan.source_begin[home]; entry < plan.source_begin[home + 1]; ++entry) {
      const int64_t token = int64_t{plan.entry_token[entry]} * top_k;
      std::byte* const section = arguments.home_weight_grads[home];
      for (int64_t j = plan.row_begin[entry]; j < plan.row_begin[entry + 1]; ++j) {
        const int64_t place = plan.row[j];
        if (plan.shape.layout == RowLayout::expert) {
          set_weight(section, dtype, token + plan.row_k[j],
                     place < 0 ? 0.0 : weight_at(arguments.weight_grads, dtype, place));
          continue;
        }
        for (int32_t k = 0; k < top_k; ++k)
          if (plan.entry_ids[entry * top_k + k] >= 0)
            set_weight(section, dtype, token + k,
                       place < 0 ? 0.0 : weight_at(arguments.weight_grads, dtype, place * top_k + k));
      }
    }
}

void sum_home(const Context& context, const Plan& plan, const CombineArguments& arguments, std::byte* y) {
  const int64_t row_bytes = context.shape.row_bytes(), slots = context.shape.slots();
  const RowKernels& kernels = row_kernels();
  const RowVerbs& verbs = kernels.verbs[static_cast<int>(context.shape.dtype)];
  const bool stream = context.heuristics.stream(plan.tokens * row_bytes);
  context.pool.parallel(
      plan.tokens, context.heuristics.parallel(plan.tokens * row_bytes), [&](int64_t begin, int64_t end) {
        EntrySum own_sum(context, plan, arguments);
        std::vector<std::byte> own(static_cast<size_t>(row_bytes));
        std::vector<const void*> sources(static_cast<size_t>(slots));
        for (int64_t t = begin; t < end; ++t) {
          std::byte* const out = y + t * row_bytes;
          const int64_t first = plan.owner_begin[t], owners = plan.owner_begin[t + 1] - first;
          if (owners == 1 && plan.own_entry[t] >= 0) {
            own_sum.write(plan.own_entry[t], out, stream);
            continue;
          }
          for (int64_t slot = 0; slot < owners; ++slot) {
            if (plan.owner[first + slot] == context.rank) {
              own_sum.write(plan.own_entry[t], own.data(), false);
              sources[slot] = own.data();
            } else {
              sources[slot] = arguments.slots[context.rank] + (t * slots + slot) * row_bytes;
            }
          }
          if (owners == 0)
            std::memset(out, 0, static_cast<size_t>(row_bytes));
          else if (owners == 1)
            kernels.copy(out, sources[0], row_bytes, stream);
          else
            verbs.sum(out, sources.data(), nullptr, static_cast<int>(owners), context.shape.hidden, stream);
        }
        kernels.fence();
      });
}

void collect_weight_grads(const Context& context, const Plan& plan, const std::byte* section,
                          std::byte* out) {
  const DType dtype = context.shape.dtype;
  for (int64_t i = 0; i < static_cast<int64_t>(plan.home_ids.size()); ++i)
    set_weight(out, dtype, i, plan.home_ids[i] >= 0 ? weight_at(section, dtype, i) : 0.0);
}

}  // namespace moecomm::cpu
