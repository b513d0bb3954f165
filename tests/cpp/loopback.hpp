// A network between threads of one process that delivers in random order: puts wait in a bag of their sender,
// which copies some of them, whichever, at each poll.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace moecomm::test {

class Loopback : public Transport {
 public:
  /// Where a rank's immediates arrive, and its window.
  struct Port {
    std::byte* base = nullptr;
    std::mutex mutex;
    std::vector<uint32_t> immediates;
    std::atomic<bool> gone = false;   ///< this rank's network has failed: nothing leaves or arrives any more
    std::atomic<bool> stuck = false;  ///< poll() of this rank does not return
  };

  /// ports[n]: of the rail's rank on node n. At most `room` puts are under way.
  Loopback(std::vector<std::shared_ptr<Port>> ports, int32_t self, uint64_t seed, size_t room)
      : ports_(std::move(ports)), self_(self), random_(seed), room_(room) {
    caps_.provider = "loopback";
    caps_.max_message = int64_t{1} << 30;
  }

  const TransportCaps& caps() const override { return caps_; }

  bool put(int32_t peer, int64_t dst, int64_t src, int64_t bytes, uint32_t immediate,
           uint64_t context) override {
    if (bag_.size() >= room_ || ports_[self_]->gone) return false;
    bag_.push_back({peer, dst, src, bytes, immediate, context});
    return true;
  }

  void forget(int32_t peer) override {
    std::erase_if(bag_, [peer](const Put& put) { return put.peer == peer; });
  }

  void poll(std::vector<TransportEvent>& events) override {
    while (ports_[self_]->stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (ports_[self_]->gone) {
      if (!std::exchange(told_, true))
        events.push_back({TransportEvent::Kind::failed, -1, 0, 0, "loopback: the network has gone"});
      return;
    }
    for (int tries = static_cast<int>(random_() % 3); tries > 0 && !bag_.empty(); --tries) {
      std::swap(bag_[random_() % bag_.size()], bag_.back());
      const Put put = bag_.back();
      bag_.pop_back();
      Port& port = *ports_[put.peer];
      std::memcpy(port.base + put.dst, ports_[self_]->base + put.src, put.bytes);
      {
        const std::lock_guard lock(port.mutex);
        port.immediates.push_back(put.immediate);
      }
      events.push_back({TransportEvent::Kind::sent, put.peer, 0, put.context, {}});
    }
    Port& own = *ports_[self_];
    const std::lock_guard lock(own.mutex);
    std::shuffle(own.immediates.begin(), own.immediates.end(), random_);
    // Some of what is there, so that what belongs together is seen at different times.
    for (size_t left = random_() % (own.immediates.size() + 1); left > 0; --left) {
      events.push_back({TransportEvent::Kind::arrived, -1, own.immediates.back(), 0, {}});
      own.immediates.pop_back();
    }
  }

 private:
  struct Put {
    int32_t peer;
    int64_t dst, src, bytes;
    uint32_t immediate;
    uint64_t context;
  };
  std::vector<std::shared_ptr<Port>> ports_;
  const int32_t self_;
  std::mt19937_64 random_;
  const size_t room_;
  TransportCaps caps_;
  std::vector<Put> bag_;
  bool told_ = false;
};

}  // namespace moecomm::test
