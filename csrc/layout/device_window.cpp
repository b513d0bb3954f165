#include "layout/device_window.hpp"

#include <algorithm>
#include <bit>

#include "common/error.hpp"
#include "layout/routing.hpp"

namespace moecomm {
namespace {

constexpr int64_t kLeastStage = 64;  // sections hold rows of at least so many tokens of a source, or home
constexpr int64_t kFlag = sizeof(uint64_t);

/// Calls visit(name, offset field, bytes) for every section in the order of the window.
template <class Visit>
void for_each_section(DeviceWindow& w, int64_t rows_bytes, const Visit& visit) {
  const DeviceShape& s = w.shape;
  const int64_t entries = s.max_tokens * s.top_k, weight = weight_bytes(s.dtype);
  visit("peer signals", w.sources, s.ranks * int64_t{sizeof(SourceLines)});
  visit("kernel state", w.state, int64_t{sizeof(DeviceState)});
  visit("lost peers", w.losses, s.ranks * int64_t{sizeof(PeerLoss)});
  visit("waits by rank", w.late_ns, s.ranks * int64_t{sizeof(uint64_t)});
  visit("route counts", w.route_counts, kMaxRouteBlocks * s.bins() * 4);
  for (auto& offset : w.error_text) visit("error text", offset, kErrorText);
  for (auto& offset : w.starts) visit("starts", offset, s.ranks * int64_t{sizeof(DispatchStart)});
  for (auto& offset : w.counts)
    visit("row counts", offset, s.ranks * s.announced() * int64_t{sizeof(uint64_t)});
  for (auto& offset : w.routes) visit("routes", offset, s.ranks * entries * int64_t{sizeof(Route)});
  for (auto& offset : w.weight_grads) visit("weight gradients", offset, entries * weight);
  visit("arrival flags", w.arrived, s.ranks * (s.max_chunks() + 1) * kFlag);
  visit("credit flags", w.credits, s.ranks * (s.max_chunks() + 1) * kFlag);
  for (auto& offset : w.rows) visit("rows", offset, rows_bytes);
  if (const int64_t others = s.other_nodes(); others > 0) {
    visit("relay state", w.relay_state, others * int64_t{sizeof(RelayState)});
    for (auto& offset : w.relay_text) visit("texts of other nodes", offset, others * kErrorText);
    for (auto& offset : w.relay_grads) visit("gradients for other nodes", offset, others * entries * weight);
    visit("partial sum flags", w.partial_arrived, s.ranks * (s.max_chunks() + 1) * kFlag);
    visit("partial sum credits", w.partial_credits, s.ranks * (s.max_chunks() + 1) * kFlag);
    const WindowShape host = host_window_shape(s);
    visit("staged rows", w.staged_rows, others * host.chunks(s.max_tokens) * 4);
    visit("chunks here", w.chunks_here, others * host.chunks(s.max_tokens) * kFlag);
    for (auto& offset : w.partials)
      visit("partial sums", offset, others * w.partial_tokens * s.node_slots() * s.row_bytes());
  }
}

/// Bytes of a `rows` section. Combine needs a slot for each possible owner of each token. Dispatch stages
/// arriving rows in the same memory: in the wire format, or along a kept plan in their dtype. On one node all
/// rows of up to whole_sources sources fit at once. With more sources, or several nodes (where the network
/// delays rows anyway), tokens reuse memory in turn if not all of them fit.
int64_t rows_bytes(const DeviceShape& s) {
  int64_t bytes =
      std::max(s.max_tokens * s.slots() * s.row_bytes(),
               s.ranks * std::min(s.max_tokens, kLeastStage) * std::max(s.row_bytes(), s.wire_row_bytes()));
  for (const WireFormat wire : {WireFormat::same, s.wire}) {
    const DeviceShape staged = s.with_wire(wire);
    if (s.other_nodes() == 0 && staged.staged_sources() <= s.whole_sources)
      bytes = std::max(bytes, staged.staged_sources() * s.max_tokens * staged.wire_row_bytes());
  }
  return bytes;
}

int64_t fitting_tokens(const DeviceShape& s, int64_t bytes) {
  const int64_t fitting = bytes / (s.staged_sources() * s.wire_row_bytes());
  return fitting >= s.max_tokens ? s.max_tokens : fitting / kMaxChunk * kMaxChunk;
}

/// How many of a home's tokens have room for their sums in `partials`: as many as fit in as much memory as
/// this rank's own tokens take for sums, at least kLeastStage. If not all fit, tokens reuse memory in turn.
int64_t partial_tokens(const DeviceShape& s) {
  if (s.other_nodes() == 0) return 0;
  const int64_t fitting = s.max_tokens * s.slots() / (int64_t{s.other_nodes()} * s.node_slots());
  if (fitting >= s.max_tokens) return s.max_tokens;
  return std::min(s.max_tokens, std::max(fitting / kMaxChunk * kMaxChunk, kLeastStage));
}

int32_t number_bits(const DeviceShape& s) {
  return static_cast<int32_t>(std::bit_width(static_cast<uint64_t>(s.max_tokens - 1)));
}

template <class Visit>
DeviceWindow walk(const DeviceShape& shape, const Visit& visit) {
  DeviceWindow window{};
  window.shape = KernelShape(shape);
  window.number_bits = number_bits(shape);
  const int64_t rows = align_up(rows_bytes(shape), kPage);
  window.stage_tokens = fitting_tokens(shape, rows);
  window.partial_tokens = partial_tokens(shape);
  int64_t end = 0;
  for_each_section(window, rows, [&](const char* name, int64_t& offset, int64_t bytes) {
    offset = end;
    end += align_up(bytes, kPage);
    visit(name, offset, align_up(bytes, kPage));
  });
  window.total_bytes = end;
  return window;
}

}  // namespace

void check_shape(const DeviceShape& s) {
  // A warp holds the ids of a token, and a set of ranks as 32 bits per lane. A block counts rows for every
  // expert in its shared memory. An expert and a row's number share one 32-bit number (packed routes).
  constexpr int32_t kMostRanks = 1024;
  constexpr int64_t kMostCounts = 32000;
  const auto refuse = [](const auto&... text) { throw Error(ErrorKind::unsupported, text_of(text...)); };
  if (s.top_k > kMaxTopK) refuse("top_k is ", s.top_k, ", on CUDA it is at most ", kMaxTopK);
  if (s.ranks > kMostRanks) refuse("the group has ", s.ranks, " ranks, on CUDA at most ", kMostRanks);
  if (s.nodes().local_ranks > kMaxNodeRanks)
    refuse("a node has ", s.nodes().local_ranks, " ranks, on CUDA at most ", kMaxNodeRanks);
  if (s.bins() > kMostCounts)
    refuse("num_experts is ", s.num_experts, ", on CUDA experts and ranks together are at most ",
           kMostCounts);
  if (s.num_experts << number_bits(s) > int64_t{1} << 31)
    refuse("max_tokens is ", s.max_tokens, " for ", s.num_experts,
           " experts, on CUDA the product of experts and tokens (as a power of two) is at most 2^31");
  if (s.max_tokens >= static_cast<int64_t>(EpochNumber::kMask))
    refuse("max_tokens is ", s.max_tokens, ", on CUDA it is less than ", EpochNumber::kMask);
  if (s.dtype == DType::float64) refuse("dtype is float64, on CUDA rows are float32, bfloat16 or float16");
}

DeviceWindow DeviceWindow::make(const DeviceShape& shape) {
  check_shape(shape);
  return walk(shape, [](const char*, int64_t, int64_t) {});
}

DeviceWindow DeviceWindow::with_wire(WireFormat wire) const {
  DeviceWindow window = *this;
  window.shape = KernelShape(shape.with_wire(wire));
  window.stage_tokens = fitting_tokens(window.shape, rows[1] - rows[0]);
  return window;
}

WindowShape host_window_shape(const DeviceShape& s) {
  WindowShape shape{s.ranks, s.top_k, s.hidden, s.max_tokens, s.dtype, s.ranks_per_node};
  shape.device_counts = s.counts();
  for (const WireFormat wire : kWireFormats)
    shape.wire_row_bytes[static_cast<int>(wire)] = s.with_wire(wire).wire_row_bytes();
  return shape;
}

std::vector<Section> device_window_sections(const DeviceShape& shape) {
  std::vector<Section> sections;
  walk(shape,
       [&](const char* name, int64_t offset, int64_t bytes) { sections.push_back({name, offset, bytes}); });
  return sections;
}

}  // namespace moecomm
