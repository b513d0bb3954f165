// What operations launch, by the one decision of it: over shapes, numbers of tokens, layouts and kinds of
// rows.
#include <algorithm>
#include <string>

#include "check.hpp"
#include "kernels/gpu/common/launch_plan.hpp"

using namespace moecomm;
using namespace moecomm::gpu;

namespace {

constexpr int kSms = 132;
constexpr int64_t kMaxTokens = 4096;

/// A communicator on a GPU of 132 SMs, as far as plans ask for it.
struct Setup {
  Setup(int32_t ranks, int32_t ranks_per_node, int budget, int64_t stage_tokens = kMaxTokens)
      : shape{ranks, 8, int64_t{32} * ranks, 7168, kMaxTokens, DType::bfloat16, WireFormat::fp8} {
    shape.ranks_per_node = ranks_per_node;
    heuristics =
        choose_heuristics(kSms, budget, most_fused_tokens(ranks, shape.num_experts), shape, WireFormat::fp8);
    stage = stage_tokens;
  }
  LaunchContext context() const { return {heuristics, shape, heuristics.fused_tokens, stage}; }

  DeviceShape shape;
  Heuristics heuristics;
  int64_t stage;
};

void check_dispatch(const Setup& setup, const DispatchRequest& request) {
  const DispatchPlan plan = plan_dispatch(setup.context(), request);
  const int most = setup.heuristics.all_blocks();
  const bool one_node = setup.shape.other_nodes() == 0;
  const bool may = !request.in_halves && request.work != RowWork::products && one_node;
  CHECK(plan.in_one == (may && request.tokens <= setup.heuristics.fused_tokens &&
                        request.tokens <= setup.stage && setup.heuristics.fused_tokens > 0));
  CHECK(!plan.text().empty());
  if (plan.in_one) {
    CHECK(plan.fused.blocks >= 1 && plan.fused.blocks <= most);
    CHECK(plan.fused.senders >= 0 &&
          plan.fused.senders < plan.fused.blocks - leading_blocks(plan.fused.blocks) + 1);
    CHECK(request.routes || plan.fused.senders == 0);
    CHECK(plan.fused.team_warps >= 1 && plan.fused.team_warps <= kWarps);
    CHECK(plan.send == 0 && plan.route == 0 && plan.receive == 0);
    return;
  }
  CHECK(plan.send >= 1 && plan.receive >= 1 && plan.send_warps >= 1);
  CHECK(plan.send + plan.receive + plan.relay <= most);
  CHECK((plan.relay > 0) == !one_node);
  // The blocks that work out routes are followed by those that receive, and are no more.
  CHECK((plan.route > 0) == request.routes && plan.route + plan.planner <= std::max(plan.receive, 1));
  CHECK(plan.route < kMaxRouteBlocks && plan.planner <= 1);
  if (request.routes && routes_few(setup.shape, request.tokens, kRouteWords)) CHECK(plan.route == 1);
  CHECK(one_node || !plan.routes_first);
  CHECK(plan.later == ((one_node ? request.tokens : kMaxTokens) > setup.stage));
}

void check_combine(const Setup& setup, const CombineRequest& request) {
  const CombinePlan plan = plan_combine(setup.context(), request);
  const int most = setup.heuristics.all_blocks();
  const bool may = !request.held && !request.weight_grads && setup.heuristics.fused_tokens > 0;
  CHECK(plan.in_one ==
        (may && request.tokens <= setup.heuristics.fused_sums && request.tokens <= setup.stage));
  CHECK(!plan.text().empty());
  if (plan.in_one) {
    CHECK(plan.blocks >= 2 && plan.blocks <= most && plan.parts >= 1);
    CHECK(plan.team_warps >= 1 && plan.team_warps <= kReduceWarps && plan.reduce == 0 && plan.sum == 0);
    return;
  }
  CHECK(plan.reduce >= 1 && plan.sum >= 1 && plan.reduce + plan.sum + plan.relay <= most);
  const bool pipes = !request.quantised;  // rows are long
  for (const int list : {plan.reduce_list, plan.sum_list}) CHECK(pipes == (list > 0) && list <= kListTokens);
}

TEST(all) {
  for (const int ranks : {1, 2, 4, 8, 64, 128})
    for (const int per_node : {0, ranks > 1 ? ranks / 2 : 0})
      for (const int budget : {0, 2, 3, 24, kSms})
        for (const int64_t stage : {int64_t{256}, kMaxTokens}) {
          const Setup setup(ranks, per_node, budget, stage);
          for (const int64_t tokens : {0, 1, 48, 257, 512, 768, 1024, 1025, 4096})
            for (const RowLayout layout : {RowLayout::expert, RowLayout::rank})
              for (const bool halves : {false, true}) {
                for (int work = 0; work < kRowWorks; ++work)
                  for (const bool routes : {false, true})
                    check_dispatch(setup, {routes, tokens, layout, static_cast<RowWork>(work), halves});
                for (const bool quantised : {false, true})
                  for (const bool grads : {false, true})
                    check_combine(setup, {tokens, layout, quantised, grads, halves});
              }
        }
}

/// What people read.
TEST(texts) {
  const Setup four(4, 0, 0);
  const auto dispatch = [&](int64_t tokens, RowWork work, bool routes = true) {
    return plan_dispatch(four.context(), {routes, tokens, RowLayout::expert, work, false}).text();
  };
  const auto starts = [](const std::string& text, const std::string& with) {
    return text.rfind(with, 0) == 0;
  };
  CHECK(starts(dispatch(4096, RowWork::none), "routes 32 + plan 1, send ") ||
        starts(dispatch(4096, RowWork::none), "routes 31 + plan 1, send "));
  CHECK(starts(dispatch(4096, RowWork::factors, false), "send "));
  CHECK(starts(dispatch(48, RowWork::none), "one kernel of "));
  CHECK(starts(dispatch(48, RowWork::products, false), "send "));
  const Setup nodes(4, 2, 0, 256);
  const std::string between =
      plan_dispatch(nodes.context(), {true, 48, RowLayout::expert, RowWork::none, false}).text();
  CHECK(between.find(", relay 12, the rest later") != std::string::npos);
  CHECK(starts(plan_combine(four.context(), {4096, RowLayout::rank, false, false, false}).text(), "reduce "));
  CHECK(starts(plan_combine(four.context(), {48, RowLayout::rank, false, false, false}).text(),
               "one kernel of "));
  CHECK(starts(plan_combine(four.context(), {48, RowLayout::rank, false, true, false}).text(), "reduce "));
}

/// What is received again takes as many blocks as there are rows, and nothing of it is sent.
TEST(received_again) {
  const Setup two(2, 0, 0);
  const FusedDispatch few = plan_fused_dispatch(two.context(), 4, 8, false, false);
  const FusedDispatch many = plan_fused_dispatch(two.context(), 4096, 8, false, false);
  CHECK(few.senders == 0 && many.senders == 0 && few.blocks < many.blocks);
  CHECK(many.blocks == two.heuristics.all_blocks());
}

}  // namespace

int main() { return moecomm::test::run(); }
