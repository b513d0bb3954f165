// The kernels of a dispatch, a combine and the backward of a combine on the host (simt/), of ranks that run
// beside each other, against sums and copies that are made here one after the other. Each rank draws for each
// operation whether one kernel does all of it or two do, how many blocks they have, and how these divide it:
// whatever the others do, results have the same bits. Where tokens take turns in the staging section, those
// that wait for room are sent by a third kernel. Ranks do not wait for each other between operations. Between
// nodes blocks relay rows and sums, and proxies put them through a network of threads.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "check.hpp"
#include "device/comm.cuh"
#include "kernel_steps.hpp"
#include "kernels/gpu/common/arguments.hpp"
#include "kernels/gpu/common/pipe.cuh"
#include "kernels/gpu/common/token_order.cuh"
#include "loopback.hpp"
#include "rail.hpp"
#include "runtime/proxy.hpp"
#include "transport/shm/window.hpp"

using namespace moecomm;
using namespace moecomm::steps;

namespace {

/// How often something rare has happened to a rank.
struct Seen {
  int turns = 0;    ///< its tokens took turns in the staging section
  int watched = 0;  ///< a block of its own found that a capacity was passed

  void add(const Seen& other) {
    turns += other.turns;
    watched += other.watched;
  }
};

/// A rank with its window.
class Rank {
 public:
  Rank(const DeviceShape& shape, int rank, uint64_t seed)
      : random_(seed), main_(random_()), later_(random_()), rank_(rank), window_(DeviceWindow::make(shape)) {
    memory_.resize(static_cast<size_t>(window_.total_bytes) / sizeof(Line) + 1);
    comm.window = window_.with_wire(shape.wire);
    comm.rank = rank;
    const NodeMap nodes = shape.nodes();
    comm.local_ranks = nodes.local_ranks;
    comm.first_rank = comm.bases.first_rank = nodes.first(nodes.node_of(rank));
    const WindowLayout layout = WindowLayout::make(host_window_shape(shape));
    host_window_ = shm::Window::create(layout.total_bytes, layout.committed_bytes);
    comm.rail = device::Rail::of(layout, rank, host_base());
    comm.derive();
    comm.own = base();
    comm.host = &status_;
    comm.timeout_ns = 60'000'000'000;
    comm.plan_fields = DevicePlan::make(shape);
    plan_.resize(static_cast<size_t>(comm.plan_fields.total));
    comm.state().bad_id = ~uint64_t{0};
    comm.state().epoch = (uint64_t{1} << 32) - 3;
  }
  std::byte* base() { return reinterpret_cast<std::byte*>(memory_.data()); }
  std::byte* host_base() { return host_window_.base(); }

  /// Starts the proxy. `hosts`: the host windows of all ranks.
  void connect(const std::vector<std::byte*>& hosts, std::unique_ptr<Transport> network,
               std::unique_ptr<tcp::Links> links) {
    const auto first = hosts.begin() + comm.first_rank;
    const std::vector<int64_t> pids(static_cast<size_t>(comm.local_ranks), getpid());
    signals_.emplace(comm.rail.layout, std::vector(first, first + comm.local_ranks), rank_, pids, 60, 8);
    proxy_.emplace(comm.rail.layout, rank_, host_base(), *signals_, std::move(network), std::move(links), 60,
                   comm.state().epoch + 1);
  }
  bool close() { return !proxy_ || proxy_->close(true); }

