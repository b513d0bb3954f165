// The plan of one dispatch on the GPU. Kernels write it to memory that the caller keeps in its handle, so
// that it outlives the window's sections; every replay of a graph rewrites it. It says what the plan of
// layout/plan.hpp says (see there for relay indices), but in arrays with an entry for every (source, token),
// so that no list has to be compacted. A token's home is the rank that it comes from.
#pragma once

#include <cstdint>

#include "common/macros.hpp"
#include "layout/device_window.hpp"

namespace moecomm {

inline constexpr int32_t kRowElsewhere = -1;   ///< the id names no expert of this rank
inline constexpr int32_t kRowDropped = -2;     ///< the expert is on this rank, but the row past the capacity
inline constexpr int32_t kNoOwnSlot = 0xFFFF;  ///< in DevicePlan::home: this rank has no slot

struct PlanHeader {
  uint64_t id;          ///< epoch of the plan's dispatch; 0: it failed, and nothing may move along the plan
  int32_t rows;         ///< rows of the output: the capacity, or needed_rows
  int32_t needed_rows;  ///< rows that an output without a capacity would have, with padding
  int32_t overflow;     ///< needed_rows or needed_positions, the first that exceeds its capacity; or 0
  int32_t positions;    ///< expert-major positions (in the expert layout: rows; in the rank layout: entries
                        ///< of the index): their capacity, or needed_positions
  int32_t needed_positions;
  int32_t reserved[9];
};
static_assert(sizeof(PlanHeader) == 64);

/// Fields of a plan, as offsets in int32 words.
struct DevicePlan {
  int64_t header;          ///< PlanHeader
  int64_t expert_rows;     ///< [local experts] rows without padding
  int64_t expert_starts;   ///< [1 + local experts] 0, and then `offsets`
  int64_t offsets;         ///< [local experts] first position after each group, at most header.positions
  int64_t source_ends;     ///< [ranks] rank layout: end of each source's rows, at most header.rows
  int64_t ends;            ///< [local experts] where each group's padding begins, at most header.positions
  int64_t tokens;          ///< [ranks] tokens of each source
  int64_t bases;           ///< [ranks][local experts] first position of (source, expert)
  int64_t source_bases;    ///< [ranks] rank layout: first row of a source
  int64_t local_topk_idx;  ///< [max_tokens][top_k] this rank's own ids, bad ones as -1
  int64_t home;            ///< [max_tokens] for own tokens: number of sums; from bit 16 on this rank's slot
  int64_t slots;           ///< [ranks][max_tokens] this rank's slot at the token's home; -1: no expert here
  int64_t positions;       ///< [ranks][max_tokens][top_k] position in expert-major order, kRowElsewhere or
                           ///< kRowDropped
  int64_t rows;            ///< [ranks][max_tokens] rank layout: output row, kRowElsewhere or kRowDropped

  // For several nodes only. [other]: index of another node; its rail rank has this rank's local number.
  int64_t node_tokens;   ///< [other] number of this rank's tokens that the other node needs
  int64_t home_index;    ///< [other][max_tokens] relay indices of this rank's tokens; -1: not needed there
  int64_t relay_tokens;  ///< [other] number of the rail rank's tokens that this node needs
  int64_t relay_index;   ///< [other][max_tokens] relay indices of the rail rank's tokens; -1: not needed here
  int64_t relay_ids;     ///< [other][max_tokens][top_k] experts of the rail rank's tokens, -1: none
  int64_t total;         ///< words of the whole plan

  static DevicePlan make(const DeviceShape& shape) {
    DevicePlan p{};
    int64_t end = 0;
    const auto place = [&](int64_t& field, int64_t words) {
      field = end;
      end += (words + 63) / 64 * 64;
    };
    const int64_t local = shape.local_experts(), tokens = shape.max_tokens;
    place(p.header, sizeof(PlanHeader) / 4);
    place(p.expert_rows, local);
    place(p.expert_starts, 1 + local);
    p.offsets = p.expert_starts + 1;
    place(p.source_ends, shape.ranks);
    place(p.ends, local);
    place(p.tokens, shape.ranks);
    place(p.bases, shape.ranks * local);
    place(p.source_bases, shape.ranks);
    place(p.local_topk_idx, tokens * shape.top_k);
    place(p.home, tokens);
    place(p.slots, shape.ranks * tokens);
    place(p.positions, shape.ranks * tokens * shape.top_k);
    place(p.rows, shape.ranks * tokens);
    const int64_t others = shape.other_nodes();
    place(p.node_tokens, others);
    place(p.home_index, others * tokens);
    place(p.relay_tokens, others);
    place(p.relay_index, others * tokens);
    place(p.relay_ids, others * tokens * shape.top_k);
    p.total = end;
    return p;
  }
};

}  // namespace moecomm
