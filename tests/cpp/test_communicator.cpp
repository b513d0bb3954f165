// Dispatch and combine between threads of one process that share each other's windows (a sanitizer sees
// everything), against sums made from the definition. Values are small integers, so that every order of a sum
// gives the same.
#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <string>

#include "check.hpp"
#include "layout/routing.hpp"
#include "loopback.hpp"
#include "rail.hpp"
#include "runtime/communicator.hpp"
#include "runtime/host_pool.hpp"

using namespace moecomm;

namespace {

constexpr int64_t kHidden = 20;

struct Ranks {
  Ranks(int32_t ranks, int32_t local_experts, int32_t top_k, int64_t max_tokens, int threads,
        int32_t ranks_per_node = 0, int64_t hidden = kHidden, double timeout_seconds = 60.0) {
    for (int32_t r = 0; r < ranks; ++r)
      comms.push_back(std::make_shared<Communicator>(
          CommunicatorConfig{{ranks, top_k, hidden, max_tokens, DType::float32, ranks_per_node},
                             r,
                             int64_t{ranks} * local_experts,
                             threads,
                             timeout_seconds,
                             ranks}));
    const NodeMap nodes = comms[0]->config().shape.nodes();
    for (int32_t node = 0; node < nodes.nodes(); ++node) {
      std::vector<std::byte*> bases;
      for (int32_t i = 0; i < nodes.local_ranks; ++i) bases.push_back(comms[nodes.rank_of(node, i)]->base());
      for (int32_t i = 0; i < nodes.local_ranks; ++i) comms[nodes.rank_of(node, i)]->connect_threads(bases);
    }
    if (nodes.nodes() > 1)
      for (int32_t local = 0; local < nodes.local_ranks; ++local) connect_rail(nodes, local);
    for (auto& comm : comms) comm->unlink();
  }
  ~Ranks() {
    // Each waits for those that still need something of it, so all at a time; and it writes into the windows
    // of all, so before the first goes.
    test::at_once(count(), [&](int rank) { comms[rank]->close(); });
  }
  void connect_rail(const NodeMap& nodes, int32_t local) {
    tcp::test_rail::Rail rail(nodes.nodes());
    rail.connect();
    std::vector<std::shared_ptr<test::Loopback::Port>> ports;
    for (int32_t node = 0; node < nodes.nodes(); ++node) {
      ports.push_back(std::make_shared<test::Loopback::Port>());
      ports.back()->base = comms[nodes.rank_of(node, local)]->base();
      ports_of_rank[nodes.rank_of(node, local)] = ports.back();
    }
    for (int32_t node = 0; node < nodes.nodes(); ++node) {
      const int32_t rank = nodes.rank_of(node, local);
      comms[rank]->connect_nodes(
          std::make_unique<test::Loopback>(ports, node, test::seed() + rank, 1 + test::seed() % 20),
          std::move(rail.links[node]));
    }
  }
  template <class Body>
  void run(const Body& body) {
    test::at_once(count(), [&](int rank) {
      const Error error = test::error_of([&] { body(*comms[rank], rank); });
      if (!CHECK(error.kind() == ErrorKind::none)) std::printf("unexpected error: %s\n", error.what());
    });
  }
  int count() const { return static_cast<int>(comms.size()); }
  std::vector<std::shared_ptr<Communicator>> comms;
  std::map<int32_t, std::shared_ptr<test::Loopback::Port>> ports_of_rank;
};

struct Input {
  std::vector<float> x, weights;
  std::vector<int32_t> ids;
  int64_t tokens;
};

/// `size` values whose address is not null even if there are none: null says that an argument is absent.
std::vector<float> values(int64_t size) {
  std::vector<float> made;
  made.reserve(size + 1);
  made.assign(size, -99.0f);
  return made;
}

Input make_input(std::mt19937_64& random, int64_t tokens, int32_t top_k, int32_t experts,
                 int64_t hidden = kHidden) {
  Input input{values(0), values(0), {}, tokens};
  std::vector<int32_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t t = 0; t < tokens; ++t) {
    std::shuffle(order.begin(), order.end(), random);
    for (int32_t k = 0; k < top_k; ++k) {
      input.ids.push_back(random() % 5 == 0 ? -1 : order[k]);
      input.weights.push_back(static_cast<float>(1 + random() % 7));
    }
    for (int64_t h = 0; h < hidden; ++h)
      input.x.push_back(static_cast<float>(static_cast<int>(random() % 15) - 7));
  }
  return input;
}

template <class T>
const std::byte* bytes(const std::vector<T>& data) {
  return reinterpret_cast<const std::byte*>(data.data());
}
template <class T>
std::byte* bytes(std::vector<T>& data) {
  return reinterpret_cast<std::byte*>(data.data());
}

