// A rank's ways to its rail while they are being opened: what peers have to know of them, then the
// connections. Peers are numbered by node, in errors by rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layout/window.hpp"
#include "transport/fabric/laned_transport.hpp"
#include "transport/tcp/links.hpp"

namespace moecomm {

struct RailOptions {
  tcp::JobId job;
  NodeMap nodes;
  int32_t rank;
  double timeout_seconds;
  std::string provider, interface;  ///< empty: chosen
  std::string gpu_bus_id;           ///< the NICs nearest to this GPU are taken; empty: CPU ranks
  int lanes = 0;                    ///< endpoints (fabric/lanes.hpp); 0: chosen
  uint64_t shuffle = 0;             ///< not 0: deliver in random order, by this seed (for tests)
};

class Rail {
 public:
  /// Registers the part of the window at `base` that other nodes write to or that leaves for them.
  Rail(const RailOptions& options, const WindowLayout& layout, std::byte* base);

  /// The endpoint addresses of all lanes.
  std::vector<std::byte> endpoint_address() const;
  const std::string& endpoint() const { return links_->endpoint(); }
  /// Connects to all peers, within one and a half times the timeout, by as many lanes as all of them have.
  /// Errors as those of tcp::Links::connect and fabric::FabricTransport::connect, and Error(peer_lost) as
  /// soon as a peer gives up. After an error only the destructor is left.
  void connect(const std::vector<std::vector<std::byte>>& endpoint_addresses,
               const std::vector<std::string>& endpoints, const std::function<void()>& interrupt);

  /// Hands over the transport; called once, after connect().
  std::unique_ptr<Transport> take_transport();
  std::unique_ptr<tcp::Links> take_links() { return std::move(links_); }

 private:
  int32_t node() const { return options_.nodes.node_of(options_.rank); }
  void insert_peers(const std::vector<std::vector<std::byte>>& endpoint_addresses);
  void connect_lanes(double timeout_seconds, const std::function<void()>& interrupt);
  void require_peers();

  const RailOptions options_;
  std::vector<std::unique_ptr<fabric::FabricTransport>> lanes_;  // until they are connected
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<tcp::Links> links_;
};

}  // namespace moecomm