  /// A step of this rank, and a check of all that it gives.
  void play(const Shape& shape, const Step& step) {
    const Input& input = step.inputs[static_cast<size_t>(rank_)];
    check_dispatch(shape, step, input);
    if (step.disagrees()) {
      const HostStatus::Verdict& verdict = status_.verdict;
      CHECK(verdict.set != 0 && verdict.rank == std::max(step.odd, 1));
      if (step.after)
        CHECK(verdict.about == Disagreement::carries && (verdict.index ^ verdict.value) == kAfterGivenUp);
      else
        CHECK(verdict.about == Disagreement::caller && verdict.index + verdict.value == 3 + 7);
      status_.verdict.set = 0;
    } else if (!step.given_up) {
      for (int turn = 0; turn < step.combines; ++turn) check_combine(shape, step, input);
      check_backward(shape, step, input);
    }
    CHECK(status_.broken.set == 0 && status_.verdict.set == 0 && comm.state().failed == 0);
    CHECK((status_.overflow.set != 0) == overflows(step));
    status_.overflow.set = 0;
  }

  /// A combine with the weights of tokens that this rank runs alone, and in which another wait fails while
  /// the other rank's weights arrive. It ends, also where they came in time for some warps of a team only.
  void fail_combine(const Shape& shape, const Step& step) {
    const uint64_t epoch = comm.state().epoch + 1;
    const Input& input = step.inputs[static_cast<size_t>(rank_)];
    Rows y(static_cast<size_t>(input.tokens * shape.hidden));
    gpu::CombineArguments args{};
    args.rows = bytes(input.answers);
    args.token_weights = input.weights.data();
    args.y = bytes(y);
    args.plan = plan_.data();
    args.tokens = input.tokens;
    args.layout = step.layout;
    args.team_warps = 8;
    args.parts = 1;
    gpu::launch_combine_fused(launch(main_, 2), comm, args);
    const auto pause = [&](int least, int most) {
      std::this_thread::sleep_for(std::chrono::microseconds(draw(random_, least, most)));
    };
    // Own weights go out first.
    while (!EpochNumber::is_of(std::atomic_ref(comm.routes(comm.own, rank_, epoch)->place).load(), epoch))
      std::this_thread::yield();
    pause(0, 2'000);
    std::atomic_ref(comm.state().failed).store(1);
    pause(0, 3'000);
    const int32_t other = 1 - rank_;
    for (int i = 0; i < step.inputs[static_cast<size_t>(other)].tokens * shape.top_k; ++i)
      device::put(comm.routes(comm.own, other, epoch) + i, ptx::Pair{0, EpochNumber::word(epoch, 0)});
    main_.join();
    CHECK(comm.state().epoch == epoch);
    comm.state().failed = 0;
  }

  device::Comm comm{};
  Seen seen;  ///< in dispatches, and in backwards of combines

 private:
  struct alignas(128) Line {
    std::byte bytes[128];
  };

  static bool overflows(const Step& step) {
    return !step.dropless && !step.disagrees() &&
           std::any_of(step.origins.begin(), step.origins.end(), [&](const auto& origins) {
             return static_cast<int64_t>(origins.size()) > step.inputs[0].capacity;
           });
  }

  bool may_fuse(int64_t tokens) const {
    return comm.rail.others == 0 && gpu::in_one_kernel(tokens, gpu::kMostFusedTokens) && tokens > 0;
  }
  int some_relays() { return comm.rail.others > 0 ? draw(random_, 1, 3) : 0; }
  gpu::Launch launch(CUstream_st& stream, int blocks, bool overlapped = false) {
    return {&stream, blocks, overlapped, false};
  }

  /// Sends and receives in one kernel, or in those for many tokens; these leave counters behind.
  void move(gpu::SendArguments sent, gpu::ReceiveArguments received) {
    received.operation = sent.operation;
    received.x = sent.x;
    received.plan = sent.plan;
    received.layout = sent.layout;
    const bool dispatch = sent.operation == Operation::dispatch;
    const bool waits = sent.tokens > comm.window.stage_tokens;
    seen.turns += waits;
    if (received.other == nullptr && may_fuse(sent.tokens) && !waits && draw(random_, 0, 2) > 0) {
      constexpr int kWatched = 33;  // so many blocks have a third leading one, which watches the capacity
      const int blocks =
          draw(random_, 0, dispatch && overflowing_ ? 3 : 31) == 0 ? kWatched : draw(random_, 2, 6);
      const int most = blocks - gpu::leading_blocks(blocks) - 1;
      seen.watched += blocks == kWatched && dispatch && overflowing_;
      const int senders = draw(random_, 0, 1) * draw(random_, 0, most);
      return receive_all(sent, received, [&](const gpu::ReceiveArguments& output, bool again) {
        gpu::FusedArguments both{sent, output, gpu::kWarps >> draw(random_, 0, 3), again ? 0 : senders};
        both.again = again;
        gpu::launch_dispatch_fused<WireFormat::same>(launch(main_, blocks), comm, both);
      });
    }
    sent.warps = draw(random_, 4, 8);
    const bool few = gpu::routes_few(comm.window.shape, sent.tokens, gpu::kRouteWords);
    sent.route_blocks = few ? 1 : draw(random_, 1, 3);
    const int planners = draw(random_, 0, 1);
    const int relays = sent.relay_blocks = some_relays();
    sent.plan_block = planners * (sent.route_blocks + relays);
    const int senders = draw(random_, 1, 3) + relays;
    received.senders = waits ? senders : 0;
    if (dispatch)
      gpu::launch_dispatch_route(launch(main_, sent.route_blocks + planners + relays), comm, sent);
    gpu::launch_dispatch_send<WireFormat::same>(launch(main_, senders, dispatch), comm, sent);
    if (waits && gives_up_) {
      gpu::launch_abandon(launch(main_, 1, true), comm, sent.operation, sent.tokens, false);
      main_.join();
    } else {
      receive_all(sent, received, [&](const gpu::ReceiveArguments& output, bool again) {
        const bool beside = !again && draw(random_, 0, 3) > 0;
        gpu::launch_dispatch_receive(launch(main_, draw(random_, 1, 3), beside), comm, output);
        if (!waits) return;
        gpu::SendArguments rest = sent;
        rest.later = true;
        gpu::launch_dispatch_send<WireFormat::same>(launch(later_, senders), comm, rest);
      });
    }
    later_.join();
  }

  /// Calls receive(arguments, false). The output of a dropless dispatch is offered, unless its chunks take
  /// turns: large enough, or too small; then nothing of it is touched, and receive(arguments, true) follows
  /// with the whole one.
  template <class Receive>
  void receive_all(const gpu::SendArguments& sent, const gpu::ReceiveArguments& received,
                   const Receive& receive) {
    const bool dropless = sent.operation == Operation::dispatch && sent.capacity < 0;
    gpu::ReceiveArguments offered = received;
    offered.offered = dropless && comm.rail.others == 0 && sent.tokens <= comm.window.stage_tokens;
    const bool enough = !offered.offered || received.rows == 0 || draw(random_, 0, 1) == 0;
    if (!enough) offered.rows = draw(random_, 0, static_cast<int>(received.rows) - 1);
    if (!enough && received.layout == RowLayout::expert) offered.positions = offered.rows;
    receive(offered, false);
    main_.join();
    if (dropless) CHECK(status_.rows.ticket == sent.ticket && status_.rows.rows == received.rows);
    const int32_t* const counts = plan_.data() + comm.plan_fields.expert_rows;
    if (dropless) CHECK(std::equal(counts, counts + comm.local_experts, host_counts(&status_)));
    if (gives_up_) {
      gpu::launch_abandon(launch(main_, 1), comm, sent.operation, sent.tokens, true);
      return main_.join();
    }
    if (enough) return;
    const auto* const out = reinterpret_cast<const uint16_t*>(received.out);
    CHECK(std::all_of(out, out + received.rows * comm.window.shape.hidden,
                      [](uint16_t value) { return value == 0xffff; }));
    receive(received, true);
    main_.join();
  }

  void check_dispatch(const Shape& shape, const Step& step, const Input& input) {
    Rows out(static_cast<size_t>(input.capacity * shape.hidden), 0xffff);
    const int64_t each = step.by_rank() ? shape.top_k : 1;  // weights of a row
    std::vector<float> weights(static_cast<size_t>(input.capacity * each), 7.0f);
    std::vector<int64_t> ids(static_cast<size_t>(input.capacity * each), -7);
    gpu::SendArguments sent{};
    sent.operation = Operation::dispatch;
    sent.x = bytes(input.x);
    sent.ids = input.ids.data();
    sent.wide_ids = true;
    sent.weights = bytes(input.weights);
    sent.plan = plan_.data();
    sent.tokens = input.tokens;
    sent.alignment = step.alignment;
    sent.capacity = step.dropless ? -1 : input.capacity;
    sent.positions = step.groups > 0 ? step.groups : -1;
    if (step.by_rank() && !step.dropless) sent.positions = input.capacity * shape.top_k;
    sent.ticket = ++tickets_;
    const bool odd = step.odd == rank_;
    sent.caller = !odd || step.after ? 3 : 7;
    sent.after = odd && step.after ? uint32_t{kAfterGivenUp} : 0;
    sent.layout = step.layout;
    gpu::ReceiveArguments received{};
    received.rows = input.capacity;
    received.positions = input.capacity * each;
    received.out = bytes(out);
    received.out_weights = bytes(weights);
    received.out_ids = step.by_rank() ? ids.data() : nullptr;
    received.wide_ids = sent.wide_ids;
    gives_up_ = step.given_up;
    overflowing_ = overflows(step);
    move(sent, received);
    gives_up_ = false;
    if (step.given_up || step.disagrees()) return;
    const auto& origins = step.origins[static_cast<size_t>(rank_)];
    const int64_t rows = std::min(input.capacity, static_cast<int64_t>(origins.size()));
    CHECK(!step.by_rank() ||
          std::count(ids.begin() + rows * each, ids.end(), -1) == (input.capacity - rows) * each);
    for (int64_t row = 0; row < rows; ++row) {
      const Origin& from = origins[static_cast<size_t>(row)];
      if (from.source < 0) {
        CHECK(is_padding(step, out, row, shape.hidden));
        CHECK(weights[static_cast<size_t>(row)] == (step.groups > 0 ? 7 : 0));
        continue;
      }
      const Input& source = step.inputs[static_cast<size_t>(from.source)];
      CHECK(same_row(out, row, source.x, from.token, shape.hidden));
      const auto entry = static_cast<size_t>(from.token * shape.top_k);
      if (!step.by_rank()) {
        CHECK(weights[static_cast<size_t>(row)] == source.weights[entry + static_cast<size_t>(from.k)]);
        continue;
      }
      for (size_t k = 0; k < static_cast<size_t>(shape.top_k); ++k) {
        const int64_t id = source.ids[entry + k], local = id - int64_t{rank_} * shape.experts_each;
        const bool here = id >= 0 && local >= 0 && local < shape.experts_each;
        const size_t at = static_cast<size_t>(row * shape.top_k) + k;
        CHECK(ids[at] == (here ? local : -1) && weights[at] == (here ? source.weights[entry + k] : 0.0f));
      }
    }
  }

  void check_combine(const Shape& shape, const Step& step, const Input& input) {
    Rows y(static_cast<size_t>(input.tokens * shape.hidden), 0xffff);
    gpu::CombineArguments args{};
    args.rows = bytes(input.answers);
    args.weights = step.weighted && !step.by_token ? bytes(input.factors) : nullptr;
    args.token_weights = step.by_token ? input.weights.data() : nullptr;
    args.y = bytes(y);
    args.plan = plan_.data();
    args.tokens = input.tokens;
    args.layout = step.layout;
    if (draw(random_, 0, 2) > 0) {  // pipes
      args.reduce_list = 2 << draw(random_, 0, 2);
      args.sum_list = 2 << draw(random_, 0, 2);
    }
    if (step.sums_in_fp8) args.wire = WireFormat::fp8;
    if (step.by_token || (may_fuse(input.tokens) && draw(random_, 0, 2) > 0)) {
      args.team_warps = 2 << draw(random_, 0, 3);
      args.flags_late = draw(random_, 0, 1) == 1;
      args.parts = draw(random_, 1, gpu::sum_strips(shape.hidden * 2));
      gpu::launch_combine_fused(launch(main_, draw(random_, 2, 5)), comm, args);
    } else {
      args.relay_blocks = some_relays();
      gpu::launch_combine_reduce(launch(main_, draw(random_, 1, 3) + args.relay_blocks), comm, args);
      gpu::launch_combine_sum(launch(main_, draw(random_, 1, 3), true), comm, args);
    }
    main_.join();
    std::vector<float> bounds;
    for (int token = 0; token < input.tokens; ++token) {
      const Rows want = expected_sum(shape, step, rank_, token, step.sums_in_fp8 ? &bounds : nullptr);
      if (!step.sums_in_fp8) CHECK(same_row(y, token, want, 0, shape.hidden));
      for (size_t c = 0; c < bounds.size(); ++c)
        CHECK(std::abs(widened(y[static_cast<size_t>(token * shape.hidden) + c]) - widened(want[c])) <=
              bounds[c]);
    }
  }

  void check_backward(const Shape& shape, const Step& step, const Input& input) {
    Rows out(static_cast<size_t>(input.capacity * shape.hidden), 0xffff);
    gpu::SendArguments sent{};
    sent.operation = Operation::redispatch;
    sent.x = bytes(input.grads);
    sent.plan = plan_.data();
    sent.tokens = input.tokens;
    sent.layout = step.layout;
    gpu::ReceiveArguments received{};
    received.rows = received.positions = input.capacity;
    received.out = bytes(out);
    received.scales = step.weighted ? bytes(input.factors) : nullptr;
    const bool products = !step.by_rank() && draw(random_, 0, 1) == 1;  // with the answers
    std::vector<float> dots(static_cast<size_t>(input.capacity));
    received.other = products ? bytes(input.answers) : nullptr;
    received.dots = products ? bytes(dots) : nullptr;
    move(sent, received);
    const auto& origins = step.origins[static_cast<size_t>(rank_)];
    for (int64_t row = 0; row < std::min(input.capacity, static_cast<int64_t>(origins.size())); ++row) {
      const Origin& from = origins[static_cast<size_t>(row)];
      if (from.source < 0) {
        CHECK(is_padding(step, out, row, shape.hidden));
        continue;
      }
      Rows want = step.inputs[static_cast<size_t>(from.source)].grads;
      if (products)
        CHECK(is_product(dots[static_cast<size_t>(row)], want, from.token, input.answers, row, shape.hidden));
      if (step.weighted)
        for (uint16_t& value : want)
          value = rounded(widened(value) * input.factors[static_cast<size_t>(row)]);
      CHECK(same_row(out, row, want, from.token, shape.hidden));
    }
  }

  template <class T>
  static std::byte* bytes(const std::vector<T>& values) {
    static T nothing[8];  // null stands for what is absent
    return reinterpret_cast<std::byte*>(values.empty() ? nothing : const_cast<T*>(values.data()));
  }
  static bool same_row(const Rows& left, int64_t row, const Rows& right, int64_t other, int64_t hidden) {
    return std::equal(left.begin() + row * hidden, left.begin() + (row + 1) * hidden,
                      right.begin() + other * hidden);
  }

  /// True if `dot` is the product of two rows, in whatever order it was added up.
  static bool is_product(float dot, const Rows& left, int64_t row, const Rows& right, int64_t other,
                         int64_t hidden) {
    double sum = 0, size = 0;
    for (int64_t i = 0; i < hidden; ++i) {
      const double term = double{widened(left[static_cast<size_t>(row * hidden + i)])} *
                          widened(right[static_cast<size_t>(other * hidden + i)]);
      sum += term;
      size += std::abs(term);
    }
    return std::abs(dot - sum) <= 1e-5 * size;
  }

  static bool is_padding(const Step& step, const Rows& rows, int64_t row, int64_t hidden) {
    return std::all_of(rows.begin() + row * hidden, rows.begin() + (row + 1) * hidden,
                       [&](uint16_t value) { return value == (step.groups > 0 ? 0xffff : 0); });
  }

  Random random_;
  CUstream_st main_, later_;
  const int rank_;
  const DeviceWindow window_;
  std::vector<Line> memory_;
  shm::Window host_window_;
  std::optional<shm::Signals> signals_;
  std::optional<Proxy> proxy_;
  std::vector<int32_t> plan_;
  std::vector<Line> host_ = std::vector<Line>(sizeof(HostStatus) / sizeof(Line) + 8);
  HostStatus& status_ = *reinterpret_cast<HostStatus*>(host_.data());
  uint64_t tickets_ = 0;
  bool gives_up_ = false, overflowing_ = false;  ///< the dispatch that is played
};

/// The ranks of a shape, which have each other's windows.
std::vector<std::unique_ptr<Rank>> make_ranks(const Shape& shape, Random& random) {
  DeviceShape device{};
  device.ranks = shape.ranks;
  device.top_k = shape.top_k;
  device.num_experts = shape.ranks * shape.experts_each;
  device.hidden = shape.hidden;
  device.max_tokens = std::max(shape.max_tokens, shape.most_tokens);
  device.dtype = DType::bfloat16;
  device.wire = WireFormat::same;
  device.whole_sources = 0;  // but there is room for 64 tokens of each rank
  const int local = device.ranks_per_node = shape.ranks / shape.nodes;
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int rank = 0; rank < shape.ranks; ++rank)
    ranks.push_back(std::make_unique<Rank>(device, rank, random()));
  for (const auto& each : ranks)
    for (int i = 0; i < local; ++i)
      each->comm.bases.of[i] = ranks[static_cast<size_t>(each->comm.first_rank + i)]->base();
  std::vector<std::byte*> hosts;
  for (const auto& each : ranks) hosts.push_back(each->host_base());
  for (int rail = 0; shape.nodes > 1 && rail < local; ++rail) {
    tcp::test_rail::Rail links(shape.nodes);
    links.connect();
    std::vector<std::shared_ptr<test::Loopback::Port>> ports;
    for (int rank = rail; rank < shape.ranks; rank += local)
      ports.emplace_back(new test::Loopback::Port)->base = hosts[rank];
    for (int node = 0; node < shape.nodes; ++node)
      ranks[node * local + rail]->connect(
          hosts, std::make_unique<test::Loopback>(ports, node, random(), draw(random, 1, 8)),
          std::move(links.links[node]));
  }
  return ranks;
}

/// Plays steps of all ranks.
void play(const Shape& shape, const std::vector<std::unique_ptr<Rank>>& ranks,
          const std::vector<Step>& steps) {
  std::vector<std::thread> threads;
  for (const auto& each : ranks)
    threads.emplace_back([&] {
      for (const Step& step : steps) each->play(shape, step);
      CHECK(each->close());
    });
  for (std::thread& thread : threads) thread.join();
}

/// Plays a few steps. Returns how often what is rare has happened.
Seen play(const Shape& shape, Random& random) {
  const auto ranks = make_ranks(shape, random);
  std::vector<Step> steps;
  for (int i = 0; i < shape.steps; ++i) steps.push_back(make_step(shape, random));
  play(shape, ranks, steps);
  Seen all;
  for (const auto& each : ranks) all.add(each->seen);
  return all;
}

/// Plays combines that fail, after a dispatch.
void play_failures(Random& random) {
  const Shape shape{2, 2, 2, 8, 4, 1, 4};
  const auto ranks = make_ranks(shape, random);
  Step step = make_step(shape, random);
  while (!step.by_token || step.disagrees() || step.given_up) step = make_step(shape, random);
  play(shape, ranks, {step});
  for (int i = 0; i < 30; ++i) ranks[0]->fail_combine(shape, step);
}

/// Plays a step whose rows all go through, twice, between two nodes of two ranks.
void play_nodes(Random& random) {
  const Shape shape{4, 2, 3, 72, 6, 2, 1, 0, 2};
  const auto ranks = make_ranks(shape, random);
  Step step = make_step(shape, random);
  while (step.disagrees() || step.given_up) step = make_step(shape, random);
  play(shape, ranks, {step, step});
}

/// Claims take each token of a source once, in pieces that begin at a multiple of their size; the first ones
/// at all places, if there are so many tokens.
void check_order(int tokens, int size, int shift) {
  const gpu::TokenOrder order(tokens, size, shift);
  std::vector<int> taken(static_cast<size_t>(tokens));
  for (int claim = 0; claim < order.claims(); ++claim) {
    const int begin = order.begin(claim), end = std::min(begin + size, tokens);
    CHECK(begin >= 0 && begin <= tokens && (begin == tokens || begin % size == 0));
    for (int token = begin; token < end; ++token) ++taken[static_cast<size_t>(token)];
    if (shift == 0) CHECK(begin == std::min(claim * size, tokens));
  }
  CHECK(std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; }));
  for (int claim = order.claims(); claim < order.claims() + 20; ++claim) CHECK(order.begin(claim) == tokens);
  const int places = 1 << shift;
  if (tokens % (places * 8) == 0)
    for (int claim = 0; claim < places; ++claim) CHECK(order.begin(claim) == claim * (tokens / places));
}

}  // namespace

