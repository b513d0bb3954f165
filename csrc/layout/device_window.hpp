// The window of a CUDA communicator: what peers write into each other's GPU memory. One field list, shared by
// host and device, from which all offsets and the total size come (device_window.cpp). A token's owners are
// the ranks with its experts, its home the rank that it comes from. A rail: see layout/nodes.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dtype.hpp"
#include "common/macros.hpp"
#include "layout/control.hpp"
#include "layout/window.hpp"
#include "layout/wire_format.hpp"

namespace moecomm {

inline constexpr int32_t kMaxTopK = 32;  ///< a warp holds the ids of a token
inline constexpr int32_t kMaxNodeRanks = 128;
inline constexpr int32_t kMaxChunk = 8;         ///< the most tokens of a chunk
inline constexpr int32_t kMaxRouteBlocks = 32;  ///< the most blocks that count ids for routes

/// Chunks of a rank with up to kMostOfOne tokens have 1 token; up to kMostOfTwo 2, kMostOfFour 4; else 8.
inline constexpr int64_t kMostOfOne = 1024, kMostOfTwo = 4096, kMostOfFour = 16384;
/// Log2 of chunk_tokens.
MOECOMM_HD constexpr int32_t chunk_shift(int64_t tokens) {
  return tokens <= kMostOfOne ? 0 : tokens <= kMostOfTwo ? 1 : tokens <= kMostOfFour ? 2 : 3;
}
static_assert(1 << chunk_shift(kMostOfFour + 1) == kMaxChunk);
/// Tokens of a chunk, which has one arrival flag: few, so that many warps share the work evenly, but so many
/// that flags cost little. Depends on the source's number of tokens alone: sender and receiver agree on it.
MOECOMM_HD constexpr int32_t chunk_tokens(int64_t tokens) { return 1 << chunk_shift(tokens); }

/// Number of chunks of `tokens` tokens. It avoids a division, which takes a GPU as long as loading a row.
MOECOMM_HD constexpr int64_t chunk_count(int64_t tokens) {
  return (tokens + chunk_tokens(tokens) - 1) >> chunk_shift(tokens);
}

/// A number that travels with its epoch in one word: a reader that finds the epoch has the number, so no
/// fence or flag has to follow. Zeroed memory belongs to no epoch.
struct EpochNumber {
  static constexpr int kBits = 24;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

  MOECOMM_HD static constexpr uint64_t word(uint64_t epoch, int32_t number) {
    return epoch << kBits | (static_cast<uint64_t>(number) + 1);
  }
  MOECOMM_HD static constexpr bool is_of(uint64_t word, uint64_t epoch) {
    return (word & kMask) != 0 && (word & ~kMask) == epoch << kBits;
  }
  MOECOMM_HD static constexpr int32_t number(uint64_t word) { return static_cast<int32_t>(word & kMask) - 1; }
};

/// A rank's announcement that it begins a dispatch: 16 bytes, stored and loaded as a whole.
struct alignas(16) DispatchStart {
  uint64_t arguments;  ///< arguments_hash of the record that follows
  uint64_t epoch;      ///< EpochNumber; only its epoch has a meaning
};
static_assert(sizeof(DispatchStart) == 16);

/// The route of a (token, k), stored and loaded as a whole.
struct alignas(16) Route {
  int32_t packed;  ///< expert << number_bits | number among the source's rows for that expert; -1: none
  float weight;    ///< 0 without weights
  uint64_t place;  ///< EpochNumber: in the rank layout the token's number among those that its source sends
                   ///< to the expert's owner, else 0
};
static_assert(sizeof(Route) == 16);

/// An owner's staging section holds all tokens of up to this many sources (the GPUs of a host) at once.
inline constexpr int32_t kWholeSources = 8;

struct DeviceShape {
  int32_t ranks;
  int32_t top_k;
  int64_t num_experts;
  int64_t hidden;
  int64_t max_tokens;
  DType dtype;
  WireFormat wire;
  int32_t ranks_per_node = 0;             ///< 0: all
  int32_t whole_sources = kWholeSources;  ///< with more sources on a node, tokens may reuse memory

  /// Returns this shape with another wire format of rows.
  MOECOMM_HD DeviceShape with_wire(WireFormat other) const {
    DeviceShape shape = *this;
    shape.wire = other;
    return shape;
  }

