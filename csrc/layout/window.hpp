// The window: one allocation a rank, the same layout on every rank, described once. All offsets and the total
// size come from the one field list in window.cpp; nobody else computes an offset into a window.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/dtype.hpp"
#include "common/macros.hpp"
#include "layout/control.hpp"
#include "layout/nodes.hpp"
#include "layout/wire_format.hpp"

namespace moecomm {

struct WindowShape {
  int32_t ranks;
  int32_t top_k;
  int64_t hidden;
  int64_t max_tokens;
  DType dtype;
  int32_t ranks_per_node = 0;  ///< 0: all
  /// GPUs on several nodes: the window is in host memory, between kernels and the network, and holds no more
  /// than that takes. Numbers that each source announces (DeviceShape::counts); 0: the ranks are CPU ranks.
  int64_t device_counts = 0;
  int64_t wire_row_bytes[kWireFormatCount] = {};  ///< GPUs: bytes of a row that travels in a format

  MOECOMM_HD bool for_device() const { return device_counts > 0; }
  NodeMap nodes() const { return NodeMap::of(ranks, ranks_per_node); }
  int32_t other_nodes() const { return nodes().nodes() - 1; }
  MOECOMM_HD int64_t row_bytes() const { return hidden * dtype_bytes(dtype); }
  int64_t row_bytes_in(WireFormat wire) const {
    return wire == WireFormat::same ? row_bytes() : wire_row_bytes[static_cast<int>(wire)];
  }
  /// Most ranks of a node that one token can have as owners.
  int32_t slots() const {
    const int32_t owners = nodes().local_ranks;
    return owners < top_k ? owners : top_k;
  }
  int64_t weights_bytes() const { return max_tokens * top_k * weight_bytes(dtype); }

  // Rows cross the network in chunks, one put each: large enough that a message's fixed cost does not count,
  // small enough that copying one lies under the wire time of another.
  /// Rows of a chunk; the last one of a node may have fewer.
  int64_t chunk_rows() const;
  /// Chunks of `rows` rows.
  int64_t chunks(int64_t rows) const { return (rows + chunk_rows() - 1) / chunk_rows(); }
  /// Chunks that can wait for the network. Kernels have room for all that they send in an operation.
  int64_t staging_chunks() const;
  /// Bytes that travel with a dispatch of `tokens` tokens besides weights and rows: ids; or from GPUs what
  /// their source has worked out (route.cuh): counts, packed routes, in the rank layout places; and with it,
  /// for each node, the relay index of each token.
  int64_t ids_bytes(int64_t tokens, RowLayout layout) const {
    const int64_t ids = tokens * top_k * 4;
    return for_device() ? counts_bytes() + ids * (layout == RowLayout::rank ? 2 : 1) : ids;
  }
  int64_t index_bytes(int64_t tokens) const { return for_device() ? tokens * 4 : 0; }
  MOECOMM_HD int64_t counts_bytes() const { return (device_counts * 4 + 15) / 16 * 16; }
  int64_t most_ids_bytes() const {
    return ids_bytes(max_tokens, for_device() ? RowLayout::rank : RowLayout::expert);
  }
  /// Commands that the proxy's ring holds: those of four operations, or more.
  uint64_t commands() const;
  /// Pieces in which `bytes` of ids, weights or gradients travel.
  MOECOMM_HD static int64_t pieces(int64_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }
  /// Arrival flags of one other node: its chunks, then the pieces of gradients.
  int64_t arrival_flags() const { return chunks(max_tokens) + pieces(weights_bytes()); }

