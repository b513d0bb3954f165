// A communicator as its kernels see it: plain data, passed by value. A token's home is the rank that it comes
// from. A rail is the ranks with the same local number on all nodes; ranks talk to other nodes over it.
#pragma once

#include <cstdint>

#include "layout/command.hpp"
#include "layout/device_plan.hpp"
#include "layout/device_window.hpp"
#include "layout/host_status.hpp"
#include "layout/routing.hpp"

namespace moecomm::device {

/// The connection to other nodes as kernels see it: host memory of this rank, from which its proxy (a host
/// thread) sends and into which it receives.
struct Rail {
  int32_t node, others;  ///< this node's number; number of other nodes
  std::byte* memory;
  WindowLayout layout;                                                 ///< layout of the host memory
  int64_t chunk_rows, chunks, arrival_flags, ids_bytes, counts_bytes;  ///< sizes computed by layout.shape
  uint64_t commands;

  /// The rail of `rank`. `memory`: the address that its kernels use for its window in host memory.
  static Rail of(const WindowLayout& layout, int32_t rank, std::byte* memory) {
    const WindowShape& s = layout.shape;
    return {s.nodes().node_of(rank),
            s.nodes().nodes() - 1,
            memory,
            layout,
            s.chunk_rows(),
            s.chunks(s.max_tokens),
            s.arrival_flags(),
            s.most_ids_bytes(),
            s.counts_bytes(),
            s.commands()};
  }
  template <class T = std::byte>
  __device__ T* at(int64_t offset) const {
    return reinterpret_cast<T*>(memory + offset);
  }
  __device__ int32_t other_of(int32_t its_node) const { return NodeMap::other(its_node, node); }
  __device__ int32_t node_of_other(int32_t other) const { return NodeMap::node_of_other(other, node); }
  __device__ int64_t chunk_bytes() const { return chunk_rows * layout.shape.row_bytes(); }
  /// Address in `section` of row number `row` among the rows that travel to or from one other node. The
  /// first chunk of these rows in the section is `first_chunk`. A row has `row_bytes` bytes.
  __device__ std::byte* row(int64_t section, int64_t first_chunk, int32_t row, int64_t row_bytes) const {
    const int32_t chunk = row / static_cast<int32_t>(chunk_rows);
    return memory + section + (first_chunk + chunk) * chunk_bytes() +
           (row - chunk * static_cast<int32_t>(chunk_rows)) * row_bytes;
  }
  /// Address, in the staging section, of row `number` among the rows that go to the node `other`.
  __device__ std::byte* staged(int32_t other, int32_t number, int64_t row_bytes) const {
    return row(layout.staging, other * chunks, number, row_bytes);
  }
  /// Address of row `number` among the rows that have arrived from the node `other`.
  __device__ const std::byte* arrived(uint64_t epoch, int32_t other, int32_t number,
                                      int64_t row_bytes) const {
    const int64_t section =
        layout.relay_rows[epoch & 1] + other * layout.shape.max_tokens * layout.shape.row_bytes();
    return row(section, 0, number, row_bytes);
  }
  __device__ const uint64_t* arrival(uint64_t epoch, int32_t other, int64_t flag) const {
    return at<uint64_t>(layout.arrivals[epoch & 1]) + other * arrival_flags + flag;
  }
  /// Address in `section` of the weights, or of their gradients, that belong to the node `other`.
  __device__ float* weights(int64_t section, int32_t other) const {
    return at<float>(section) + other * layout.shape.max_tokens * layout.shape.top_k;
  }
};

/// Addresses of the windows of a node's ranks: kernel parameters, so that no load from memory is needed.
struct NodeBases {
  int32_t first_rank;
  std::byte* of[kMaxNodeRanks];

