// A network of one or more lanes to the same peers. A lane is an endpoint. A rank has several lanes if
// it has several NICs, or if one core cannot copy as much as the network takes. The caller's thread drives a
// single lane; of several lanes each has a thread. A put is not split: it goes over the lane with the fewest
// bytes to send. Puts have no guaranteed order, with one lane or several.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/backoff.hpp"
#include "common/error.hpp"
#include "common/start_thread.hpp"
#include "transport/fabric/network.hpp"
#include "transport/fabric/transport.hpp"

namespace moecomm::fabric {
namespace {

// The most bytes that a lane holds, waiting or under way: enough to keep any network busy, and few enough
// that a slow lane does not hold bytes that a fast lane could send. A single put may have more.
constexpr int64_t kMostBytes = int64_t{8} << 20;
constexpr auto kLongestSleep = std::chrono::microseconds(100);
constexpr auto kPause = std::chrono::milliseconds(1);  // between checks whether all lanes are connected

struct Stopped {};

/// A request of the caller's thread to a lane's thread.
struct Order {
  enum class Kind : uint32_t { put, forget };
  Kind kind;
  int32_t peer;
  int64_t dst_offset, src_offset, bytes;
  uint32_t immediate;
  uint64_t context;
};

struct Lane {
  enum class State { connecting, connected, failed };

  FabricLane remote;  // used only by `thread`, once that runs
  Backoff backoff{kLongestSleep};
  std::atomic<State> state{State::connecting};
  std::exception_ptr error;  // why the lane failed

  std::mutex mutex;
  std::deque<Order> orders;            // under the mutex
  std::vector<TransportEvent> events;  // under the mutex
  std::atomic<bool> has_orders{false}, has_events{false};
  // Bytes of puts that wait for `thread`, and of puts that are under way in the network.
  std::atomic<int64_t> waiting{0}, under_way{0};
  std::thread thread;

  void give(const Order& order) {
    {
      const std::lock_guard lock(mutex);
      waiting += order.bytes;
      orders.push_back(order);
      has_orders = true;
    }
    backoff.wake();
  }
};

class Lanes final : public Network {
 public:
  Lanes(const FabricOptions& options, void* base, int64_t bytes) {
    for (Info& chosen : choose_lanes(options.provider)) {
      lanes_.push_back(std::make_unique<Lane>());
      lanes_.back()->remote.reset(new FabricTransport(options, std::move(chosen), base, bytes));
    }
    gather_caps();
  }
  /// Closes all lanes concurrently, and so takes as long as the slowest lane.
  ~Lanes() override { stop(); }

  const TransportCaps& caps() const override { return caps_; }
  void stay_awake(bool yes) override { stay_awake_.store(yes, std::memory_order_relaxed); }

  std::vector<AddressBytes> endpoint_addresses() const override {
    std::vector<AddressBytes> addresses;
    for (const std::unique_ptr<Lane>& lane : lanes_) addresses.push_back(lane->remote->endpoint_address());
    return addresses;
  }

  void insert_peers(const std::vector<std::vector<AddressBytes>>& peers, int own_index) override {
    size_t common = lanes_.size();
    for (const std::vector<AddressBytes>& peer : peers) common = std::min(common, peer.size());
    if (common == 0) throw Error(ErrorKind::invalid_argument, "fabric: a peer has no endpoint address");
    lanes_.resize(common);
    gather_caps();
    for (size_t lane = 0; lane < common; ++lane) {
      std::vector<AddressBytes> its;
      for (const std::vector<AddressBytes>& peer : peers) its.push_back(peer[lane]);
      lanes_[lane]->remote->insert_peers(its, own_index);
    }
  }

  void connect(double timeout_seconds, const std::function<void()>& interrupt) override {
    if (lanes_.size() == 1) return lanes_.front()->remote->connect(timeout_seconds, interrupt);
    try {
      for (const std::unique_ptr<Lane>& lane : lanes_)
        lane->thread = start_thread([this, at = lane.get(), timeout_seconds] { drive(*at, timeout_seconds); },
                                    "a lane between nodes", "lanes (MOECOMM_FABRIC_LANES)");
      while (true) {
        bool all = true;
        for (const std::unique_ptr<Lane>& lane : lanes_) {
          const Lane::State state = lane->state;
          if (state == Lane::State::failed) std::rethrow_exception(lane->error);
          all &= state == Lane::State::connected;
        }
        if (all) return;
        if (interrupt) interrupt();
        std::this_thread::sleep_for(kPause);
      }
    } catch (...) {
      stop();
      throw;
    }
  }

