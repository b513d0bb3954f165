#include "runtime/rail.hpp"

#include <algorithm>
#include <chrono>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "transport/fabric/shuffled_transport.hpp"
#include "transport/network_interface.hpp"

namespace moecomm {
namespace {

fabric::FabricOptions fabric_options(const RailOptions& options) {
  fabric::FabricOptions chosen;
  chosen.provider.provider = options.provider;
  chosen.provider.interface = options.interface;
  chosen.provider.gpu_bus_id = options.gpu_bus_id;
  chosen.provider.local_rank = options.nodes.local_of(options.rank);
  chosen.provider.local_ranks = options.nodes.local_ranks;
  chosen.provider.lanes = options.lanes;
  return chosen;
}

/// The interface that was asked for may be a device of RDMA ("mlx5_0"), which TCP does not know.
std::string interface_for_links(const std::string& interface) {
  try {
    interface_address(interface);
    return interface;
  } catch (const Error&) {
    return "";
  }
}

// Links end when a host is silent for longer than this and than a wait may take, as far as the kernel goes.
constexpr double kLeastSilence = 30.0;

}  // namespace

Rail::Rail(const RailOptions& options, const WindowLayout& layout, std::byte* base)
    : options_(options),
      lanes_(fabric::open_lanes(fabric_options(options), base, layout.committed_bytes)),
      links_(std::make_unique<tcp::Links>(
          tcp::LinkOptions{options.job, node(), options.nodes.nodes(), interface_for_links(options.interface),
                           std::clamp(options.timeout_seconds, kLeastSilence, tcp::kLongestSilence)})) {}

std::vector<std::byte> Rail::endpoint_address() const {
  std::vector<std::vector<std::byte>> endpoint_addresses;
  for (const std::unique_ptr<fabric::FabricTransport>& lane : lanes_)
    endpoint_addresses.push_back(lane->endpoint_address());
  return fabric::pack_endpoint_addresses(endpoint_addresses);
}

/// Hosts may differ in what they have: the lanes that all peers have are used, the others closed.
void Rail::insert_peers(const std::vector<std::vector<std::byte>>& endpoint_addresses) {
  std::vector<std::vector<std::vector<std::byte>>> of_peers;  // [peer][lane]
  size_t lanes = lanes_.size();
  for (const std::vector<std::byte>& endpoint_address : endpoint_addresses) {
    of_peers.push_back(fabric::unpack_endpoint_addresses(endpoint_address));
    lanes = std::min(lanes, of_peers.back().size());
  }
  lanes_.resize(lanes);
  for (size_t lane = 0; lane < lanes; ++lane) {
    std::vector<std::vector<std::byte>> its;
    for (std::vector<std::vector<std::byte>>& peer : of_peers) its.push_back(std::move(peer[lane]));
    lanes_[lane]->insert_peers(its, node());
  }
}

/// A single lane is driven by the proxy itself, which saves it the way to another thread.
void Rail::connect_lanes(double timeout_seconds, const std::function<void()>& interrupt) {
  const auto look = [&] {
    if (interrupt) interrupt();
    require_peers();
  };
  if (lanes_.size() == 1) {
    lanes_.front()->connect(timeout_seconds, look);
    transport_ = std::move(lanes_.front());
  } else {
    auto laned = std::make_unique<fabric::LanedTransport>(std::move(lanes_));
    laned->connect(timeout_seconds, look);
    transport_ = std::move(laned);
  }
  lanes_.clear();
}

/// Peers say nothing before all have connected: what comes is the end of one that could not.
void Rail::require_peers() {
  std::vector<tcp::LinkEvent> events;
  links_->poll(events);
  for (const tcp::LinkEvent& event : events) {
    if (event.kind != tcp::LinkEvent::Kind::lost) continue;
    ErrorDetails details;
    details.peer = event.peer;
    details.phase = "construction: connections";
    throw Error(ErrorKind::peer_lost, "a peer gave up while ranks connected: " + event.text, details);
  }
}

void Rail::connect(const std::vector<std::vector<std::byte>>& endpoint_addresses,
                   const std::vector<std::string>& endpoints, const std::function<void()>& interrupt) {
  try {
    insert_peers(endpoint_addresses);
    const auto start = Clock::now();
    links_->connect(endpoints, options_.timeout_seconds, interrupt);
    const std::chrono::duration<double> spent = Clock::now() - start;
    connect_lanes(std::max(options_.timeout_seconds - spent.count(), options_.timeout_seconds / 2),
                  interrupt);
  } catch (const Error& error) {
    links_.reset();  // so that peers wait no longer
    if (error.details().peer < 0) throw;
    ErrorDetails details = error.details();
    const std::string peer = std::to_string(details.peer);
    details.rank = options_.rank;
    details.peer = options_.nodes.rank_of(details.peer, options_.nodes.local_of(options_.rank));
    throw Error(error.kind(),
                "rank " + std::to_string(details.rank) + ", " + error.what() + "; peer " + peer +
                    " is rank " + std::to_string(details.peer),
                details);
  } catch (...) {
    links_.reset();
    throw;
  }
}

std::unique_ptr<Transport> Rail::take_transport() {
  if (options_.shuffle == 0) return std::move(transport_);
  return std::make_unique<fabric::ShuffledTransport>(std::move(transport_), options_.shuffle);
}

}  // namespace moecomm
