// Transport for tests that delivers late and in any order, as networks may. It stands around another one
// and holds back each put before it goes out and each event before it is reported, for a random time of its
// own.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "common/deadline.hpp"
#include "transport/transport.hpp"

namespace moecomm::fabric {

class ShuffledTransport final : public Transport {
 public:
  /// Holds nothing longer than `longest` on each of its ways (out, arrival, completion), as long as poll()
  /// is called. The same seed gives the same delays, not the same order: that depends on the time too.
  ShuffledTransport(std::unique_ptr<Transport> inner, uint64_t seed,
                    std::chrono::microseconds longest = std::chrono::microseconds(3000));

  const TransportCaps& caps() const override { return inner_->caps(); }
  /// Bounds are checked by the inner one, when the put goes out: its error then comes from poll().
  bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
           uint64_t context) override;
  void poll(std::vector<TransportEvent>& events) override;

  void forget(int32_t peer) override { inner_->forget(peer); }
  void stay_awake(bool yes) override { inner_->stay_awake(yes); }

  Transport& inner() { return *inner_; }

 private:
  struct Put {
    Clock::time_point due;
    int32_t peer;
    int64_t dst_offset, src_offset, bytes;
    uint32_t immediate;
    uint64_t context;
  };
  struct Held {
    Clock::time_point due;
    TransportEvent event;
  };
  Clock::time_point later();

  std::unique_ptr<Transport> inner_;
  std::mt19937_64 random_;
  std::chrono::microseconds longest_;
  std::vector<Put> puts_;
  std::vector<Held> held_;
  std::vector<TransportEvent> fresh_;
};

}  // namespace moecomm::fabric
