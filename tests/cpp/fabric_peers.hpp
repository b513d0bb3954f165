// Peers of the libfabric transport in one process, and a two-way exchange of messages between them.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "common/deadline.hpp"
#include "transport/fabric/library.hpp"
#include "transport/fabric/network.hpp"
#include "transport/fabric/transport.hpp"

namespace moecomm::fabric::test_peers {

using Kind = TransportEvent::Kind;

constexpr double kHang = 60;  // seconds after which a wait has failed

// ---- memory and endpoints

/// A window of this process.
struct Memory {
  explicit Memory(int64_t count) : bytes(count) {}
  const int64_t bytes;
  const std::unique_ptr<uint8_t[]> owned = std::make_unique<uint8_t[]>(bytes);
  uint8_t* const base = owned.get();
};

inline FabricOptions options_for(const std::string& provider) {
  FabricOptions options;
  options.provider.provider = provider;
  if (provider != "shm") options.provider.interface = "127.0.0.1";
  return options;
}

inline FabricLane open_lane(const FabricOptions& options, void* base, int64_t bytes) {
  ProviderOptions one = options.provider;
  one.lanes = 1;
  return FabricLane(new FabricTransport(options, std::move(choose_lanes(one).front()), base, bytes));
}

inline FabricLane open_lane(const std::string& provider, const Memory& memory) {
  return open_lane(options_for(provider), memory.base, memory.bytes);
}

inline void connect_lane(FabricTransport& lane, const std::vector<AddressBytes>& endpoint_addresses,
                         int own_index, double timeout_seconds, const std::function<void()>& interrupt = {}) {
  lane.insert_peers(endpoint_addresses, own_index);
  lane.connect(timeout_seconds, interrupt);
}

/// Peers of one process: connected by a thread each, then polled by whoever likes.
struct Group {
  Group(int count, int64_t bytes, const FabricOptions& options) {
    std::vector<AddressBytes> endpoint_addresses;
    for (int i = 0; i < count; ++i) {
      memory.push_back(std::make_unique<Memory>(bytes));
      remote.push_back(open_lane(options, memory.back()->base, bytes));
      endpoint_addresses.push_back(remote.back()->endpoint_address());
    }
    test::at_once(count, [&](int i) {
      const Error error = test::error_of([&] { connect_lane(*remote[i], endpoint_addresses, i, kHang); });
      if (!CHECK(error.kind() == ErrorKind::none)) std::printf("peer %d: %s\n", i, error.what());
    });
  }
  std::vector<std::unique_ptr<Memory>> memory;
  std::vector<FabricLane> remote;
};

/// Calls `step` until it returns true. False, and a failed check, if that takes too long.
inline bool until(const char* what, const std::function<bool()>& step) {
  const Deadline deadline{std::chrono::duration<double>(kHang)};
  while (!step()) {
    if (!deadline.passed()) continue;
    std::printf("waited too long for %s\n", what);
    return CHECK(!"in time");
  }
  return true;
}

// ---- traffic

/// What message `index` of a seed carries; both ends know it without talking.
struct Message {
  int64_t bytes, dst, src;
};

inline void fill(uint8_t* at, int64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(at + i, &word, std::min<int64_t>(8, bytes - i));
  }
}

inline bool filled(const uint8_t* at, int64_t bytes, uint64_t seed) {
  std::vector<uint8_t> expected(bytes);
  fill(expected.data(), bytes, seed);
  return bytes == 0 || std::memcmp(at, expected.data(), expected.size()) == 0;
}

constexpr int64_t kHalf = int64_t{12} << 20;  // a window is a half to send from and one to receive into

/// Messages of all sizes at offsets that are multiples of nothing, in random places without overlap.
inline std::vector<Message> messages(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int64_t> sizes;
  for (int i = 0; i < 40; ++i)
    for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{64}, int64_t{7168}}) sizes.push_back(size);
  for (int i = 0; i < 6; ++i) sizes.push_back((int64_t{1} << 20) + static_cast<int64_t>(random() % 5000));
  std::vector<Message> list;
  std::shuffle(sizes.begin(), sizes.end(), random);
  int64_t at = static_cast<int64_t>(random() % 64);
  for (int64_t size : sizes) {
    list.push_back({size, at, 0});
    at += size + static_cast<int64_t>(random() % 64);
  }
  std::vector<size_t> order(list.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  at = static_cast<int64_t>(random() % 64);
  for (size_t i : order) {
    list[i].src = kHalf + at;
    at += list[i].bytes + static_cast<int64_t>(random() % 64);
  }
  if (at > kHalf) std::printf("window too small\n"), std::exit(1);
  return list;
}

/// One end of a two-way exchange: sends `out` to `peer`, expects `in` from it.
class Exchange {
 public:
  Exchange(Transport& remote, Memory& memory, int peer, uint64_t out_seed, uint64_t in_seed)
      : remote_(remote),
        memory_(memory),
        peer_(peer),
        out_seed_(out_seed),
        in_seed_(in_seed),
        out_(messages(out_seed)),
        in_(messages(in_seed)),
        sent_(out_.size(), 0),
        arrived_(in_.size(), 0),
        order_(out_.size()) {
    std::iota(order_.begin(), order_.end(), 0);
    std::mt19937_64 random(out_seed + 1);
    std::shuffle(order_.begin(), order_.end(), random);
    for (size_t i = 0; i < out_.size(); ++i) fill(memory_.base + out_[i].src, out_[i].bytes, out_seed_ + i);
  }

  /// True when all that this end sends is sent and all that it expects is here.
  bool step() {
    while (next_ < order_.size()) {
      const size_t i = order_[next_];
      if (!remote_.put(peer_, out_[i].dst, out_[i].src, out_[i].bytes, static_cast<uint32_t>(i), 7000 + i))
        break;
      ++next_;
    }
    events_.clear();
    remote_.poll(events_);
    for (const TransportEvent& event : events_) {
      if (event.kind == Kind::sent) {
        if (!CHECK(event.context >= 7000 && event.context < 7000 + out_.size())) continue;
        const size_t i = event.context - 7000;
        CHECK(event.peer == peer_);
        CHECK(++sent_[i] == 1);
        // Done with: whatever is written there now must not reach the peer.
        std::memset(memory_.base + out_[i].src, 0xee, out_[i].bytes);
        ++sent_count_;
      } else if (event.kind == Kind::arrived) {
        if (!CHECK(event.immediate < in_.size())) continue;
        const size_t i = event.immediate;
        CHECK(++arrived_[i] == 1);
        CHECK(filled(memory_.base + in_[i].dst, in_[i].bytes, in_seed_ + i));
        ++arrived_count_;
      } else {
        std::printf("failed: %s\n", event.text.c_str());
        CHECK(!"no failure");
      }
    }
    return sent_count_ == out_.size() && arrived_count_ == in_.size();
  }

 private:
  Transport& remote_;
  Memory& memory_;
  int peer_;
  uint64_t out_seed_, in_seed_;
  std::vector<Message> out_, in_;
  std::vector<int> sent_, arrived_;
  std::vector<size_t> order_;
  std::vector<TransportEvent> events_;
  size_t next_ = 0, sent_count_ = 0, arrived_count_ = 0;
};

}  // namespace moecomm::fabric::test_peers
