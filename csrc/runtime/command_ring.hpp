// The lock-free ring of commands to the proxy: many producers, one consumer. A bit in each slot says whether
// the slot is filled; its meaning flips with every lap. A producer takes a ticket, its command's number,
// and stores two words in its slot, the second with release. Kernels use pinned memory (device/rail.cuh).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "layout/command.hpp"

namespace moecomm {

class CommandRing {
 public:
  struct Slot {
    std::atomic<uint64_t> high{0}, low{0};
  };
  static_assert(sizeof(Slot) == 16);

  /// Makes a ring in memory that it allocates.
  CommandRing() : own_(std::make_unique<Slot[]>(kSlots)), slots_(own_.get()), count_(kSlots) {}
  /// Makes a ring over zeroed memory with `count` slots, a power of two, for commands of a GPU. The host must
  /// not push(), and kernels must leave at most `count` commands waiting.
  CommandRing(void* memory, uint64_t count) : slots_(static_cast<Slot*>(memory)), count_(count) {}

  static constexpr uint64_t kSlots = 4096;

  /// Adds a command. Returns false if the ring is full.
  bool push(const Command& command) {
    uint64_t ticket = head_.load(std::memory_order_relaxed);
    do {
      if (ticket - tail_.load(std::memory_order_acquire) >= count_) return false;
    } while (!head_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed));
    Slot& slot = slots_[ticket % count_];
    slot.low.store(low_word(command), std::memory_order_relaxed);
    slot.high.store(high_word(command, ticket, count_), std::memory_order_release);
    return true;
  }

  /// Removes the next command and returns it; nullopt: none is there. Only the one consumer may call it.
  std::optional<Command> pop() {
    const uint64_t ticket = tail_.load(std::memory_order_relaxed);
    Slot& slot = slots_[ticket % count_];
    const uint64_t high = slot.high.load(std::memory_order_acquire);
    if (high >> 63 != command_turn(ticket, count_)) return std::nullopt;
    const uint64_t low = slot.low.load(std::memory_order_relaxed);
    tail_.store(ticket + 1, std::memory_order_release);
    return command_from(high, low);
  }

 private:
  std::unique_ptr<Slot[]> own_;
  Slot* const slots_;
  const uint64_t count_;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
};

}  // namespace moecomm
