#include "layout/window.hpp"

#include <algorithm>
#include <bit>

#include "layout/routing.hpp"

namespace moecomm {
namespace {

// A chunk has a sixteenth of the bytes that a rank can send to a node, since staging holds 16 chunks, but at
// least so many that a put's fixed cost does not matter. CPU ranks of a node wait for each other at every
// chunk of sums. GPUs do not: their chunks are smaller, to fill several endpoints (docs/history.md).
constexpr int64_t kChunksWanted = WindowLayout::kStagingChunks, kLeastChunkBytes = int64_t{512} << 10,
                  kMostChunkBytes = int64_t{4} << 20, kMostDeviceChunkBytes = int64_t{1} << 20;
// An immediate has 15 bits for an arrival flag, and a command 16 bits for the rows of a chunk.
constexpr int64_t kMostChunks = 1 << 14, kMostChunkRows = (1 << 16) - 1;

/// Calls visit(name, offset field, bytes) for every section in the order of the window.
template <class Visit>
void for_each_section(WindowLayout& layout, const Visit& visit) {
  const WindowShape& s = layout.shape;
  const int64_t weights = s.weights_bytes();
  const bool cpu = !s.for_device();  // GPUs keep the node's rows, slots and gradients in device memory
  visit("peer signals", layout.peers, s.ranks * int64_t{sizeof(PeerLines)});
  visit("doorbell", layout.owner, int64_t{sizeof(OwnerLines)});
  if (cpu)
    for (auto& offset : layout.error_text) visit("error text", offset, kErrorText);
  for (auto& offset : layout.ids) visit("expert ids", offset, s.most_ids_bytes());
  for (auto& offset : layout.weights) visit("routing weights", offset, weights);
  if (cpu) {
    for (auto& offset : layout.weight_grads) visit("weight gradients", offset, weights);
    for (auto& offset : layout.rows) visit("token rows", offset, s.max_tokens * s.row_bytes());
    for (auto& offset : layout.slots)
      visit("combine slots", offset, s.max_tokens * s.slots() * s.row_bytes());
  }
  if (const int64_t others = s.other_nodes(); others > 0) {
    visit("relay progress", layout.progress, int64_t{sizeof(RelayProgress)} + others * 8);
    for (auto& offset : layout.announcement)
      visit("announcements", offset, others * int64_t{sizeof(Announcement)});
    for (auto& offset : layout.relay_head)
      visit("relay heads", offset, others * int64_t{sizeof(Announcement)});
    for (auto& offset : layout.relay_ids) visit("relay ids", offset, others * s.most_ids_bytes());
    for (auto& offset : layout.relay_weights) visit("relay weights", offset, others * weights);
    for (auto& offset : layout.relay_grads) visit("relay gradients", offset, others * weights);
    for (auto& offset : layout.outgoing_grads) visit("outgoing gradients", offset, others * weights);
    for (auto& offset : layout.arrivals) visit("arrival flags", offset, others * s.arrival_flags() * 8);
    for (auto& offset : layout.relay_rows) visit("relay rows", offset, others * s.max_tokens * s.row_bytes());
    const int64_t chunk = s.chunk_rows() * s.row_bytes();
    visit("staging", layout.staging, s.staging_chunks() * chunk);
    if (cpu) {
      if (s.nodes().local_ranks > 1)
        visit("partial sums", layout.partials, WindowLayout::kPartialRounds * chunk * s.slots());
    } else {
      const int64_t index = others * s.index_bytes(s.max_tokens);
      for (auto& offset : layout.index) visit("relay indices", offset, index);
      for (auto& offset : layout.relay_index) visit("indices from others", offset, index);
      visit("commands", layout.commands, static_cast<int64_t>(s.commands() * 16));
    }
  }
  for (auto& offset : layout.input) visit("input rows", offset, cpu ? s.max_tokens * s.row_bytes() : 0);
}

}  // namespace

int64_t WindowShape::chunk_rows() const {
  const int64_t bytes = std::clamp(max_tokens * row_bytes() / kChunksWanted, kLeastChunkBytes,
                                   for_device() ? kMostDeviceChunkBytes : kMostChunkBytes);
  const int64_t wanted = std::clamp<int64_t>((bytes + row_bytes() - 1) / row_bytes(), 1, kMostChunkRows);
  const int64_t least = (max_tokens + kMostChunks - 1) / kMostChunks;
  return std::min(std::max(wanted, least), max_tokens);
}

int64_t WindowShape::staging_chunks() const {
  return for_device() ? other_nodes() * chunks(max_tokens) : WindowLayout::kStagingChunks;
}

uint64_t WindowShape::commands() const {
  constexpr uint64_t kLeast = 4096;
  if (!for_device()) return kLeast;
  const int64_t each = 1 + pieces(most_ids_bytes()) + 2 * pieces(weights_bytes()) +
                       pieces(index_bytes(max_tokens)) + chunks(max_tokens);
  return std::max(kLeast, std::bit_ceil(static_cast<uint64_t>(4 * other_nodes() * each)));
}

int64_t WindowShape::largest_put() const {
  return std::max({chunk_rows() * row_bytes(), kPieceBytes, int64_t{sizeof(Announcement)}});
}

WindowLayout WindowLayout::make(const WindowShape& shape) {
  WindowLayout layout{};
  layout.shape = shape;
  int64_t end = 0;
  for_each_section(layout, [&](const char*, int64_t& offset, int64_t bytes) {
    offset = end;
    end += align_up(bytes, kPage);
  });
  layout.committed_bytes = layout.input[0];
  layout.total_bytes = end;
  return layout;
}

std::vector<Section> window_sections(const WindowShape& shape) {
  WindowLayout layout = WindowLayout::make(shape);
  std::vector<Section> sections;
  for_each_section(layout, [&](const char* name, int64_t& offset, int64_t bytes) {
    sections.push_back({name, offset, align_up(bytes, kPage)});
  });
  return sections;
}

}  // namespace moecomm
