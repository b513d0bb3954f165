// The window: one allocation per rank, with the same layout on every rank, described once. All offsets and
// the total size come from the one field list in window.cpp; no other code computes an offset into a window.
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
  /// How many numbers each source counts for others (DeviceShape::counts); 0: CPU ranks. GPUs on several
  /// nodes have this window in host memory, between kernels and the network, for what crosses the network.
  int64_t device_counts = 0;
  int64_t wire_row_bytes[kWireFormatCount] = {};  ///< GPUs: bytes of a row in each wire format

  MOECOMM_HD bool for_device() const { return device_counts > 0; }
  NodeMap nodes() const { return NodeMap::of(ranks, ranks_per_node); }
  int32_t other_nodes() const { return nodes().nodes() - 1; }
  MOECOMM_HD int64_t row_bytes() const { return hidden * dtype_bytes(dtype); }
  int64_t row_bytes_in(WireFormat wire) const {
    return wire == WireFormat::same ? row_bytes() : wire_row_bytes[static_cast<int>(wire)];
  }
  /// The most ranks of a node that can own one token's experts.
  int32_t slots() const {
    const int32_t owners = nodes().local_ranks;
    return owners < top_k ? owners : top_k;
  }
  int64_t weights_bytes() const { return max_tokens * top_k * weight_bytes(dtype); }

  // Rows per chunk; the last chunk for a node may have fewer. Rows cross the network in chunks, one put each.
  // A chunk is so large that a put's fixed cost does not matter, and so small that a rank can copy one chunk
  // while it sends another.
  int64_t chunk_rows() const;
  /// Number of chunks for `rows` rows.
  int64_t chunks(int64_t rows) const { return (rows + chunk_rows() - 1) / chunk_rows(); }
  /// The most chunks that can wait for the network. For GPUs: all chunks that a rank sends in an operation.
  int64_t staging_chunks() const;
  /// Bytes of the ids of a dispatch of `tokens` tokens. GPUs send what the source has computed from the ids
  /// (route.cuh): its counts, the packed routes and, in the rank layout, each Route::place.
  int64_t ids_bytes(int64_t tokens, RowLayout layout) const {
    const int64_t ids = tokens * top_k * 4;
    return for_device() ? counts_bytes() + ids * (layout == RowLayout::rank ? 2 : 1) : ids;
  }
  /// Bytes of the tokens' relay indices (layout/plan.hpp), which only GPUs send.
  int64_t index_bytes(int64_t tokens) const { return for_device() ? tokens * 4 : 0; }
  MOECOMM_HD int64_t counts_bytes() const { return (device_counts * 4 + 15) / 16 * 16; }
  int64_t most_ids_bytes() const {
    return ids_bytes(max_tokens, for_device() ? RowLayout::rank : RowLayout::expert);
  }
  /// Number of commands that the proxy's ring holds: at least those of four operations.
  uint64_t commands() const;
  /// Number of pieces in which `bytes` of ids, weights or gradients travel.
  MOECOMM_HD static int64_t pieces(int64_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }
  /// Arrival flags for one other node: for its chunks, then for the pieces of gradients.
  int64_t arrival_flags() const { return chunks(max_tokens) + pieces(weights_bytes()); }

  static constexpr int64_t kPieceBytes = int64_t{1} << 20;
  /// Bytes of the largest put.
  int64_t largest_put() const;
};

/// What a rank announces to another node in each operation: its record, and how many rows and parts it sends.
struct Announcement {
  SignalRecord record;
  uint64_t parts;  ///< chunks of rows that follow in this epoch; from GPUs also pieces of gradients, which
                   ///< raise arrival flags too. CPU: 0 in a combine
  int64_t rows;    ///< rows in these chunks
  char text[kErrorText];  ///< the error text, if record.error
};

