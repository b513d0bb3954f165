// A network of one or more connections to the same peers. A lane is an endpoint: on a NIC of its own where a
// rank has several, or an additional connection where a single core cannot copy as much as the network takes.
// The caller's thread drives a single lane; several have a thread each. A put travels whole, over the lane
// with the least to do; puts have no guaranteed order anyway.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "transport/fabric/transport.hpp"

namespace moecomm::fabric {

class Lanes final : public Network {
 public:
  Lanes(const FabricOptions& options, void* base, int64_t bytes);
  /// Takes as long as the slowest lane: all close concurrently.
  ~Lanes() override;
  Lanes(const Lanes&) = delete;
  Lanes& operator=(const Lanes&) = delete;

  std::vector<AddressBytes> endpoint_addresses() const override;
  void insert_peers(const std::vector<std::vector<AddressBytes>>& peers, int own_index) override;
  void connect(double timeout_seconds, const std::function<void()>& interrupt) override;

  /// The first lane's capabilities, with the NICs of all lanes.
  const TransportCaps& caps() const override { return caps_; }
  /// With several lanes bounds are checked when the put is sent: one out of bounds is reported as a failure
  /// of its peer.
  bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
           uint64_t context) override;
  void poll(std::vector<TransportEvent>& events) override;
  /// `failed` is called at most once per peer and lane.
  void forget(int32_t peer) override;
  void stay_awake(bool yes) override { stay_awake_.store(yes, std::memory_order_relaxed); }

 private:
  struct Lane;
  void gather_caps();
  void drive(Lane& lane, double timeout_seconds);
  void serve(Lane& lane);
  void stop();

  TransportCaps caps_;
  std::atomic<bool> stop_{false}, stay_awake_{false};
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace moecomm::fabric
