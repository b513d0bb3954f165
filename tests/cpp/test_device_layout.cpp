// The window and the plan of a CUDA communicator: pure arithmetic, so no GPU is needed. The sizes are
// computed here a second time, from the documented formula.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "common/error.hpp"
#include "kernels/gpu/common/heuristics.hpp"
#include "layout/device_plan.hpp"
#include "layout/device_window.hpp"
#include "layout/routing.hpp"

using namespace moecomm;

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kFewestStaged = 64;  // tokens

/// Bytes of the scales of a row in a format.
int64_t scale_bytes(WireFormat wire, int64_t hidden) {
  if (wire == WireFormat::fp8) return (hidden + 127) / 128 * 4;
  return wire == WireFormat::mxfp8 ? (hidden + 31) / 32 : 0;
}

int64_t rounded(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

/// Calls body(shape) for many sizes that a communicator can have.
template <class Body>
void for_each_shape(const Body& body) {
  for (const int32_t ranks : {1, 2, 3, 4, 8, 9, 72})
    for (const int32_t top_k : {1, 2, 8, 32})
      for (const int64_t hidden : {32, 288, 7168})
        for (const int64_t tokens : {1, 63, 64, 65, 513, 4096, 4100, 16385, 70001})
          for (const DType dtype : {DType::float32, DType::bfloat16})
            for (const WireFormat wire : kWireFormats)
              for (const int32_t whole_sources : {0, kWholeSources})
                body(DeviceShape{ranks, top_k, int64_t{32} * ranks, hidden, tokens, dtype, wire, 0,
                                 whole_sources});
}

TEST(chunks) {
  int64_t most = 0;
  for (int64_t tokens = 1; tokens <= 70000; ++tokens) {
    const int64_t size = chunk_tokens(tokens), count = chunk_count(tokens);
    CHECK(size >= 1 && size <= kMaxChunk && kMaxChunk % size == 0);
    CHECK((count - 1) * size < tokens && tokens <= count * size);
    most = std::max(most, count);
    // A rank with room for so many tokens may bring fewer, and with smaller chunks have more of them.
    const DeviceShape shape{2, 2, 4, 16, tokens, DType::bfloat16, WireFormat::same};
    CHECK(shape.max_chunks() == most);
  }
  CHECK(chunk_count(0) == 0);
}

TEST(rows_on_the_wire) {
  for_each_shape([](const DeviceShape& s) {
    const int64_t scales = scale_bytes(s.wire, s.hidden);
    CHECK(s.wire_row_bytes() % 16 == 0 && s.wire_row_bytes() >= s.wire_data_bytes() + scales);
    CHECK(s.wire_row_bytes() < s.wire_data_bytes() + scales + (s.wire == WireFormat::same ? 16 : 128));
    CHECK(s.wire_row_bytes() <= s.row_bytes());
  });
  const DeviceShape shape{4, 8, 64, 7168, 4096, DType::bfloat16, WireFormat::fp8};
  CHECK(shape.wire_data_bytes() == 7168 && shape.wire_row_bytes() == 7424);  // 7168 + 56 * 4 in whole lines
}

TEST(sections) {
  for_each_shape([](const DeviceShape& shape) {
    const DeviceWindow w = DeviceWindow::make(shape);
    const std::vector<Section> sections = device_window_sections(shape);
    int64_t end = 0;
    for (const Section& section : sections) {
      CHECK(section.offset == end && section.offset % kPage == 0 && section.bytes > 0);
      end += section.bytes;
    }
    CHECK(end == w.total_bytes);
    std::vector<int64_t> fields{w.sources, w.state, w.losses, w.late_ns, w.route_counts};
    for (const auto* pair : {w.error_text, w.starts, w.counts, w.routes, w.weight_grads})
      fields.insert(fields.end(), pair, pair + 2);
    fields.insert(fields.end(), {w.arrived, w.credits, w.rows[0], w.rows[1]});
    CHECK(fields.size() == sections.size());
    for (size_t i = 0; i < std::min(fields.size(), sections.size()); ++i)
      CHECK(fields[i] == sections[i].offset);
  });
}

/// Calls body(shape) for sizes of communicators on several nodes.
template <class Body>
void for_each_node_shape(const Body& body) {
  for (const auto& [ranks, per_node] : {std::pair{2, 1}, {4, 2}, {6, 2}, {4, 1}, {16, 8}, {128, 8}})
    for (const int32_t top_k : {1, 2, 8, 32})
      for (const int64_t hidden : {16, 7168})
        for (const int64_t tokens : {1, 64, 65, 513, 4096})
          body(DeviceShape{ranks, top_k, int64_t{32} * ranks, hidden, tokens, DType::bfloat16,
                           WireFormat::fp8, per_node});
}

TEST(sections_of_nodes) {
  bool turns = false;
  for_each_node_shape([&](const DeviceShape& s) {
    const DeviceWindow w = DeviceWindow::make(s);
    const int64_t others = s.ranks / s.ranks_per_node - 1, owners = std::min(s.ranks_per_node, s.top_k);
    CHECK(s.other_nodes() == others && s.node_slots() == owners);
    CHECK(s.slots() == std::min<int64_t>(s.top_k, s.ranks_per_node + others));
    CHECK(s.bins() == s.num_experts + s.ranks + others + 1);
    const int64_t fields[] = {w.relay_state,    w.relay_text[0],   w.relay_text[1],   w.relay_grads[0],
                              w.relay_grads[1], w.partial_arrived, w.partial_credits, w.staged_rows,
                              w.chunks_here,    w.partials[0],     w.partials[1],     w.total_bytes};
    CHECK(fields[0] == w.rows[1] + (w.rows[1] - w.rows[0]));
    for (size_t i = 1; i < std::size(fields); ++i) CHECK(fields[i] > fields[i - 1] && fields[i] % kPage == 0);
    // They take no more than the slots of this rank's own tokens, but for a few tokens.
    CHECK(w.partial_tokens >= std::min(s.max_tokens, kFewestStaged) && w.partial_tokens <= s.max_tokens);
    CHECK(w.partial_tokens == s.max_tokens || w.partial_tokens % kMaxChunk == 0);
    CHECK(w.partials[1] - w.partials[0] ==
          rounded(others * w.partial_tokens * owners * s.row_bytes(), kPage));
    if (w.partial_tokens > kFewestStaged)
      CHECK(others * w.partial_tokens * owners <= s.max_tokens * s.slots());
    turns = turns || w.partial_tokens < s.max_tokens;

    const WindowShape host = host_window_shape(s);
    const WindowLayout layout = WindowLayout::make(host);
    const int64_t row = s.max_tokens * s.row_bytes(), chunk = host.chunk_rows() * s.row_bytes();
    CHECK(host.for_device() && host.staging_chunks() == others * host.chunks(s.max_tokens));
    CHECK(layout.relay_rows[1] - layout.relay_rows[0] == rounded(others * row, kPage));
    CHECK(layout.index[0] - layout.staging == rounded(host.staging_chunks() * chunk, kPage));
    CHECK(layout.committed_bytes == layout.total_bytes);  // nothing is taken later
    // A ring that never fills: two operations at most are under way.
    const int64_t most = others * (1 + WindowShape::pieces(host.most_ids_bytes()) +
                                   WindowShape::pieces(host.index_bytes(s.max_tokens)) +
                                   2 * WindowShape::pieces(host.weights_bytes()) + host.chunks(s.max_tokens));
    CHECK(static_cast<int64_t>(host.commands()) >= 2 * most &&
          (host.commands() & (host.commands() - 1)) == 0);

    const DevicePlan plan = DevicePlan::make(s);
    const int64_t tokens = others * s.max_tokens;
    CHECK(plan.relay_tokens - plan.home_index == rounded(tokens, 64));
    CHECK(plan.relay_ids - plan.relay_index == rounded(tokens, 64));
    CHECK(plan.total - plan.relay_ids == rounded(tokens * s.top_k, 64));
  });
  CHECK(turns);
}

void check_stage(const DeviceWindow& w, WireFormat made_for, int64_t room) {
  const DeviceShape& s = w.shape;
  CHECK(s.staged_sources() * w.stage_tokens * s.wire_row_bytes() <= room);
  CHECK(w.stage_tokens <= s.max_tokens);
  CHECK(w.stage_tokens >= std::min(s.max_tokens, kFewestStaged));
  if (s.ranks <= s.top_k) CHECK(w.stage_tokens == s.max_tokens);
  if (s.other_nodes() == 0 && s.staged_sources() <= s.top_k) CHECK(w.stage_tokens == s.max_tokens);
  const bool has_room = s.wire == made_for || s.wire == WireFormat::same;
  if (has_room && s.staged_sources() <= s.whole_sources) CHECK(w.stage_tokens == s.max_tokens);
  for (int64_t tokens = 0; tokens <= s.max_tokens; tokens += std::max(tokens, int64_t{1})) {
    const int64_t at_once = w.chunks_at_once(tokens);
    CHECK(at_once <= chunk_count(tokens) && at_once * chunk_tokens(tokens) <= w.stage_tokens + kMaxChunk);
    CHECK((at_once == chunk_count(tokens)) == (tokens <= w.stage_tokens));
  }
  if (w.stage_tokens == s.max_tokens) return;
  // Sources take turns: all chunks of a rank have places of their own, however many tokens it brings.
  CHECK(w.stage_tokens % kMaxChunk == 0);
  CHECK(s.staged_sources() * (w.stage_tokens + kMaxChunk) * s.wire_row_bytes() > room - kPage);
  for (const int64_t tokens : {w.stage_tokens + 1, int64_t{512}, int64_t{513}, int64_t{4096}, int64_t{4097},
                               int64_t{16384}, int64_t{16385}, s.max_tokens})
    if (tokens > w.stage_tokens && tokens <= s.max_tokens) CHECK(w.stage_tokens % chunk_tokens(tokens) == 0);
}

TEST(stage) {
  bool turns = false;
  for_each_shape([&](const DeviceShape& shape) {
    const DeviceWindow w = DeviceWindow::make(shape);
    const int64_t room = w.rows[1] - w.rows[0];
    CHECK(room == w.total_bytes - w.rows[1]);
    for (const WireFormat wire : kWireFormats) {
      const DeviceWindow other = w.with_wire(wire);
      CHECK(other.shape.wire == wire && other.total_bytes == w.total_bytes && other.rows[1] == w.rows[1]);
      CHECK(other.with_wire(shape.wire).stage_tokens == w.stage_tokens);
      CHECK(other.shape.wire_row_bytes() == shape.with_wire(other.shape.wire).wire_row_bytes());
      CHECK(w.shape.wire_row_bytes() == shape.wire_row_bytes());
      check_stage(other, shape.wire, room);
      turns = turns || other.stage_tokens < shape.max_tokens;
    }
    check_stage(w, shape.wire, room);
  });
  CHECK(turns);
}

/// What the comments of DeviceWindow say, without its code.
int64_t window_bytes(const DeviceShape& s, int64_t chunks) {
  const int64_t R = s.ranks, K = s.top_k, E = s.num_experts, M = s.max_tokens;
  const int64_t element = s.dtype == DType::float32 ? 4 : 2;
  const int64_t weight = 4, route = 16;
  const int64_t row = s.hidden * element;
  const int64_t values = s.hidden + scale_bytes(s.wire, s.hidden);
  const int64_t lines = rounded(values, 128), wire = s.wire == WireFormat::same ? row
                                                     : lines <= row             ? lines
                                                                                : rounded(values, 16);
  int64_t rows = std::max(M * std::min(R, K) * row, R * std::min<int64_t>(M, 64) * std::max(row, wire));
  const int64_t others = std::max<int64_t>(R - 1, 1), staged = s.wire == WireFormat::same ? others : R;
  if (others <= s.whole_sources) rows = std::max(rows, others * M * row);
  if (staged <= s.whole_sources) rows = std::max(rows, staged * M * wire);
  int64_t total = kPage;  // kernel state
  for (const int64_t once :
       {128 * R, 32 * R, 8 * R, 32 * (E + R) * 4, R * (chunks + 1) * 8, R * (chunks + 1) * 8})
    total += rounded(once, kPage);
  for (const int64_t twice :
       {int64_t{512}, 16 * R, 8 * R * (E + R + 1), R * M * K * route, M * K * weight, rows})
    total += 2 * rounded(twice, kPage);
  return total;
}

TEST(formula) {
  static_assert(sizeof(DeviceState) <= kPage);
  std::vector<int64_t> most_chunks(70002);  // by max_tokens
  for (int64_t tokens = 1; tokens < static_cast<int64_t>(most_chunks.size()); ++tokens)
    most_chunks[tokens] = std::max(most_chunks[tokens - 1], chunk_count(tokens));
  for_each_shape([&](const DeviceShape& shape) {
    const DeviceWindow window = DeviceWindow::make(shape);
    CHECK(window.total_bytes == window_bytes(shape, most_chunks[shape.max_tokens]));
  });
}

TEST(plan_fields) {
  for_each_shape([](const DeviceShape& s) {
    const DevicePlan p = DevicePlan::make(s);
    const int64_t R = s.ranks, L = s.num_experts / R, M = s.max_tokens, K = s.top_k;
    std::vector<std::pair<int64_t, int64_t>> fields{
        {p.header, 16},     {p.expert_rows, L}, {p.expert_starts, 1 + L}, {p.source_ends, R},
        {p.ends, L},        {p.tokens, R},      {p.bases, R * L},         {p.local_topk_idx, M * K},
        {p.home, M},        {p.slots, R * M},   {p.positions, R * M * K}, {p.rows, R * M},
        {p.source_bases, R}};
    std::sort(fields.begin(), fields.end());
    int64_t end = 0, words = 0;
    for (const auto& [offset, count] : fields) {
      CHECK(offset % 64 == 0 && offset >= end);
      end = offset + count;
      words += rounded(count, 64);
    }
    CHECK(p.offsets == p.expert_starts + 1);
    CHECK(p.header == 0 && end <= p.total && p.total == words);
  });
}

/// A divisor finds the quotients that a division does.
TEST(divisors) {
  const auto check = [](int32_t by) {
    const Divisor divisor = Divisor::of(by);
    const auto same = [&](int64_t number) {
      if (number < 0 || number > INT32_MAX) return;
      CHECK(divisor.quotient(static_cast<int32_t>(number)) == number / by);
    };
    for (int64_t number = 0; number < 1 << 16; number += 7) same(number);
    for (int64_t quotient : {int64_t{1}, int64_t{2}, int64_t{1000}, int64_t{INT32_MAX} / by})
      for (int64_t more : {-1, 0, 1}) same(quotient * by + more);
    for (int64_t number = INT32_MAX; number > INT32_MAX - 20; --number) same(number);
  };
  for (int32_t by = 1; by < 70000; by += by < 300 ? 1 : 977) check(by);
  for (int32_t by : {1 << 20, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, INT32_MAX - 1, INT32_MAX}) check(by);
}

/// A shape for kernels has the sizes of the shape that it is made of.
TEST(sizes_for_kernels) {
  const auto check = [](const DeviceShape& shape) {
    const KernelShape sizes(shape);
    CHECK(sizes.row_bytes() == shape.row_bytes() && sizes.wire_data_bytes() == shape.wire_data_bytes());
    CHECK(sizes.wire_scale_bytes() == shape.wire_scale_bytes());
    CHECK(sizes.wire_row_bytes() == shape.wire_row_bytes());
    CHECK(sizes.max_chunks() == shape.max_chunks());
    CHECK(sizes.bins() == shape.bins() && sizes.other_nodes() == shape.other_nodes());
    CHECK(sizes.slots() == shape.slots() && sizes.node_slots() == shape.node_slots());
  };
  for_each_shape([&](const DeviceShape& shape) {
    check(shape);
    DeviceShape of_nodes = shape;
    of_nodes.ranks_per_node = 1;
    check(of_nodes);
  });
}

/// True if a communicator can have so many ranks, so many of them on a node (0: all).
bool serves_ranks(int32_t ranks, int32_t ranks_per_node) {
  DeviceShape shape{ranks, 8, ranks, 64, 16, DType::bfloat16, WireFormat::same};
  shape.ranks_per_node = ranks_per_node;
  const ErrorKind kind = test::error_of([&] { check_shape(shape); }).kind();
  CHECK(kind == ErrorKind::none || kind == ErrorKind::unsupported);
  return kind == ErrorKind::none;
}

TEST(limits) {
  CHECK(serves_ranks(128, 0) && serves_ranks(1024, 128) && serves_ranks(1024, 8));
  CHECK(!serves_ranks(129, 0) && !serves_ranks(1032, 129) && !serves_ranks(1032, 8));
}

/// The division of `budget` of 132 SMs, 0: the default, between the sides of operations with so many ranks.
gpu::Heuristics choose(int budget, int32_t ranks, int32_t top_k, int64_t row_bytes,
                       WireFormat wire = WireFormat::fp8) {
  const DeviceShape shape{ranks, top_k, int64_t{64} * ranks, row_bytes / 2, 4096, DType::bfloat16, wire};
  return gpu::choose_heuristics(132, budget, 512, shape, wire);
}

/// The two sides of a combine share the SMs as they share its additions, and each has at least one.
TEST(division_of_a_combine) {
  const auto near = [](double share, double expected) { return std::abs(share - expected) < 1e-3; };
  CHECK(gpu::owners_share(1, 8) == 0.0);                          // all rows are at home
  CHECK(near(gpu::owners_share(2, 8), 4 / (4 + 4 + 1.9921875)));  // two owners of nearly all tokens
  CHECK(near(gpu::owners_share(4, 1), 0.75 / (0.75 + 0.25 + 1)));
  CHECK(gpu::owners_share_by_rank(1, 8) == 0.0);
  CHECK(near(gpu::owners_share_by_rank(4, 1), 1.5 / 75 / (1.5 / 75 + 2.0 / 56)));
  // On two ranks the homes have more to do where owners only copy.
  CHECK(choose(24, 2, 8, 14336).combine(true, false).reduce == 8);
  CHECK(choose(24, 2, 8, 14336).combine(false, false).reduce == 10);
  CHECK(choose(48, 2, 8, 14336).combine(false, false).reduce == 22);
  // Blocks that quantise sums are slow, so that more of them reduce.
  const gpu::Heuristics four = choose(0, 4, 8, 14336);
  for (const bool rank_layout : {false, true})
    CHECK(four.combine(rank_layout, true).reduce >= four.combine(rank_layout, false).reduce + 4);
  for (const int ranks : {1, 2, 4, 8, 128})
    for (const int budget : {0, 2, 3, 4, 24, 64, 132}) {
      const gpu::Heuristics h = choose(budget, ranks, 8, 14336);
      for (const bool rank_layout : {false, true})
        for (const bool quantised : {false, true}) {
          const gpu::CombineBlocks& blocks = h.combine(rank_layout, quantised);
          CHECK(blocks.reduce >= 1 && blocks.sum >= 1 && blocks.reduce <= 34);
          for (const int list : {blocks.reduce_list, blocks.sum_list})
            CHECK(quantised ? list == 0 : list == 2 || list == 4 || list == gpu::kListTokens);
          CHECK(blocks.all() == (budget > 0 ? budget : 99));
          CHECK(budget < 4 || blocks.reduce % 2 == 0);  // in clusters of two
        }
    }
}

/// Lists of a combine's tokens are the shorter the longer a unit takes for a token. Short rows have none, and
/// more blocks that reduce, since warps send them one by one.
TEST(lists_of_a_combine) {
  const auto blocks = [](int budget, int32_t ranks, int32_t top_k, int64_t row_bytes) {
    return choose(budget, ranks, top_k, row_bytes).combine(false, false);
  };
  CHECK(blocks(0, 4, 8, 14336).reduce_list == 2 && blocks(0, 4, 8, 14336).sum_list == 2);
  CHECK(blocks(24, 4, 8, 14336).reduce_list == 4 && blocks(24, 4, 8, 14336).sum_list == 4);
  CHECK(blocks(0, 4, 8, 8192).reduce_list == 4);
  CHECK(blocks(0, 4, 8, 6160).reduce_list == gpu::kListTokens && blocks(0, 4, 8, 6144).reduce_list == 0);
  CHECK(blocks(24, 4, 8, 4112).sum_list == gpu::kListTokens && blocks(24, 4, 8, 4096).sum_list == 0);
  CHECK(blocks(0, 2, 2, 512).reduce == 31 && blocks(0, 2, 2, 14336).reduce == 15);
  CHECK(gpu::list_of(1000, 2000) == 2 && gpu::list_of(1000, 2001) == 4 && gpu::list_of(0, 1) == 8);
}

/// The division of `total` SMs between the sides of a dispatch; rows that are quantised become half as long.
gpu::DispatchBlocks divide(int total, double owners, double sent, double received, int64_t bytes,
                           gpu::RowWork work) {
  const int64_t wire_bytes = work == gpu::RowWork::quantised ? bytes / 2 : bytes;
  return gpu::divide_dispatch(total, {owners, sent, received, bytes, work, wire_bytes}, false);
}

/// The two sides of a dispatch share the SMs so that neither is the slower one by far, and each has one.
TEST(division_of_a_dispatch) {
  for (const int ranks : {1, 2, 3, 4, 8, 128})
    for (const int budget : {0, 2, 3, 4, 24, 64, 132}) {
      const gpu::Heuristics h = choose(budget, ranks, 8, 14336);
      for (const gpu::RowWork work :
           {gpu::RowWork::none, gpu::RowWork::quantised, gpu::RowWork::factors, gpu::RowWork::products}) {
        for (const bool rank_layout : {false, true}) {
          const gpu::DispatchBlocks& blocks = h.dispatch(rank_layout, work);
          CHECK(blocks.send >= 1 && blocks.receive >= 1);
          CHECK(blocks.send <= (work == gpu::RowWork::quantised ? blocks.all() / 2 : 30));
          CHECK(blocks.all() == (budget > 0 ? budget : 99));
          CHECK(budget < 4 || blocks.send % 2 == 0);  // in clusters of two
          CHECK(blocks.send_warps >= 4);
        }
        // Rows of the rank layout are stored once.
        CHECK(h.dispatch(true, work).send >= h.dispatch(false, work).send);
      }
    }
  // Of the rows of a token that are stored one in nine goes out with two ranks, a quarter with four.
  CHECK(divide(24, 2, 1, 8, 14336, gpu::RowWork::none).send <= 4);
  const int of_four = divide(24, 3.6, 2.7, 8, 14336, gpu::RowWork::none).send;
  CHECK(of_four >= 5 && of_four <= 8);
  // The links hold it, whoever receives: more blocks send than fill them, but not many more.
  const int of_many = divide(99, 3.6, 2.7, 8, 14336, gpu::RowWork::none).send;
  CHECK(of_many >= 12 && of_many <= 22);
  CHECK(divide(132, 3.6, 2.7, 8, 14336, gpu::RowWork::none).send == of_many);
  // Where rows are multiplied fewer send, and the fewer the more is read and written there.
  const int factors = divide(99, 3.6, 2.7, 8, 14336, gpu::RowWork::factors).send,
            products = divide(99, 3.6, 2.7, 8, 14336, gpu::RowWork::products).send;
  CHECK(products >= 8 && products <= factors && factors <= 12);
  CHECK(divide(99, 2, 1, 8, 14336, gpu::RowWork::products).send + 4 <=
        divide(99, 2, 1, 8, 14336, gpu::RowWork::factors).send);
  // Quantising takes longer than copying, and short rows are held by what is done for each.
  CHECK(divide(24, 2, 1, 8, 14336, gpu::RowWork::quantised).send >= 5);
  CHECK(divide(24, 2, 1, 8, 4096, gpu::RowWork::none).send >= 5);
  // Rows wait for the routes where the memory holds a dispatch: of two ranks by expert, on enough blocks.
  CHECK(divide(99, 2, 1, 8, 14336, gpu::RowWork::none).routes_first &&
        divide(99, 2, 1, 8, 14336, gpu::RowWork::quantised).routes_first);
  CHECK(!divide(24, 2, 1, 8, 14336, gpu::RowWork::none).routes_first &&
        !divide(64, 2, 1, 8, 14336, gpu::RowWork::none).routes_first &&
        !divide(99, 2, 1, 2, 14336, gpu::RowWork::none).routes_first &&
        !divide(99, 1, 0.5, 1, 14336, gpu::RowWork::none).routes_first &&
        !divide(99, 3.6, 2.7, 8, 14336, gpu::RowWork::none).routes_first &&
        !divide(99, 3.6, 2.7, 8, 14336, gpu::RowWork::quantised).routes_first);
  CHECK(gpu::Heuristics::route_blocks(0, 16) == 1 && gpu::Heuristics::route_blocks(4096, 16) == 16);
  CHECK(gpu::Heuristics::route_blocks(513, 32) == 5);
}

/// Warps that sum rows at home end together, and few of them take more than they need.
TEST(parts_of_a_sum) {
  const auto parts = [](int64_t tokens, int strips) {
    return gpu::Heuristics::sum_parts(tokens, 1568, strips);
  };
  CHECK(parts(0, 14) == 1 && parts(1, 14) == 14 && parts(1, 1) == 1);  // one for each strip
  CHECK(parts(512, 14) == 3 && parts(768, 14) == 2);                   // one for each warp
  CHECK(parts(1024, 14) == 3);  // two for each warp, and not one for two in three
  for (int64_t tokens = 0; tokens <= gpu::kMostFusedTokens; ++tokens)
    for (const int strips : {1, 4, 14, 64})
      CHECK(parts(tokens, strips) >= 1 && parts(tokens, strips) <= strips);
}

/// Teams of a dispatch are smaller between two ranks where some blocks send and the others receive.
TEST(teams_of_a_dispatch) {
  const auto warps = [](int64_t items, int senders, bool quantised, int ranks) {
    return gpu::Heuristics::dispatch_team_warps(items, 96, 12, senders, quantised, ranks);
  };
  CHECK(warps(96, 0, false, 2) == 12 && warps(192, 0, true, 2) == 6 && warps(193, 0, false, 2) == 4);
  CHECK(warps(256, 33, false, 2) == 1 && warps(1024, 28, true, 2) == 2);
  CHECK(warps(256, 25, false, 4) == 4 && warps(2048, 28, true, 4) == 4);
}

/// Teams that send sums take them in one turn where two warps each make that possible.
TEST(teams_of_a_combine) {
  const auto warps = [](int64_t tokens, int ranks) {
    return gpu::Heuristics::sum_team_warps(tokens, 98, 16, ranks);
  };
  CHECK(warps(1, 2) == 16 && warps(98, 2) == 16 && warps(99, 2) == 8 && warps(197, 2) == 4);
  CHECK(warps(392, 2) == 4 && warps(393, 2) == 2 && warps(784, 2) == 2 && warps(785, 2) == 4);
  CHECK(warps(32, 4) == 16 && warps(64, 4) == 8 && warps(130, 4) == 4 && warps(131, 4) == 2);
  CHECK(warps(261, 4) == 2 && warps(262, 4) == 4 && warps(1024, 1) == 16);
  CHECK(!gpu::Heuristics::flags_late(127, 2) && gpu::Heuristics::flags_late(128, 2));
  CHECK(!gpu::Heuristics::flags_late(1024, 1) && gpu::Heuristics::flags_late(512, 4));
}

DeviceShape shape_of_offers() {
  DeviceShape shape{};
  shape.ranks = 2;
  shape.top_k = 8;
  shape.num_experts = 256;
  shape.hidden = 7168;
  shape.max_tokens = 4096;
  shape.dtype = DType::bfloat16;
  return shape;
}

/// What a dropless dispatch is offered: all that may come, or half as many rows again as do with uniform
/// routing, if that is not much memory.
TEST(offered_rows) {
  DeviceShape shape = shape_of_offers();
  const auto rows = [&](int64_t tokens, RowLayout layout, int64_t alignment = 1) {
    return gpu::offered_rows(tokens, layout, alignment, shape);
  };
  CHECK(rows(128, RowLayout::expert).rows == 1536 && rows(128, RowLayout::expert).positions == 1536);
  CHECK(rows(128, RowLayout::rank).rows == 256 && rows(128, RowLayout::rank).positions == 1536);
  CHECK(rows(0, RowLayout::expert).rows == rows(32, RowLayout::expert).rows);  // others may bring some
  CHECK(rows(128, RowLayout::expert, 4).rows == 1536 + 3 * 128);
  CHECK(rows(512, RowLayout::expert).rows == 0 && rows(512, RowLayout::rank).rows == 1024);
  CHECK(rows(8, RowLayout::expert, 128).rows == 0);
  shape.ranks = 8;  // with one expert each no more than all tokens come
  shape.num_experts = 8;
  CHECK(rows(100, RowLayout::expert).rows == 800);
}

/// More than few tokens are offered what the last dispatches brought, and a little more.
TEST(recent_rows) {
  const DeviceShape shape = shape_of_offers();
  gpu::RecentRows recent;
  const auto rows = [&](int64_t tokens, int64_t alignment = 1) {
    return recent.offer(tokens, alignment, shape).rows;
  };
  CHECK(rows(4096) == 0);  // nobody knows
  recent.note(255, {2000, 2000});
  CHECK(rows(4096) == 0);  // of few tokens
  recent.note(4096, {32768, 32768});
  recent.note(2048, {16000, 16500});
  CHECK(rows(4096) == 33751 && rows(2048) == 16875 && rows(512) == 4218 && rows(255) == 0);
  CHECK(recent.offer(4096, 1, shape).positions == 33990);
  recent.note(4096, {50000, 50000});  // far from uniform
  CHECK(rows(4096) == 0 && rows(4096, 128) == 51500);
  for (int i = 0; i < 7; ++i) recent.note(4096, {100, 100});
  CHECK(rows(4096) == 0);
  recent.note(4096, {100, 100});  // forgotten
  CHECK(rows(4096) == 103);
}

/// The shapes that kernels for few tokens serve have their tables in the shared memory of a block.
TEST(shapes_of_one_kernel) {
  for (const int ranks : {1, 8, 64}) CHECK(gpu::most_fused_tokens(ranks, 256) == 1024);
  CHECK(gpu::most_fused_tokens(8, 600) == 512 && gpu::most_fused_tokens(8, 1024) == 512);
  CHECK(gpu::most_fused_tokens(65, 65) == 0 && gpu::most_fused_tokens(72, 144) == 0);
  CHECK(gpu::most_fused_tokens(64, 1024) == 0 && gpu::most_fused_tokens(1, 4096) == 0);
  CHECK(choose(0, 4, 8, 14336).fused_tokens == 512);
  DeviceShape shape{4, 8, 256, 7168, 4096, DType::bfloat16, WireFormat::same};
  CHECK(gpu::choose_heuristics(132, 0, 512, shape, WireFormat::fp8).fused_tokens == 512);
  CHECK(gpu::choose_heuristics(132, 0, 0, shape, WireFormat::fp8).fused_tokens == 0);
  shape.ranks_per_node = 2;
  CHECK(gpu::choose_heuristics(132, 0, 512, shape, WireFormat::fp8).fused_tokens == 0);
  CHECK(gpu::Heuristics::fused_senders(96, 99, false, 2) == 0 &&
        gpu::Heuristics::fused_senders(256, 99, true, 2) == 0);
  CHECK(gpu::Heuristics::fused_senders(48, 99, false, 4) == 0 &&
        gpu::Heuristics::fused_senders(128, 99, true, 4) == 0);
  for (const int ranks : {2, 4})
    for (const int blocks : {2, 3, 32, 99}) {  // some receive, and what is sent is sent by some
      const int senders = gpu::Heuristics::fused_senders(512, blocks, false, ranks);
      CHECK(senders >= 0 && senders < blocks - 1);
      CHECK(gpu::Heuristics::fused_senders(512, 99, false, ranks) > 0);
    }
  CHECK(gpu::in_one_kernel(0, 512) && gpu::in_one_kernel(512, 512) && !gpu::in_one_kernel(513, 512));
  CHECK(!gpu::in_one_kernel(0, 0) && !gpu::in_one_kernel(1, 0));  // not even where there are no tokens
  for (const int budget : {0, 2, 3, 24, 64, 132}) {
    const gpu::Heuristics h = choose(budget, 4, 8, 14336);
    for (const int64_t items : {0, 1, 100, 5000})
      for (const int leads : {1, gpu::leading_blocks(h.all_blocks())}) {
        const int blocks = h.fused_blocks(items, 3, leads);
        CHECK(blocks > leads && blocks <= h.all_blocks());
        CHECK(leads == 1 || gpu::leading_blocks(blocks) == leads);
      }
  }
}

}  // namespace

int main() { return moecomm::test::run(); }
