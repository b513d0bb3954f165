// Transport over libfabric: one registered window, one endpoint, puts by fi_writedata. What holds for it:
//
// - Neither order nor delivery is guaranteed: `sent` only frees source bytes. The receiver counts immediates
//   against a deadline, and so notices a put that the network has lost (tcp may when it reconnects).
// - connect() makes connections in both directions. From then on poll() has to be called continuously, also
//   when there is nothing to send: several providers accept and deliver only during it.
// - If a peer ends while writes to it are in flight, tcp reports `failed`; without such writes, put() to it
//   returns false from then on. shm never reports that, and no provider reports a peer that hangs or whose
//   link is cut. The caller learns of such peers by its control links, and calls forget().
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/fabric/endpoint.hpp"
#include "transport/fabric/endpoint_address.hpp"
#include "transport/fabric/network.hpp"

namespace moecomm::fabric {

/// The immediate of the hellos that connect() sends; put() refuses it.
constexpr uint32_t kHelloImmediate = 0xffffffff;
/// The most peers of one window.
constexpr int kMaxPeers = 4096;

class FabricTransport final : public Transport {
 public:
  /// Opens an endpoint as choose_lanes() has chosen, and registers [base, base + bytes), which must stay
  /// mapped until this object is gone. Errors as in open_network().
  FabricTransport(const FabricOptions& options, Info chosen, void* base, int64_t bytes);

  AddressBytes endpoint_address() const { return own_.to_bytes(); }

  /// Takes the endpoint addresses of all peers, by index; at own_index stands this rank's, which is not read.
  /// Called once. Throws an error for a bad endpoint address.
  void insert_peers(const std::vector<AddressBytes>& endpoint_addresses, int own_index);
  /// Sends a hello (a random word) to each peer. Returns when all hellos are sent and every peer's hello
  /// has arrived. Errors as in Network::connect.
  void connect(double timeout_seconds, const std::function<void()>& interrupt = {});

  const TransportCaps& caps() const override { return caps_; }
  /// A put to a peer that has failed or was forgotten returns true and is dropped: the caller then waits for
  /// the failure of the whole job anyway. Throws Error(invalid_argument), before anything is sent, if the
  /// bytes do not lie in both windows (an out-of-bounds write might be lost without an error). Zero bytes are
  /// allowed and send only the immediate.
  bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
           uint64_t context) override;
  /// `failed` is reported at most once per peer; the peer's puts in flight then get no `sent`. If the
  /// provider names no peer, `failed` has the only peer that is left, or else -1 (all peers).
  void poll(std::vector<TransportEvent>& events) override;
  /// Sends nothing more to this peer, and no longer counts the puts to it that are in flight.
  void forget(int32_t peer) override;

  /// Puts in flight: accepted, not yet `sent`, to peers that have neither failed nor been forgotten.
  int in_flight() const { return counted_; }
  int64_t bytes_in_flight() const { return counted_bytes_; }

 private:
  friend struct CloseInTime;
  // A write in flight. libfabric has `context` until the write completes, and then returns its address.
  struct Operation {
    fi_context2 context;
    int32_t peer;
    bool counted;  // counts towards the limits, until the write ends or its peer is dropped
    bool hello;
    int64_t bytes;
    uint64_t user;
  };
  struct Peer {
    EndpointAddress endpoint_address;
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    std::string name;     // for messages: "peer 3 (fi_sockaddr_in://192.0.2.7:4711)"
    bool dropped = true;  // failed, forgotten, or the rank itself
    bool hello_sent = false;
  };

  bool write(int32_t index, const std::byte* source, int64_t bytes, void* descriptor,
             const RemoteRegion& region, int64_t offset, uint32_t immediate, bool hello, uint64_t user);
  void take_completions(std::vector<TransportEvent>& events);
  void completed(Operation& operation, std::vector<TransportEvent>& events);
  void fail(int32_t index, const std::string& what, std::vector<TransportEvent>& events);
  void drop(int32_t index);
  void release(Operation& operation);
  void unlink_file() const;
  const Peer& known(const char* call, int32_t peer) const;
  bool greeted() const;
  [[noreturn]] void not_greeted(double seconds) const;
  std::string where() const { return "fabric " + caps_.provider + " on " + caps_.interface; }

  const FabricOptions options_;
  std::byte* const window_;
  const int64_t window_bytes_;
  // Hellos: peer i writes its word to greetings[i]; the last entry is this rank's own word, to be sent.
  std::vector<uint64_t> greetings_ = std::vector<uint64_t>(kMaxPeers + 1);
  // These fields precede the endpoint, so that they outlive it.
  std::deque<Operation> operations_;
  std::vector<Operation*> free_;

  Endpoint endpoint_;
  void* window_descriptor_ = nullptr;
  void* greeting_descriptor_ = nullptr;
  TransportCaps caps_;
  EndpointAddress own_;
  std::vector<Peer> peers_;
  int own_index_ = -1;
  int counted_ = 0;
  int64_t counted_bytes_ = 0;
  std::vector<TransportEvent> early_;  // events that arrived while other peers were still connecting
};

/// Destroys a transport within a few seconds, whatever the peers do. What the provider has not closed by then
/// stays open until the process ends. So do all endpoints of rxm providers: closing these is not safe.
struct CloseInTime {
  void operator()(FabricTransport* transport) const;
};
using FabricLane = std::unique_ptr<FabricTransport, CloseInTime>;

}  // namespace moecomm::fabric
