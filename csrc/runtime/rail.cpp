#include "runtime/rail.hpp"

#include <algorithm>
#include <chrono>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "transport/network_interface.hpp"

namespace moecomm {
namespace {

/// Returns `interface`, or "" if it has no address for TCP, as an RDMA device ("mlx5_0").
std::string interface_for_links(const std::string& interface) {
  try {
    interface_address(interface);
    return interface;
  } catch (const Error&) {
    return "";
  }
}

// A host that is silent for this long loses its link. A longer timeout counts, up to the kernel's limit.
constexpr double kLeastSilence = 30.0;

}  // namespace

Rail::Rail(const RailOptions& options, const WindowLayout& layout, std::byte* base)
    : options_(options),
      network_(fabric::open_network({options.network}, base, layout.committed_bytes)),
      links_(std::make_unique<tcp::Links>(tcp::LinkOptions{
          options.job, node(), options.nodes.nodes(), interface_for_links(options.network.interface),
          std::clamp(options.timeout_seconds, kLeastSilence, tcp::kLongestSilence)})) {}

/// Throws Error(peer_lost) if a link has ended: its peer could not connect. No peer sends messages yet.
void Rail::require_peers() {
  std::vector<tcp::LinkEvent> events;
  links_->poll(events);
  for (const tcp::LinkEvent& event : events) {
    if (event.kind != tcp::LinkEvent::Kind::lost) continue;
    throw Error(ErrorKind::peer_lost, "a peer gave up while ranks connected: " + event.text,
                {.peer = event.peer, .phase = "construction: connections"});
  }
}

void Rail::connect(const std::vector<std::vector<fabric::AddressBytes>>& peers,
                   const std::vector<std::string>& endpoints, const std::function<void()>& interrupt) {
  try {
    network_->insert_peers(peers, node());
    const auto start = Clock::now();
    links_->connect(endpoints, options_.timeout_seconds, interrupt);
    const std::chrono::duration<double> spent = Clock::now() - start;
    const double left = std::max(options_.timeout_seconds - spent.count(), options_.timeout_seconds / 2);
    network_->connect(left, [&] {
      if (interrupt) interrupt();
      require_peers();
    });
  } catch (const Error& error) {
    links_.reset();  // so that peers stop waiting
    if (error.details().peer < 0) throw;
    ErrorDetails details = error.details();
    const std::string peer = std::to_string(details.peer);
    details.rank = options_.rank;
    details.peer = options_.nodes.rank_of(details.peer, options_.nodes.local_of(options_.rank));
    throw Error(
        error.kind(),
        text_of("rank ", details.rank, ", ", error.what(), "; peer ", peer, " is rank ", details.peer),
        details);
  } catch (...) {
    links_.reset();
    throw;
  }
}

}  // namespace moecomm
