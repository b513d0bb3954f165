// How many commands a second one proxy takes from its ring: the real Proxy with control links over loopback,
// before a network that does nothing and is done at once. What compute threads and the ring cost is part of
// it, what a provider costs is not (bench/fabric_raw.cpp). One line of JSON a kind of command and number of
// producers on standard output.
//
//   proxy_rate [SECONDS]     of a run, 0.3 without
//
// Kinds: rows: a command a row, 64 of them make a put. chunks: a command a put of rows. For both a
// producer waits until the staging slot that it wants is free again, as ranks do. pieces: a command a put
// that has no slot, as ids travel. A run ends when the last put has been made; puts and bytes have to be
// those that the commands ask for.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "runtime/proxy.hpp"

using namespace moecomm;

namespace {

constexpr double kHang = 60;  // seconds that one run may take
constexpr auto kGlance = std::chrono::microseconds(50);
constexpr int32_t kTopK = 8;
constexpr int64_t kHidden = 7168, kTokens = 4096;  // bfloat16: chunks of 256 rows
constexpr int64_t kSlots = WindowLayout::kStagingChunks;
constexpr int32_t kNodes = 2;
constexpr int64_t kRows = 64;  // of a put of single rows
constexpr int kProducers[] = {1, 2};
constexpr int kRepeats = 5;

enum class Kind { rows, chunks, pieces };
constexpr Kind kKinds[] = {Kind::rows, Kind::chunks, Kind::pieces};

const char* name_of(Kind kind) {
  return kind == Kind::rows ? "rows" : kind == Kind::chunks ? "chunks" : "pieces";
}

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "proxy_rate: %s\n", text.c_str());
  std::fflush(nullptr);
  std::_Exit(1);  // other threads may be at work
}

/// Takes every put and reports it as done at the next poll. Its counts are for whoever sees stats().puts of
/// the proxy, which is raised behind them.
class NoNetwork : public Transport {
 public:
  explicit NoNetwork(int64_t window_bytes) : window_bytes_(window_bytes) {
    caps_.provider = "none";
    caps_.max_message = window_bytes;
  }
  const TransportCaps& caps() const override { return caps_; }
  bool put(int32_t peer, int64_t dst, int64_t src, int64_t bytes, uint32_t, uint64_t context) override {
    if (std::min({dst, src, bytes - 1}) < 0 || std::max(dst, src) + bytes > window_bytes_) outside = true;
    done_.push_back({TransportEvent::Kind::sent, peer, 0, context, {}});
    return true;
  }
  void forget(int32_t) override {}
  void poll(std::vector<TransportEvent>& events) override {
    events.insert(events.end(), done_.begin(), done_.end());
    done_.clear();
  }

  std::atomic<bool> outside{false};  // a put left the window

 private:
  const int64_t window_bytes_;
  TransportCaps caps_;
  std::vector<TransportEvent> done_;
};

/// Returns when all `uses` of a slot so far are done.
void wait_free(Proxy& proxy, int64_t slot, uint64_t uses) {
  const std::atomic_ref<uint64_t> done(*proxy.staging_done(slot));
  if (done.load(std::memory_order_acquire) >= uses) return;
  const Deadline deadline{std::chrono::duration<double>(kHang)};
  for (int spins = 1; done.load(std::memory_order_acquire) < uses; ++spins) {
    if (spins % 64 != 0) continue;
    std::this_thread::yield();
    if (deadline.passed()) fail("a staging slot does not get free");
  }
}

constexpr uint32_t kPiece = kTopK * 4;  // bytes: the ids of a token

/// What one producer does: the commands of `puts` puts. `uses`: how often each of its staging slots, from
/// `first_slot` on, has been filled.
void produce(Proxy& proxy, const WindowShape& shape, Kind kind, int64_t puts, int64_t rows,
             int64_t first_slot, std::vector<uint64_t>& uses) {
  const auto other = [&](int64_t n) { return static_cast<uint16_t>(n % shape.other_nodes()); };
  if (kind == Kind::pieces) {
    for (int64_t n = 0; n < puts; ++n) proxy.push({Command::Kind::ids, 0, other(n), 0, kPiece, 0});
    return;
  }
  const int64_t commands = kind == Kind::rows ? rows : 1;
  const auto fill = static_cast<uint32_t>(rows / commands) << 16 | static_cast<uint32_t>(rows);
  const int64_t chunks = shape.chunks(shape.max_tokens);
  for (int64_t n = 0; n < puts; ++n) {
    const auto own = static_cast<size_t>(n) % uses.size();
    const int64_t slot = first_slot + static_cast<int64_t>(own);
    wait_free(proxy, slot, uses[own]++);
    const auto chunk = static_cast<uint32_t>(n % chunks);
    for (int64_t i = 0; i < commands; ++i)
      proxy.push({Command::Kind::chunk, 0, other(n), chunk, static_cast<uint32_t>(slot), fill});
  }
}

