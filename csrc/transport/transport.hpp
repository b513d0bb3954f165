// Interface between a rank's proxy (its thread for the network) and the network: puts, which are one-sided
// writes into a peer's window, each with an immediate (32 bits that arrive after the data), and events about
// their outcome. Implemented by fabric/ (libfabric) and, in tests, a loopback; both may deliver in any order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moecomm {

/// What a network is and can do, for display and for the choice of sizes.
struct TransportCaps {
  std::string provider;         ///< for example "tcp", "verbs;ofi_rxm"
  std::string version;          ///< version of the network library
  std::string interface;        ///< NICs or addresses in use
  int64_t max_message = 0;      ///< bytes of the largest put
  std::vector<int> cores = {};  ///< cores near the NIC; empty if unknown
  int lanes = 1;                ///< endpoints; if there are several, each has a thread

  std::string text() const {
    return provider + " on " + interface + (lanes > 1 ? ", " + std::to_string(lanes) + " lanes" : "") +
           " (libfabric " + version + ")";
  }
};

/// An event that poll() reports.
struct TransportEvent {
  enum class Kind : uint32_t {
    sent,     ///< the source bytes of this rank's put may change again; says nothing about delivery
    arrived,  ///< a peer's put has arrived completely, and its bytes are visible
    failed,   ///< nothing more will reach `peer`
  };
  Kind kind;
  int32_t peer;        ///< of sent and failed; -1: all peers
  uint32_t immediate;  ///< of arrived: the put's immediate
  uint64_t context;    ///< of sent: the value given to put()
  std::string text;    ///< of failed: the reason, with the provider's name
};

/// Puts from this rank's window into peers' windows. The caller, always the proxy, numbers the peers.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const TransportCaps& caps() const = 0;
  /// Starts to write `bytes` from src_offset of this rank's window to dst_offset of the peer's. False if too
  /// many puts are in flight: poll() and try again. The source bytes must not change until `sent`.
  virtual bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
                   uint64_t context) = 0;
  /// The caller tells that `peer` has ended. Nothing more is sent to the peer.
  virtual void forget(int32_t peer) = 0;
  /// Makes progress and appends the events since the last call. Call it continuously, also when idle.
  virtual void poll(std::vector<TransportEvent>& events) = 0;
  /// While the argument is true (data is in flight), the threads of an implementation do not sleep.
  virtual void stay_awake(bool) {}
};

}  // namespace moecomm
