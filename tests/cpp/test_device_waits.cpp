// The waits of kernels (device/wait.cuh), compiled for the host: what a flag says that nobody has
// written for 2^31 epochs or more, that a called-off operation is told from one of 2^32 epochs ago, and which
// waits for a peer that has closed go on.
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "device/wait.cuh"
#include "ptx/grid.cuh"
#include "ptx/memory.cuh"

using namespace moecomm;

namespace {

constexpr uint64_t kHalf = uint64_t{1} << 31, kWhole = uint64_t{1} << 32;

/// Two ranks, of which this is rank 0, whose window is plain memory.
struct Window {
  Window() {
    comm.window = DeviceWindow::make({2, 1, 2, 16, 4, DType::float32, WireFormat::same});
    memory.resize(static_cast<size_t>(comm.window.total_bytes) / sizeof(Line) + 1);
    comm.own = reinterpret_cast<std::byte*>(memory.data());
    comm.local_ranks = 2;
    comm.host = host.get();
    comm.timeout_ns = 1'000'000;
  }
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };
  std::vector<Line> memory;
  std::unique_ptr<HostStatus> host = std::make_unique<HostStatus>();
  device::Comm comm{};
};

/// Says whether a flag that holds `written` says that `wanted` has arrived.
bool arrived(uint64_t written, uint64_t wanted) {
  using Word = std::remove_const_t<std::remove_pointer_t<decltype(device::EpochFlag::address)>>;
  const auto word = static_cast<Word>(written);
  return device::EpochFlag{&word, static_cast<Word>(wanted)}.arrived();
}

TEST(flags) {
  for (const uint64_t epoch : {uint64_t{1}, kHalf - 1, kHalf, kWhole - 1, kWhole, kWhole + kHalf}) {
    CHECK(arrived(epoch, epoch) && arrived(epoch + 1, epoch));
    CHECK(!arrived(epoch - 1, epoch));
    for (const uint64_t untouched :
         {kHalf, kHalf + 1, kWhole - 1, kWhole, kWhole + kHalf + 1, uint64_t{1} << 40})
      CHECK(!arrived(epoch, epoch + untouched));
  }
  CHECK(!arrived(0, kHalf + 1));  // never written
}

/// Says whether a wait for rank 1's flag of `epoch`, which does not come, is reported as a failure.
bool reported(uint64_t epoch, uint64_t cancelled) {
  Window window;
  auto& state = window.comm.state();
  state.cancelled = static_cast<decltype(state.cancelled)>(cancelled);
  auto* const flag = window.comm.arrival(window.comm.own, 1, 0);
  using Word = std::remove_pointer_t<decltype(flag)>;
  CHECK(!device::wait_until(window.comm, {1, WaitPhase::rows, Operation::dispatch, epoch},
                            device::EpochFlag{flag, static_cast<Word>(epoch)}));
  if (window.host->broken.set == 0) return false;
  CHECK(window.host->broken.cause == Cause::no_signal && window.host->broken.expected == epoch);
  return true;
}

TEST(called_off) {
  for (const uint64_t epoch : {uint64_t{3}, kWhole + 3}) {
    CHECK(!reported(epoch, epoch));     // it ends at once, and nothing has failed
    CHECK(reported(epoch, epoch - 1));  // it ends at the deadline
  }
  CHECK(reported(kWhole + 3, 3));
}

/// Waits in vain for a count that rank 1 is to bring up, and returns what the host learns.
HostStatus::Broken counted_in_vain(uint64_t epoch, uint64_t begun_by_0, uint64_t begun_by_1) {
  Window window;
  window.comm.record(window.comm.own, 0, begun_by_0).epoch = begun_by_0;
  window.comm.record(window.comm.own, 1, begun_by_1).epoch = begun_by_1;
  const uint32_t count = 7;
  CHECK(!device::wait_until(window.comm, {1, WaitPhase::blocks, Operation::dispatch, epoch},
                            device::BlockCount{&count, 8}));
  return window.host->broken;
}

