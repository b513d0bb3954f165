// Transport over libfabric: one registered window, one endpoint, puts by fi_writedata. What holds for it:
//
// - Nothing is promised about order, and nothing about delivery: `sent` only frees source bytes. A put that
//   the network loses (a reconnect of tcp does that) is noticed by who counts immediates against a deadline.
// - Connections are made in connect(), in both directions. From then on poll() has to be called all the time,
//   also when there is nothing to send: several providers accept and deliver only then.
// - A peer that ends is reported as `failed` by tcp if writes to it are under way then; otherwise put()
//   returns false from then on. By shm it is never reported, and one that stops or whose link is cut is
//   reported by no provider. The caller learns it by links of its own, and says so by forget().
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

/// The immediate that connect() uses; put() refuses it.
constexpr uint32_t kHelloImmediate = 0xffffffff;
/// Peers of one window at most.
constexpr int kMaxPeers = 4096;

class FabricTransport final : public Transport {
 public:
  /// Opens an endpoint with what choose_lanes() has found, and registers [base, base + bytes), which must
  /// stay mapped until this object is gone. Errors as those of open_network().
  FabricTransport(const FabricOptions& options, Info chosen, void* base, int64_t bytes);
  FabricTransport(const FabricTransport&) = delete;
  FabricTransport& operator=(const FabricTransport&) = delete;

  AddressBytes endpoint_address() const { return own_.to_bytes(); }

  /// Takes the endpoint addresses of all peers, that of peer i at index i; that at own_index has to be this
  /// one's. Called once. Throws what is wrong with an endpoint address.
  void insert_peers(const std::vector<AddressBytes>& endpoint_addresses, int own_index);
  /// Sends a hello to each peer and returns when one of every peer has arrived and all of its own are sent.
  /// As Network::connect.
  void connect(double timeout_seconds, const std::function<void()>& interrupt = {});

  const TransportCaps& caps() const override { return caps_; }
  /// A put to a peer that has failed or was forgotten returns true and is dropped: who waits for it waits for
  /// the whole job's failure already. Error(invalid_argument), before anything is sent, if the bytes do not
  /// lie in both windows (a write out of bounds may be lost without a word). Zero bytes are allowed and carry
  /// the immediate alone.
  bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
           uint64_t context) override;
  /// `failed` comes at most once a peer; its puts under way then have no `sent`. A failure that the provider
  /// does not tie to a peer is that of the only peer left, or of all (-1).
  void poll(std::vector<TransportEvent>& events) override;
  /// Sends nothing more to this peer; what is under way no longer counts as such.
  void forget(int32_t peer) override;

  /// Puts under way: accepted, neither `sent` nor failed nor forgotten.
  int in_flight() const { return counted_; }
  int64_t bytes_in_flight() const { return counted_bytes_; }

 private:
  friend struct CloseInTime;
  // A write under way. libfabric owns `context` until its completion and gives back its address.
  struct Operation {
    fi_context2 context;
    int32_t peer;
    bool counted;  // in the limits; no longer once its peer has failed
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
  // Hellos: peer i writes its word to greetings[i]; the last one is this rank's own, to send from.
  std::vector<uint64_t> greetings_ = std::vector<uint64_t>(kMaxPeers + 1);
  // These fields stand before the endpoint, so that it closes first.
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
  std::vector<TransportEvent> early_;  // what arrived while others were still connecting
};

/// Destroys a transport in a few seconds at most, whatever the peers do. What the provider has not closed by
/// then stays until the end of the process, and so do endpoints of providers that are layered by rxm, which
/// do not close safely.
struct CloseInTime {
  void operator()(FabricTransport* transport) const;
};
using FabricLane = std::unique_ptr<FabricTransport, CloseInTime>;

}  // namespace moecomm::fabric
