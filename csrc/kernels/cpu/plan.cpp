// The plan by count and prefix sum (layout/plan.hpp says what it holds):
//   1. for every source, count the rows of each local expert, and the entries (tokens that need this rank)
//   2. rows of expert e start at the aligned end of expert e-1's, ordered by source
//   3. walk the ids again in (source, token, k) order and hand out rows from the start of (source, expert) on
// Worked example (tests/cpp/test_plan.cpp, docs/routing.md): 2 ranks, 4 experts, top-2, this is rank 0
// (experts 0, 1), alignment 4; source 0 ids {0,2} {1,0} {3,2}, source 1 ids {1,3} {0,1}.
//   expert 0: (s0,t0) (s0,t1) (s1,t1) -> rows 0 1 2, row 3 is padding
//   expert 1: (s0,t1) (s1,t0) (s1,t1) -> rows 4 5 6, row 7 is padding; offsets {4, 8}
//   entries: (0,0) -> {0}; (0,1) -> {4,1} in k order; (1,0) -> {5}; (1,1) -> {2,6}
#include "layout/plan.hpp"

#include <algorithm>

#include "layout/routing.hpp"

namespace moecomm {
namespace {

/// Sets max_needed and max_needed_rank: every rank knows whether any rank exceeds a fixed capacity.
void find_max_needed(Plan& plan, const std::vector<SourceIds>& sources) {
  const PlanShape& s = plan.shape;
  std::vector<int64_t> counts(int64_t{s.ranks} * s.local_experts, 0), needed(s.ranks, 0);
  for (const SourceIds& source : sources)
    for (int64_t t = 0; t < source.tokens; ++t) {
      const int32_t* ids = source.ids + t * s.top_k;
      for (int32_t k = 0; k < s.top_k; ++k) {
        if (ids[k] < 0) continue;
        if (s.layout == RowLayout::expert)
          ++counts[ids[k]];
        else if (first_of_owner(ids, k, s.local_experts))
          ++needed[expert_owner(ids[k], s.local_experts)];
      }
    }
  if (s.layout == RowLayout::expert)
    for (size_t e = 0; e < counts.size(); ++e) needed[e / s.local_experts] += s.group_rows(counts[e]);
  const auto most = std::max_element(needed.begin(), needed.end());
  plan.max_needed = *most;
  plan.max_needed_rank = static_cast<int32_t>(most - needed.begin());
}

void plan_home(Plan& plan, const SourceIds& home) {
  const PlanShape& s = plan.shape;
  const NodeMap nodes = s.nodes();
  const int32_t own_node = nodes.node_of(s.rank);
  std::vector<int32_t> relayed(nodes.nodes() - 1, 0);
  plan.tokens = home.tokens;
  plan.local_topk_idx.assign(home.ids, home.ids + home.tokens * s.top_k);
  plan.owner_begin.reserve(home.tokens + 1);
  plan.owner_begin.push_back(0);
  for (int64_t t = 0; t < home.tokens; ++t) {
    const int32_t* ids = home.ids + t * s.top_k;
    const auto begin = static_cast<int64_t>(plan.owner.size());
    for (int32_t k = 0; k < s.top_k; ++k) {
      if (!first_of_owner(ids, k, s.local_experts)) continue;
      const int32_t owner = expert_owner(ids[k], s.local_experts);
      const int32_t contributor = nodes.same_node(owner, s.rank) ? owner : nodes.first(nodes.node_of(owner));
      if (std::find(plan.owner.begin() + begin, plan.owner.end(), contributor) == plan.owner.end())
        plan.owner.push_back(contributor);
    }
    std::sort(plan.owner.begin() + begin, plan.owner.end());
    int32_t slot = 0;
    for (auto owner = plan.owner.begin() + begin; owner != plan.owner.end(); ++owner)
      plan.owner_place.push_back(nodes.same_node(*owner, s.rank)
                                     ? slot++
                                     : relayed[NodeMap::other(nodes.node_of(*owner), own_node)]++);
    plan.owner_begin.push_back(static_cast<int64_t>(plan.owner.size()));
  }
  plan.own_entry.assign(home.tokens, -1);
  for (int64_t i = plan.source_begin[s.rank]; i < plan.source_begin[s.rank + 1]; ++i)
    plan.own_entry[plan.entry_token[i]] = i;
}

/// Adds by_expert and the expert-major index to a plan in the rank layout. Both plans have the same entries.
void add_index(Plan& plan, const std::vector<SourceIds>& sources, const RelayRoutes& routes) {
  PlanShape shape = plan.shape;
  shape.layout = RowLayout::expert;
  shape.capacity = plan.shape.positions;
  shape.positions = -1;
  auto by_expert = std::make_shared<Plan>(make_plan(shape, sources, routes));
  plan.index.assign(by_expert->rows, 0);
  for (int64_t entry = 0; entry < plan.entries(); ++entry)
    for (int64_t j = by_expert->row_begin[entry]; j < by_expert->row_begin[entry + 1]; ++j) {
      int32_t& position = by_expert->row[j];
      if (plan.row[entry] < 0) position = -1;  // a position whose row was left out stays empty
      if (position >= 0) plan.index[position] = plan.row[entry];
    }
  plan.by_expert = std::move(by_expert);
}

/// Adds one relayed token to `sums`: its owners on this node, and this rank's plan entry for it (-1: none).
void add_relay_sum(const PlanShape& s, RelaySums& sums, const int32_t* ids, int64_t entry) {
  const NodeMap nodes = s.nodes();
  const int32_t first = nodes.first(nodes.node_of(s.rank));
  const auto begin = static_cast<int64_t>(sums.owner.size());
  for (int32_t k = 0; k < s.top_k; ++k) {
    const int32_t owner = expert_owner(ids[k], s.local_experts);
    if (owner >= first && owner < first + nodes.local_ranks && first_of_owner(ids, k, s.local_experts))
      sums.owner.push_back(owner - first);
  }
  std::sort(sums.owner.begin() + begin, sums.owner.end());
  sums.begin.push_back(static_cast<int64_t>(sums.owner.size()));
  sums.own.push_back(entry);
}

}  // namespace

RelayRoutes make_routes(const PlanShape& shape, const SourceIds& own) {
  const NodeMap nodes = shape.nodes();
  const int32_t own_node = nodes.node_of(shape.rank);
  RelayRoutes routes;
  routes.tokens.resize(nodes.nodes() - 1);
  for (int32_t other = 0; other < nodes.nodes() - 1; ++other) {
    const int32_t first = nodes.first(NodeMap::node_of_other(other, own_node));
    for (int64_t t = 0; t < own.tokens; ++t)
      if (owned_in(own.ids + t * shape.top_k, shape.top_k, shape.local_experts, first,
                   first + nodes.local_ranks))
        routes.tokens[other].push_back(static_cast<int32_t>(t));
  }
  return routes;
}

Plan make_plan(const PlanShape& shape, const std::vector<SourceIds>& sources, const RelayRoutes& routes) {
  Plan plan;
  plan.shape = shape;
  const int32_t local = shape.local_experts, first = shape.rank * local;
  const bool by_expert = shape.layout == RowLayout::expert;
  const auto local_expert = [&](int32_t id) { return id >= first && id < first + local ? id - first : -1; };
  // Calls visit(e, k) for each local expert e of a token. Returns false if the token has none.
  const auto for_local = [&](const int32_t* ids, const auto& visit) {
    bool any = false;
    for (int32_t k = 0; k < shape.top_k; ++k)
      if (const int32_t e = local_expert(ids[k]); e >= 0) {
        visit(e, k);
        any = true;
      }
    return any;
  };

  // 1. count
  std::vector<int64_t> counts(int64_t{shape.ranks} * local, 0);  // [source][expert]
  plan.source_begin.assign(shape.ranks + 1, 0);
  int64_t pairs = 0;
  for (int32_t r = 0; r < shape.ranks; ++r) {
    int64_t entries = 0;
    for (int64_t t = 0; t < sources[r].tokens; ++t)
      entries += for_local(sources[r].ids + t * shape.top_k, [&](int32_t e, int32_t) {
        ++counts[int64_t{r} * local + e];
        ++pairs;
      });
    plan.source_begin[r + 1] = plan.source_begin[r] + entries;
  }

  // 2. starts
  const int64_t entries = plan.source_begin[shape.ranks];
  plan.expert_rows.assign(local, 0);
  for (int32_t e = 0; e < local; ++e)
    for (int32_t r = 0; r < shape.ranks; ++r)
      plan.expert_rows[e] += static_cast<int32_t>(counts[int64_t{r} * local + e]);
  const auto clamp = [&](int64_t row) { return shape.capacity < 0 ? row : std::min(row, shape.capacity); };
  std::vector<int64_t> next(int64_t{shape.ranks} * local, 0);  // next row of [source][expert]
  if (by_expert) {
    int64_t end = 0;
    for (int32_t e = 0; e < local; ++e) {
      const int64_t begin = end;
      int64_t row = begin;
      for (int32_t r = 0; r < shape.ranks; ++r) {
        next[int64_t{r} * local + e] = row;
        row += counts[int64_t{r} * local + e];
      }
      end = begin + shape.group_rows(row - begin);
      plan.offsets.push_back(static_cast<int32_t>(clamp(end)));
      if (clamp(row) < clamp(end) && !shape.fixed_groups()) plan.padding.emplace_back(clamp(row), clamp(end));
    }
    plan.needed_rows = end;
  } else {
    for (int32_t r = 0; r < shape.ranks; ++r)
      plan.offsets.push_back(static_cast<int32_t>(clamp(plan.source_begin[r + 1])));
    plan.needed_rows = entries;
  }
  plan.rows = shape.capacity < 0 ? plan.needed_rows : shape.capacity;

  // 3. rows
  const NodeMap nodes = shape.nodes();
  const int32_t own_node = nodes.node_of(shape.rank), node_first = nodes.first(own_node);
  for (const SourceIds& source : sources) plan.source_tokens.push_back(source.tokens);
  plan.relayed.assign(shape.ranks, 0);
  plan.relay_sums.resize(nodes.nodes() - 1);
  for (RelaySums& sums : plan.relay_sums) sums.begin.push_back(0);
  plan.entry_token.reserve(entries);
  plan.entry_place.reserve(entries);
  plan.entry_slot.reserve(entries);
  plan.row_begin.reserve(entries + 1);
  plan.row_begin.push_back(0);
  plan.row.reserve(by_expert ? pairs : entries);
  plan.row_k.reserve(by_expert ? pairs : entries);
  const auto place = [&](int64_t row, int32_t k) {
    plan.row.push_back(row < plan.rows ? static_cast<int32_t>(row) : -1);
    plan.row_k.push_back(k);
  };
  for (int32_t r = 0; r < shape.ranks; ++r) {
    const bool remote = !nodes.same_node(r, shape.rank);
    RelaySums* const sums = remote && nodes.local_of(r) == nodes.local_of(shape.rank)
                                ? &plan.relay_sums[NodeMap::other(nodes.node_of(r), own_node)]
                                : nullptr;
    for (int64_t t = 0; t < sources[r].tokens; ++t) {
      const int32_t* ids = sources[r].ids + t * shape.top_k;
      const bool needed = for_local(ids, [&](int32_t e, int32_t k) {
        if (by_expert) place(next[int64_t{r} * local + e]++, k);
      });
      int64_t at_source = t;
      if (remote) {
        if (!owned_in(ids, shape.top_k, local, node_first, node_first + nodes.local_ranks)) continue;
        at_source = plan.relayed[r]++;
        if (sums != nullptr) add_relay_sum(shape, *sums, ids, needed ? plan.entries() : -1);
      }
      if (!needed) continue;
      if (!by_expert) {
        place(plan.entries(), -1);
        for (int32_t k = 0; k < shape.top_k; ++k) plan.entry_ids.push_back(local_expert(ids[k]));
      }
      plan.entry_token.push_back(static_cast<int32_t>(t));
      plan.entry_place.push_back(static_cast<int32_t>(at_source));
      plan.entry_slot.push_back(owners_between(ids, shape.top_k, local, node_first, shape.rank));
      plan.row_begin.push_back(static_cast<int64_t>(plan.row.size()));
    }
  }

  if (shape.capacity >= 0) find_max_needed(plan, sources);
  plan_home(plan, sources[shape.rank]);
  plan.routes = routes;
  if (!by_expert) add_index(plan, sources, routes);
  return plan;
}

}  // namespace moecomm
