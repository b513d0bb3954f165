#include "transport/shm/signal.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#include "common/deadline.hpp"
#include "common/error.hpp"

namespace moecomm::shm {
namespace {

// While it sleeps, a waiter looks this often for peers that have ended: the bound on how late a loss is noticed.
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

Signals::Signals(const WindowLayout& layout, std::vector<std::byte*> bases, int rank, const std::vector<int64_t>& pids,
                 double timeout_seconds)
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

OwnerLines& Signals::owner(int rank) const { return *reinterpret_cast<OwnerLines*>(bases_[rank] + layout_.owner); }

void Signals::ring(int rank) const {
  OwnerLines& line = owner(rank);
  // Sequentially consistent with the waiter's store of `sleeping`: either it sees the new doorbell or we see it asleep.
  atomic(line.doorbell).fetch_add(1);
  if (atomic(line.sleeping).load() != 0) futex_wake(&line.doorbell);
}

void Signals::signal(const SignalRecord& record) {
  const int ranks = static_cast<int>(bases_.size());
  for (int i = 0; i < ranks; ++i) {
    const int peer = (rank_ + i) % ranks;
    SignalRecord& slot = lines(peer, rank_).record[record.epoch & 1];
    std::memcpy(reinterpret_cast<std::byte*>(&slot) + kAfterEpoch, reinterpret_cast<const std::byte*>(&record) + kAfterEpoch,
                sizeof(SignalRecord) - kAfterEpoch);
    atomic(slot.epoch).store(record.epoch, std::memory_order_release);
    if (peer != rank_) ring(peer);
  }
}

const SignalRecord& Signals::record(int peer, uint64_t epoch) const { return lines(rank_, peer).record[epoch & 1]; }

void Signals::complete(uint64_t epoch) { atomic(owner(rank_).completed).store(epoch, std::memory_order_release); }

void Signals::wait_all(uint64_t epoch, const char* phase) {
  const auto seen = [&](int peer) {
    return atomic(lines(rank_, peer).record[epoch & 1].epoch).load(std::memory_order_acquire);
  };
  int next = 0;
  wait_until(
      [&] {
        for (; next < static_cast<int>(bases_.size()); ++next)
          if (seen(next) < epoch) return next;
        return -1;
      },
      seen, epoch, phase);
}

void Signals::wait_completed(uint64_t epoch, const char* phase) {
  const auto seen = [&](int peer) { return atomic(owner(peer).completed).load(std::memory_order_acquire); };
  wait_until(
      [&] {
        for (int peer = 0; peer < static_cast<int>(bases_.size()); ++peer)
          if (seen(peer) < epoch) return peer;
        return -1;
      },
      seen, epoch, phase);
}

void Signals::wait_until(const std::function<int()>& find_missing, const std::function<uint64_t(int)>& seen,
                         uint64_t epoch, const char* phase) {
  for (int spin = 0; spin < spins_; ++spin) {
    if (find_missing() < 0) return;
    cpu_relax();
  }
  for (int turn = 0; turn < kYields; ++turn) {
    if (find_missing() < 0) return;
    std::this_thread::yield();
  }
  const Deadline deadline{std::chrono::duration<double>(timeout_seconds_)};
  OwnerLines& own = owner(rank_);
  while (true) {
    atomic(own.sleeping).store(1);
    const uint32_t doorbell = atomic(own.doorbell).load();
    if (find_missing() >= 0) futex_wait(&own.doorbell, doorbell);
    atomic(own.sleeping).store(0);

    const int missing = find_missing();
    if (missing < 0) return;
    for (int peer = 0; peer < static_cast<int>(bases_.size()); ++peer) {
      // The end of a peer is looked at before its signal: what it signalled before it ended counts.
      PeerLines& line = lines(rank_, peer);
      const bool ended = watch_.lost(peer), closed = atomic(line.closed).load(std::memory_order_acquire) != 0;
      const uint32_t abort_kind = atomic(line.abort_kind).load(std::memory_order_acquire);
      if (abort_kind != 0)
        give_up(static_cast<ErrorKind>(abort_kind), line.abort_peer,
                "rank " + std::to_string(peer) + " gave up on it", phase, epoch, seen(line.abort_peer));
      if ((ended || closed) && seen(peer) < epoch)
        give_up(ErrorKind::peer_lost, peer, ended ? "its process has ended" : "it has closed the communicator", phase, epoch,
                seen(peer));
    }
    if (deadline.passed())
      give_up(ErrorKind::peer_timeout, missing,
              "no signal within " + std::to_string(timeout_seconds_) + " s; it may be stopped, far behind or in another call",
              phase, epoch, seen(missing));
  }
}

void Signals::give_up(ErrorKind kind, int peer, const std::string& text, const char* phase, uint64_t expected,
                      uint64_t seen) {
  for (int r = 0; r < static_cast<int>(bases_.size()); ++r) {
    PeerLines& line = lines(r, rank_);
    line.abort_peer = peer;
    atomic(line.abort_kind).store(static_cast<uint32_t>(kind), std::memory_order_release);
    if (r != rank_) ring(r);
  }
  ErrorDetails details;
  details.rank = rank_;
  details.peer = peer;
  details.phase = phase;
  details.expected = expected;
  details.seen = seen;
  throw Error(kind,
              "rank " + std::to_string(rank_) + ", " + phase + ": " +
                  (kind == ErrorKind::peer_lost ? "lost rank " : "waited in vain for rank ") + std::to_string(peer) +
                  " (" + text + "); expected epoch " + std::to_string(expected) + ", seen " + std::to_string(seen) +
                  ". The communicator can't be used any more; build a new one.",
              details);
}

void Signals::close() noexcept {
  for (int r = 0; r < static_cast<int>(bases_.size()); ++r) {
    atomic(lines(r, rank_).closed).store(1, std::memory_order_release);
    if (r != rank_) ring(r);
  }
}

}  // namespace moecomm::shm
