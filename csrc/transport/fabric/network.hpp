// What the runtime sees of this folder: a rank's network over one or more lanes (libfabric endpoints), and
// what libfabric offers here. Builds without libfabric's headers replace this folder by
// without_libfabric.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/fabric/provider.hpp"
#include "transport/transport.hpp"

namespace moecomm::fabric {

struct FabricOptions {
  ProviderOptions provider;
  /// The most puts and bytes in flight in a lane, to all peers together; a put that is alone may have more
  /// bytes. Providers may set no limit: tcp takes as much as fits into memory.
  int max_in_flight_operations = 256;
  int64_t max_in_flight_bytes = int64_t{64} << 20;
};

using AddressBytes = std::string;  ///< bytes, not text

class Network : public Transport {
 public:
  /// The endpoint address of each lane, for peers' insert_peers(). Peers can connect while connect() runs.
  virtual std::vector<AddressBytes> endpoint_addresses() const = 0;
  /// Takes the endpoint addresses of all peers (peers[i]: those of peer i, one per lane), and drops lanes
  /// that a peer lacks. Called once. Throws an error for a bad address.
  virtual void insert_peers(const std::vector<std::vector<AddressBytes>>& peers, int own_index) = 0;
  /// Establishes the connections to all peers, in both directions. Calls `interrupt` every few milliseconds;
  /// its exceptions pass through. Throws Error(peer_timeout), which names the missing peers, or
  /// Error(peer_lost) if a peer refuses. After an error the object can only be destroyed.
  virtual void connect(double timeout_seconds, const std::function<void()>& interrupt) = 0;
};

/// Opens as many lanes as choose_lanes() says, all for the window [base, base + bytes), which must stay
/// mapped until the object is gone. Error(unsupported) without libfabric or a suitable provider,
/// Error(out_of_memory) if the system refuses to pin the window.
std::unique_ptr<Network> open_network(const FabricOptions& options, void* base, int64_t bytes);

/// The usable providers with their interfaces, best provider first, such as "net (eth0, lo), shm".
/// Error(unsupported) without libfabric.
std::string offers_text();

/// The version of libfabric, "1.17". Error(unsupported), with what to install, if there is no libfabric.
std::string installed_version();

}  // namespace moecomm::fabric