  __device__ std::byte* operator[](int32_t rank) const { return of[rank - first_rank]; }
};

struct Comm {
  DeviceWindow window;
  int32_t rank;
  int32_t first_rank, local_ranks;  ///< the first rank of this node, and the number of its ranks
  int32_t local_experts;
  Divisor of_owner;             ///< divides by local_experts
  Divisor of_ranks, of_others;  ///< divide by the number of ranks; by that number less 1, at least by 1
  int32_t places_shift;         ///< log2 of the number of starting points of sends (TokenOrder)
  NodeBases bases;              ///< windows of this node's ranks as mapped here
  std::byte* own;               ///< bases[rank]
  HostStatus* host;
  uint64_t timeout_ns, absence_ns;  ///< longest wait; longest wait for a rank to begin the operation
  DevicePlan plan_fields;
  Rail rail;

  /// Computes local_experts, the divisors and places_shift from `window` and local_ranks.
  void derive() {
    local_experts = window.shape.local_experts();
    of_owner = Divisor::of(local_experts);
    of_ranks = Divisor::of(window.shape.ranks);
    of_others = Divisor::of(window.shape.ranks > 1 ? window.shape.ranks - 1 : 1);
    // One starting point for up to two ranks on the node, else 8 to 64. With many starting points, ranks
    // seldom send to one receiver at the same time (docs/history.md, "Blocks that meet at one receiver").
    constexpr int32_t kLeast = 3, kMost = 6;
    places_shift = local_ranks <= 2 ? 0 : kLeast;
    while (places_shift > 0 && places_shift < kMost && 1 << places_shift < local_ranks) ++places_shift;
  }

  /// An item of work for one rank: the rank, and the item's number among the items for this rank.
  struct Turn {
    int32_t rank, number;
  };
  /// Item `item` of the work for all ranks, taken round-robin from this rank on.
  __device__ Turn turn(int32_t item) const {
    const int32_t number = of_ranks.quotient(item);
    return {after(item - number * ranks()), number};
  }
  /// Item `item` of the work for all other ranks, round-robin from the next rank on.
  __device__ Turn turn_of_others(int32_t item) const {
    const int32_t number = of_others.quotient(item);
    return {after(1 + item - number * (ranks() - 1)), number};
  }
  /// The rank `steps` after this rank, modulo the number of ranks; `steps` is less than that number.
  __device__ int32_t after(int32_t steps) const {
    return rank + steps < ranks() ? rank + steps : rank + steps - ranks();
  }

  /// The rank that has an expert; -1: none.
  __device__ int32_t owner(int32_t expert) const { return expert < 0 ? -1 : of_owner.quotient(expert); }
  __device__ bool is_local(int32_t r) const { return r >= first_rank && r < first_rank + local_ranks; }
  /// The local rank that relays for `r`: `r` itself if it is on this node, else the rank here on r's rail.
  __device__ int32_t relay_rank(int32_t r) const { return is_local(r) ? r : first_rank + r % local_ranks; }
  /// For a token of this node: the rank in whose slot the sum of `owner` arrives (-1: none). It is `owner`
  /// or, if that is on another node, the first rank there.
  __device__ int32_t sender(int32_t owner) const {
    return owner < 0 || is_local(owner) ? owner : owner - owner % local_ranks;
  }
  /// The rank of the node `other` that is on this rank's rail.
  __device__ int32_t rail_rank(int32_t other) const {
    return rail.node_of_other(other) * local_ranks + rank - first_rank;
  }
  __device__ int32_t other_of(int32_t r) const { return rail.other_of(r / local_ranks); }
  /// Index, in a section of flags, of the pair (node of `r`, rank `neighbour` of this node).
  __device__ int32_t pair(int32_t r, int32_t neighbour) const {
    return r / local_ranks * local_ranks + neighbour - first_rank;
  }

  __device__ DeviceState& state() const { return *reinterpret_cast<DeviceState*>(own + window.state); }
  __device__ int32_t ranks() const { return window.shape.ranks; }
  __device__ int32_t top_k() const { return window.shape.top_k; }

