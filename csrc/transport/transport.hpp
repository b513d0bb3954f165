// Interface between proxy and network: one-sided writes into a peer's window with an immediate, and events
// that say what became of them. The implementations are fabric/ (libfabric) and, in tests, a loopback; both
// may deliver in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moecomm {

/// Capabilities of a network, for people and for choices of size.
struct TransportCaps {
  std::string provider;         ///< "tcp", "verbs;ofi_rxm"
  std::string version;          ///< of the library behind it
  std::string interface;        ///< NICs or addresses that are used
  int64_t max_message = 0;      ///< bytes of the largest put
  std::vector<int> cores = {};  ///< near the NIC; empty: not known
  int lanes = 1;                ///< endpoints, each driven by a thread of its own if there are several

  std::string text() const {
    return provider + " on " + interface + (lanes > 1 ? ", " + std::to_string(lanes) + " lanes" : "") +
           " (libfabric " + version + ")";
  }
};

/// An event that poll() reports.
struct TransportEvent {
  enum class Kind : uint32_t {
    sent,     ///< a put of this rank is done with its source bytes; says nothing about delivery
    arrived,  ///< a peer's put has arrived as a whole, its bytes are visible
    failed,   ///< nothing more will reach `peer`
  };
  Kind kind;
  int32_t peer;        ///< sent, failed; -1: all of them
  uint32_t immediate;  ///< arrived
  uint64_t context;    ///< sent: as given to put()
  std::string text;    ///< failed: why, with the provider's name
};

/// Puts between the windows of peers; peers are numbered by the caller. Used by one thread, the proxy.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const TransportCaps& caps() const = 0;
  /// Starts to write `bytes` from src_offset of the own window to dst_offset of the peer's. False if no more
  /// may be under way now: poll() and try again. The source bytes must stay as they are until `sent`.
  virtual bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
                   uint64_t context) = 0;
  /// `peer` is known to have ended: nothing more is sent there.
  virtual void forget(int32_t peer) = 0;
  /// Makes progress and appends what has happened since. To be called all the time, also when idle.
  virtual void poll(std::vector<TransportEvent>& events) = 0;
  /// Says whether something is on its way, so that the threads of an implementation do not sleep.
  virtual void stay_awake(bool) {}
};

}  // namespace moecomm
