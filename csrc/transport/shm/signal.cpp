#include "transport/shm/signal.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#include "common/deadline.hpp"
#include "common/error.hpp"

namespace moecomm::shm {
namespace {

// While it sleeps, a waiter looks this often for peers that have ended: the bound on how late a loss is
// noticed.
constexpr long kSleepNanoseconds = 20'000'000;
constexpr int kYields = 64;
constexpr size_t kAfterEpoch = sizeof(SignalRecord::epoch);

template <class T>
std::atomic_ref<T> atomic(T& value) {
  return std::atomic_ref<T>(value);
}

void futex_wait(uint32_t* word, uint32_t value) {
  const timespec span{0, kSleepNanoseconds};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &span, nullptr, 0);
}

void futex_wake(uint32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int available_cpus() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Signals::Signals(const WindowLayout& layout, std::vector<std::byte*> bases, int rank,
                 const std::vector<int64_t>& pids, double timeout_seconds)
    : layout_(layout),
      bases_(std::move(bases)),
      rank_(rank),
      timeout_seconds_(timeout_seconds),
      // Spinning only pays while every rank has a core of its own.
      spins_(static_cast<int>(bases_.size()) <= available_cpus() ? 2000 : 0),
      watch_(pids, rank) {}

PeerLines& Signals::lines(int owner, int writer) const {
  return reinterpret_cast<PeerLines*>(bases_[owner] + layout_.peers)[writer];
}

OwnerLines& Signals::owner(int rank) const {
  return *reinterpret_cast<OwnerLines*>(bases_[rank] + layout_.owner);
}

void Signals::ring(int rank) const {
  OwnerLines& line = owner(rank);
  // Sequentially consistent with the waiter's store of `sleeping`: either it sees the new doorbell or we see
  // it asleep.
  atomic(line.doorbell).fetch_add(1);
  if (atomic(line.sleeping).load() != 0) futex_wake(&line.doorbell);
}

void Signals::signal(const SignalRecord& record) {
  const int ranks = static_cast<int>(bases_.size());
  for (int i = 0; i < ranks; ++i) {
    const int peer = (rank_ + i) % ranks;
    SignalRecord& slot = lines(peer, rank_).record[record.epoch & 1];
    std::memcpy(reinterpret_cast<std::byte*>(&slot) + kAfterEpoch,
                reinterpret_cast<const std::byte*>(&record) + kAfterEpoch,
                sizeof(SignalRecord) - kAfterEpoch);
    atomic(slot.epoch).store(record.epoch, std::memory_order_release);
    if (peer != rank_) ring(peer);
  }
}

const SignalRecord& Signals::record(int peer, uint64_t epoch) const {
  return lines(rank_, peer).record[epoch & 1];
}

void Signals::complete(uint64_t epoch) {
  atomic(owner(rank_).completed).store(epoch, std::memory_order_release);
}

void Signals::wait_all(uint64_t epoch, const char* phase) {
  const auto announced = [&](int peer, uint64_t parity) {
    return atomic(lines(rank_, peer).record[parity & 1].epoch).load(std::memory_order_acquire);
  };
  wait_until([&](int peer) { return announced(peer, epoch) >= epoch; },
             [&](int peer) { return std::max(announced(peer, 0), announced(peer, 1)); }, epoch, phase);
}

void Signals::wait_completed(uint64_t epoch, const char* phase) {
  const auto seen = [&](int peer) { return atomic(owner(peer).completed).load(std::memory_order_acquire); };
  wait_until([&](int peer) { return seen(peer) >= epoch; }, seen, epoch, phase);
}

void Signals::wait_until(const std::function<bool(int)>& arrived, const std::function<uint64_t(int)>& seen,
                         uint64_t epoch, const char* phase) {
  const int ranks = static_cast<int>(bases_.size());
  int next = 0;  // epochs only grow, so a peer that has arrived is not looked at again
  const auto all_arrived = [&] {
    while (next < ranks && arrived(next)) ++next;
    return next == ranks;
  };
  for (int spin = 0; spin < spins_; ++spin) {
    if (all_arrived()) return;
    cpu_relax();
  }
  for (int turn = 0; turn < kYields; ++turn) {
    if (all_arrived()) return;
    std::this_thread::yield();
  }
  const Deadline deadline{std::chrono::duration<double>(timeout_seconds_)};
  OwnerLines& own = owner(rank_);
  while (true) {
    atomic(own.sleeping).store(1);
    const uint32_t doorbell = atomic(own.doorbell).load();
    if (!all_arrived()) futex_wait(&own.doorbell, doorbell);
    atomic(own.sleeping).store(0);
    if (all_arrived()) return;
    if (interrupt_) interrupt_();
    for (int peer = 0; peer < ranks; ++peer) {
      // The end of a peer is looked at before its signal: what it signalled before it ended counts.
      const std::optional<Loss> lost = loss(peer);
      if (lost && (lost->first != rank_ || !arrived(peer))) give_up(*lost, phase, epoch, seen(lost->peer));
    }
    if (deadline.passed() && !all_arrived())
      give_up({next, Cause::no_signal, rank_}, phase, epoch, seen(next));
  }
}

std::optional<Signals::Loss> Signals::loss(int peer) const {
  PeerLines& line = lines(rank_, peer);
  const bool ended = watch_.lost(peer);
  if (atomic(line.abort).load(std::memory_order_acquire) != 0)
    return Loss{line.abort_peer, line.abort_cause, peer};
  if (ended) return Loss{peer, Cause::ended, rank_};
  if (atomic(line.closed).load(std::memory_order_acquire) != 0) return Loss{peer, Cause::closed, rank_};
  return std::nullopt;
}

void Signals::announce_loss(int peer, Cause cause) {
  for (int r = 0; r < static_cast<int>(bases_.size()); ++r) {
    PeerLines& line = lines(r, rank_);
    line.abort_peer = peer;
    line.abort_cause = cause;
    atomic(line.abort).store(1, std::memory_order_release);
    if (r != rank_) ring(r);
  }
}

namespace {

std::string loss_text(const Signals::Loss& loss, int rank, const std::string& phase, double timeout_seconds,
                      uint64_t expected, uint64_t seen) {
  std::string text = "rank " + std::to_string(rank) + ", " + phase + ": ";
  if (loss.cause == Cause::no_signal)
    text += "waited " + std::to_string(timeout_seconds) + " s in vain for rank " + std::to_string(loss.peer) +
            " (it may be stopped, far behind or in another call)";
  else
    text += "lost rank " + std::to_string(loss.peer) +
            (loss.cause == Cause::ended ? " (its process has ended)" : " (it has closed the communicator)");
  if (loss.first != rank) text += ", as rank " + std::to_string(loss.first) + " found out";
  return text + "; expected epoch " + std::to_string(expected) + ", seen " + std::to_string(seen) +
         ". The communicator can't be used any more; build a new one.";
}

}  // namespace

Error loss_error(const Signals::Loss& loss, int rank, const std::string& phase, double timeout_seconds,
                 uint64_t expected, uint64_t seen) {
  ErrorDetails details;
  details.rank = rank;
  details.peer = loss.peer;
  details.phase = phase;
  details.expected = expected;
  details.seen = seen;
  return Error(loss.cause == Cause::no_signal ? ErrorKind::peer_timeout : ErrorKind::peer_lost,
               loss_text(loss, rank, phase, timeout_seconds, expected, seen), details);
}

/// Tells all ranks that this one is out of the game, and throws.
void Signals::give_up(const Loss& loss, const char* phase, uint64_t expected, uint64_t seen) {
  announce_loss(loss.peer, loss.cause);
  throw loss_error(loss, rank_, phase, timeout_seconds_, expected, seen);
}

void Signals::close() noexcept {
  for (int r = 0; r < static_cast<int>(bases_.size()); ++r) {
    atomic(lines(r, rank_).closed).store(1, std::memory_order_release);
    if (r != rank_) ring(r);
  }
}

}  // namespace moecomm::shm
