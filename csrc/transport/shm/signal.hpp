// Signals between the ranks of a node: records in each other's windows (layout/control.hpp), ordered by
// release and acquire, numbered by epochs so that nothing is ever reset. A waiter spins, then yields, then
// sleeps on the futex in its own window, so that waiting stays cheap with more ranks than cores.
//
// Ranks of other nodes have their lines in the windows here too. What such a rank announces is written there
// by the rank of its rail on this node (deliver and deliver_gone, by its proxy), so waiters see no
// difference.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "layout/window.hpp"
#include "transport/shm/peers.hpp"

namespace moecomm::shm {

class Signals {
 public:
  /// bases[i] is the window of the node's rank i as mapped here, pids[i] its process. `host_ranks`: ranks
  /// of this host, which share its cores; at least those of the node. `absence_seconds`: what a wait may
  /// take instead of the timeout, if that is less, for a rank that lives and has not begun the operation.
  Signals(const WindowLayout& layout, std::vector<std::byte*> bases, int rank,
          const std::vector<int64_t>& pids, double timeout_seconds, int host_ranks,
          double absence_seconds = 0);

  /// Says, while it lives, that this rank is within a call: one that hangs there is not merely absent.
  class Inside {
   public:
    explicit Inside(Signals& signals) : signals_(signals) { signals_.count_inside(1); }
    ~Inside() { signals_.count_inside(-1); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Signals& signals_;
  };

  /// Do more threads of this host want a core than it has?
  bool crowded() const { return spins_ == 0; }
  /// Makes `record`, and everything this rank wrote before, visible to every rank that waits for
  /// record.epoch.
  void signal(const SignalRecord& record);

  /// Returns when every rank has signalled `epoch`; what they wrote before it is visible then. Throws
  /// Error(peer_timeout) at the deadline and Error(peer_lost) when a peer has ended or closed, and then tells
  /// the other ranks. late_seconds: to each rank's entry the time is added until it had signalled.
  void wait_all(uint64_t epoch, const char* phase, std::vector<double>* late_seconds = nullptr);

  /// The record of `peer` for an epoch that was waited for.
  const SignalRecord& record(int peer, uint64_t epoch) const;

  /// Says that this rank has finished reading what others published in `epoch` (release).
  void complete(uint64_t epoch);
  /// Returns when every rank of the node has completed `epoch`; then what this rank published in it may be
  /// overwritten.
  void wait_completed(uint64_t epoch, const char* phase);

  /// Returns when the word that `counter` gives for a rank of the node, in its window, has reached `value`,
  /// for every rank of the node.
  void wait_node(const std::function<uint64_t*(int rank)>& counter, uint64_t value, uint64_t epoch,
                 const char* phase);
  /// Returns when `word`, in a window of this node, has reached `value`. It comes from `peer`, through the
  /// rank `through`; the loss of either ends the wait.
  void wait_word(uint64_t* word, uint64_t value, int peer, int through, uint64_t epoch, const char* phase);
  /// Stores `value` (release) and wakes the ranks of the node that wait for it.
  void store(uint64_t* word, uint64_t value);
  /// Stores a word that only the own rank waits for.
  void store_own(uint64_t* word, uint64_t value);

  /// Signals `record` on behalf of `peer`, which is on another node. One thread only.
  void deliver(int peer, const SignalRecord& record);
  /// `peer`, on another node, will announce nothing more.
  void deliver_gone(int peer, Cause cause);
  /// `peer`, on another node, has given up on `on`.
  void deliver_abort(int peer, int on, Cause cause);
  /// Sets the function that is called when this rank gives up on a peer, to tell the other nodes.
  void set_on_abort(std::function<void(int peer, Cause cause)> tell) { on_abort_ = std::move(tell); }
  /// More about why a peer is unreachable, for the error's text.
  void set_reason(std::function<std::string(int peer)> reason) { reason_ = std::move(reason); }

  /// Why `peer` will signal no more, or nothing.
  struct Loss {
    int peer;  ///< the one to blame: itself, or who it gave up on
    Cause cause;
    int first;  ///< the rank that noticed
  };
  std::optional<Loss> loss(int peer) const;
  /// The last epoch that `peer` has announced to this rank.
  uint64_t announced(int peer) const { return std::max(announced(peer, 0), announced(peer, 1)); }
  /// Tells all ranks that this one is out of the game because of `peer`.
  void announce_loss(int peer, Cause cause);

  /// Sets the function that is called every few milliseconds while a wait lasts; what it throws ends the
  /// wait. Python's signal handlers run here.
  void set_interrupt(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

  /// Ends the wait of this rank that is under way and all later ones, by Error(closed). Any thread may call
  /// it.
  void stop_waiting() noexcept;
  /// Throws Error(closed) after stop_waiting().
  void require_going_on() const;

  /// Tells all ranks that this one will signal no more. Peers that still wait for it get Error(peer_lost).
  void close() noexcept;

 private:
  PeerLines& lines(int owner, int writer) const;
  OwnerLines& owner(int rank) const;
  void ring(int rank) const;
  [[noreturn]] void give_up(const Loss& loss, const char* phase, uint64_t expected, double waited = 0);
  void count_inside(int by);
  /// `peer` has not begun `epoch`, and does something else than an operation, as far as is known here.
  bool absent(int peer, uint64_t epoch) const;
  void ring_node() const;
  /// The last epoch of the given parity that `peer` has announced to this rank.
  uint64_t announced(int peer, uint64_t parity) const;
  void write_record(int peer, const SignalRecord& record);
  template <class Write>
  void write_lines(int peer, const Write& write);
  /// arrived(peer) says whether a peer is where `epoch` needs it. `blame`: the peer to name at the deadline
  /// if not the first that has not arrived.
  void wait_until(const std::function<bool(int)>& arrived, uint64_t epoch, const char* phase, int blame = -1);

  WindowLayout layout_;
  NodeMap nodes_;
  std::vector<std::byte*> bases_;  // of the node's ranks
  int rank_, first_;
  double timeout_seconds_, absence_seconds_;
  int spins_;
  PeerWatch watch_;
  std::function<void()> interrupt_;
  std::atomic<bool> stopped_ = false;
  std::function<void(int, Cause)> on_abort_;
  std::function<std::string(int)> reason_;
};

/// Makes the error of rank `rank` when a wait of epoch `expected` ends because of `loss`. `seen`: the last
/// epoch that the lost rank has begun; if that is `expected`, what it sends later in the epoch is missing.
/// `waited`: seconds, if it was this rank that waited until its deadline.
Error loss_error(const Signals::Loss& loss, int rank, const std::string& phase, double waited,
                 uint64_t expected, uint64_t seen, const std::string& reason = {});

}  // namespace moecomm::shm
