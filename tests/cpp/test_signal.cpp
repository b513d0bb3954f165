// Signals between threads over plain memory, so that a thread sanitizer sees both ends of every wait.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "transport/shm/signal.hpp"

using namespace moecomm;

namespace {

struct Node {
  explicit Node(int ranks, double timeout, double absence = 0)
      : layout(WindowLayout::make({ranks, 1, 16, 8, DType::float32})) {
    for (int r = 0; r < ranks; ++r) {
      bases.push_back(
          static_cast<std::byte*>(std::aligned_alloc(4096, static_cast<size_t>(layout.total_bytes))));
      std::memset(bases.back(), 0, static_cast<size_t>(layout.total_bytes));
    }
    const std::vector<int64_t> pids(static_cast<size_t>(ranks), getpid());
    for (int r = 0; r < ranks; ++r)
      signals.push_back(std::make_unique<shm::Signals>(layout, bases, r, pids, timeout, ranks, absence));
  }
  ~Node() {
    for (std::byte* base : bases) std::free(base);
  }
  WindowLayout layout;
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
void test_epochs(int ranks) {
  Node node(ranks, 30.0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
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
  for (auto& thread : threads) thread.join();
}

void test_deadline() {
  Node node(3, 0.2);
  node.signals[0]->signal(record(1, 0));
  node.signals[1]->signal(record(1, 0));
  try {
    node.signals[0]->wait_all(1, "dispatch");
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::peer_timeout);
    CHECK(error.details().rank == 0 && error.details().peer == 2 && error.details().phase == "dispatch");
    CHECK(error.details().expected == 1 && error.details().seen == 0);
  }
  // The others learn of it at once, and name the same rank.
  try {
    node.signals[1]->wait_all(1, "dispatch");
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::peer_timeout && error.details().peer == 2);
    CHECK(std::string(error.what()).find("as rank 0 found out") != std::string::npos);
  }
  // So does the rank itself, which comes late: what it finds of the others is there, and no more comes.
  node.signals[2]->signal(record(1, 0));
  node.signals[2]->wait_all(1, "dispatch");
  node.signals[2]->signal(record(2, 0));
  try {
    node.signals[2]->wait_all(2, "dispatch");
    CHECK(false);
  } catch (const Error& error) {
    const std::string text = error.what();
    CHECK(error.kind() == ErrorKind::peer_timeout && error.details().peer == 2);
    CHECK(text.find("rank 2, dispatch: rank 0 waited in vain for this rank (") == 0);
    CHECK(text.find("kernels") == std::string::npos && text.find("found out") == std::string::npos);
  }
}

/// A rank that began the epoch and then stopped: the text does not say that the epoch itself is missing.
void test_deadline_within_an_epoch() {
  Node node(2, 0.2);
  for (int rank = 0; rank < 2; ++rank) node.signals[rank]->signal(record(1, rank));
  uint64_t* const word = reinterpret_cast<uint64_t*>(node.bases[0] + node.layout.rows[0]);
  try {
    node.signals[0]->wait_word(word, 1, 1, 1, 1, "rows");
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::peer_timeout && error.details().peer == 1);
    CHECK(error.details().expected == 1 && error.details().seen == 1);
    const std::string text = error.what();
    CHECK(text.find("it has begun epoch 1, and what this wait still needs of it has not come") !=
          std::string::npos);
    CHECK(text.find("expected epoch") == std::string::npos);
  }
}

/// The timeout of a rank that was away for longer than that counts from when it comes.
void test_a_rank_that_comes_back() {
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

void test_closed() {
  Node node(2, 30.0);
  node.signals[1]->signal(record(1, 0));
  node.signals[1]->close();
  node.signals[0]->signal(record(1, 0));
  node.signals[0]->wait_all(1, "dispatch");  // what was signalled before the end counts
  node.signals[0]->signal(record(2, 0));
  CHECK(test::throws(ErrorKind::peer_lost, "closed", [&] { node.signals[0]->wait_all(2, "combine"); }));
}

}  // namespace

int main() {
  test_epochs(2);
  test_epochs(5);
  test_deadline();
  test_deadline_within_an_epoch();
  test_a_rank_that_comes_back();
  test_closed();
  return test::finish();
}
