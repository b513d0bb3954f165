// Signals between the ranks of a node: records (announcements of operations, layout/control.hpp) in each
// other's windows, ordered by release and acquire. Epochs number them, so that none is ever reset. A waiter
// spins, yields, then sleeps on the futex in its window: waiting is cheap even with more ranks than cores.
//
// This node's windows also have PeerLines for ranks of other nodes. There the proxy of this node's rank with
// the same local index (on the same rail) writes their announcements, so waiters see no difference.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/descriptor.hpp"
#include "common/error.hpp"
#include "layout/window.hpp"

namespace moecomm::shm {

class Signals {
 public:
  /// bases[i] is the mapping of the window of the node's rank i, pids[i] its process. `host_ranks`: ranks on
  /// this host, which share its cores; at least those of the node. `absence_seconds`: deadline, if above the
  /// timeout, of waits for a rank that is alive but has not begun the operation.
  Signals(const WindowLayout& layout, std::vector<std::byte*> bases, int rank,
          const std::vector<int64_t>& pids, double timeout_seconds, int host_ranks,
          double absence_seconds = 0);

  /// Marks, while it lives, that this rank is within a call. If the rank hangs there, peers wait for the
  /// timeout, not for absence_seconds.
  class Inside {
   public:
    explicit Inside(Signals& signals) : signals_(signals) { signals_.count_inside(1); }
    ~Inside() { signals_.count_inside(-1); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Signals& signals_;
  };

  /// Returns whether more threads of this host may want a core than there are cores.
  bool crowded() const { return spins_ == 0; }
  /// Makes `record`, and everything this rank wrote before, visible to every rank that waits for
  /// record.epoch.
  void signal(const SignalRecord& record) { deliver(rank_, record); }

  /// Returns when every rank has signalled `epoch`; their earlier writes are visible then. Throws
  /// Error(peer_timeout) at the deadline and Error(peer_lost) when a peer has ended or closed, and then tells
  /// the other ranks. Adds to late_seconds[r] the time from the call until rank r had signalled.
  void wait_all(uint64_t epoch, const char* phase, std::vector<double>* late_seconds = nullptr);

  /// The record of `peer` for an epoch whose wait has ended.
  const SignalRecord& record(int peer, uint64_t epoch) const;

  /// Tells the ranks of the node that this rank has read what they published in `epoch` (release).
  void complete(uint64_t epoch);
  /// Returns when every rank of the node has completed `epoch`; what this rank published in it may then be
  /// overwritten.
  void wait_completed(uint64_t epoch, const char* phase);

  /// Returns when, for every rank of the node, the word counter(rank) in its window has reached `value`.
  void wait_node(const std::function<uint64_t*(int rank)>& counter, uint64_t value, uint64_t epoch,
                 const char* phase);
  /// Returns when `word`, in a window of this node, has reached `value`. The data is from `peer`, and comes
  /// through rank `through`; the loss of either ends the wait.
  void wait_word(uint64_t* word, uint64_t value, int peer, int through, uint64_t epoch, const char* phase);
  /// Stores `value` (release) and wakes waiting ranks of the node.
  void store(uint64_t* word, uint64_t value);
  /// Stores `value` (release) in a word for which only this rank waits, and wakes this rank.
  void store_own(uint64_t* word, uint64_t value);

  /// Signals for `peer`: this rank or, if called by the proxy's thread, a rank of another node.
  void deliver(int peer, const SignalRecord& record);
  /// Tells the ranks of this node that `peer` will announce nothing more, because of `cause`.
  void deliver_gone(int peer, Cause cause);
  /// Tells the ranks of this node that `peer` has given up on rank `on`.
  void deliver_abort(int peer, int on, Cause cause);
  /// Sets the function that tells the other nodes when this rank gives up on a peer.
  void set_on_abort(std::function<void(int peer, Cause cause)> tell) { on_abort_ = std::move(tell); }
  /// Sets the function that says, for an error's text, why a peer is unreachable.
  void set_reason(std::function<std::string(int peer)> reason) { reason_ = std::move(reason); }

  /// Why a peer will signal nothing more. loss() returns none while the peer may still signal.
  struct Loss {
    int peer;  ///< the rank to blame: the peer itself, or the rank on which it gave up
    Cause cause;
    int first;  ///< the rank that noticed
  };
  std::optional<Loss> loss(int peer) const;
  /// The last epoch that `peer` has announced to this rank.
  uint64_t announced(int peer) const { return std::max(announced(peer, 0), announced(peer, 1)); }
  /// Tells all ranks that this rank can't go on because of `peer`.
  void announce_loss(int peer, Cause cause);

  /// Sets the function that a long wait calls at least every 20 ms; its exceptions end the wait.
  /// Python's signal handlers run there.
  void set_interrupt(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

  /// Ends a running wait of this rank and all later ones with Error(closed). Any thread may call it.
  void stop_waiting() noexcept;
  /// Throws Error(closed) after stop_waiting().
  void require_going_on() const;

  /// Tells all ranks that this rank will signal no more. Peers that still wait for it get Error(peer_lost).
  void close() noexcept;

 private:
  PeerLines& lines(int owner, int writer) const;
  OwnerLines& owner(int rank) const;
  bool has_ended(int rank) const;
  void ring(int rank) const;
  [[noreturn]] void give_up(const Loss& loss, const char* phase, uint64_t expected, double waited = 0);
  void count_inside(int by);
  /// True if `peer` has not begun `epoch` and, as far as is known here, is not within an operation.
  bool absent(int peer, uint64_t epoch) const;
  /// The last epoch of the given parity that `peer` has announced to this rank.
  uint64_t announced(int peer, uint64_t parity) const;
  template <class Write>
  void write_lines(int peer, const Write& write);
  /// Returns when arrived(peer) is true for all ranks, that is, each has reached what `epoch` needs. `blame`:
  /// the rank that an error at the deadline names; -1: a rank that has not arrived.
  void wait_until(const std::function<bool(int)>& arrived, uint64_t epoch, const char* phase, int blame = -1);

  WindowLayout layout_;
  NodeMap nodes_;
  std::vector<std::byte*> bases_;  // windows of the node's ranks
  int rank_, first_;
  double timeout_seconds_, absence_seconds_;
  int spins_;
  /// [rank of the node] a pidfd of its process, empty if that is this process. A pidfd is readable from the
  /// moment the process exits, also before its parent has reaped it, and never confused by a reused process
  /// number. nullopt: the process ended before it could be watched.
  std::vector<std::optional<Descriptor>> processes_;
  std::function<void()> interrupt_;
  std::atomic<bool> stopped_ = false;
  std::function<void(int, Cause)> on_abort_;
  std::function<std::string(int)> reason_;
};

/// Makes the error of rank `rank` for a wait in epoch `expected` that ended because of `loss`. `seen`: the
/// last epoch that the lost rank has begun; if that is `expected`, what it sends later in the epoch is
/// missing. `waited`: seconds, if this rank itself waited until its deadline.
Error loss_error(const Signals::Loss& loss, int rank, const std::string& phase, double waited,
                 uint64_t expected, uint64_t seen, const std::string& reason = {});

}  // namespace moecomm::shm
