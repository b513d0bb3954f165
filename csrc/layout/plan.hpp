// The plan of one dispatch on one rank: the rows that it needs, their sources, and their positions in the
// output. It depends on all sources' expert ids alone, so all ranks agree without another exchange. A token's
// home is the rank that it comes from; its owners have its experts. A rail: see layout/nodes.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "layout/control.hpp"
#include "layout/nodes.hpp"
#include "layout/routing.hpp"

namespace moecomm {

/// The sizes on which the plan depends in addition to the ids.
struct PlanShape {
  int32_t rank;
  int32_t ranks;
  int32_t local_experts;
  int32_t top_k;
  RowLayout layout;
  int64_t alignment;
  int64_t capacity;            ///< rows of the output, or -1 for as many as needed
  int32_t ranks_per_node = 0;  ///< 0: all
  int64_t positions = -1;  ///< rank layout: entries of `index`; expert layout: rows per group; -1: as needed

  NodeMap nodes() const { return NodeMap::of(ranks, ranks_per_node); }
  /// True if the groups of all experts have the same number of rows, enough for any routing.
  bool fixed_groups() const { return layout == RowLayout::expert && positions >= 0; }
  /// Rows of an expert's group with its padding, if `rows` rows arrive for the expert.
  int64_t group_rows(int64_t rows) const { return fixed_groups() ? positions : align_up(rows, alignment); }
  bool operator==(const PlanShape&) const = default;
};

/// Ids of one source, int32[tokens][top_k]; values outside the range of experts mean no expert.
struct SourceIds {
  const int32_t* ids;
  int64_t tokens;
};

/// The tokens of a rank that each other node needs. A token's position in a node's list is its relay index:
/// the position of its row among the rows that travel there, and of its sum among the sums that return.
struct RelayRoutes {
  std::vector<std::vector<int32_t>> tokens;  ///< [other node] tokens, ascending
};
RelayRoutes make_routes(const PlanShape& shape, const SourceIds& own);

/// The sums that this rank makes for the rank of its rail on one other node: one row per relay index, which
/// adds up the token's rows on this node's ranks.
struct RelaySums {
  std::vector<int64_t> begin;  ///< [relayed rows + 1] ranges in owner
  std::vector<int32_t> owner;  ///< local index of the ranks that have rows of the token, ascending
  std::vector<int64_t> own;    ///< [relayed rows] the entry of the token in this rank's plan, or -1
};

/// An entry is one (source, token) that this rank needs; entries are ordered by source, then token.
struct Plan {
  PlanShape shape;
  uint64_t id = 0;          ///< epoch of the dispatch that made it, the same on all ranks
  int64_t rows = 0;         ///< rows of the output: capacity, or needed_rows
  int64_t needed_rows = 0;  ///< rows that an output without a capacity would have, with padding
  int64_t max_needed = 0;   ///< the largest needed_rows of any rank; only set with a capacity
  int32_t max_needed_rank = 0;

  std::vector<int64_t> source_begin;  ///< [ranks + 1] ranges of the sources' entries
  std::vector<int32_t> entry_token;   ///< [entries] number of the token at its source
  std::vector<int32_t> entry_place;   ///< [entries] row at the source: token, or relay index on other nodes
  std::vector<int32_t> entry_slot;    ///< [entries] this rank's position among the owners on this node
  std::vector<int64_t> row_begin;     ///< [entries + 1] ranges in row and row_k
  std::vector<int32_t> row;           ///< output rows of an entry in the order of k; -1 past the capacity
  std::vector<int32_t> row_k;         ///< the k whose expert the output row is for; -1 in the rank layout
  std::vector<int32_t> entry_ids;     ///< [entries][top_k] local expert or -1 (rank layout only)

  std::vector<int32_t> expert_rows;  ///< [local experts] rows without padding
  std::vector<int32_t> offsets;      ///< end of the rows of each local expert (or source), at most `rows`
  std::vector<std::pair<int64_t, int64_t>> padding;  ///< padding rows [begin, end), zero in the output

  /// Rank layout. by_expert: the plan of this dispatch in the expert layout, whose rows are the positions of
  /// `index`. index[position]: the row of this plan that belongs there, or 0 if the position is unused.
  std::shared_ptr<const Plan> by_expert;
  std::vector<int32_t> index;

  // The home side: this rank's own tokens.
  int64_t tokens = 0;
  std::vector<int32_t> local_topk_idx;  ///< [tokens][top_k]
  std::vector<int64_t> owner_begin;     ///< [tokens + 1] each token's range in owner and owner_place
  std::vector<int32_t> owner;        ///< a token's owners, ascending; owners on another node: its first rank
  std::vector<int32_t> owner_place;  ///< [as owner] slot on this node; for other nodes the relay index
  std::vector<int64_t> own_entry;    ///< [tokens] entry of (this rank, token), or -1
  RelayRoutes routes;

  // Fields for several nodes.
  std::vector<int64_t> source_tokens;  ///< [ranks] number of tokens that each rank brought
  std::vector<int64_t> relayed;        ///< [ranks] rows that a rank of another node sends here; ranks here: 0
  std::vector<RelaySums> relay_sums;   ///< [other node]

  int64_t entries() const { return static_cast<int64_t>(entry_token.size()); }
};

/// Makes the plan of rank shape.rank. sources[r]: ids of rank r, for all shape.ranks ranks. The division into
/// nodes changes where rows come from, not their positions in the output.
Plan make_plan(const PlanShape& shape, const std::vector<SourceIds>& sources, const RelayRoutes& routes);
/// Computes the routes, then makes the plan.
inline Plan make_plan(const PlanShape& shape, const std::vector<SourceIds>& sources) {
  return make_plan(shape, sources, make_routes(shape, sources[shape.rank]));
}

}  // namespace moecomm