int main() {
  Random random(test::seed());
  for (const int tokens : {0, 1, 7, 8, 9, 63, 64, 65, 128, 1000, 4096, draw(random, 1, 5000)})
    for (const int size : {1, 2, 4, 8})
      for (const int shift : {0, 3, 6}) check_order(tokens, size, shift);
  for (int i = 0; i < 6; ++i) {
    const int ranks = draw(random, 1, 4), each = draw(random, 1, 4);
    const auto hidden = std::vector<int64_t>{8, 72, 272, 1040}[static_cast<size_t>(draw(random, 0, 3))];
    play({ranks, each, std::min(draw(random, 1, 6), ranks * each), hidden, draw(random, 1, 12), 3}, random);
  }
  play({2, 2, 2, 8200, 24, 2}, random);           // more of a row than a warp keeps sums of at a time
  play({2, 3, 3, 4104, 16, 3}, random);           // rows that a pipe with workers takes
  play({2, 1, 1, 4104, 240, 2, 200}, random);     // and so many bytes that flags go out before the end
  play({3, 4, 3, 8, 1400, 1, 1025}, random);      // of so many tokens lists and chunks are longer
  play({2, 1, 1, 8, 4200, 1, 4097}, random);      // and of so many chunks are as long as lists
  play({2, 17, 17, 72, 12, 3, 0, 4200}, random);  // more places than lists hold: warps move the rows
  Seen seen;  // of 128 tokens of a rank, with more sources than top-k, 32 have no place of their own
  for (int i = 0; i < 2 || (seen.turns == 0 && i < 20); ++i) seen.add(play({3, 2, 1, 128, 128, 4}, random));
  CHECK(seen.turns > 0);
  for (int i = 0; seen.watched == 0 && i < 40; ++i) seen.add(play({2, 3, 2, 8, 4, 6, 1}, random));
  CHECK(seen.watched > 0);
  play_failures(random);
  play_nodes(random);
  return test::finish();
}
