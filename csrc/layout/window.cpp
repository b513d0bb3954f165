#include "layout/window.hpp"

#include <algorithm>

#include "layout/routing.hpp"

namespace moecomm {
namespace {

// Bytes of a chunk: a sixteenth of what a rank can send to a node, so that staging holds all of it, but not
// so few that a put's fixed cost counts (docs/performance.md).
constexpr int64_t kChunksWanted = WindowLayout::kStagingChunks, kLeastChunkBytes = int64_t{512} << 10,
                  kMostChunkBytes = int64_t{4} << 20;
// An immediate has 15 bits for an arrival flag, a command 16 bits for the rows of a chunk.
constexpr int64_t kMostChunks = 1 << 14, kMostChunkRows = (1 << 16) - 1;

// Sections start on pages, so that a section can be backed, registered or dropped by itself.
constexpr int64_t kPage = 4096;

/// Calls visit(name, offset field, bytes) for every section in the order of the window.
template <class Visit>
void for_each_section(WindowLayout& layout, const Visit& visit) {
  const WindowShape& s = layout.shape;
  const int64_t entries = s.max_tokens * s.top_k;
  visit("peer signals", layout.peers, s.ranks * int64_t{sizeof(PeerLines)});
  visit("doorbell", layout.owner, int64_t{sizeof(OwnerLines)});
  for (auto& offset : layout.error_text) visit("error text", offset, kErrorText);
  for (auto& offset : layout.ids) visit("expert ids", offset, entries * 4);
  for (auto& offset : layout.weights) visit("routing weights", offset, entries * weight_bytes(s.dtype));
  for (auto& offset : layout.weight_grads) visit("weight gradients", offset, entries * weight_bytes(s.dtype));
  for (auto& offset : layout.rows) visit("token rows", offset, s.max_tokens * s.row_bytes());
  for (auto& offset : layout.slots) visit("combine slots", offset, s.max_tokens * s.slots() * s.row_bytes());
  if (const int64_t others = s.other_nodes(); others > 0) {
    visit("relay progress", layout.progress, int64_t{sizeof(RelayProgress)});
    for (auto& offset : layout.announcement)
      visit("announcements", offset, others * int64_t{sizeof(Announcement)});
    for (auto& offset : layout.relay_head)
      visit("relay heads", offset, others * int64_t{sizeof(Announcement)});
    for (auto& offset : layout.relay_ids) visit("relay ids", offset, others * entries * 4);
    for (auto& offset : layout.relay_weights) visit("relay weights", offset, others * s.weights_bytes());
    for (auto& offset : layout.relay_grads) visit("relay gradients", offset, others * s.weights_bytes());
    for (auto& offset : layout.outgoing_grads)
      visit("outgoing gradients", offset, others * s.weights_bytes());
    for (auto& offset : layout.arrivals) visit("arrival flags", offset, others * s.arrival_flags() * 8);
    for (auto& offset : layout.relay_rows) visit("relay rows", offset, others * s.max_tokens * s.row_bytes());
    const int64_t chunk = s.chunk_rows() * s.row_bytes();
    visit("staging", layout.staging, WindowLayout::kStagingChunks * chunk);
    if (s.nodes().local_ranks > 1)
      visit("partial sums", layout.partials, WindowLayout::kPartialRounds * chunk * s.slots());
  }
  for (auto& offset : layout.input) visit("input rows", offset, s.max_tokens * s.row_bytes());
}

}  // namespace

int64_t WindowShape::chunk_rows() const {
  const int64_t bytes =
      std::clamp(max_tokens * row_bytes() / kChunksWanted, kLeastChunkBytes, kMostChunkBytes);
  const int64_t wanted = std::clamp<int64_t>((bytes + row_bytes() - 1) / row_bytes(), 1, kMostChunkRows);
  const int64_t least = (max_tokens + kMostChunks - 1) / kMostChunks;
  return std::min(std::max(wanted, least), max_tokens);
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
