// The worked example of the plan. What communicators make of random ones is in tests/multirank, in
// test_dispatch_combine.py and test_nodes.py.
#include "check.hpp"
#include "layout/plan.hpp"

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

}  // namespace

int main() { return moecomm::test::run(); }
