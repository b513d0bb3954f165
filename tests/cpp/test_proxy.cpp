// The proxy at its end: the goodbye counts all that was pushed before it, whenever the proxy gets to it.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "runtime/proxy.hpp"
#include "transport/shm/window.hpp"

using namespace moecomm;
using namespace std::chrono_literals;

namespace {

constexpr double kTimeout = 60.0;

/// Takes all puts; poll() waits while `gate` is closed.
class GatedRemote final : public Transport {
 public:
  struct Gate {
    std::atomic<bool> closed = false, waiting = false;
    std::atomic<int> puts = 0;
  };
  explicit GatedRemote(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {
    caps_.provider = "gated";
    caps_.max_message = int64_t{1} << 30;
  }
  const TransportCaps& caps() const override { return caps_; }
  bool put(int32_t, int64_t, int64_t, int64_t, uint32_t, uint64_t) override {
    ++gate_->puts;
    return true;
  }
  void forget(int32_t) override {}
  void poll(std::vector<TransportEvent>&) override {
    while (gate_->closed) {
      gate_->waiting = true;
      std::this_thread::sleep_for(1ms);
    }
    gate_->waiting = false;
  }

 private:
  std::shared_ptr<Gate> gate_;
  TransportCaps caps_;
};

/// Rank 0 of two nodes of one rank; of the other node there is the end of its link only.
struct Pair {
  Pair() {
    signals.emplace(layout, std::vector{window.base()}, 0, std::vector<int64_t>{getpid()}, kTimeout, 1);
    std::vector<std::unique_ptr<tcp::Links>> links;
    std::vector<std::string> endpoints;
    for (int32_t node = 0; node < 2; ++node) {
      links.push_back(std::make_unique<tcp::Links>(tcp::LinkOptions{{}, node, 2, "127.0.0.1"}));
      endpoints.push_back(links.back()->endpoint());
    }
    std::thread other([&] { links[1]->connect(endpoints, kTimeout); });
    links[0]->connect(endpoints, kTimeout);
    other.join();
    peer = std::move(links[1]);
    proxy.emplace(layout, 0, window.base(), *signals, std::make_unique<GatedRemote>(gate),
                  std::move(links[0]), kTimeout);
  }
  /// The next message of rank 0.
  tcp::LinkMessage message() {
    std::vector<tcp::LinkEvent> events;
    const Deadline deadline{std::chrono::duration<double>(kTimeout)};
    while (events.empty() && !deadline.passed()) {
      peer->poll(events);
      std::this_thread::sleep_for(1ms);
    }
    CHECK(events.size() == 1 && events[0].kind == tcp::LinkEvent::Kind::message);
    return events.empty() ? tcp::LinkMessage{} : events[0].message;
  }

  const WindowLayout layout = WindowLayout::make({2, 2, 16, 8, DType::float32, 1});
  shm::Window window = shm::Window::create(layout.total_bytes, layout.committed_bytes);
  std::optional<shm::Signals> signals;
  std::unique_ptr<tcp::Links> peer;
  std::shared_ptr<GatedRemote::Gate> gate = std::make_shared<GatedRemote::Gate>();
  std::optional<Proxy> proxy;
};

/// The proxy has found no commands and is held up then; meanwhile the last one comes, and close(). A peer
/// that were told a count without it would take this rank for gone while its rows are still to come.
void test_goodbye_counts_what_was_pushed_before() {
  Pair pair;
  pair.gate->closed = true;
  while (!pair.gate->waiting) std::this_thread::sleep_for(1ms);
  pair.proxy->push({Command::Kind::head, 1, 0, 0, 64, 0});
  auto closing = std::async(std::launch::async, [&] { pair.proxy->close(true); });
  std::this_thread::sleep_for(50ms);  // until close() has told the thread
  pair.gate->closed = false;
  const tcp::LinkMessage goodbye = pair.message();
  CHECK(goodbye.kind == 1);  // closing
  CHECK(goodbye.value == 1 && pair.gate->puts == 1);
  // It stays until the peer says that it has received them.
  CHECK(closing.wait_for(100ms) == std::future_status::timeout);
  pair.peer->send(0, {2, 0, 0, 0});  // drained
  closing.get();
}

/// Without draining nothing is waited for.
void test_close_at_once() {
  Pair pair;
  pair.proxy->push({Command::Kind::head, 1, 0, 0, 64, 0});
  const auto begin = Clock::now();
  pair.proxy->close(false);
  CHECK(Clock::now() - begin < 5s);
}

}  // namespace

int main() {
  test_goodbye_counts_what_was_pushed_before();
  test_close_at_once();
  return test::finish();
}
