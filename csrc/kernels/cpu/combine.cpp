#include "kernels/cpu/combine.hpp"

#include <cstring>

#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/weights.hpp"
#include "layout/routing.hpp"

namespace moecomm::cpu {
namespace {

/// out = the sum of `count` rows, times their scales unless `scales` is null, rounded once; 0 without rows.
void sum_rows(std::byte* out, const void* const* rows, const double* scales, int count,
              const WindowShape& shape, bool stream) {
  const RowKernels& kernels = row_kernels();
  if (count == 0)
    std::memset(out, 0, shape.row_bytes());
  else if (count == 1 && scales == nullptr)
    kernels.copy(out, rows[0], shape.row_bytes(), stream);
  else
    kernels.verbs[static_cast<int>(shape.dtype)].sum(out, rows, scales, count, shape.hidden, stream);
}

/// Sums this rank's rows of a plan entry, a (source, token). Holds scratch memory: one object per thread.
class EntrySum {
 public:
  EntrySum(const Context& context, const Plan& plan, const CombineArguments& arguments)
      : plan_(plan),
        arguments_(arguments),
        shape_(context.shape),
        sources_(shape_.top_k),
        scales_(shape_.top_k) {}

  void write(int64_t entry, std::byte* out, bool stream) {
    int count = 0;
    for (int64_t j = plan_.row_begin[entry]; j < plan_.row_begin[entry + 1]; ++j) {
      const int32_t place = plan_.row[j];
      if (place < 0) continue;
      sources_[count] = arguments_.rows + place * shape_.row_bytes();
      if (arguments_.weights != nullptr) scales_[count] = weight_at(arguments_.weights, shape_.dtype, place);
      ++count;
    }
    const double* const scales = arguments_.weights != nullptr ? scales_.data() : nullptr;
    sum_rows(out, sources_.data(), scales, count, shape_, stream);
  }

 private:
  const Plan& plan_;
  const CombineArguments& arguments_;
  const WindowShape& shape_;
  std::vector<const void*> sources_;
  std::vector<double> scales_;
};

/// Sums the rows of each entry of a range, and writes the sum to row slot_of(entry) of `slots`.
template <class SlotOf>
void sum_entries(const Context& context, const Plan& plan, const CombineArguments& arguments,
                 EntryRange range, std::byte* slots, bool stream, const SlotOf& slot_of) {
  const int64_t row_bytes = context.shape.row_bytes(), entries = range.end - range.begin;
  context.parallel(entries, entries * row_bytes, [&](int64_t begin, int64_t end) {
    EntrySum sum(context, plan, arguments);
    for (int64_t entry = range.begin + begin; entry < range.begin + end; ++entry)
      sum.write(entry, slots + slot_of(entry) * row_bytes, stream);
    row_kernels().fence();
  });
}

/// Adds up the sums that ranks give for a token, their shares. Holds scratch memory: one object per thread.
class ShareSum {
 public:
  ShareSum(const Context& context, const Plan& plan, const CombineArguments& arguments)
      : shape_(context.shape),
        own_sum_(context, plan, arguments),
        own_(shape_.row_bytes()),
        sources_(shape_.top_k) {}

  /// out = sum of share(0) .. share(count - 1). A null share is this rank's: the rows of `own_entry`, summed.
  template <class Share>
  void write(int64_t count, const Share& share, int64_t own_entry, std::byte* out, bool stream) {
    for (int64_t i = 0; i < count; ++i) {
      const std::byte* const row = share(i);
      if (row == nullptr && count == 1) return own_sum_.write(own_entry, out, stream);
      if (row == nullptr) own_sum_.write(own_entry, own_.data(), false);
      sources_[i] = row == nullptr ? own_.data() : row;
    }
    sum_rows(out, sources_.data(), nullptr, static_cast<int>(count), shape_, stream);
  }