TEST(what_is_seen_is_the_epoch_of_the_rank_to_blame) {
  const auto late = counted_in_vain(22, 22, 21);
  CHECK(late.peer == 1 && late.expected == 22 && late.seen == 21);
  const auto begun = counted_in_vain(22, 22, 22);
  CHECK(begun.peer == 1 && begun.expected == 22 && begun.seen == 22);
  const auto behind = counted_in_vain(22, 19, 22);
  CHECK(behind.peer == 0 && behind.expected == 22 && behind.seen == 19);
}

/// Waits in vain for a flag of `epoch` of rank 1, which has closed; all that it has sent up to the epoch
/// `complete` is on this node. Returns what the host learns.
HostStatus::Broken waited_for_who_has_closed(uint64_t epoch, uint64_t complete, uint64_t timeout_ns) {
  Window window;
  window.comm.timeout_ns = timeout_ns;
  window.comm.mine<PeerLoss>(window.comm.window.losses)[1] = {1, 1, Cause::closed, 1, complete};
  CHECK(!device::wait_until(window.comm, {1, WaitPhase::rows, Operation::combine, epoch},
                            device::EpochFlag{window.comm.arrival(window.comm.own, 1, 0), epoch}));
  return window.host->broken;
}

TEST(what_a_closed_rank_sent_is_waited_for) {
  CHECK(waited_for_who_has_closed(5, 0, 60'000'000'000).cause == Cause::closed);
  CHECK(waited_for_who_has_closed(6, 5, 60'000'000'000).cause == Cause::closed);
  CHECK(waited_for_who_has_closed(5, 5, 1'000'000).cause == Cause::closed);  // at the deadline
  Window window;
  window.comm.timeout_ns = 60'000'000'000;
  window.comm.mine<PeerLoss>(window.comm.window.losses)[1] = {1, 1, Cause::closed, 1, 5};
  uint64_t* const flag = window.comm.arrival(window.comm.own, 1, 0);
  std::thread handed_on([flag] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic_ref(*flag).store(5, std::memory_order_release);
  });
  CHECK(device::wait_until(window.comm, {1, WaitPhase::rows, Operation::combine, 5},
                           device::EpochFlag{flag, 5}));
  handed_on.join();
  CHECK(window.host->broken.set == 0);
}

/// Rank 1 begins epoch 5 when `away` nanoseconds have passed, and what is waited for comes `later` after
/// that.
struct Away {
  static constexpr unsigned kInterval = 400;
  uint64_t* begun;
  uint64_t away, later, start = ptx::global_nanoseconds();
  bool arrived() const {
    const uint64_t passed = ptx::global_nanoseconds() - start;
    if (passed >= away) *begun = 5;
    return passed >= away && passed - away >= later;
  }
};

constexpr uint64_t kNever = uint64_t{1} << 62, kTimeout = 1'000'000;

/// Waits for a rank that is away first, and returns whether it found what it waited for.
bool found_after(uint64_t absence_ns, uint64_t away, uint64_t later, HostStatus::Broken* broken) {
  Window window;
  window.comm.timeout_ns = kTimeout;
  window.comm.absence_ns = absence_ns;
  window.comm.record(window.comm.own, 0, 5).epoch = 5;
  const Away read{&window.comm.record(window.comm.own, 1, 5).epoch, away, later};
  const bool found = device::wait_until(window.comm, {1, WaitPhase::rows, Operation::dispatch, 5}, read);
  *broken = window.host->broken;
  return found;
}

TEST(the_timeout_of_a_rank_that_was_away_counts_from_when_it_comes) {
  constexpr uint64_t most = kTimeout - 100'000;
  HostStatus::Broken broken{};
  for (const uint64_t away : {kTimeout / 2, kTimeout - 50'000, kTimeout + 50'000, 3 * kTimeout})
    CHECK(found_after(1000 * kTimeout, away, most, &broken) && broken.set == 0);
  CHECK(!found_after(1000 * kTimeout, 3 * kTimeout, kNever, &broken) && broken.peer == 1 && broken.seen == 5);
  CHECK(!found_after(4 * kTimeout, kNever, 0, &broken) && broken.peer == 1 && broken.seen == 0);
  CHECK(!found_after(kTimeout, 3 * kTimeout, 0, &broken) && broken.set != 0);  // as a given timeout has it
}

}  // namespace

int main() { return moecomm::test::run(); }