  bool put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes, uint32_t immediate,
           uint64_t context) override {
    if (lanes_.size() == 1)
      return lanes_.front()->remote->put(peer, dst_offset, src_offset, bytes, immediate, context);
    size_t least = 0;
    int64_t load = std::numeric_limits<int64_t>::max();
    for (size_t i = 0; i < lanes_.size(); ++i)
      if (const int64_t its = lanes_[i]->waiting + lanes_[i]->under_way; its < load) least = i, load = its;
    if (load > 0 && bytes > kMostBytes - load) return false;
    // The lane checks bounds when it sends; if a put is out of bounds, poll() reports its peer as failed.
    lanes_[least]->give({Order::Kind::put, peer, dst_offset, src_offset, bytes, immediate, context});
    return true;
  }

  void poll(std::vector<TransportEvent>& events) override {
    if (lanes_.size() == 1) return lanes_.front()->remote->poll(events);
    for (const std::unique_ptr<Lane>& lane : lanes_) {
      if (!lane->has_events) continue;
      const std::lock_guard lock(lane->mutex);
      events.insert(events.end(), std::make_move_iterator(lane->events.begin()),
                    std::make_move_iterator(lane->events.end()));
      lane->events.clear();
      lane->has_events = false;
    }
  }

  void forget(int32_t peer) override {
    if (lanes_.size() == 1) return lanes_.front()->remote->forget(peer);
    for (const std::unique_ptr<Lane>& lane : lanes_) lane->give({Order::Kind::forget, peer, 0, 0, 0, 0, 0});
  }

 private:
  void gather_caps() {
    caps_ = lanes_.front()->remote->caps();
    caps_.lanes = static_cast<int>(lanes_.size());
    std::vector<std::string> interfaces{caps_.interface};
    for (const std::unique_ptr<Lane>& lane : lanes_) {
      const TransportCaps& caps = lane->remote->caps();
      caps_.max_message = std::min(caps_.max_message, caps.max_message);
      if (std::find(interfaces.begin(), interfaces.end(), caps.interface) != interfaces.end()) continue;
      caps_.interface += ", " + caps.interface;
      interfaces.push_back(caps.interface);
    }
  }

  /// The main function of a lane's thread.
  void drive(Lane& lane, double timeout_seconds) {
    begin_polling("moecomm-lane", lane.remote->caps().cores);
    try {
      lane.remote->connect(timeout_seconds, [this] {
        if (stop_) throw Stopped{};
      });
      lane.state = Lane::State::connected;
    } catch (...) {
      lane.error = std::current_exception();
      lane.state = Lane::State::failed;
    }
    if (lane.state == Lane::State::connected) serve(lane);
    lane.remote.reset();  // here, so that lanes close concurrently
  }

  void serve(Lane& lane) {
    std::deque<Order> orders;
    std::vector<TransportEvent> events;
    FabricTransport& remote = *lane.remote;
    const auto carry_out = [&](const Order& order) {
      if (order.kind == Order::Kind::forget) {
        remote.forget(order.peer);
        return true;
      }
      try {
        if (!remote.put(order.peer, order.dst_offset, order.src_offset, order.bytes, order.immediate,
                        order.context))
          return false;
      } catch (const Error& error) {
        events.push_back({TransportEvent::Kind::failed, order.peer, 0, 0, error.what()});
      }
      lane.under_way = remote.bytes_in_flight();
      lane.waiting -= order.bytes;
      return true;
    };
    while (!stop_) {
      bool busy = false;
      if (lane.has_orders) {
        const std::lock_guard lock(lane.mutex);
        orders.insert(orders.end(), lane.orders.begin(), lane.orders.end());
        lane.orders.clear();
        lane.has_orders = false;
      }
      while (!orders.empty() && carry_out(orders.front())) {
        orders.pop_front();
        busy = true;
      }
      remote.poll(events);
      lane.under_way = remote.bytes_in_flight();
      if (!events.empty()) {
        busy = true;
        const std::lock_guard lock(lane.mutex);
        lane.events.insert(lane.events.end(), std::make_move_iterator(events.begin()),
                           std::make_move_iterator(events.end()));
        lane.has_events = true;
        events.clear();
      }
      lane.backoff.turn(busy, stay_awake_.load(std::memory_order_relaxed));
    }
  }

  void stop() {
    stop_ = true;
    for (const std::unique_ptr<Lane>& lane : lanes_) lane->backoff.wake();
    for (const std::unique_ptr<Lane>& lane : lanes_)
      if (lane->thread.joinable()) lane->thread.join();
  }

  TransportCaps caps_;  // of the first lane, but with the NICs of all lanes and their smallest max_message
  std::atomic<bool> stop_{false}, stay_awake_{false};
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace

std::unique_ptr<Network> open_network(const FabricOptions& options, void* base, int64_t bytes) {
  return std::make_unique<Lanes>(options, base, bytes);
}

}  // namespace moecomm::fabric