  MOECOMM_HD NodeMap nodes() const { return NodeMap::of(ranks, ranks_per_node); }
  MOECOMM_HD int32_t other_nodes() const { return nodes().nodes() - 1; }
  MOECOMM_HD int32_t local_experts() const { return static_cast<int32_t>(num_experts / ranks); }
  MOECOMM_HD int64_t row_bytes() const { return hidden * dtype_bytes(dtype); }
  /// Bytes of the values of a row on the wire; the scales follow.
  MOECOMM_HD int64_t wire_data_bytes() const { return wire == WireFormat::same ? row_bytes() : hidden; }
  /// Bytes of the scales of a row on the wire.
  MOECOMM_HD int64_t wire_scale_bytes() const {
    const WireEntry entry = wire_entry(wire);
    const int32_t columns = entry.scale_columns;
    return columns == 0 ? 0 : (hidden + columns - 1) / columns * entry.scale_bytes;
  }
  MOECOMM_HD int64_t wire_row_bytes() const {
    if (wire == WireFormat::same) return row_bytes();
    const int64_t bytes = wire_data_bytes() + wire_scale_bytes();
    const int64_t lines = (bytes + 127) / 128 * 128;  // rows in cache lines of their own fill a link better
    return lines <= row_bytes() ? lines : (bytes + 15) / 16 * 16;
  }
  /// True if a rank also stages rows of its own tokens, because they have to be converted to the wire format.
  MOECOMM_HD bool own_rows_travel() const { return wire != WireFormat::same; }
  /// Number of sources that write rows into an owner's staging section.
  MOECOMM_HD int32_t staged_sources() const { return own_rows_travel() || ranks == 1 ? ranks : ranks - 1; }
  /// The most sums for one token: one of each owner on its node, and one of each other node.
  MOECOMM_HD int32_t slots() const {
    const int32_t senders = nodes().local_ranks + other_nodes();
    return senders < top_k ? senders : top_k;
  }
  /// The most owners of one token on one node.
  MOECOMM_HD int32_t node_slots() const {
    const int32_t owners = nodes().local_ranks;
    return owners < top_k ? owners : top_k;
  }
  /// The most chunks of a source with up to max_tokens tokens.
  MOECOMM_HD int64_t max_chunks() const {
    int64_t most = 0;
    for (int64_t bound : {kMostOfOne, kMostOfTwo, kMostOfFour, max_tokens}) {
      const int64_t tokens = bound < max_tokens ? bound : max_tokens;
      if (chunk_count(tokens) > most) most = chunk_count(tokens);
    }
    return most;
  }
  /// How many numbers a source counts for others: rows for each expert, then tokens for each rank.
  MOECOMM_HD int64_t counts() const { return num_experts + ranks; }
  /// How many numbers a source announces: its counts(), then its number of tokens.
  MOECOMM_HD int64_t announced() const { return counts() + 1; }
  /// How many numbers a source counts: its counts(), then for several nodes the tokens for each node.
  MOECOMM_HD int64_t bins() const { return other_nodes() > 0 ? counts() + nodes().nodes() : counts(); }
};

/// Throws Error(unsupported) for a shape that the kernels can't serve.
void check_shape(const DeviceShape& shape);

/// The shape of the window in host memory through which kernels exchange data with the network.
WindowShape host_window_shape(const DeviceShape& shape);

/// A shape that keeps sizes, computed in advance, which kernels need often: to compute a size takes a
/// division, or a dozen dependent instructions.
class KernelShape : public DeviceShape {
 public:
  KernelShape() = default;
  explicit KernelShape(const DeviceShape& shape)
      : DeviceShape(shape),
        row_bytes_(shape.row_bytes()),
        wire_data_bytes_(shape.wire_data_bytes()),
        wire_scale_bytes_(shape.wire_scale_bytes()),
        wire_row_bytes_(shape.wire_row_bytes()),
        max_chunks_(shape.max_chunks()),
        bins_(shape.bins()),
        other_nodes_(shape.other_nodes()),
        slots_(shape.slots()),
        node_slots_(shape.node_slots()) {}

  MOECOMM_HD int64_t row_bytes() const { return row_bytes_; }
  MOECOMM_HD int64_t wire_data_bytes() const { return wire_data_bytes_; }
  MOECOMM_HD int64_t wire_scale_bytes() const { return wire_scale_bytes_; }
  MOECOMM_HD int64_t wire_row_bytes() const { return wire_row_bytes_; }
  MOECOMM_HD int64_t max_chunks() const { return max_chunks_; }
  MOECOMM_HD int64_t bins() const { return bins_; }
  MOECOMM_HD int32_t other_nodes() const { return other_nodes_; }
  MOECOMM_HD int32_t slots() const { return slots_; }
  MOECOMM_HD int32_t node_slots() const { return node_slots_; }

