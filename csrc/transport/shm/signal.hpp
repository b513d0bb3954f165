// Signals between the ranks of a node: records in each other's windows (layout/control.hpp), ordered by
// release and acquire, numbered by epochs so that nothing is ever reset. A waiter spins, then yields, then
// sleeps on the futex in its own window, so that waiting stays cheap with more ranks than cores.
#pragma once

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
  /// bases[r] is rank r's window as mapped here.
  Signals(const WindowLayout& layout, std::vector<std::byte*> bases, int rank,
          const std::vector<int64_t>& pids, double timeout_seconds);

  /// Makes `record`, and everything this rank wrote before, visible to every rank that waits for
  /// record.epoch.
  void signal(const SignalRecord& record);

  /// Returns when every rank has signalled `epoch`; what they wrote before it is visible then. Throws
  /// Error(peer_timeout) at the deadline and Error(peer_lost) when a peer has ended or closed, and then tells
  /// the other ranks.
  void wait_all(uint64_t epoch, const char* phase);

  /// The record of `peer` for an epoch that was waited for.
  const SignalRecord& record(int peer, uint64_t epoch) const;

  /// Says that this rank has finished reading what others published in `epoch` (release).
  void complete(uint64_t epoch);
  /// Returns when every rank has completed `epoch`; then what this rank published in it may be overwritten.
  void wait_completed(uint64_t epoch, const char* phase);

  /// Why `peer` will signal no more, or nothing.
  struct Loss {
    int peer;  ///< the one to blame: itself, or who it gave up on
    Cause cause;
    int first;  ///< the rank that noticed
  };
  std::optional<Loss> loss(int peer) const;
  /// Tells all ranks that this one is out of the game because of `peer`.
  void announce_loss(int peer, Cause cause);

  /// To be called every few milliseconds while a wait lasts; what it throws ends the wait. Python's signal
  /// handlers run here.
  void set_interrupt(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

  /// Tells all ranks that this one will signal no more. Peers that still wait for it get Error(peer_lost).
  void close() noexcept;

 private:
  PeerLines& lines(int owner, int writer) const;
  OwnerLines& owner(int rank) const;
  void ring(int rank) const;
  [[noreturn]] void give_up(const Loss& loss, const char* phase, uint64_t expected, uint64_t seen);
  /// arrived(peer) says whether a peer is where `epoch` needs it; seen(peer) is the last epoch of it, for the
  /// error.
  void wait_until(const std::function<bool(int)>& arrived, const std::function<uint64_t(int)>& seen,
                  uint64_t epoch, const char* phase);

  WindowLayout layout_;
  std::vector<std::byte*> bases_;
  int rank_;
  double timeout_seconds_;
  int spins_;
  PeerWatch watch_;
  std::function<void()> interrupt_;
};

/// What rank `rank` raises when a wait ends because of `loss`.
Error loss_error(const Signals::Loss& loss, int rank, const std::string& phase, double timeout_seconds,
                 uint64_t expected, uint64_t seen);

}  // namespace moecomm::shm
