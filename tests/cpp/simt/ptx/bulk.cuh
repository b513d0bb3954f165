// csrc/ptx/bulk.cuh for kernels on the host: copies are made in any order and at any time at which they may
// be. What a copy loads into is garbage until then.
#pragma once

#include <cuda_runtime.h>

#include <deque>

namespace moecomm::ptx {

/// What is in the word of a barrier.
struct BarrierWord {
  uint16_t phase : 1, expected : 15;
  int16_t pending;  ///< arrivals that the phase still needs
  int32_t bytes;    ///< that are still to be copied
};
static_assert(sizeof(BarrierWord) == sizeof(uint64_t));

inline BarrierWord& barrier_word(uint64_t* barrier) { return *reinterpret_cast<BarrierWord*>(barrier); }

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  barrier_word(barrier) = {0, static_cast<uint16_t>(arrivals), static_cast<int16_t>(arrivals), 0};
}
inline void fence_barrier_init() {}

/// Ends the phase of a barrier that needs no more.
inline void end_phase(uint64_t* barrier) {
  BarrierWord& word = barrier_word(barrier);
  if (word.pending < 0) simt::Block::now().fail("too many arrive at a barrier");
  if (word.pending > 0 || word.bytes != 0) return;
  word.phase ^= 1;
  word.pending = static_cast<int16_t>(word.expected);
  simt::Block::now().wake(barrier);
}
inline void barrier_arrive(uint64_t* barrier, uint32_t count = 1) {
  barrier_word(barrier).pending -= static_cast<int16_t>(count);
  end_phase(barrier);
}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  barrier_word(barrier).bytes += static_cast<int32_t>(bytes);
  barrier_arrive(barrier);
}
inline bool barrier_done_now(uint64_t* barrier, uint32_t parity) {
  simt::Block::now().pause();
  return barrier_word(barrier).phase != parity;
}
/// Waits for the end of the phase, if that has not come.
inline bool barrier_done(uint64_t* barrier, uint32_t parity) {
  if (barrier_word(barrier).phase == parity) simt::Block::now().sleep(barrier);
  return barrier_word(barrier).phase != parity;
}

inline void check_copy(const void* to, const void* from, uint32_t bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0 || bytes == 0)
    simt::Block::now().fail("a bulk copy of other than multiples of 16 bytes");
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier,
                      uint64_t /*policy*/ = 0) {
  check_copy(shared, global, bytes);
  std::memset(shared, 0x7f, bytes);
  simt::Block::now().copy(true, [=] {
    std::memcpy(shared, global, bytes);
    barrier_word(barrier).bytes -= static_cast<int32_t>(bytes);
    end_phase(barrier);
  });
}

/// Stores that a thread commits together.
struct BulkGroup {
  int unread = 0, unwritten = 0;  ///< stores
};
struct BulkGroups {
  std::shared_ptr<BulkGroup> open = std::make_shared<BulkGroup>();
  std::deque<std::shared_ptr<BulkGroup>> committed;
};
/// Those of this thread.
inline BulkGroups& bulk_groups() {
  thread_local std::vector<BulkGroups> of_threads;  // a block is a thread of the system
  of_threads.resize(simt::Block::now().grid.threads);
  return of_threads[simt::Block::now().thread().x];
}
inline void bulk_store(void* global, const void* shared, uint32_t bytes, uint64_t /*policy*/ = 0) {
  check_copy(global, shared, bytes);
  const std::shared_ptr<BulkGroup> group = bulk_groups().open;
  ++group->unread;
  ++group->unwritten;
  simt::Block::now().copy(true, [=] {
    const auto* const from = static_cast<const std::byte*>(shared);
    --group->unread;
    simt::Block::now().wake(group.get());
    simt::Block::now().copy(false, [=, read = std::vector<std::byte>(from, from + bytes)] {
      std::memcpy(global, read.data(), bytes);
      --group->unwritten;
      simt::Block::now().wake(group.get());
    });
  });
}
inline void bulk_commit() {
  BulkGroups& groups = bulk_groups();
  groups.committed.push_back(std::exchange(groups.open, std::make_shared<BulkGroup>()));
}
/// Waits until `left` of all groups but the newest `pending` is zero.
inline void wait_for_groups(int pending, int BulkGroup::* left) {
  while (!bulk_groups().committed.empty() && bulk_groups().committed.front()->unwritten == 0)
    bulk_groups().committed.pop_front();
  for (size_t i = 0; i + static_cast<size_t>(pending) < bulk_groups().committed.size(); ++i) {
    const std::shared_ptr<BulkGroup> group = bulk_groups().committed[i];
    while (group.get()->*left > 0) simt::Block::now().sleep(group.get());
  }
}
template <int pending>
void bulk_wait_read() {
  wait_for_groups(pending, &BulkGroup::unread);
}
template <int pending>
void bulk_wait() {
  wait_for_groups(pending, &BulkGroup::unwritten);
}

inline uint64_t line_policy(bool) { return 0; }
inline void fence_shared_to_bulk() {}
inline void fence_global_to_bulk() {}

}  // namespace moecomm::ptx
