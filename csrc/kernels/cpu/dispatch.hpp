// Dispatch on the CPU: a rank publishes rows that others need in its own window, then pulls the rows of its
// plan.
#pragma once

#include <span>
#include <vector>

#include "common/thread_pool.hpp"
#include "kernels/cpu/heuristics.hpp"
#include "layout/plan.hpp"
#include "layout/window.hpp"

namespace moecomm::cpu {

/// What every CPU kernel of a communicator works with.
struct Context {
  const WindowShape& shape;
  ThreadPool& pool;
  const Heuristics& heuristics;
  int32_t rank;
  int32_t local_experts;

  /// Splits [0, count) among the threads, if the work, which moves `bytes` in all, is worth it.
  template <class Body>
  void parallel(int64_t count, int64_t bytes, const Body& body) const {
    pool.parallel(count, heuristics.parallel(bytes), body);
  }
};

/// Copies each row of x [tokens] that another rank of this node will pull to the row of `rows` with the same
/// number. Returns how many rows it has copied.
int64_t dispatch_send(const Context& context, const std::byte* x, const int32_t* ids, int64_t tokens,
                      std::byte* rows);

/// Copies rows tokens[0], tokens[1], ... of x to consecutive rows of `out`, a chunk to send to another node.
void dispatch_send_chunk(const Context& context, const std::byte* x, std::span<const int32_t> tokens,
                         std::byte* out);

/// Entries [begin, end) of a plan.
struct EntryRange {
  int64_t begin, end;
};
/// Returns the entries of source `rank` whose Plan::entry_place is in [first, end).
EntryRange entries_between(const Plan& plan, int32_t rank, int64_t first, int64_t end);

/// Calls visit(source, number, here, expert) for every (token, k) whose expert is on this rank. number: index
/// of the weight at the source; here: index of the weight in the output, -1 if its row is past the capacity;
/// expert: the local expert in the rank layout, -1 in the expert layout.
template <class Visit>
void for_each_weight(const Plan& plan, const Visit& visit) {
  const int64_t top_k = plan.shape.top_k;
  for (int32_t source = 0; source < plan.shape.ranks; ++source)
    for (int64_t entry = plan.source_begin[source]; entry < plan.source_begin[source + 1]; ++entry) {
      const int64_t first = plan.entry_token[entry] * top_k;
      for (int64_t j = plan.row_begin[entry]; j < plan.row_begin[entry + 1]; ++j) {
        const int64_t row = plan.row[j];
        if (plan.shape.layout == RowLayout::expert) {
          visit(source, first + plan.row_k[j], row, -1);
          continue;
        }
        for (int64_t k = 0; k < top_k; ++k)
          if (const int32_t id = plan.entry_ids[entry * top_k + k]; id >= 0)
            visit(source, first + k, row < 0 ? row : row * top_k + k, id);
      }
    }
}

/// For dispatch_receive(), which reads each source row once and writes it to all its rows of `out`
/// [plan.rows][hidden]. rows[r]: rank r's rows, numbered as in plan.entry_place. If `scales` (weight type,
/// [plan.rows]) is given, row p of `out` is the source row times scales[p]. If `dots` is given, dots[p] is
/// the dot product of the source row and row p of `other`: the gradient of a weight in combine's backward.
struct PullArguments {
  std::vector<const std::byte*> rows;
  std::byte* out = nullptr;
  const std::byte* scales = nullptr;
  const std::byte* other = nullptr;
  std::byte* dots = nullptr;
};
void dispatch_receive(const Context& context, const Plan& plan, const PullArguments& arguments,
                      EntryRange range);
/// Sets the padding rows of `out`, and their `dots`, to zero.
void zero_padding(const Context& context, const Plan& plan, const PullArguments& arguments);

/// Expert layout: pulls weights [plan.rows]. Rank layout: weights and local expert ids [plan.rows][top_k].
/// Unused weights are 0, ids -1. weights[r]: rank r's published weights [tokens][top_k]. Outputs may be null.
void pull_metadata(const Context& context, const Plan& plan, const std::vector<const std::byte*>& weights,
                   std::byte* out_weights, int32_t* out_ids);

}  // namespace moecomm::cpu
