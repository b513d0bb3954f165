#include "layout/window.hpp"

#include "layout/routing.hpp"

namespace moecomm {
namespace {

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
  for (auto& offset : layout.input) visit("input rows", offset, s.max_tokens * s.row_bytes());
}

}  // namespace

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