class Bench {
 public:
  explicit Bench(double seconds)
      : seconds_(seconds),
        layout_(WindowLayout::make({kNodes, kTopK, kHidden, kTokens, DType::bfloat16, 1})) {
    // Address space: no row is ever touched.
    void* mapped = mmap(nullptr, static_cast<size_t>(layout_.total_bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) fail(errno_text("mapping the window"));
    auto* base = static_cast<std::byte*>(mapped);
    signals_ = std::make_unique<shm::Signals>(layout_, std::vector<std::byte*>{base}, 0,
                                              std::vector<int64_t>{getpid()}, kHang, 1);
    std::vector<std::string> endpoints;
    for (int32_t node = 0; node < kNodes; ++node) {
      links_.push_back(std::make_unique<tcp::Links>(tcp::LinkOptions{{}, node, kNodes, "127.0.0.1"}));
      endpoints.push_back(links_.back()->endpoint());
    }
    std::vector<std::thread> connecting;
    for (auto& each : links_)
      connecting.emplace_back([&each, &endpoints] {
        try {
          each->connect(endpoints, kHang);
        } catch (const Error& error) {
          fail(error.what());
        }
      });
    for (auto& thread : connecting) thread.join();
    auto network = std::make_unique<NoNetwork>(layout_.total_bytes);
    network_ = network.get();
    proxy_ = std::make_unique<Proxy>(layout_, 0, base, *signals_, std::move(network),
                                     std::move(links_.front()), kHang);
  }

  void measure() {
    for (const Kind kind : kKinds)
      for (const int producers : kProducers) measure(kind, producers);
  }

 private:
  void measure(Kind kind, int producers) {
    int64_t puts = 256;
    double trial = run(kind, producers, puts);
    while (trial < seconds_ / 4) trial = run(kind, producers, puts *= 2);
    puts = static_cast<int64_t>(static_cast<double>(puts) * std::max(1.0, seconds_ / trial));
    std::vector<double> seconds;
    for (int repeat = 0; repeat < kRepeats; ++repeat) seconds.push_back(run(kind, producers, puts));
    print(kind, producers, puts, std::move(seconds));
  }

  /// Every producer asks for `puts` puts. Returns the seconds until all of them have been made.
  double run(Kind kind, int producers, int64_t puts) {
    const int64_t total = puts * producers, share = kSlots / producers;
    const int64_t rows = kind == Kind::rows ? kRows : layout_.shape.chunk_rows();
    const int64_t bytes = kind == Kind::pieces ? kPiece : rows * layout_.shape.row_bytes();
    WireStats& stats = proxy_->stats();
    stats.reset();
    std::barrier start(producers + 1);
    std::vector<std::thread> threads;
    for (int64_t first = 0; first < share * producers; first += share)
      threads.emplace_back([&, first] {
        const auto own = uses_.begin() + first;
        std::vector<uint64_t> uses(own, own + share);  // its own lines of the cache
        start.arrive_and_wait();
        try {
          produce(*proxy_, layout_.shape, kind, puts, rows, first, uses);
        } catch (const Error& error) {
          fail(error.what());
        }
        std::copy(uses.begin(), uses.end(), own);
      });
    start.arrive_and_wait();
    const auto begun = Clock::now();
    for (auto& thread : threads) thread.join();
    const Deadline deadline{std::chrono::duration<double>(kHang)};
    while (stats.puts.load() < total) {
      if (deadline.passed()) fail("the proxy does not come to an end");
      std::this_thread::sleep_for(kGlance);
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - begun).count();
    settle(total, bytes);
    return seconds;
  }

  /// The bytes are counted behind the puts.
  void settle(int64_t puts, int64_t bytes) {
    const WireStats& stats = proxy_->stats();
    const Deadline deadline{std::chrono::duration<double>(1.0)};
    while (stats.bytes.load() != puts * bytes && !deadline.passed()) std::this_thread::sleep_for(kGlance);
    if (stats.puts.load() != puts || stats.bytes.load() != puts * bytes)
      fail("asked for " + std::to_string(puts) + " puts of " + std::to_string(bytes) + " bytes, made were " +
           std::to_string(stats.puts.load()) + " of " + std::to_string(stats.bytes.load()) + " together");
    if (network_->outside) fail("a put left the window");
  }

  void print(Kind kind, int producers, int64_t puts, std::vector<double> seconds) const {
    std::sort(seconds.begin(), seconds.end());
    const size_t half = seconds.size() / 2;
    const double median = seconds.size() % 2 == 1 ? seconds[half] : (seconds[half - 1] + seconds[half]) / 2;
    const int64_t all_puts = puts * producers;
    const int64_t a_put = kind == Kind::rows ? kRows : 1;
    const auto commands = static_cast<double>(all_puts * a_put);
    std::printf(
        "{\"kind\": \"%s\", \"producers\": %d, \"nodes\": %d, \"commands_a_put\": %lld, \"commands\": %.0f, "
        "\"repeats\": %zu, \"commands_per_s\": %.0f, \"commands_per_s_min\": %.0f, \"commands_per_s_max\": "
        "%.0f, \"puts_per_s\": %.0f}\n",
        name_of(kind), producers, kNodes, static_cast<long long>(a_put), commands, seconds.size(),
        commands / median, commands / seconds.back(), commands / seconds.front(),
        static_cast<double>(all_puts) / median);
    std::fflush(stdout);
  }

  const double seconds_;
  const WindowLayout layout_;
  std::unique_ptr<shm::Signals> signals_;
  std::vector<std::unique_ptr<tcp::Links>> links_;
  NoNetwork* network_ = nullptr;
  std::unique_ptr<Proxy> proxy_;
  std::vector<uint64_t> uses_ = std::vector<uint64_t>(kSlots, 0);  // of the staging slots
};

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc == 2 ? std::atof(argv[1]) : argc == 1 ? 0.3 : 0;
  if (!(seconds > 0 && seconds <= kHang / 4)) fail("one argument at most, the seconds of a run, up to 15");
  try {
    Bench(seconds).measure();
  } catch (const Error& error) {
    fail(error.what());
  }
  return 0;
}
