// The ring through which commands reach the proxy: any number of producers, one consumer, no locks. A slot
// says by a bit that changes every lap whether it is filled, so a producer needs one ticket and two stores,
// the second with release; a GPU writes the same sixteen bytes by one store into pinned memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "layout/command.hpp"

namespace moecomm {

class CommandRing {
 public:
  static constexpr uint64_t kSlots = 4096;

  /// False if the ring is full.
  bool push(const Command& command) {
    uint64_t ticket = head_.load(std::memory_order_relaxed);
    do {
      if (ticket - tail_.load(std::memory_order_acquire) >= kSlots) return false;
    } while (!head_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed));
    Slot& slot = slots_[ticket % kSlots];
    slot.low.store(uint64_t{command.a} << 32 | command.b, std::memory_order_relaxed);
    slot.high.store(turn(ticket) << 63 | static_cast<uint64_t>(command.kind) << 56 |
                        uint64_t{command.epoch} << 48 | uint64_t{command.other} << 32 | command.index,
                    std::memory_order_release);
    return true;
  }

  /// The next command, by the one consumer.
  std::optional<Command> pop() {
    const uint64_t ticket = tail_.load(std::memory_order_relaxed);
    Slot& slot = slots_[ticket % kSlots];
    const uint64_t high = slot.high.load(std::memory_order_acquire);
    if (high >> 63 != turn(ticket)) return std::nullopt;
    const uint64_t low = slot.low.load(std::memory_order_relaxed);
    tail_.store(ticket + 1, std::memory_order_release);
    return Command{static_cast<Command::Kind>(high >> 56 & 0x7f),
                   static_cast<uint8_t>(high >> 48),
                   static_cast<uint16_t>(high >> 32),
                   static_cast<uint32_t>(high),
                   static_cast<uint32_t>(low >> 32),
                   static_cast<uint32_t>(low)};
  }

 private:
  struct Slot {
    std::atomic<uint64_t> high{0}, low{0};
  };
  /// 1 in the first lap, so that an empty ring holds no command.
  static uint64_t turn(uint64_t ticket) { return (ticket / kSlots + 1) & 1; }

  std::unique_ptr<Slot[]> slots_ = std::make_unique<Slot[]>(kSlots);
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
};

}  // namespace moecomm
