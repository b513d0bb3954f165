// A rank's ways to its rail while they are being opened: what peers have to know of them, then the
// connections. Peers are numbered by node, in errors by rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "layout/window.hpp"
#include "transport/fabric/transport.hpp"
#include "transport/tcp/links.hpp"

namespace moecomm {

struct RailOptions {
  tcp::JobId job;
  NodeMap nodes;
  int32_t rank;
  double timeout_seconds;
  std::string provider, interface;  ///< empty: chosen
  std::string gpu_bus_id;           ///< the NIC nearest to this GPU is taken; empty: CPU ranks
  uint64_t shuffle = 0;             ///< not 0: deliver in random order, by this seed (for tests)
};

class Rail {
 public:
  /// Registers the part of the window at `base` that other nodes write to or that leaves for them.
  Rail(const RailOptions& options, const WindowLayout& layout, std::byte* base);

  std::vector<std::byte> card() const { return remote_->card(); }
  const std::string& endpoint() const { return links_->endpoint(); }
  /// Connects to all peers, within one and a half times the timeout. Errors as those of tcp::Links::connect
  /// and fabric::FabricRemote::connect.
  void connect(const std::vector<std::vector<std::byte>>& cards, const std::vector<std::string>& endpoints,
               const std::function<void()>& interrupt);

  /// After connect(), once.
  std::unique_ptr<Remote> take_remote();
  std::unique_ptr<tcp::Links> take_links() { return std::move(links_); }

 private:
  int32_t node() const { return options_.nodes.node_of(options_.rank); }

  const RailOptions options_;
  std::unique_ptr<fabric::FabricRemote> remote_;
  std::unique_ptr<tcp::Links> links_;
};

}  // namespace moecomm
