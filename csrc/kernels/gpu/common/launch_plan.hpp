// Decides which kernels an operation launches and with how many blocks. The decision is printed if
// MOECOMM_LOG is "launch". Owners are the ranks that own experts; a token's home is its own rank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "common/error.hpp"
#include "kernels/gpu/common/heuristics.hpp"
#include "layout/device_window.hpp"

namespace moecomm::gpu {

/// The properties of a communicator on which its launches depend.
struct LaunchContext {
  const Heuristics& heuristics;
  const DeviceShape& shape;
  int64_t fused_tokens;  ///< most tokens of this rank for which one kernel may do a whole operation
  int64_t stage_tokens;  ///< tokens of a rank that have room in a receiver's staging section at once

  bool fuses(int64_t tokens) const { return in_one_kernel(tokens, fused_tokens) && tokens <= stage_tokens; }
};

/// An operation that sends rows from the tokens' own rank: a dispatch, or the backward of a combine.
struct DispatchRequest {
  bool routes;  ///< true for a dispatch, which makes routes and a plan
  int64_t tokens;
  RowLayout layout;
  RowWork work;
  bool in_halves;  ///< a separate call receives the rows
};

/// The launch of a dispatch in one kernel.
struct FusedDispatch {
  int blocks, senders, team_warps;  ///< senders and team_warps: see FusedArguments
};

/// Returns the launch of a kernel that receives `items` rows. It also sends the rows of this rank's `tokens`
/// tokens, unless an earlier launch has sent them. `divides`: some blocks may only send.
inline FusedDispatch plan_fused_dispatch(const LaunchContext& context, int64_t items, int64_t tokens,
                                         bool divides, bool quantised) {
  const Heuristics& heuristics = context.heuristics;
  const int32_t ranks = context.shape.ranks;
  const int leads = leading_blocks(heuristics.all_blocks());
  FusedDispatch plan{};
  plan.blocks = heuristics.fused_blocks(items, tokens, leads);
  if (divides) plan.senders = Heuristics::fused_senders(tokens, plan.blocks, quantised, ranks);
  plan.team_warps =
      Heuristics::dispatch_team_warps(items, plan.blocks - leads, kWarps, plan.senders, quantised, ranks);
  return plan;
}

/// The kernels of a dispatch, or of the backward of a combine.
struct DispatchPlan {
  bool in_one;  ///< one kernel (`fused`) does all; else several kernels of the blocks below
  FusedDispatch fused;
  int route, planner;  ///< blocks that compute routes; 1 if a further block makes the plan, else 0
  int relay;           ///< further blocks of the route and the send kernel that relay for other nodes
  int send, send_warps, receive;
  bool routes_first;  ///< as in SendArguments
  bool later;         ///< some chunks may wait for room; a kernel on another stream sends them

  int route_blocks() const { return route + relay + planner; }
  int send_blocks() const { return send + relay; }

