// Several ways to the same peers. A lane is an endpoint with a thread that drives it: on a NIC of its own
// where a rank has several, or one more connection where a single core cannot copy what the network takes. A
// put goes whole, over the lane that has least to do; nothing is promised about order anyway.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "transport/fabric/transport.hpp"
#include "transport/transport.hpp"

namespace moecomm::fabric {

/// The endpoints of a rank, all for one window: as many as choose_lanes() says. Errors: as FabricTransport's.
std::vector<std::unique_ptr<FabricTransport>> open_lanes(const FabricOptions& options, void* base,
                                                         int64_t bytes);

class LanedTransport final : public Transport {
 public:
  /// Lanes that were introduced to their peers, in the same order on all of them, and are not connected yet.
  explicit LanedTransport(std::vector<std::unique_ptr<FabricTransport>> lanes);
  /// Takes as long as the slowest lane: they end side by side.
  ~LanedTransport() override;
  LanedTransport(const LanedTransport&) = delete;
  LanedTransport& operator=(const LanedTransport&) = delete;

  /// Connects all lanes, and starts to drive them. As FabricTransport::connect.
  void connect(double timeout_seconds, const std::function<void()>& interrupt = {});

  /// Capabilities of the first lane, with the NICs of all lanes.
  const TransportCaps& caps() const override { return caps_; }
  /// Bounds are checked when the put goes out: one that lies outside is reported as a failure of its peer.
  bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
           uint64_t context) override;
  void poll(std::vector<TransportEvent>& events) override;
  /// `failed` comes at most once a peer and lane.
  void forget(int32_t peer) override;
  void stay_awake(bool yes) override { stay_awake_.store(yes, std::memory_order_relaxed); }

 private:
  struct Lane;
  void drive(Lane& lane, double timeout_seconds);
  void serve(Lane& lane);
  void stop();

  TransportCaps caps_;
  std::atomic<bool> stop_{false}, stay_awake_{false};
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace moecomm::fabric