/// Progress of a rank, read by the ranks of its node. A combine runs in rounds, in each of which a rank sums
/// one chunk for another node; rounds are counted over all operations.
struct RelayProgress {
  alignas(kLine) uint64_t reduced;  ///< rounds whose partial sums this rank has written to its neighbours
  alignas(kLine) uint64_t summed;   ///< rounds that this rank has summed, so that their partial sums are free
  alignas(kLine) uint64_t pushed;   ///< last epoch for which this rank has written all its data to its node
  alignas(kLine) uint64_t put;      ///< commands whose bytes the proxy has sent
  /// One epoch for each other node, written by the proxy. Up to this epoch all records of the rank there on
  /// this rank's rail have arrived, with the data and Announcement::parts that belong to them.
  MOECOMM_HD uint64_t* all_here(int64_t other) { return reinterpret_cast<uint64_t*>(this + 1) + other; }
};

/// Offsets of the sections. Where epochs alternate between two sections, the index is epoch & 1.
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
  int64_t input[2];         ///< [max_tokens] rows, handed out by empty_input; allocated on first use

  // Sections for several nodes; [other] is the number of another node (NodeMap::other). What a rank of
  // another node sends to this node is in the window of the rank here on its rail (layout/nodes.hpp), where
  // all ranks of the node read it.
  int64_t progress;          ///< RelayProgress, followed by its all_here
  int64_t announcement[2];   ///< Announcement [other] to that node
  int64_t relay_head[2];     ///< Announcement [other] from that node
  int64_t relay_ids[2];      ///< [other] like ids
  int64_t relay_weights[2];  ///< [other] like weights
  int64_t relay_rows[2];     ///< [other][max_tokens] rows from the rail; combine: sums for this rank's tokens
  int64_t relay_grads[2];    ///< [other] like weight_grads: from the experts of that node
  int64_t outgoing_grads[2];  ///< [other] like weight_grads: from this node's owners, waiting to be sent
  int64_t arrivals[2];  ///< uint64 [other][arrival_flags]: each flag holds the epoch that raised it last
  int64_t staging;      ///< [staging_chunks] chunks waiting to be sent
  int64_t partials;     ///< [kPartialRounds][chunk_rows][slots] sums that this node's ranks write here
  // Sections for GPUs.
  int64_t index[2];         ///< int32[other][max_tokens]: relay index of each token; -1: not needed there
  int64_t relay_index[2];   ///< int32[other][max_tokens]: `index` of the rail's rank there for this node
  int64_t commands;         ///< CommandRing::Slot[commands]
  int64_t committed_bytes;  ///< bytes allocated at construction: everything before input
  int64_t total_bytes;

  static constexpr int64_t kStagingChunks = 16, kPartialRounds = 4;

  static WindowLayout make(const WindowShape& shape);

  /// This function and those below return the offset of what a section holds for one other node.
  int64_t relayed_ids(uint64_t epoch, int32_t other) const {
    return relay_ids[epoch & 1] + other * shape.most_ids_bytes();
  }
  int64_t relayed_weights(int64_t section, int32_t other) const {
    return section + other * shape.weights_bytes();
  }
  int64_t relayed_rows(uint64_t epoch, int32_t other) const {
    return relay_rows[epoch & 1] + other * shape.max_tokens * shape.row_bytes();
  }
  int64_t relayed_index(int64_t section, int32_t other) const {
    return section + other * shape.index_bytes(shape.max_tokens);
  }
  static int64_t relayed_head(int64_t section, int32_t other) {
    return section + other * int64_t{sizeof(Announcement)};
  }
  int64_t arrival(uint64_t epoch, int32_t other, int64_t flag) const {
    return arrivals[epoch & 1] + (other * shape.arrival_flags() + flag) * int64_t{8};
  }
};

struct Section {
  std::string name;
  int64_t offset;
  int64_t bytes;
};

/// Lists the sections of WindowLayout::make with readable names and sizes.
std::vector<Section> window_sections(const WindowShape& shape);

}  // namespace moecomm