  static constexpr int64_t kPieceBytes = int64_t{1} << 20;
  /// The largest put.
  int64_t largest_put() const;
};

/// The announcement of a rank to another node.
struct Announcement {
  SignalRecord record;
  uint64_t parts;  ///< chunks, and from GPUs all that raises arrival flags, that it sends there in this
                   ///< epoch, whatever happens
  int64_t rows;    ///< rows in them
  char text[kErrorText];  ///< if record.error
};

/// Progress of a rank, for its own node to read; rounds of combine count over all operations.
struct RelayProgress {
  alignas(kLine) uint64_t reduced;  ///< rounds whose partial sums this rank has written to its neighbours
  alignas(kLine) uint64_t summed;   ///< rounds that this rank has summed, so that their partial sums are free
  alignas(kLine) uint64_t pushed;   ///< epoch in which all that this rank has for its node is written
  alignas(kLine) uint64_t put;      ///< by the proxy: commands whose bytes have left
  /// Written by the proxy, for each other node: the epoch up to which everything that the rail's rank there
  /// sent unasked has arrived.
  MOECOMM_HD uint64_t* all_here(int64_t other) { return reinterpret_cast<uint64_t*>(this + 1) + other; }
};

/// Sections exist twice where their use alternates by epoch; the index is 0 or 1.
struct WindowLayout {
  WindowShape shape;
  int64_t peers;            ///< PeerLines[ranks]
  int64_t owner;            ///< OwnerLines
  int64_t error_text[2];    ///< char[kErrorText]
  int64_t ids[2];           ///< int32[max_tokens][top_k]
  int64_t weights[2];       ///< weight type [max_tokens][top_k]
  int64_t weight_grads[2];  ///< weight type [max_tokens][top_k], written by the owners of the experts
  int64_t rows[2];          ///< [max_tokens] rows
  int64_t slots[2];         ///< [max_tokens][slots] rows, written by the owners of the experts
  int64_t input[2];         ///< [max_tokens] rows, handed out by empty_input; memory is taken on first use

  // Sections with several nodes; [other] is the number of another node (NodeMap::other). What a rank of
  // another node sends to this node lies in the window of the rank of its rail, and all ranks of the node
  // read it there.
  int64_t progress;          ///< RelayProgress, and its all_here
  int64_t announcement[2];   ///< Announcement [other], as they leave
  int64_t relay_head[2];     ///< Announcement [other]
  int64_t relay_ids[2];      ///< [other] as ids
  int64_t relay_weights[2];  ///< [other] as weights
  int64_t relay_rows[2];  ///< [other][max_tokens] rows: what the rail sends, and combine's sums for this rank
  int64_t relay_grads[2];     ///< [other] as weight_grads: those that experts there have
  int64_t outgoing_grads[2];  ///< [other] as weight_grads: written by the owners of this node, on their way
  int64_t arrivals[2];        ///< uint64 [other][arrival_flags]: the epoch that has arrived
  int64_t staging;            ///< [staging_chunks] chunks on their way out
  int64_t partials;           ///< [kPartialRounds][chunk_rows][slots] rows: sums of the ranks of this node
  // Sections for GPUs.
  int64_t index[2];         ///< int32[other][max_tokens]: relay index of each token, -1: not needed there
  int64_t relay_index[2];   ///< [other], laid out as `index`
  int64_t commands;         ///< CommandRing::Slot[commands]
  int64_t committed_bytes;  ///< taken at construction: everything before input
  int64_t total_bytes;

  static constexpr int64_t kStagingChunks = 16, kPartialRounds = 4;

  static WindowLayout make(const WindowShape& shape);

  /// Offset of the part of `section` that belongs to another node.
  int64_t relayed_ids(int parity, int32_t other) const {
    return relay_ids[parity] + other * shape.most_ids_bytes();
  }
  int64_t relayed_weights(int64_t section, int32_t other) const {
    return section + other * shape.weights_bytes();
  }
  int64_t relayed_rows(int parity, int32_t other) const {
    return relay_rows[parity] + other * shape.max_tokens * shape.row_bytes();
  }
  int64_t relayed_index(int64_t section, int32_t other) const {
    return section + other * shape.index_bytes(shape.max_tokens);
  }
  static int64_t relayed_head(int64_t section, int32_t other) {
    return section + other * int64_t{sizeof(Announcement)};
  }
  int64_t arrival(int parity, int32_t other, int64_t flag) const {
    return arrivals[parity] + (other * shape.arrival_flags() + flag) * int64_t{8};
  }
};

struct Section {
  std::string name;
  int64_t offset;
  int64_t bytes;
};

/// Lists the sections of WindowLayout::make, with names and sizes for people.
std::vector<Section> window_sections(const WindowShape& shape);

}  // namespace moecomm