 private:
  int64_t row_bytes_, wire_data_bytes_, wire_scale_bytes_, wire_row_bytes_;
  int64_t max_chunks_, bins_;
  int32_t other_nodes_, slots_, node_slots_;
};

/// The records that one source writes. Two alternate, because a source can be one epoch ahead.
struct SourceLines {
  SignalRecord record[2];
};
static_assert(sizeof(SourceLines) == 2 * kLine);

/// Tells kernels that wait for a peer that the peer will not signal any more. The host copies it to device
/// memory: kernels that polled host memory would slow down their own NVLink traffic (docs/history.md).
struct alignas(32) PeerLoss {
  uint32_t set;  ///< 1: waits for this peer end, unless its signal has arrived
  int32_t peer;  ///< the rank to blame: this peer, or the rank on which this peer gave up
  Cause cause;
  int32_t first;      ///< the rank that noticed the loss first
  uint64_t complete;  ///< waits for epochs up to `complete` go on: what the peer sent in them before it
                      ///< closed is on this node, where kernels may still have to forward it
};
static_assert(sizeof(PeerLoss) == 32 && offsetof(PeerLoss, set) == 0);  // other fields are copied first

/// Phases of an operation on a GPU. In a single kernel announcing, sending and agreeing overlap; otherwise
/// phases pass in this order, except `sent`, which may pass at any time.
enum class Phase : int32_t {
  announced,  ///< this rank has announced the operation to all; a dispatch does so after counting its ids
  agreed,     ///< all ranks are known to run the same operation
  planned,    ///< dispatch: the plan of arriving rows is made
  sent,       ///< this rank's last row, or sum, is sent
  ended,
};
inline constexpr const char* kPhaseNames[] = {"announced", "agreed", "planned", "sent", "ended"};
inline constexpr int kPhases = sizeof(kPhaseNames) / sizeof(kPhaseNames[0]);

/// When the newest operation of a kind began and passed its phases, in nanoseconds of the GPU's clock. Phases
/// that it has not passed hold the times of an earlier operation.
struct PhaseClock {
  uint64_t started;
  uint64_t passed[kPhases];