/// dispatch, then combine of rows * (1 + global expert), then both backwards.
void step(Communicator& comm, const Input& input, int32_t top_k, int32_t local_experts) {
  const int64_t hidden = comm.config().shape.hidden;
  const auto plan = comm.begin_dispatch({bytes(input.x), input.ids.data(), false, bytes(input.weights),
                                         input.tokens, RowLayout::expert, 4, -1});
  std::vector<float> rows = values(plan->rows * hidden), weights = values(plan->rows);
  comm.pull(bytes(rows), bytes(weights), nullptr);
  const int32_t first = comm.config().rank * local_experts;
  int64_t row = 0;
  for (int32_t e = 0; e < local_experts; ++e)
    for (; row < plan->offsets[e]; ++row)
      for (int64_t h = 0; h < hidden; ++h) rows[row * hidden + h] *= static_cast<float>(1 + first + e);

  std::vector<float> y = values(input.tokens * hidden);
  comm.combine(plan, bytes(rows), bytes(weights), bytes(y), nullptr, nullptr);
  bool right = true;
  for (int64_t t = 0; t < input.tokens; ++t) {
    float factor = 0;
    for (int32_t k = 0; k < top_k; ++k) {
      const int64_t i = t * top_k + k;
      if (input.ids[i] >= 0) factor += input.weights[i] * static_cast<float>(1 + input.ids[i]);
    }
    for (int64_t h = 0; h < hidden; ++h)
      right = right && y[t * hidden + h] == factor * input.x[t * hidden + h];
  }
  CHECK(right);

  // Backward of combine with dy = x: rows come back scaled, and dots are <row, x>. Then the weights'
  // gradients go home.
  std::vector<float> grad_rows = values(plan->rows * hidden), dots = values(plan->rows);
  comm.redispatch(plan, bytes(input.x), bytes(grad_rows), bytes(weights), bytes(rows), bytes(dots));
  std::vector<float> grad_x = values(input.tokens * hidden), grad_weights = values(input.tokens * top_k);
  comm.combine(plan, bytes(grad_rows), nullptr, bytes(grad_x), bytes(dots), bytes(grad_weights));
  right = true;
  for (int64_t t = 0; t < input.tokens; ++t) {
    float square = 0, weight = 0;
    for (int64_t h = 0; h < hidden; ++h) square += input.x[t * hidden + h] * input.x[t * hidden + h];
    for (int32_t k = 0; k < top_k; ++k) {
      const int64_t i = t * top_k + k;
      const bool is_expert = input.ids[i] >= 0;
      right = right && grad_weights[i] == (is_expert ? square * static_cast<float>(1 + input.ids[i]) : 0.0f);
      if (is_expert) weight += input.weights[i];
    }
    for (int64_t h = 0; h < hidden; ++h)
      right = right && grad_x[t * hidden + h] == weight * input.x[t * hidden + h];
  }
  CHECK(right);
}

void run_steps(int32_t ranks, int threads, int steps, int64_t max_tokens, int32_t ranks_per_node = 0,
               int64_t hidden = kHidden) {
  const int32_t local_experts = 3, top_k = std::min(4, ranks * local_experts);
  Ranks node(ranks, local_experts, top_k, max_tokens, threads, ranks_per_node, hidden);
  node.run([&](Communicator& comm, int rank) {
    std::mt19937_64 random(test::seed() + rank);
    for (int i = 0; i < steps; ++i) {
      // Nearly all where there are many: enough bytes for the thread pool.
      const int64_t tokens = max_tokens > 1000 ? max_tokens - static_cast<int64_t>(random() % 1000)
                                               : static_cast<int64_t>(random() % (max_tokens + 1));
      step(comm, make_input(random, tokens, top_k, ranks * local_experts, hidden), top_k, local_experts);
    }
    CHECK(comm.stats().plans_made + comm.stats().plans_reused == steps);  // two empty steps share one
  });
}

TEST(steps) {
  for (const int32_t ranks : {1, 2, 3, 7}) run_steps(ranks, 1, 30, 40);
  run_steps(2, 3, 2, 16000);
  for (const auto& [ranks, ranks_per_node] :
       {std::pair{2, 1}, {4, 2}, {6, 2}, {6, 3}, {4, 1}, {3, 1}, {8, 4}, {7, 1}})
    run_steps(ranks, 1, 12, 40, ranks_per_node);
  // Rows of 640 KB: a chunk each, more than there are places for in staging and partial sums.
  run_steps(4, 1, 3, 30, 2, 160000);
  run_steps(2, 3, 2, 4000, 1, 200);
}

