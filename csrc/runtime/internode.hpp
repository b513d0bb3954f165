// An operation's work between nodes (docs/protocol.md): sends what other nodes need, waits for their data,
// and adds up rows for tokens of their ranks. Data travels along a rail, the ranks with the same
// local index on all nodes. A token's home is the rank that it belongs to. `other` numbers the nodes without
// this one (NodeMap::other). The proxy does the puts (writes to other nodes) and tracks arrivals.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "kernels/cpu/combine.hpp"
#include "layout/plan.hpp"
#include "runtime/proxy.hpp"

namespace moecomm {

class Internode {
 public:
  /// bases[i]: address here of the window of the node's rank i.
  Internode(const WindowLayout& layout, int32_t rank, std::vector<std::byte*> bases, shm::Signals& signals,
            std::unique_ptr<Transport> transport, std::unique_ptr<tcp::Links> links, double timeout_seconds,
            uint64_t first_epoch);

  Proxy& proxy() { return proxy_; }

  /// Received from `rank`, on another node: rows in the order sent; with its record ids, weights, error text.
  const std::byte* rows(int32_t rank, uint64_t epoch) const {
    return window_of(rank) + layout_.relayed_rows(epoch, other_of(rank));
  }
  const int32_t* ids(int32_t rank, uint64_t epoch) const {
    return reinterpret_cast<const int32_t*>(window_of(rank) + layout_.relayed_ids(epoch, other_of(rank)));
  }
  const std::byte* weights(int32_t rank, uint64_t epoch) const {
    return window_of(rank) + layout_.relayed_weights(layout_.relay_weights[epoch & 1], other_of(rank));
  }
  const char* error_text(int32_t rank, uint64_t epoch) const {
    const int64_t head = WindowLayout::relayed_head(layout_.relay_head[epoch & 1], other_of(rank));
    return reinterpret_cast<const Announcement*>(window_of(rank) + head)->text;
  }
  /// Memory in which gradients of the routing weights of `home`, on another node, wait to be sent.
  std::byte* outgoing_grads(int32_t home, uint64_t epoch) const {
    return window_of(home) + layout_.relayed_weights(layout_.outgoing_grads[epoch & 1], other_of(home));
  }
  /// sums(), grads(): what `node` sends for this rank's tokens, sums and gradients of routing weights.
  const std::byte* sums(int32_t node, uint64_t epoch) const {
    return own() + layout_.relayed_rows(epoch, NodeMap::other(node, node_));
  }
  const std::byte* grads(int32_t node, uint64_t epoch) const {
    return own() + layout_.relayed_weights(layout_.relay_grads[epoch & 1], NodeMap::other(node, node_));
  }

  /// Sends the record of an operation to the rail. A dispatch adds the tokens' ids and weights, an error its
  /// `text`. `routes`: the tokens whose rows send_rows() will send, or null.
  void announce(const SignalRecord& record, const RelayRoutes* routes, const char* text);
  /// Sends the rows of x that other nodes need. Returns when all have been handed to the proxy.
  void send_rows(const cpu::Context& context, const RelayRoutes& routes, const std::byte* x, uint64_t epoch);
  /// Returns when all data that the rail's ranks announced up to `epoch` has arrived here.
  void wait_all_here(uint64_t epoch);

  /// Receives rows from other nodes chunk by chunk: calls pull(range) for the entries of each chunk that has
  /// arrived.
  void pull(const Plan& plan, uint64_t epoch, const std::function<void(cpu::EntryRange)>& pull);

  /// Does this rank's part of a combine for tokens of other nodes: gives its sums to the ranks of this node
  /// on the homes' rails, and sends the node's totals to the homes on its own rail.
  void relay(const cpu::Context& context, const Plan& plan, const cpu::CombineArguments& arguments,
             uint64_t epoch);
  /// Returns when all ranks of the node have called it: then all their sums and gradients are written.
  void node_barrier(uint64_t epoch);
  /// Sends the rail's other ranks the gradients of their routing weights that this node has computed.
  void send_grads(const Plan& plan, uint64_t epoch);
  /// Calls sum(first, end) for ranges of this rank's tokens, in order, as other nodes' sums arrive.
  void combine_sum(const Plan& plan, uint64_t epoch, const std::function<void(int64_t, int64_t)>& sum);
  /// Returns when the gradients of this rank's routing weights have arrived from all other nodes.
  void wait_grads(const Plan& plan, uint64_t epoch);

 private:
  std::byte* window(int32_t local) const { return bases_[local]; }
  /// The window of this node's rank on the rail of `rank`.
  std::byte* window_of(int32_t rank) const { return window(nodes_.local_of(rank)); }
  std::byte* own() const { return window_of(rank_); }
  int32_t other_of(int32_t rank) const { return NodeMap::other(nodes_.node_of(rank), node_); }
  RelayProgress& progress(int32_t rank) const {
    return *reinterpret_cast<RelayProgress*>(window_of(rank) + layout_.progress);
  }
  int32_t rank_at(int32_t other, int32_t local) const {
    return nodes_.rank_of(NodeMap::node_of_other(other, node_), local);
  }
  int32_t rail(int32_t other) const { return rank_at(other, nodes_.local_of(rank_)); }
  /// Waits for arrival flag `flag` of `source`, in the window of this node's rank on the rail of `source`.
  void wait_part(int32_t source, int64_t flag, uint64_t epoch, const char* phase);
  /// Returns a free staging slot for data to node `other`, after a wait for one.
  int64_t take_slot(int32_t other, uint64_t epoch);
  std::byte* staging(int64_t slot) const {
    return own() + layout_.staging + slot * layout_.shape.chunk_rows() * layout_.shape.row_bytes();
  }
  void push_chunk(int32_t other, int64_t chunk, int64_t slot, int64_t rows, uint64_t epoch);
  void push_pieces(Command::Kind kind, int32_t other, int64_t bytes, uint64_t epoch);

  const WindowLayout layout_;
  const NodeMap nodes_;
  const int32_t rank_, node_, others_;
  const std::vector<std::byte*> bases_;
  shm::Signals& signals_;
  uint64_t staged_ = 0;               // chunks that ever got a staging slot
  std::vector<int32_t> slot_target_;  // [slot] node (`other`) to which its last chunk went
  uint64_t rounds_ = 0;               // rounds of relay(), over all operations
  Proxy proxy_;
};

}  // namespace moecomm
