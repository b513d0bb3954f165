// Dispatch on the CPU, the sending half: copies rows that others need into the own window, or to where they
// wait for the network.
#include <algorithm>
#include <atomic>

#include "kernels/cpu/dispatch.hpp"
#include "kernels/cpu/rows.hpp"
#include "layout/routing.hpp"

namespace moecomm::cpu {

int64_t dispatch_send(const Context& context, const std::byte* x, const int32_t* ids, int64_t tokens,
                      std::byte* rows) {
  const int64_t row_bytes = context.shape.row_bytes();
  const int32_t top_k = context.shape.top_k;
  const RowKernels& kernels = row_kernels();
  const bool stream = context.heuristics.stream(tokens * row_bytes);
  const NodeMap nodes = context.shape.nodes();
  std::atomic<int64_t> copied = 0;
  context.pool.parallel(tokens, context.heuristics.parallel(tokens * row_bytes),
                        [&](int64_t begin, int64_t end) {
                          int64_t here = 0;
                          for (int64_t t = begin; t < end; ++t) {
                            const int32_t* token_ids = ids + t * top_k;
                            const bool leaves = std::any_of(token_ids, token_ids + top_k, [&](int32_t id) {
                              const int32_t owner = expert_owner(id, context.local_experts);
                              return id >= 0 && owner != context.rank && nodes.same_node(owner, context.rank);
                            });
                            if (!leaves) continue;
                            kernels.copy(rows + t * row_bytes, x + t * row_bytes, row_bytes, stream);
                            ++here;
                          }
                          kernels.fence();
                          copied += here;
                        });
  return copied;
}

void dispatch_send_chunk(const Context& context, const std::byte* x, std::span<const int32_t> tokens,
                         std::byte* out) {
  const int64_t row_bytes = context.shape.row_bytes(), count = static_cast<int64_t>(tokens.size());
  const RowKernels& kernels = row_kernels();
  context.pool.parallel(count, context.heuristics.parallel(2 * count * row_bytes),
                        [&](int64_t begin, int64_t end) {
                          for (int64_t i = begin; i < end; ++i)
                            kernels.copy(out + i * row_bytes, x + tokens[i] * row_bytes, row_bytes, false);
                        });
}

}  // namespace moecomm::cpu
