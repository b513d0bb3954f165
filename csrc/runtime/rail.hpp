// Opens a rank's connections to its rail, the ranks with the same local index on the other nodes: first its
// own ends, whose addresses peers need, then the connections. Peers are numbered by node, in errors by rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layout/window.hpp"
#include "transport/fabric/network.hpp"
#include "transport/tcp/links.hpp"

namespace moecomm {

struct RailOptions {
  tcp::JobId job;
  NodeMap nodes;
  int32_t rank;
  double timeout_seconds;
  fabric::ProviderOptions network;
};

class Rail {
 public:
  /// Opens this rank's ends. Registers the part of the window at `base` that the network writes or reads.
  Rail(const RailOptions& options, const WindowLayout& layout, std::byte* base);

  /// The address of each lane (libfabric endpoint) for rows. endpoint(): the address of the TCP links.
  std::vector<fabric::AddressBytes> endpoint_addresses() const { return network_->endpoint_addresses(); }
  const std::string& endpoint() const { return links_->endpoint(); }
  /// Connects to all peers, within 1.5 times the timeout. Throws the errors of tcp::Links::connect and
  /// fabric::Network::connect, and Error(peer_lost) as soon as a peer gives up. After an error the object can
  /// only be destroyed.
  void connect(const std::vector<std::vector<fabric::AddressBytes>>& peers,
               const std::vector<std::string>& endpoints, const std::function<void()>& interrupt);

  std::unique_ptr<Transport> take_network() { return std::move(network_); }
  std::unique_ptr<tcp::Links> take_links() { return std::move(links_); }

 private:
  int32_t node() const { return options_.nodes.node_of(options_.rank); }
  void require_peers();

  const RailOptions options_;
  std::unique_ptr<fabric::Network> network_;
  std::unique_ptr<tcp::Links> links_;
};

}  // namespace moecomm
