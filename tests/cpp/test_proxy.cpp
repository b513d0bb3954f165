// The proxy: how many bytes a command for rows puts; and its end, where the goodbye counts all that was
// pushed before it, whenever the proxy gets to it.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "check.hpp"
#include "layout/device_window.hpp"
#include "rail.hpp"
#include "runtime/proxy.hpp"
#include "transport/shm/window.hpp"

using namespace moecomm;
using namespace std::chrono_literals;

static thread_local bool no_memory = false;  // for this thread
[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const memory = no_memory ? nullptr : std::malloc(bytes);
  return memory != nullptr ? memory : throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { operator delete(memory); }

namespace {

constexpr double kTimeout = 60.0;

/// Takes all puts; poll() waits while `gate` is closed, as long as the library of a network does that waits
/// for a killed peer.
class GatedRemote final : public Transport {
 public:
  struct Gate {
    std::atomic<bool> closed = false, waiting = false, throws = false, lacks_memory = false;
    std::atomic<int> puts = 0;
    std::atomic<int64_t> bytes = 0;
  };
  explicit GatedRemote(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {
    caps_.provider = "gated";
    caps_.max_message = int64_t{1} << 30;
  }
  const TransportCaps& caps() const override { return caps_; }
  bool put(int32_t, int64_t, int64_t, int64_t bytes, uint32_t, uint64_t) override {
    ++gate_->puts;
    gate_->bytes += bytes;
    const Error error(ErrorKind::out_of_memory, "the network has no memory");
    no_memory = gate_->lacks_memory;
    return gate_->throws ? throw error : true;
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
  explicit Pair(double timeout_seconds = kTimeout,
                const WindowShape& shape = {2, 2, 16, 8, DType::float32, 1})
      : layout(WindowLayout::make(shape)) {
    signals.emplace(layout, std::vector{window.base()}, 0, std::vector<int64_t>{getpid()}, timeout_seconds,
                    1);
    tcp::test_rail::Rail rail(2);
    rail.connect();
    peer = std::move(rail.links[1]);
    proxy.emplace(layout, 0, window.base(), *signals, std::make_unique<GatedRemote>(gate),
                  std::move(rail.links[0]), timeout_seconds);
  }
  /// Closes the gate, and returns when the proxy's thread waits there.
  void hold_up() {
    gate->closed = true;
    CHECK(test::eventually([&] { return gate->waiting.load(); }));
  }
  /// The next event of the link to rank 0.
  tcp::LinkEvent event() { return tcp::test_rail::take(*peer, 1).at(0); }

  const WindowLayout layout;
  shm::Window window = shm::Window::create(layout.total_bytes, layout.committed_bytes);
  std::optional<shm::Signals> signals;
  std::unique_ptr<tcp::Links> peer;
  std::shared_ptr<GatedRemote::Gate> gate = std::make_shared<GatedRemote::Gate>();
  std::optional<Proxy> proxy;
};

/// Rows are as long on the network as in the format that their command names.
TEST(rows_in_every_format) {
  const DeviceShape rows{2, 2, 8, 256, 8, DType::bfloat16, WireFormat::same, 1};
  // Values, and behind them scales, in whole lines of 128 bytes.
  const int64_t expected[] = {512, 256 + 128, 256 + 128, 128 + 128};
  for (const WireFormat wire : kWireFormats) {
    Pair pair(kTimeout, host_window_shape(rows));
    pair.proxy->push({chunk_kind(wire), 1, 0, 0, 0, 3u << 16 | 3u});
    CHECK(test::eventually([&] { return pair.gate->puts > 0; }));
    CHECK(pair.gate->puts == 1 && pair.gate->bytes == 3 * expected[static_cast<int>(wire)]);
    CHECK(pair.proxy->close(false));
  }
}

/// The proxy has found no commands and is held up then; meanwhile the last one comes, and close(). A peer
/// that were told a count without it would take this rank for gone while its rows are still to come.
TEST(goodbye_counts_what_was_pushed_before) {
  Pair pair;
  pair.hold_up();
  pair.proxy->push({Command::Kind::head, 1, 0, 0, 64, 0});
  auto closing = std::async(std::launch::async, [&] { return pair.proxy->close(true); });
  std::this_thread::sleep_for(50ms);  // until close() has told the thread
  pair.gate->closed = false;
  const tcp::LinkEvent goodbye = pair.event();
  CHECK(goodbye.kind == tcp::LinkEvent::Kind::message && goodbye.message.kind == 1);  // closing
  CHECK(goodbye.message.value == 1 && pair.gate->puts == 1);
  // It stays until the peer says that it has received them.
  CHECK(closing.wait_for(100ms) == std::future_status::timeout);
  pair.peer->send(0, {2, 0, 0, 0});  // drained
  CHECK(closing.get());
}

/// Without draining nothing is waited for.
TEST(close_at_once) {
  Pair pair;
  pair.proxy->push({Command::Kind::head, 1, 0, 0, 64, 0});
  const auto begin = Clock::now();
  CHECK(pair.proxy->close(false));
  CHECK(Clock::now() - begin < 5s);
}

/// A thread that does not come back from the network is left behind: the peer sees the end of the link all
/// the same, and should the thread come back, it finds all that it uses, and ends the network.
TEST(thread_that_does_not_come_back) {
  static Pair* kept[2];  // what the thread has been left with stays until the process ends
  for (const bool drain : {true, false}) {
    Pair& pair = *(kept[drain] = new Pair(0.2));
    pair.hold_up();
    CHECK(!pair.proxy->close(drain));
    CHECK(!pair.proxy->close(false));  // again, without waiting
    CHECK(pair.event().kind == tcp::LinkEvent::Kind::lost);
    CHECK(pair.gate.use_count() == 2);  // its transport is there
    pair.gate->closed = false;
    CHECK(test::eventually([&] { return pair.gate.use_count() == 1; }));
  }
}

/// What the network's library throws is the reason why nobody on other nodes is reached; the thread ends.
/// Also where there is no memory to keep the reason.
TEST(network_that_throws) {
  for (const std::string reason : {"the network has no memory", "out of memory"}) {
    Pair pair;
    pair.gate->throws = true;
    pair.gate->lacks_memory = reason == "out of memory";
    pair.proxy->push({Command::Kind::head, 1, 0, 0, 64, 0});
    CHECK(test::eventually([&] { return pair.proxy->reason(1) == reason; }));
    CHECK(pair.proxy->close(true));
  }
}

}  // namespace

int main() { return moecomm::test::run(); }
