// Combine on the CPU where sums arrive: at the rank that relays for another node, and at a token's home.
#include "kernels/cpu/combine.hpp"
#include "kernels/cpu/entry_sum.hpp"
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/weights.hpp"
#include "layout/routing.hpp"

namespace moecomm::cpu {
namespace {

/// Sums the shares of one row's contributors; holds the scratch memory for that. One object per thread.
class ShareSum {
 public:
  ShareSum(const Context& context, const Plan& plan, const CombineArguments& arguments)
      : shape_(context.shape),
        own_sum_(context, plan, arguments),
        own_(shape_.row_bytes()),
        sources_(shape_.top_k) {}

  /// out = sum of share(0) .. share(count - 1). A null share is this rank's own, computed from `own_entry`.
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

void combine_sum_relayed(const Context& context, const Plan& plan, const CombineArguments& arguments,
                         int32_t other, int64_t first, int64_t end, const std::byte* partials,
                         std::byte* out) {
  const int64_t row_bytes = context.shape.row_bytes(), slots = context.shape.slots();
  const int32_t local = context.shape.nodes().local_of(context.rank);
  const RelaySums& sums = plan.relay_sums[other];
  const int64_t touched = (sums.begin[end] - sums.begin[first]) * context.shape.top_k * row_bytes;
  context.pool.parallel(end - first, context.heuristics.parallel(touched), [&](int64_t begin, int64_t stop) {
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
  context.pool.parallel(end - first, context.heuristics.parallel(touched), [&](int64_t begin, int64_t stop) {
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
