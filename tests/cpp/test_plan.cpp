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

void test_worked_example() {
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

void test_random() {
  std::mt19937_64 random(test::seed());
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(bound));
  };
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
          CHECK(owners_below(&plan.home_ids[t * top_k], top_k, local, plan.owner[o]) ==
                o - plan.owner_begin[t]);
    }
    if (capacity >= 0) CHECK(max_needed == most);
  }
}

}  // namespace

int main() {
  test_worked_example();
  test_random();
  return test::finish();
}
