// The plan: its worked example, and random routings against the definition of the row order.
#include <algorithm>
#include <map>
#include <tuple>

#include "check.hpp"
#include "layout/plan.hpp"
#include "layout/routing.hpp"

using namespace moecomm;

namespace {

using Ids = std::vector<int32_t>;

std::vector<SourceIds> sources_of(const std::vector<Ids>& ids, int32_t top_k) {
  std::vector<SourceIds> sources;
  for (const Ids& source : ids)
    sources.push_back({source.data(), static_cast<int64_t>(source.size()) / top_k});
  return sources;
}

TEST(worked_example) {
  const std::vector<Ids> ids = {{0, 2, 1, 0, 3, 2}, {1, 3, 0, 1}};
  const Plan plan = make_plan({0, 2, 2, 2, RowLayout::expert, 4, -1}, sources_of(ids, 2));
  CHECK((plan.offsets == std::vector<int32_t>{4, 8}));
  CHECK((plan.expert_rows == std::vector<int32_t>{3, 3}));
  CHECK((plan.source_begin == std::vector<int64_t>{0, 2, 4}));
  CHECK((plan.entry_token == std::vector<int32_t>{0, 1, 0, 1}));
  CHECK((plan.row_begin == std::vector<int64_t>{0, 1, 3, 4, 6}));
  CHECK((plan.row == std::vector<int32_t>{0, 4, 1, 5, 2, 6}));
  CHECK((plan.row_k == std::vector<int32_t>{0, 0, 1, 0, 0, 1}));
  CHECK((plan.padding == std::vector<std::pair<int64_t, int64_t>>{{3, 4}, {7, 8}}));
  CHECK((plan.owner_begin == std::vector<int64_t>{0, 2, 3, 4}));
  CHECK((plan.owner == std::vector<int32_t>{0, 1, 0, 1}));
  CHECK((plan.own_entry == std::vector<int64_t>{0, 1, -1}));

  const Plan fixed = make_plan({0, 2, 2, 2, RowLayout::expert, 4, 6}, sources_of(ids, 2));
  CHECK(fixed.rows == 6 && fixed.needed_rows == 8 && fixed.max_needed == 8 && fixed.max_needed_rank == 0);
  CHECK((fixed.offsets == std::vector<int32_t>{4, 6}));
  CHECK((fixed.row == std::vector<int32_t>{0, 4, 1, 5, 2, -1}));

  const Plan by_rank = make_plan({1, 2, 2, 2, RowLayout::rank, 1, -1}, sources_of(ids, 2));
  CHECK((by_rank.offsets == std::vector<int32_t>{2, 3}));
  CHECK((by_rank.entry_token == std::vector<int32_t>{0, 2, 0}));
  CHECK((by_rank.entry_ids == std::vector<int32_t>{-1, 0, 1, 0, -1, 1}));
  CHECK((by_rank.entry_slot == std::vector<int32_t>{1, 0, 1}));
}

/// Every property that dispatch and combine rely on, from the definition: expert, then source, then token.
void check_plan(const Plan& plan, const std::vector<Ids>& ids) {
  const PlanShape& s = plan.shape;
  std::vector<std::tuple<int32_t, int32_t, int32_t>> order;  // (local expert, source, token)
  for (int32_t r = 0; r < s.ranks; ++r)
    for (size_t i = 0; i < ids[r].size(); ++i)
      if (expert_owner(ids[r][i], s.local_experts) == s.rank)
        order.emplace_back(ids[r][i] - s.rank * s.local_experts, r, static_cast<int32_t>(i / s.top_k));
  std::sort(order.begin(), order.end());
  std::map<std::tuple<int32_t, int32_t, int32_t>, int64_t> row_of;
  int64_t row = 0;
  int32_t expert = 0;
  for (const auto& item : order) {
    for (; expert < std::get<0>(item); ++expert) row = align_up(row, s.alignment);
    row_of[item] = row++;
  }
  CHECK(plan.needed_rows == align_up(row, s.alignment));
  CHECK(plan.rows == (s.capacity < 0 ? plan.needed_rows : s.capacity));
  size_t seen = 0;
  for (int32_t r = 0; r < s.ranks; ++r)
    for (int64_t entry = plan.source_begin[r]; entry < plan.source_begin[r + 1]; ++entry) {
      const int32_t token = plan.entry_token[entry];
      int32_t last_k = -1;
      for (int64_t j = plan.row_begin[entry]; j < plan.row_begin[entry + 1]; ++j, ++seen) {
        CHECK(plan.row_k[j] > last_k);
        last_k = plan.row_k[j];
        const int32_t e = ids[r][int64_t{token} * s.top_k + plan.row_k[j]] - s.rank * s.local_experts;
        const int64_t expected = row_of.at({e, r, token});
        CHECK(plan.row[j] == (expected < plan.rows ? expected : -1));
      }
      CHECK(last_k >= 0);
    }
  CHECK(seen == order.size());
  int64_t zeros = 0;
  for (const auto& [begin, end] : plan.padding) zeros += end - begin;
  if (s.capacity < 0) CHECK(zeros + static_cast<int64_t>(order.size()) == plan.rows);
}

/// Ranks of a node that have experts of a token, ascending.
std::vector<int32_t> owners_on(const NodeMap& nodes, int32_t node, const int32_t* ids, const PlanShape& s) {
  std::vector<int32_t> owners;
  for (int32_t rank = nodes.first(node); rank < nodes.first(node) + nodes.local_ranks; ++rank)
    if (std::any_of(ids, ids + s.top_k, [&](int32_t id) { return id >= 0 && id / s.local_experts == rank; }))
      owners.push_back(rank);
  return owners;
}

/// The same plan between nodes: the output is that of one node, and where rows and sums travel follows from
/// the definition.
void check_nodes(const Plan& plan, const Plan& one_node, const std::vector<Ids>& ids) {
  const PlanShape& s = plan.shape;
  const NodeMap nodes = s.nodes();
  const int32_t node = nodes.node_of(s.rank), first = nodes.first(node);
  CHECK(plan.row == one_node.row && plan.row_k == one_node.row_k && plan.offsets == one_node.offsets &&
        plan.entry_token == one_node.entry_token && plan.padding == one_node.padding);
  std::vector<int64_t> tokens;
  for (const Ids& source : ids) tokens.push_back(static_cast<int64_t>(source.size()) / s.top_k);
  CHECK(plan.source_tokens == tokens);

  for (int32_t r = 0; r < s.ranks; ++r) {
    int64_t relayed = 0, entry = plan.source_begin[r];
    for (int64_t t = 0; t < tokens[r]; ++t) {
      const int32_t* const of_token = ids[r].data() + t * s.top_k;
      const std::vector<int32_t> owners = owners_on(nodes, node, of_token, s);
      const bool remote = !nodes.same_node(r, s.rank);
      const auto mine = std::find(owners.begin(), owners.end(), s.rank);
      if (mine != owners.end()) {
        CHECK(plan.entry_token[entry] == t && plan.entry_place[entry] == (remote ? relayed : t));
        CHECK(plan.entry_slot[entry] == mine - owners.begin());
      }
      if (remote && !owners.empty()) {
        if (nodes.local_of(r) == nodes.local_of(s.rank)) {
          const RelaySums& sums = plan.relay_sums[NodeMap::other(nodes.node_of(r), node)];
          CHECK(sums.begin[relayed + 1] - sums.begin[relayed] == static_cast<int64_t>(owners.size()));
          for (size_t i = 0; i < owners.size(); ++i)
            CHECK(sums.owner[sums.begin[relayed] + static_cast<int64_t>(i)] == owners[i] - first);
          CHECK(sums.own[relayed] == (mine == owners.end() ? -1 : entry));
        }
        ++relayed;
      }
      entry += mine != owners.end();
    }
    CHECK(plan.relayed[r] == relayed && entry == plan.source_begin[r + 1]);
  }

  std::vector<int32_t> sent(nodes.nodes() - 1, 0);
  for (int64_t t = 0; t < plan.tokens; ++t) {
    const int32_t* const of_token = ids[s.rank].data() + t * s.top_k;
    std::vector<std::pair<int32_t, int32_t>> expected, found;  // contributor and place
    for (int32_t n = 0; n < nodes.nodes(); ++n) {
      const std::vector<int32_t> owners = owners_on(nodes, n, of_token, s);
      if (n == node) {
        for (size_t i = 0; i < owners.size(); ++i) expected.emplace_back(owners[i], static_cast<int32_t>(i));
      } else if (!owners.empty()) {
        const int32_t other = NodeMap::other(n, node);
        CHECK(plan.routes.tokens[other][sent[other]] == t);
        expected.emplace_back(nodes.first(n), sent[other]++);
      }
    }
    for (int64_t o = plan.owner_begin[t]; o < plan.owner_begin[t + 1]; ++o)
      found.emplace_back(plan.owner[o], plan.owner_place[o]);
    CHECK(found == expected);
  }
  for (size_t other = 0; other < sent.size(); ++other)
    CHECK(plan.routes.tokens[other].size() == static_cast<size_t>(sent[other]));
}

TEST(random) {
  std::mt19937_64 random(test::seed());
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
  for (int trial = 0; trial < 300; ++trial) {
    const auto ranks = static_cast<int32_t>(1 + below(7)), local = static_cast<int32_t>(1 + below(5));
    const auto top_k = static_cast<int32_t>(1 + below(std::min(ranks * local, 9)));
    std::vector<Ids> ids(ranks);
    for (Ids& source : ids)
      for (int64_t tokens = below(20); tokens > 0; --tokens) {
        Ids experts(ranks * local);
        for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
        std::shuffle(experts.begin(), experts.end(), random);
        for (int32_t k = 0; k < top_k; ++k) source.push_back(below(6) == 0 ? -1 : experts[k]);
      }
    const int64_t alignment = int64_t{1} << below(5), capacity = below(2) == 0 ? -1 : below(60);
    int64_t most = 0, max_needed = 0;
    for (int32_t rank = 0; rank < ranks; ++rank) {
      const Plan plan = make_plan({rank, ranks, local, top_k, RowLayout::expert, alignment, capacity},
                                  sources_of(ids, top_k));
      check_plan(plan, ids);
      most = std::max(most, plan.needed_rows);
      max_needed = plan.max_needed;
      for (int64_t t = 0; t < plan.tokens; ++t)
        for (int64_t o = plan.owner_begin[t]; o < plan.owner_begin[t + 1]; ++o)
          CHECK(owners_between(&plan.local_topk_idx[t * top_k], top_k, local, 0, plan.owner[o]) ==
                o - plan.owner_begin[t]);
      for (int32_t per_node = 1; per_node <= ranks; ++per_node)
        if (ranks % per_node == 0)
          check_nodes(make_plan({rank, ranks, local, top_k, RowLayout::expert, alignment, capacity, per_node},
                                sources_of(ids, top_k)),
                      plan, ids);
    }
    if (capacity >= 0) CHECK(max_needed == most);
  }
}

}  // namespace

int main() { return moecomm::test::run(); }
