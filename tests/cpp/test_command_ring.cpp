// Commands of several producers reach the consumer whole, those of one producer in their order, over many
// laps of the ring.
#include <thread>
#include <vector>

#include "check.hpp"
#include "runtime/command_ring.hpp"

using namespace moecomm;

namespace {

TEST(fields) {
  CommandRing ring;
  CHECK(!ring.pop());
  const Command sent{Command::Kind::chunk, 0xfe, 0xabcd, 0x12345678, 0x9abcdef0, 0xfedcba98};
  CHECK(ring.push(sent));
  const auto got = ring.pop();
  CHECK(got && got->kind == sent.kind && got->epoch == sent.epoch && got->other == sent.other &&
        got->index == sent.index && got->a == sent.a && got->b == sent.b);
  CHECK(!ring.pop());
  for (const WireFormat wire : kWireFormats) {
    CHECK(ring.push({chunk_kind(wire), 0, 0, 0, 0, 0}));
    const auto chunk = ring.pop();
    CHECK(chunk && chunk_format(chunk->kind) == wire);
  }
}

TEST(full) {
  CommandRing ring;
  for (int lap = 0; lap < 3; ++lap) {
    for (uint32_t i = 0; i < CommandRing::kSlots; ++i) CHECK(ring.push({Command::Kind::ids, 0, 0, i, 0, 0}));
    CHECK(!ring.push({}));
    for (uint32_t i = 0; i < CommandRing::kSlots; ++i) {
      const auto got = ring.pop();
      CHECK(got && got->index == i);
    }
    CHECK(!ring.pop());
  }
}

void produce_and_take(uint32_t producers) {
  constexpr uint32_t kEach = 50'000;
  CommandRing ring;
  std::vector<std::jthread> threads;
  for (uint32_t p = 0; p < producers; ++p)
    threads.emplace_back([&ring, p] {
      for (uint32_t i = 0; i < kEach; ++i)
        while (!ring.push(
            {Command::Kind::chunk, static_cast<uint8_t>(i), static_cast<uint16_t>(p), i, i * 3, p + i}))
          std::this_thread::yield();
    });
  std::vector<uint32_t> next(producers, 0);
  bool whole = true;
  for (uint32_t left = producers * kEach; left > 0;) {
    const auto got = ring.pop();
    if (!got) {
      std::this_thread::yield();
      continue;
    }
    --left;
    whole = whole && got->other < producers && got->index == next[got->other] &&
            got->epoch == static_cast<uint8_t>(got->index) && got->a == got->index * 3 &&
            got->b == got->other + got->index;
    ++next[got->other % producers];
  }
  threads.clear();
  CHECK(whole && !ring.pop());
}

TEST(producers) {
  for (const uint32_t producers : {1, 2, 5}) produce_and_take(producers);
}

}  // namespace

int main() { return moecomm::test::run(); }
