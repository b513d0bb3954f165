// Transport over libfabric: one registered window, one endpoint, puts by fi_writedata. What holds for it:
//
// - Nothing is promised about order, and nothing about delivery: `sent` only frees source bytes. A put that
// the
//   network loses (a reconnect of tcp does that) is noticed by who counts immediates against a deadline.
// - Connections are made in connect(), in both directions. From then on poll() has to be called all the time,
// also
//   when there is nothing to send: several providers accept and deliver only then.
// - A peer that ends is reported as `failed` by tcp if writes to it are under way then; otherwise put()
// returns false from
//   then on. By shm it is never reported, and one that stops or whose link is cut is reported by no provider.
//   The caller learns it by links of its own, and says so by forget().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/fabric/endpoint_address.hpp"
#include "transport/fabric/provider.hpp"
#include "transport/transport.hpp"

namespace moecomm::fabric {

/// The immediate that connect() uses; put() refuses it.
constexpr uint32_t kHelloImmediate = 0xffffffff;
/// Peers of one window at most.
constexpr int kMaxPeers = 4096;

struct FabricOptions {
  ProviderOptions provider;
  /// Puts and bytes under way at most, over all peers. The provider's own limits are no bound: tcp takes all
  /// that memory holds. A single put may be larger than the second limit if nothing else is under way.
  int max_in_flight_operations = 256;
  int64_t max_in_flight_bytes = int64_t{64} << 20;
  int cuda_device = -1;  ///< the window is memory of this GPU; -1: host memory
};

class FabricTransport final : public Transport {
 public:
  /// Registers [base, base + bytes), which must stay mapped until this object is gone. Error(unsupported)
  /// without libfabric or a provider that fits, Error(out_of_memory) if the system refuses to pin the window.
  FabricTransport(const FabricOptions& options, void* base, int64_t bytes);
  /// Opens an endpoint with what choose_lanes() has found; options.provider is not looked at.
  FabricTransport(const FabricOptions& options, Info chosen, void* base, int64_t bytes);
  /// Takes a few seconds at most, whatever the peers do. What the provider has not closed by then stays until
  /// the end of the process, and so do endpoints of providers that are layered by rxm, which do not close
  /// safely.
  ~FabricTransport() override;
  FabricTransport(const FabricTransport&) = delete;
  FabricTransport& operator=(const FabricTransport&) = delete;

  /// Endpoint address that peers need for their insert_peers(). Peers can connect as long as this end polls
  /// in its own connect().
  std::vector<std::byte> endpoint_address() const;

  /// Takes the endpoint addresses of all peers, that of peer i at index i; that at own_index has to be this
  /// one's. Called once. Throws what is wrong with an endpoint address. From then on files of the shm
  /// provider that killed peers leave are removed at the end.
  void insert_peers(const std::vector<std::vector<std::byte>>& endpoint_addresses, int own_index);
  /// Establishes the connections to all peers, both ways: sends a hello to each and returns when one of every
  /// peer has arrived and all of its own are sent. Calls `interrupt` every few milliseconds; what it throws
  /// passes through. Errors: peer_timeout naming the peers that are missing; peer_lost if a peer refuses.
  /// After an error the object can only be destroyed.
  void connect(double timeout_seconds, const std::function<void()>& interrupt = {});
  /// Does insert_peers() and connect().
  void connect(const std::vector<std::vector<std::byte>>& endpoint_addresses, int own_index,
               double timeout_seconds, const std::function<void()>& interrupt = {}) {
    insert_peers(endpoint_addresses, own_index);
    connect(timeout_seconds, interrupt);
  }

  const TransportCaps& caps() const override;
  /// A put to a peer that has failed or was forgotten returns true and is dropped: who waits for it waits for
  /// the whole job's failure already. Error(invalid_argument), before anything is sent, if the bytes do not
  /// lie in both windows (a write out of bounds may be lost without a word). Zero bytes are allowed and carry
  /// the immediate alone.
  bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
           uint64_t context) override;
  /// `failed` comes at most once a peer; its puts under way then have no `sent`. A failure that the provider
  /// does not tie to a peer is that of the only peer left, or of all (-1).
  void poll(std::vector<TransportEvent>& events) override;

  /// Sends nothing more to this peer; what is under way no longer counts as such. With the shm provider
  /// also removes the file that a killed process leaves in /dev/shm. For a peer that is known to have ended.
  void forget(int32_t peer) override;

  /// Puts under way: accepted, neither `sent` nor failed nor forgotten.
  int in_flight() const;
  int64_t bytes_in_flight() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace moecomm::fabric