  __device__ bool own_rows_travel() const { return window.shape.own_rows_travel(); }
  /// True if rows may have to be sent within this node: to other ranks, or to this rank itself.
  __device__ bool sends_here() const { return local_ranks > 1 || own_rows_travel(); }

  template <class T>
  __device__ T* at(std::byte* base, int64_t offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
  template <class T>
  __device__ T* mine(int64_t offset) const {
    return reinterpret_cast<T*>(own + offset);
  }
  /// The record that `writer` writes for `epoch` into the window at `base`.
  __device__ SignalRecord& record(std::byte* base, int32_t writer, uint64_t epoch) const {
    return at<SourceLines>(base, window.sources)[writer].record[epoch & 1];
  }
  /// The counts that `source` writes into the window at `base` in a dispatch, as EpochNumbers.
  __device__ uint64_t* counts(std::byte* base, int32_t source, uint64_t epoch) const {
    return at<uint64_t>(base, window.counts[epoch & 1]) + source * window.shape.announced();
  }
  /// The routes of all (token, k) of `source`, in the window at `base`.
  __device__ Route* routes(std::byte* base, int32_t source, uint64_t epoch) const {
    return at<Route>(base, window.routes[epoch & 1]) + source * window.shape.max_tokens * top_k();
  }
  /// token % places: a token's place in memory that has room for `places` tokens at once and is reused by
  /// later tokens. It avoids a 64-bit division, which takes as long as loading a row.
  __device__ static int64_t in_turn(int64_t token, int64_t places) {
    const auto number = static_cast<uint32_t>(token), all = static_cast<uint32_t>(places);
    return number < all ? number : number % all;
  }
  /// Dispatch: address of the row of `source`'s token in the staging section of `owner`, a rank of this node.
  __device__ std::byte* staged_row(int32_t owner, uint64_t epoch, int32_t source, int64_t token) const {
    const int32_t place = source - (!own_rows_travel() && source > owner);
    return bases[owner] + window.rows[epoch & 1] +
           (place * window.stage_tokens + in_turn(token, window.stage_tokens)) *
               window.shape.wire_row_bytes();
  }
  /// Combine: address of slot `slot` of a token. `base`: the window of the rank that the token came from.
  __device__ std::byte* slot_row(std::byte* base, uint64_t epoch, int64_t token, int32_t slot) const {
    return base + window.rows[epoch & 1] + (token * window.shape.slots() + slot) * window.shape.row_bytes();
  }
  /// Combine: address of sum number `slot` for a token of a rank on the other node `other`. `base`: the
  /// window of the rank of this node that relays to that rank.
  __device__ std::byte* partial_row(std::byte* base, uint64_t epoch, int32_t other, int64_t token,
                                    int32_t slot) const {
    return base + window.partials[epoch & 1] +
           ((other * window.partial_tokens + in_turn(token, window.partial_tokens)) *
                window.shape.node_slots() +
            slot) *
               window.shape.row_bytes();
  }
  __device__ uint64_t* flag(std::byte* base, int64_t section, int32_t writer, int64_t chunk) const {
    return at<uint64_t>(base, section) + writer * (window.shape.max_chunks() + 1) + chunk;
  }
  /// Arrival flag, in the window at `base`, of chunk `number` from `writer`.
  __device__ uint64_t* arrival(std::byte* base, int32_t writer, int64_t number) const {
    return flag(base, window.arrived, writer, number);
  }
  /// The number of the arrival flag for gradients of weights. This flag follows the flags of the chunks.
  __device__ int64_t gradients_number() const { return window.shape.max_chunks(); }
};

/// A plan in device memory.
struct PlanView {
  int32_t* words;
  DevicePlan fields;

  __device__ PlanHeader& header() const { return *reinterpret_cast<PlanHeader*>(words + fields.header); }
  __device__ int32_t* at(int64_t field) const { return words + field; }
};

}  // namespace moecomm::device