 private:
  const WindowShape& shape_;
  EntrySum own_sum_;
  std::vector<std::byte> own_;
  std::vector<const void*> sources_;
};

}  // namespace

void combine_reduce(const Context& context, const Plan& plan, const CombineArguments& arguments) {
  const int64_t slots = context.shape.slots();
  const bool stream = context.heuristics.stream(plan.entries() * context.shape.row_bytes());
  const NodeMap nodes = context.shape.nodes();
  const int32_t node = nodes.node_of(context.rank), local = nodes.local_of(context.rank);
  for (int32_t i = 1; i < nodes.local_ranks; ++i) {
    const int32_t index = (local + i) % nodes.local_ranks;  // ranks start at different homes
    const int32_t home = nodes.rank_of(node, index);
    const EntryRange range{plan.source_begin[home], plan.source_begin[home + 1]};
    sum_entries(context, plan, arguments, range, arguments.slots[index], stream,
                [&](int64_t entry) { return plan.entry_token[entry] * slots + plan.entry_slot[entry]; });
  }
}

void combine_reduce_relayed(const Context& context, const Plan& plan, const CombineArguments& arguments,
                            int32_t home, int64_t first, int64_t end, std::byte* partials) {
  const int64_t slots = context.shape.slots();
  const EntryRange range = entries_between(plan, home, first, end);
  sum_entries(context, plan, arguments, range, partials, false, [&](int64_t entry) {
    return (plan.entry_place[entry] - first) * slots + plan.entry_slot[entry];
  });
}

void push_weight_grads(const Context& context, const Plan& plan, const CombineArguments& arguments) {
  const DType dtype = context.shape.dtype;
  for_each_weight(plan, [&](int32_t home, int64_t at_home, int64_t here, int32_t) {
    set_weight(arguments.home_weight_grads[home], dtype, at_home,
               here < 0 ? 0.0 : weight_at(arguments.weight_grads, dtype, here));
  });
}

void combine_sum_relayed(const Context& context, const Plan& plan, const CombineArguments& arguments,
                         int32_t other, int64_t first, int64_t end, const std::byte* partials,
                         std::byte* out) {
  const int64_t row_bytes = context.shape.row_bytes(), slots = context.shape.slots();
  const int32_t local = context.shape.nodes().local_of(context.rank);
  const RelaySums& sums = plan.relay_sums[other];
  const int64_t touched = (sums.begin[end] - sums.begin[first]) * context.shape.top_k * row_bytes;
  context.parallel(end - first, touched, [&](int64_t begin, int64_t stop) {
    ShareSum sum(context, plan, arguments);
    for (int64_t i = begin; i < stop; ++i) {
      const int64_t owners = sums.begin[first + i];
      const auto share = [&](int64_t slot) {
        return sums.owner[owners + slot] == local ? nullptr : partials + (i * slots + slot) * row_bytes;
      };
      sum.write(sums.begin[first + i + 1] - owners, share, sums.own[first + i], out + i * row_bytes, false);
    }
  });
}

void combine_sum(const Context& context, const Plan& plan, const CombineArguments& arguments, std::byte* y,
                 int64_t first, int64_t end) {
  const int64_t row_bytes = context.shape.row_bytes(), slots = context.shape.slots();
  const NodeMap nodes = context.shape.nodes();
  const int32_t node = nodes.node_of(context.rank);
  const std::byte* const own_slots = arguments.slots[nodes.local_of(context.rank)];
  const bool stream = context.heuristics.stream(plan.tokens * row_bytes);
  const int64_t touched = (plan.owner_begin[end] - plan.owner_begin[first] + end - first) * row_bytes;
  context.parallel(end - first, touched, [&](int64_t begin, int64_t stop) {
    ShareSum sum(context, plan, arguments);
    for (int64_t t = first + begin; t < first + stop; ++t) {
      const int64_t owners = plan.owner_begin[t];
      const auto share = [&](int64_t i) -> const std::byte* {
        const int32_t owner = plan.owner[owners + i];
        const int64_t place = plan.owner_place[owners + i];
        if (owner == context.rank) return nullptr;
        if (nodes.same_node(owner, context.rank)) return own_slots + (t * slots + place) * row_bytes;
        const auto other = static_cast<size_t>(NodeMap::other(nodes.node_of(owner), node));
        return arguments.relayed_rows[other] + place * row_bytes;
      };
      sum.write(plan.owner_begin[t + 1] - owners, share, plan.own_entry[t], y + t * row_bytes, stream);
    }
    row_kernels().fence();
  });
}

void collect_weight_grads(const Context& context, const Plan& plan,
                          const std::vector<const std::byte*>& sections, std::byte* out) {
  const DType dtype = context.shape.dtype;
  const NodeMap nodes = context.shape.nodes();
  for (int64_t i = 0; i < static_cast<int64_t>(plan.local_topk_idx.size()); ++i) {
    const int32_t owner = expert_owner(plan.local_topk_idx[i], context.local_experts);
    set_weight(out, dtype, i, owner < 0 ? 0.0 : weight_at(sections[nodes.node_of(owner)], dtype, i));
  }
}

}  // namespace moecomm::cpu
