// Signals between threads, so that a thread sanitizer sees both ends of every wait; and their windows where
// functions of the C library fail.
#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "transport/shm/signal.hpp"
#include "transport/shm/window.hpp"

using namespace moecomm;

static std::atomic<int> interrupted = 0;
static std::atomic<int> entries_left = 1 << 30;  // of a folder, before it can't be read any more

/// As older kernels do it while signals come without end: each ends the call, and nothing is allocated.
extern "C" int posix_fallocate(int fd, off_t offset, off_t bytes) {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  if (sigismember(&blocked, SIGPROF) == 0 && ++interrupted < 1000) return EINTR;
  return fallocate(fd, 0, offset, bytes) == 0 ? 0 : errno;
}

extern "C" [[gnu::visibility("default")]] dirent* readdir(DIR* folder) {
  if (--entries_left >= 0) return reinterpret_cast<dirent*>(readdir64(folder));
  errno = EIO;
  return nullptr;
}

namespace {

TEST(windows) {
  shm::Window named = shm::Window::create(4096, 4096);
  CHECK(interrupted == 0);
  named.link();
  entries_left = 3;  // two are the folder itself and its parent
  CHECK(shm::Window::create(4096, 4096).base() != nullptr && entries_left < 0);
  entries_left = 1 << 30;
}

struct Node {
  explicit Node(int ranks, double timeout, double absence = 0)
      : layout(WindowLayout::make({ranks, 1, 16, 8, DType::float32})) {
    for (int r = 0; r < ranks; ++r) {
      windows.push_back(shm::Window::create(layout.total_bytes, layout.committed_bytes));
      bases.push_back(windows.back().base());
    }
    const std::vector<int64_t> pids(ranks, getpid());
    for (int r = 0; r < ranks; ++r)
      signals.push_back(std::make_unique<shm::Signals>(layout, bases, r, pids, timeout, ranks, absence));
  }
  WindowLayout layout;
  std::vector<shm::Window> windows;
  std::vector<std::byte*> bases;
  std::vector<std::unique_ptr<shm::Signals>> signals;
};

SignalRecord record(uint64_t epoch, int32_t tokens) {
  SignalRecord made{};
  made.epoch = epoch;
  made.tokens = tokens;
  return made;
}

/// Plain writes before a signal are seen after the wait, for thousands of epochs with sections that
/// alternate.
TEST(epochs) {
  for (const int ranks : {2, 5}) {
    Node node(ranks, 30.0);
    test::at_once(ranks, [&](int rank) {
      shm::Signals& signals = *node.signals[rank];
      bool seen = true;
      for (uint64_t epoch = 1; epoch <= 1500; ++epoch) {
        auto* const own = reinterpret_cast<uint64_t*>(node.bases[rank] + node.layout.rows[epoch & 1]);
        *own = epoch * 1000 + static_cast<uint64_t>(rank);
        signals.signal(record(epoch, rank + 5));
        signals.wait_all(epoch, "test");
        for (int peer = 0; peer < ranks; ++peer) {
          const auto* theirs =
              reinterpret_cast<const uint64_t*>(node.bases[peer] + node.layout.rows[epoch & 1]);
          seen = seen && *theirs == epoch * 1000 + static_cast<uint64_t>(peer) &&
                 signals.record(peer, epoch).tokens == peer + 5;
        }
        signals.complete(epoch);
        if (epoch % 100 == 0) signals.wait_completed(epoch, "test");
      }
      CHECK(seen);
    });
  }
}

TEST(deadline) {
  Node node(3, 0.2);
  node.signals[0]->signal(record(1, 0));
  node.signals[1]->signal(record(1, 0));
  const Error first = test::error_of([&] { node.signals[0]->wait_all(1, "dispatch"); });
  CHECK(first.kind() == ErrorKind::peer_timeout);
  CHECK(first.details().rank == 0 && first.details().peer == 2 && first.details().phase == "dispatch");
  CHECK(first.details().expected == 1 && first.details().seen == 0);
  // The others learn of it at once, and name the same rank.
  const Error second = test::error_of([&] { node.signals[1]->wait_all(1, "dispatch"); });
  CHECK(second.kind() == ErrorKind::peer_timeout && second.details().peer == 2);
  CHECK(test::has(second.what(), "as rank 0 found out"));
  // So does the rank itself, which comes late: what it finds of the others is there, and no more comes.
  node.signals[2]->signal(record(1, 0));
  node.signals[2]->wait_all(1, "dispatch");
  node.signals[2]->signal(record(2, 0));
  const Error late = test::error_of([&] { node.signals[2]->wait_all(2, "dispatch"); });
  const std::string text = late.what();
  CHECK(late.kind() == ErrorKind::peer_timeout && late.details().peer == 2);
  CHECK(text.starts_with("rank 2, dispatch: rank 0 waited in vain for this rank ("));
  CHECK(!test::has(text, "kernels") && !test::has(text, "found out"));
}

/// A rank whose link is cut may first hear of it from the other end: it does not call itself ended.
TEST(a_link_to_this_rank_that_another_has_lost) {
  Node node(2, 30.0);
  node.signals[0]->deliver_abort(0, 1, Cause::ended);
  const Error error = test::error_of([&] { node.signals[1]->wait_all(1, "dispatch"); });
  CHECK(error.kind() == ErrorKind::peer_lost && error.details().peer == 1);
  CHECK(test::has(error.what(), "rank 1, dispatch: rank 0 has lost its link to this rank"));
}

/// A rank that began the epoch and then stopped: the text does not say that the epoch itself is missing.
TEST(deadline_within_an_epoch) {
  Node node(2, 0.2);
  for (int rank = 0; rank < 2; ++rank) node.signals[rank]->signal(record(1, rank));
  uint64_t* const word = reinterpret_cast<uint64_t*>(node.bases[0] + node.layout.rows[0]);
  const Error error = test::error_of([&] { node.signals[0]->wait_word(word, 1, 1, 1, 1, "rows"); });
  CHECK(error.kind() == ErrorKind::peer_timeout && error.details().peer == 1);
  CHECK(error.details().expected == 1 && error.details().seen == 1);
  CHECK(test::has(error.what(), "it has begun epoch 1, and what this wait still needs of it has not come"));
  CHECK(!test::has(error.what(), "expected epoch"));
}

/// The timeout of a rank that was away for longer than that counts from when it comes.
TEST(a_rank_that_comes_back) {
  Node node(2, 0.3, 60.0);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    const shm::Signals::Inside inside(*node.signals[1]);
    std::this_thread::sleep_for(std::chrono::milliseconds(100));  // polled meanwhile, every 20 ms
    node.signals[1]->signal(record(1, 0));
  });
  node.signals[0]->signal(record(1, 0));
  node.signals[0]->wait_all(1, "dispatch");
  other.join();
  // One that hangs there is late all the same.
  node.signals[0]->signal(record(2, 0));
  const shm::Signals::Inside inside(*node.signals[1]);
  CHECK(test::throws(ErrorKind::peer_timeout, "rank 1", [&] { node.signals[0]->wait_all(2, "combine"); }));
}

TEST(closed) {
  Node node(2, 30.0);
  node.signals[1]->signal(record(1, 0));
  node.signals[1]->close();
  node.signals[0]->signal(record(1, 0));
  node.signals[0]->wait_all(1, "dispatch");  // what was signalled before the end counts
  node.signals[0]->signal(record(2, 0));
  CHECK(test::throws(ErrorKind::peer_lost, "closed", [&] { node.signals[0]->wait_all(2, "combine"); }));
}

}  // namespace

int main() { return moecomm::test::run(); }