  std::string text() const {
    if (in_one)
      return text_of("one kernel of ", fused.blocks, " blocks, ", fused.senders, " only send, ",
                     fused.team_warps, " warps a row");
    const std::string routes = route > 0 ? text_of("routes ", route, " + plan ", planner, ", ") : "";
    const std::string relays = relay > 0 ? text_of(", relay ", relay) : "";
    return text_of(routes, "send ", send, " of up to ", send_warps, " warps",
                   routes_first ? " behind routes" : "", ", receive ", receive, relays,
                   later ? ", the rest later" : "");
  }
};

inline DispatchPlan plan_dispatch(const LaunchContext& context, const DispatchRequest& request) {
  const DeviceShape& shape = context.shape;
  const bool quantised = request.work == RowWork::quantised, several_nodes = shape.other_nodes() > 0;
  DispatchPlan plan{};
  // Dot products with other rows are sums that one warp has to make in order.
  plan.in_one = !request.in_halves && request.work != RowWork::products && context.fuses(request.tokens);
  if (plan.in_one) {
    plan.fused =
        plan_fused_dispatch(context, request.tokens * shape.ranks, request.tokens, request.routes, quantised);
    return plan;
  }
  const DispatchBlocks& blocks = context.heuristics.dispatch(request.layout == RowLayout::rank, request.work);
  plan.relay = context.heuristics.relay_blocks;
  plan.send = blocks.send;
  plan.send_warps = blocks.send_warps;
  plan.receive = blocks.receive;
  plan.routes_first = blocks.routes_first && !several_nodes;
  // The number of tokens that other nodes bring is not known here.
  plan.later = (several_nodes ? shape.max_tokens : request.tokens) > context.stage_tokens;
  if (request.routes) {
    const bool few = routes_few(shape, request.tokens, kRouteWords);
    const int most = few ? 1 : std::clamp<int>(blocks.receive - 1, 1, kMaxRouteBlocks - 1);
    plan.route = Heuristics::route_blocks(request.tokens, most);
    // A further block makes the plan, if the receiving side has one more. With it the limit of blocks is
    // even: blocks of other kernels run faster next to their own kind (docs/history.md, "Blocks in pairs").
    plan.planner = blocks.receive > plan.route ? 1 : 0;
  }
  return plan;
}

struct CombineRequest {
  int64_t tokens;
  RowLayout layout;
  bool quantised;     ///< sums travel in another format than their dtype
  bool weight_grads;  ///< gradients of routing weights travel as well
  bool held;          ///< a separate call receives the sums
};

/// The kernels of a combine.
struct CombinePlan {
  bool in_one;                    ///< one kernel of `blocks` blocks; else two, of `reduce` and `sum` blocks
  int blocks, team_warps, parts;  ///< team_warps and parts: see CombineArguments
  bool flags_late;                ///< see CombineArguments
  int reduce, sum, reduce_list, sum_list;
  int relay;  ///< further blocks of the reducing kernel that relay for other nodes

  int reduce_blocks() const { return reduce + relay; }

  std::string text() const {
    if (in_one)
      return text_of("one kernel of ", blocks, " blocks, ", team_warps, " warps a sum, ", parts,
                     " parts of a row", flags_late ? ", flags late" : "");
    const std::string lists =
        sum_list > 0 ? text_of("lists of ", reduce_list, " and ", sum_list, " tokens") : "a warp a sum";
    return text_of("reduce ", reduce, ", sum ", sum, ", ", lists,
                   relay > 0 ? text_of(", relay ", relay) : "");
  }
};

inline CombinePlan plan_combine(const LaunchContext& context, const CombineRequest& request) {
  const Heuristics& heuristics = context.heuristics;
  const DeviceShape& shape = context.shape;
  CombinePlan plan{};
  plan.in_one = !request.held && !request.weight_grads && request.tokens <= heuristics.fused_sums &&
                context.fuses(request.tokens);
  if (plan.in_one) {
    // At the tokens' own rank, where sums are added up, many warps share each of the few tokens.
    plan.blocks = heuristics.fused_blocks(request.tokens, 0, 1);
    const int working = plan.blocks - 1;
    plan.team_warps = Heuristics::sum_team_warps(request.tokens, working, kReduceWarps, shape.ranks);
    plan.flags_late = Heuristics::flags_late(request.tokens, shape.ranks);
    plan.parts =
        Heuristics::sum_parts(request.tokens, int64_t{working} * kReduceWarps, sum_strips(shape.row_bytes()));
    return plan;
  }
  const CombineBlocks& blocks = heuristics.combine(request.layout == RowLayout::rank, request.quantised);
  plan.reduce = blocks.reduce;
  plan.sum = blocks.sum;
  plan.reduce_list = blocks.reduce_list;
  plan.sum_list = blocks.sum_list;
  plan.relay = heuristics.relay_blocks;
  return plan;
}

}  // namespace moecomm::gpu
