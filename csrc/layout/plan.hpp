// The plan of one dispatch on one rank: which rows it needs, from where, and where they go. A pure function
// of every source's expert ids, so that all ranks agree without another exchange, whatever the timing.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "layout/control.hpp"
#include "layout/nodes.hpp"

namespace moecomm {

/// The sizes that the plan depends on besides the ids.
struct PlanShape {
  int32_t rank;
  int32_t ranks;
  int32_t local_experts;
  int32_t top_k;
  RowLayout layout;
  int64_t alignment;
  int64_t capacity;            ///< rows of the output, or -1 for as many as needed
  int32_t ranks_per_node = 0;  ///< 0: all
  int64_t positions = -1;      ///< rank layout: capacity of the expert-major index, or -1

  NodeMap nodes() const { return NodeMap::of(ranks, ranks_per_node); }
  bool operator==(const PlanShape&) const = default;
};

/// Ids of one source, int32[tokens][top_k]; values outside the experts are no expert.
struct SourceIds {
  const int32_t* ids;
  int64_t tokens;
};

/// The tokens of a rank that each other node needs. A token's place in such a list is its relay index:
/// where its row lies among those that travel to that node, and where the sum from there comes back.
struct RelayRoutes {
  std::vector<std::vector<int32_t>> tokens;  ///< [other node], ascending
};
RelayRoutes make_routes(const PlanShape& shape, const SourceIds& own);

/// The sums that this rank makes for the ranks of its rail: one row for each relay index, of what the ranks
/// of this node have of that token.
struct RelaySums {
  std::vector<int64_t> begin;  ///< [relayed rows + 1] into owner
  std::vector<int32_t> owner;  ///< local index of the ranks that have rows of the token, ascending
  std::vector<int64_t> own;    ///< [relayed rows] entry of this rank, or -1
};

/// An entry is one (source, token) that this rank needs; entries are ordered by source, then token.
struct Plan {
  PlanShape shape;
  uint64_t id = 0;          ///< epoch in which it was made, the same on all ranks
  int64_t rows = 0;         ///< rows of the output: capacity, or needed_rows
  int64_t needed_rows = 0;  ///< rows that every expert row and its alignment take here
  int64_t max_needed = 0;   ///< the largest needed_rows of any rank (fixed capacity only)
  int32_t max_needed_rank = 0;

  std::vector<int64_t> source_begin;  ///< [ranks + 1] entries of a source
  std::vector<int32_t> entry_token;   ///< [entries]
  std::vector<int32_t> entry_place;   ///< [entries] its row at the source: token, or relay index
  std::vector<int32_t> entry_slot;    ///< [entries] this rank's number among the token's owners on this node
  std::vector<int64_t> row_begin;     ///< [entries + 1] into row and row_k
  std::vector<int32_t> row;           ///< destination rows in the order of k; -1 past capacity
  std::vector<int32_t> row_k;         ///< the token's k that the row serves; -1 in the rank layout
  std::vector<int32_t> entry_ids;     ///< [entries][top_k] local expert or -1 (rank layout only)

  std::vector<int32_t> expert_rows;  ///< [local experts] rows without alignment
  std::vector<int32_t> offsets;      ///< inclusive ends a local expert (or a source), at most rows
  std::vector<std::pair<int64_t, int64_t>> padding;  ///< alignment rows [begin, end), zero in the output

  /// Rank layout: the plan of the same dispatch in the expert layout, whose rows are the positions of the
  /// index; and the row of this plan that each position reads, 0 where nothing is.
  std::shared_ptr<const Plan> by_expert;
  std::vector<int32_t> index;

  // The home side: this rank's own tokens.
  int64_t tokens = 0;
  std::vector<int32_t> local_topk_idx;  ///< [tokens][top_k]
  std::vector<int64_t> owner_begin;     ///< [tokens + 1] into owner
  std::vector<int32_t> owner;  ///< ranks with the token's experts, ascending; other nodes: the first rank
  std::vector<int32_t> owner_place;  ///< [like owner] its slot on this node; other nodes: relay index
  std::vector<int64_t> own_entry;    ///< [tokens] entry of (this rank, token), or -1
  RelayRoutes routes;

  // Fields with several nodes.
  std::vector<int64_t> source_tokens;  ///< [ranks] tokens that each rank brought
  std::vector<int64_t> relayed;  ///< [ranks] rows of a rank that travel to this node (0: it is of this node)
  std::vector<RelaySums> relay_sums;  ///< [other node] for this rank's rail

  int64_t entries() const { return static_cast<int64_t>(entry_token.size()); }
};

/// sources[r] is rank r's; sources.size() == shape.ranks. Which nodes there are changes where rows come from,
/// not which rows of the output they get.
Plan make_plan(const PlanShape& shape, const std::vector<SourceIds>& sources, const RelayRoutes& routes);
/// Makes the plan where the routes are not known yet.
inline Plan make_plan(const PlanShape& shape, const std::vector<SourceIds>& sources) {
  return make_plan(shape, sources, make_routes(shape, sources[shape.rank]));
}

}  // namespace moecomm