TEST(errors) {
  for (const int32_t ranks_per_node : {3, 1}) {
    Ranks node(3, 2, 2, 8, 1, ranks_per_node);
    node.run([&](Communicator& comm, int rank) {
      std::mt19937_64 random(test::seed() + rank);
      const Input good = make_input(random, 4, 2, 6);
      Input bad = good;
      bad.ids[3] = rank == 1 ? 6 : 0;
      const auto dispatch = [&](const Input& input, int64_t alignment, int64_t capacity) {
        return comm.begin_dispatch(
            {bytes(input.x), input.ids.data(), false, nullptr, 4, RowLayout::expert, alignment, capacity});
      };
      CHECK(test::throws(ErrorKind::invalid_routing, "topk_idx[1, 1] is 6",
                         [&] { dispatch(rank == 1 ? bad : good, 1, -1); }));
      step(comm, good, 2, 2);
      CHECK(test::throws(ErrorKind::mismatched_arguments, "alignment: rank 0 has 1, rank 2 has 8",
                         [&] { dispatch(good, rank == 2 ? 8 : 1, -1); }));
      step(comm, good, 2, 2);
      CHECK(test::throws(ErrorKind::invalid_argument, "x is odd", [&] {
        if (rank == 0) comm.fail(ErrorKind::invalid_argument, "x is odd");
        dispatch(good, 1, -1);
      }));
      step(comm, good, 2, 2);
      const auto plan = dispatch(good, 1, 0);
      comm.pull(nullptr, nullptr, nullptr);
      CHECK(plan->rows == 0);
      CHECK(test::throws(ErrorKind::capacity_exceeded, "its capacity was 0", [&] { comm.check(); }));
      comm.check();
      step(comm, good, 2, 2);
      // Everybody has finished before anybody closes, or the last step would be lost.
      if (rank == 2) comm.close();
      if (rank == 2) CHECK(test::throws(ErrorKind::closed, "closed", [&] { dispatch(good, 1, -1); }));
      if (rank != 2) CHECK(test::throws(ErrorKind::peer_lost, "", [&] { dispatch(good, 1, -1); }));
      if (rank != 2) CHECK(test::throws(ErrorKind::peer_lost, "", [&] { comm.check(); }));
    });
  }
}

/// The network's library keeps one rank's thread: its close() says so and returns, and the memory that the
/// thread may still write to stays when the communicator has gone, until the process ends.
TEST(thread_left_behind) {
  Ranks pair(2, 2, 2, 8, 1, 1, kHidden, 0.2);
  pair.ports_of_rank[1]->stuck = true;
  CHECK(!pair.comms[1]->close());
  std::byte* const window = pair.comms[1]->base();
  pair.comms[1] = std::make_shared<Communicator>(pair.comms[0]->config());
  window[0] = std::byte{1};
  CHECK(pair.comms[0]->close());
}

/// The network of one rank fails for good, with nobody's process or link gone: everybody is told long before
/// the deadline of 60 s, the rank itself and its rail with what the network said.
TEST(network_that_vanishes) {
  for (const auto& [ranks, ranks_per_node] : {std::pair{2, 1}, {4, 2}, {3, 1}}) {
    Ranks nodes(ranks, 2, 2, 8, 1, ranks_per_node);
    std::vector<std::string> texts(ranks);
    const auto steps = [&](Communicator& comm, int rank, int count) {
      std::mt19937_64 random(test::seed() + rank);
      const Input input = make_input(random, 4, 2, 2 * ranks);
      for (int i = 0; i < count; ++i) step(comm, input, 2, 2);
    };
    nodes.run([&](Communicator& comm, int rank) { steps(comm, rank, 1); });
    const auto begin = std::chrono::steady_clock::now();
    nodes.ports_of_rank.at(1)->gone = true;
    nodes.run([&](Communicator& comm, int rank) {
      const Error error = test::error_of([&] { steps(comm, rank, 1000); });
      CHECK(error.kind() == ErrorKind::peer_lost);
      texts[rank] = error.what();
      CHECK(test::throws(ErrorKind::peer_lost, "", [&] { comm.check(); }));
    });
    CHECK(test::has(texts[1], "the network has gone"));
    for (const std::string& text : texts) CHECK(test::has(text, "rank"));
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));
  }
}

TEST(host_pool) {
  auto pool = std::make_shared<HostPool>();
  auto first = pool->take(1 << 20);
  std::byte* const address = first.get();
  first.reset();
  auto second = pool->take((1 << 20) - 1000);
  CHECK(second.get() == address);  // the same size class
  auto third = pool->take(1 << 20);
  CHECK(third.get() != address);
  pool.reset();
  third.get()[0] = std::byte{1};  // memory outlives the pool's other owners
}

}  // namespace

int main() { return moecomm::test::run(); }