  /// Duration of the operation, if it has ended.
  MOECOMM_HD uint64_t nanoseconds() const {
    const uint64_t ended = passed[static_cast<int>(Phase::ended)];
    return started != 0 && ended > started ? ended - started : 0;
  }
};

/// Maps an operation to its PhaseClock: one for dispatch and the backward of combine, which send rows, and
/// one for combine and the backward of dispatch, which return sums.
MOECOMM_HD constexpr int clock_of(Operation operation) { return operation == Operation::combine ? 1 : 0; }
inline constexpr int kClocks = 2;

/// State that a rank's kernels keep between operations, in its own window; peers never touch it. Counters are
/// zero between operations.
struct DeviceState {
  alignas(kLine) uint64_t epoch;   ///< last epoch that has ended here
  alignas(kLine) uint32_t failed;  ///< 1: a wait has failed; kernels return at once
  uint64_t cancelled;              ///< epoch that is called off: its records disagree, waits for it end
  uint64_t planned;  ///< epoch of the newest plan that is complete, so that kernels may read it, or failed
  uint64_t left;     ///< epoch of the newest dispatch whose rows did not fit its output
  alignas(kLine) uint32_t send_next;      ///< next chunk to be sent
  uint32_t stage_next;                    ///< next chunk to be sent to other nodes
  uint32_t later_next;                    ///< next chunk to be sent that reuses another chunk's memory
  alignas(kLine) uint32_t receive_next;   ///< next expert to be padded; combine: next own token to be summed
  alignas(kLine) uint32_t item_next;      ///< next item to be received or reduced
  alignas(kLine) uint32_t receive_done;   ///< finished blocks of an operation's last kernel
  uint32_t send_done;                     ///< finished blocks of a sending kernel beside the receiving one
  uint32_t begun;                         ///< blocks of a one-kernel operation that have begun
  alignas(kLine) uint32_t route_counted;  ///< blocks that have counted their ids
  alignas(kLine) uint32_t route_done;     ///< blocks that have written routes; combine: weight gradients
  alignas(kLine) PhaseClock clocks[kClocks];
  uint64_t clocked_ns[kClocks];    ///< since construction: time of all operations of a kind but the newest
  uint64_t wait_ns;                ///< since construction: time of waits for other ranks to begin operations
  uint64_t rows_out, bytes_wire;   ///< since construction: rows of outputs; bytes of rows from other ranks
  alignas(kLine) uint64_t bad_id;  ///< first bad id: index << 8 | k + 1 of its duplicate; all ones: none
  alignas(kLine) uint64_t commands;  ///< commands ever given to the proxy
  uint64_t commands_before;          ///< `commands` at the end of the last operation
  uint32_t relay_next;               ///< next item to be relayed
  uint32_t relay_later_next;         ///< next relayed item that reuses another item's memory
  uint32_t relay_summed;             ///< next item to be summed for other nodes
};

static_assert(offsetof(DeviceState, failed) == kLine && offsetof(DeviceState, cancelled) == kLine + 8 &&
              offsetof(DeviceState, planned) == kLine + 16 && offsetof(DeviceState, send_next) == 2 * kLine);

/// State of the blocks that forward data of one other node to the ranks of this node.
struct RelayState {
  alignas(kLine) uint64_t forwarded;  ///< epoch of that node's newest record that this rank forwarded
  uint32_t parts;                     ///< blocks that have forwarded their share of the record's data
  int32_t tokens;  ///< tokens of the rail's rank there; 0: that rank runs another operation
};

static_assert(sizeof(RelayState) == kLine && offsetof(RelayState, parts) == 8);

/// Offsets of the sections. Where epochs alternate between two sections, the index is epoch & 1.
struct DeviceWindow {
  KernelShape shape;
  int32_t number_bits;      ///< bits of a number below max_tokens
  int64_t stage_tokens;     ///< how many tokens of a source fit the staging section; tokens reuse it in turn
  int64_t sources;          ///< SourceLines[ranks]
  int64_t state;            ///< DeviceState
  int64_t losses;           ///< PeerLoss[ranks], not for peers
  int64_t late_ns;          ///< uint64[ranks], not for peers: waits for each rank to begin operations
  int64_t route_counts;     ///< int32[kMaxRouteBlocks][bins], not for peers
  int64_t error_text[2];    ///< char[kErrorText]
  int64_t starts[2];        ///< DispatchStart[ranks], by source
  int64_t counts[2];        ///< EpochNumbers [ranks][announced], by source
  int64_t routes[2];        ///< Route[ranks][max_tokens][top_k], by source
  int64_t weight_grads[2];  ///< weight type [max_tokens][top_k], written by the owners of the experts
  int64_t arrived;  ///< uint64[ranks][max_chunks + 1]: epoch in which a chunk of this source arrived; the
                    ///< last entry is for its gradients of weights
  int64_t credits;  ///< uint64[ranks][max_chunks + 1]: epoch in which a reader, a rank of this node, read a
                    ///< chunk, by Comm::pair(source, reader); source: this rank or a rank of its rail
  int64_t rows[2];  ///< dispatch: wire rows [staged_sources][stage_tokens]; combine: rows [max_tokens][slots]

  // Sections for several nodes; [other] is the number of another node (NodeMap::other). Data to and from
  // other nodes is in host memory (host_window_shape); these sections hold what the node's ranks do with it.
  int64_t relay_state;      ///< RelayState[other], not for peers
  int64_t relay_text[2];    ///< char[other][kErrorText]: error texts of the rail's other ranks
  int64_t relay_grads[2];   ///< weight type [other][max_tokens][top_k], written by this node's owners
  int64_t partial_arrived;  ///< uint64[node * local ranks + owner][max_chunks + 1], like `arrived`
  int64_t partial_credits;  ///< uint64[home][max_chunks + 1]: epoch in which the home's relay read a chunk
  int64_t staged_rows;      ///< uint32[other][chunks to a node]: rows staged for the network
  int64_t chunks_here;      ///< uint64[other][chunks to a node]: 2 epoch + 1: a chunk of rows has arrived
                            ///< from there; 2 epoch: a warp of this rank is polling for it
  int64_t partials[2];      ///< rows [other][partial_tokens][node_slots]: sums of this node's owners
  int64_t partial_tokens;   ///< how many tokens of a home have room in `partials`; tokens reuse it in turn
  int64_t total_bytes;

  /// How many chunks of a source with `tokens` tokens fit the staging section at once. Every later chunk
  /// reuses the memory of an earlier one.
  MOECOMM_HD int64_t chunks_at_once(int64_t tokens) const {
    return tokens > stage_tokens ? stage_tokens / chunk_tokens(tokens) : chunk_count(tokens);
  }

  static DeviceWindow make(const DeviceShape& shape);
  /// Returns this window for an operation with another wire format of rows.
  DeviceWindow with_wire(WireFormat wire) const;
};

/// Lists the sections of DeviceWindow::make with readable names and sizes.
std::vector<Section> device_window_sections(const DeviceShape& shape);

}  // namespace moecomm
