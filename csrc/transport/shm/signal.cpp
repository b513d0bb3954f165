#include "transport/shm/signal.hpp"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <thread>

#include "common/deadline.hpp"
#include "common/error.hpp"

namespace moecomm::shm {
namespace {

// A sleeping waiter checks this often for peers that have ended, so a loss is noticed at most this late.
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

/// Number of threads of a host that may want a core at once: with several nodes each rank also has a proxy.
int busy_threads(const NodeMap& nodes, int host_ranks) {
  return std::max(host_ranks, nodes.local_ranks) * (nodes.nodes() > 1 ? 2 : 1);
}

std::optional<Descriptor> watch(pid_t process) {
  if (process == getpid()) return Descriptor();
  Descriptor fd = Descriptor::open([&] { return static_cast<int>(syscall(SYS_pidfd_open, process, 0)); });
  if (fd) return fd;
  if (errno == ESRCH) return std::nullopt;
  throw system_error("pidfd_open of a peer", errno == ENOSYS
                                                 ? "Linux 5.3 or later is needed"
                                                 : "a container's seccomp profile has to allow it");
}

}  // namespace

Signals::Signals(const WindowLayout& layout, std::vector<std::byte*> bases, int rank,
                 const std::vector<int64_t>& pids, double timeout_seconds, int host_ranks,
                 double absence_seconds)
    : layout_(layout),
      nodes_(layout.shape.nodes()),
      bases_(std::move(bases)),
      rank_(rank),
      first_(nodes_.first(nodes_.node_of(rank))),
      timeout_seconds_(timeout_seconds),
      absence_seconds_(std::max(timeout_seconds, absence_seconds)),
      // Spinning pays only while every thread has its own core.
      spins_(busy_threads(nodes_, host_ranks) <= available_cpus() ? 2000 : 0) {
  for (const int64_t pid : pids) processes_.push_back(watch(static_cast<pid_t>(pid)));
}

PeerLines& Signals::lines(int owner, int writer) const {
  return reinterpret_cast<PeerLines*>(bases_[owner - first_] + layout_.peers)[writer];
}

OwnerLines& Signals::owner(int rank) const {
  return *reinterpret_cast<OwnerLines*>(bases_[rank - first_] + layout_.owner);
}

/// True once the process of a rank of this node has ended. Takes about a microsecond.
bool Signals::has_ended(int rank) const {
  const std::optional<Descriptor>& process = processes_[rank - first_];
  pollfd polled{process ? process->get() : -1, POLLIN, 0};
  return !process || poll(&polled, 1, 0) > 0;
}

void Signals::ring(int rank) const {
  OwnerLines& line = owner(rank);
  // Sequentially consistent with the waiter's store to `sleeping`: either the waiter sees the new doorbell,
  // or we see it asleep.
  atomic(line.doorbell).fetch_add(1);
  if (atomic(line.sleeping).load() != 0) futex_wake(&line.doorbell);
}

/// Calls write(PeerLines) for `peer` in all windows of the node, own first; wakes the windows' owners.
template <class Write>
void Signals::write_lines(int peer, const Write& write) {
  for (int i = 0; i < nodes_.local_ranks; ++i) {
    const int reader = first_ + (rank_ - first_ + i) % nodes_.local_ranks;
    write(lines(reader, peer));
    // A rank need not wake itself for its own record, but for a remote rank's, which its proxy writes.
    if (reader != peer) ring(reader);
  }
}

void Signals::deliver(int peer, const SignalRecord& record) {
  write_lines(peer, [&](PeerLines& line) {
    SignalRecord& slot = line.record[record.epoch & 1];
    std::memcpy(reinterpret_cast<std::byte*>(&slot) + kAfterEpoch,
                reinterpret_cast<const std::byte*>(&record) + kAfterEpoch,
                sizeof(SignalRecord) - kAfterEpoch);
    atomic(slot.epoch).store(record.epoch, std::memory_order_release);
  });
}

void Signals::deliver_gone(int peer, Cause cause) {
  write_lines(peer, [&](PeerLines& line) { atomic(line.gone).store(cause, std::memory_order_release); });
}

void Signals::deliver_abort(int peer, int on, Cause cause) {
  write_lines(peer, [&](PeerLines& line) {
    line.abort_peer = on;
    line.abort_cause = cause;
    atomic(line.abort).store(1, std::memory_order_release);
  });
}

void Signals::store(uint64_t* word, uint64_t value) {
  atomic(*word).store(value, std::memory_order_release);
  for (int i = 0; i < nodes_.local_ranks; ++i) ring(first_ + i);
}

void Signals::store_own(uint64_t* word, uint64_t value) {
  atomic(*word).store(value, std::memory_order_release);
  ring(rank_);
}

const SignalRecord& Signals::record(int peer, uint64_t epoch) const {
  return lines(rank_, peer).record[epoch & 1];
}

void Signals::complete(uint64_t epoch) {
  atomic(owner(rank_).completed).store(epoch, std::memory_order_release);
}

uint64_t Signals::announced(int peer, uint64_t parity) const {
  return atomic(lines(rank_, peer).record[parity & 1].epoch).load(std::memory_order_acquire);
}

void Signals::wait_all(uint64_t epoch, const char* phase, std::vector<double>* late_seconds) {
  const auto arrived = [&](int peer) { return announced(peer, epoch) >= epoch; };
  if (late_seconds == nullptr) return wait_until(arrived, epoch, phase);
  const auto start = std::chrono::steady_clock::now();
  std::vector<bool> counted(late_seconds->size());
  // wait_until checks ranks in order and stops at a late rank. count() also notes when later ranks arrive.
  const auto count = [&](int peer) {
    if (counted[peer]) return true;
    if (!arrived(peer)) return false;
    (*late_seconds)[peer] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    counted[peer] = true;
    return true;
  };
  wait_until(
      [&](int peer) {
        if (count(peer)) return true;
        for (int other = peer + 1; other < nodes_.ranks; ++other) count(other);
        return false;
      },
      epoch, phase);
}

void Signals::wait_completed(uint64_t epoch, const char* phase) {
  wait_node([&](int rank) { return &owner(rank).completed; }, epoch, epoch, phase);
}

void Signals::wait_node(const std::function<uint64_t*(int)>& counter, uint64_t value, uint64_t epoch,
                        const char* phase) {
  const auto seen = [&](int rank) { return atomic(*counter(rank)).load(std::memory_order_acquire); };
  wait_until([&](int peer) { return !nodes_.same_node(peer, rank_) || seen(peer) >= value; }, epoch, phase);
}

void Signals::wait_word(uint64_t* word, uint64_t value, int peer, int through, uint64_t epoch,
                        const char* phase) {
  const auto there = [&] { return atomic(*word).load(std::memory_order_acquire) >= value; };
  if (there()) return;
  // An error at the deadline names `peer`, the source of the data.
  wait_until([&](int each) { return (each != peer && each != through) || there(); }, epoch, phase, peer);
}

void Signals::count_inside(int by) {
  const auto inside = atomic(owner(rank_).inside);
  inside.store(inside.load(std::memory_order_relaxed) + static_cast<uint32_t>(by), std::memory_order_relaxed);
}

bool Signals::absent(int peer, uint64_t epoch) const {
  return announced(peer) < epoch &&
         (!nodes_.same_node(peer, rank_) || atomic(owner(peer).inside).load(std::memory_order_relaxed) == 0);
}

void Signals::wait_until(const std::function<bool(int)>& arrived, uint64_t epoch, const char* phase,
                         int blame) {
  const int ranks = nodes_.ranks;
  int next = 0;  // epochs only grow, so a peer that has arrived is not checked again
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
  const auto missing = [&] {
    if (blame >= 0) return blame;
    // A rank that hangs within a call is blamed before all others; then a late rank of this node, since data
    // of other nodes comes through ranks of this node.
    for (const bool may_be_absent : {false, true})
      for (int i = 0; i < ranks; ++i) {
        const int peer = (first_ + i) % ranks;
        if (!arrived(peer) && (may_be_absent || !absent(peer, epoch))) return peer;
      }
    return next;
  };
  Deadline deadline{std::chrono::duration<double>(timeout_seconds_)};
  const Deadline last{std::chrono::duration<double>(absence_seconds_)};
  const bool patient = absence_seconds_ > timeout_seconds_;
  OwnerLines& own = owner(rank_);
  while (true) {
    atomic(own.sleeping).store(1);
    const uint32_t doorbell = atomic(own.doorbell).load();
    if (!all_arrived()) futex_wait(&own.doorbell, doorbell);
    atomic(own.sleeping).store(0);
    if (all_arrived()) return;
    if (interrupt_) interrupt_();
    require_going_on();
    for (int peer = 0; peer < ranks; ++peer) {
      // The end of a peer is checked before its signal, since what it signalled before it ended counts.
      const std::optional<Loss> lost = loss(peer);
      if (lost && (lost->first != rank_ || !arrived(peer))) give_up(*lost, phase, epoch);
    }
    const int late = missing();
    const bool longer = patient && absent(late, epoch);
    if (longer && !last.passed())
      deadline = Deadline{std::chrono::duration<double>(timeout_seconds_)};  // starts once `late` has come
    else if ((longer || deadline.passed()) && !all_arrived())
      give_up({late, Cause::no_signal, rank_}, phase, epoch, longer ? absence_seconds_ : timeout_seconds_);
  }
}

std::optional<Signals::Loss> Signals::loss(int peer) const {
  PeerLines& line = lines(rank_, peer);
  const bool ended = nodes_.same_node(peer, rank_) && has_ended(peer);
  if (atomic(line.abort).load(std::memory_order_acquire) != 0)
    return Loss{line.abort_peer, line.abort_cause, peer};
  if (ended) return Loss{peer, Cause::ended, rank_};
  const Cause gone = atomic(line.gone).load(std::memory_order_acquire);
  if (gone != Cause::no_signal) return Loss{peer, gone, rank_};
  return std::nullopt;
}

void Signals::announce_loss(int peer, Cause cause) {
  deliver_abort(rank_, peer, cause);
  if (on_abort_) on_abort_(peer, cause);
}

Error loss_error(const Signals::Loss& loss, int rank, const std::string& phase, double waited,
                 uint64_t expected, uint64_t seen, const std::string& reason) {
  // [Cause]
  static constexpr const char* kCauses[] = {
      "", " (its process has ended)", " (it has closed the communicator)", " (the network to it has failed)"};
  std::string text = text_of("rank ", rank, ", ", phase, ": ");
  const std::string first = text_of("rank ", loss.first);
  // Another rank may have given up waiting for this rank, or have lost its link to it.
  const bool blamed = loss.peer == rank && loss.first != rank;
  if (loss.cause == Cause::no_signal) {
    text += blamed ? first + " waited" : "waited";
    if (loss.first == rank) text += text_of(" ", waited, " s");
    text += " in vain for ";
    if (blamed)
      text += "this rank (it was stopped, far behind or in another call, or an exception was caught here)";
    else if (loss.peer == rank)
      text += "its own kernels";
    else if (seen < expected)
      text += text_of(
          "rank ", loss.peer,
          ", which has not begun this operation (it may be saving a checkpoint, compiling, in another call, "
          "far behind or stopped; give the communicator a longer timeout if it is only slow)");
    else
      text += text_of("rank ", loss.peer, " (it may be stopped or far behind)");
  } else if (blamed) {
    text += first + " has lost its link to this rank";
  } else {
    text += text_of("lost rank ", loss.peer, kCauses[static_cast<int>(loss.cause)]);
  }
  if (!reason.empty()) text += ": " + reason;
  if (loss.first != rank && !blamed) text += ", as " + first + " found out";
  if (seen < expected) {
    text += text_of("; expected epoch ", expected, ", seen ", seen);
  } else if (expected > 0) {
    text += text_of("; it has begun epoch ", seen);
    if (loss.cause == Cause::no_signal)
      text += ", and what " + (loss.first == rank ? "this" : first + "'s") +
              " wait still needs of it has not come";
  }
  return Error(loss.cause == Cause::no_signal ? ErrorKind::peer_timeout : ErrorKind::peer_lost,
               text + ". The communicator can't be used any more; build a new one.",
               {.rank = rank, .peer = loss.peer, .phase = phase, .expected = expected, .seen = seen});
}

/// Tells all ranks that this rank can't go on, and throws.
void Signals::give_up(const Loss& loss, const char* phase, uint64_t expected, double waited) {
  announce_loss(loss.peer, loss.cause);
  const uint64_t seen = announced(loss.peer);
  throw loss_error(loss, rank_, phase, waited, expected, seen, reason_ ? reason_(loss.peer) : "");
}

void Signals::stop_waiting() noexcept {
  stopped_.store(true);
  ring(rank_);
}

void Signals::require_going_on() const {
  if (stopped_.load(std::memory_order_relaxed))
    throw Error(ErrorKind::closed,
                "the communicator was closed, or its wait interrupted, while an operation was under way");
}

void Signals::close() noexcept { deliver_gone(rank_, Cause::closed); }

}  // namespace moecomm::shm
