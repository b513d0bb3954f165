// The window's layout, and what an immediate of the network holds.
#include <algorithm>
#include <utility>

#include "check.hpp"
#include "layout/command.hpp"
#include "layout/routing.hpp"
#include "layout/window.hpp"

using namespace moecomm;

namespace {

void check_sections(const WindowLayout& layout) {
  int64_t end = 0;
  for (const Section& section : window_sections(layout.shape)) {
    CHECK(section.offset == end && section.offset % 4096 == 0 && section.bytes >= 0);
    end = section.offset + section.bytes;
  }
  CHECK(end == layout.total_bytes && layout.committed_bytes == layout.input[0]);
}

TEST(nodes) {
  for (const auto& [ranks, per_node] : {std::pair{2, 1}, {6, 2}, {128, 8}})
    for (const int64_t hidden : {8, 7168, 1 << 20})
      for (const int64_t max_tokens : {1, 4096, 100000}) {
        const WindowShape shape{ranks, 8, hidden, max_tokens, DType::bfloat16, per_node};
        const WindowLayout layout = WindowLayout::make(shape);
        check_sections(layout);
        const int64_t others = ranks / per_node - 1;
        CHECK(layout.relay_rows[1] - layout.relay_rows[0] ==
              align_up(others * max_tokens * shape.row_bytes(), 4096));
        CHECK(shape.slots() == std::min(per_node, 8));
        CHECK(shape.chunk_rows() >= 1 && shape.chunk_rows() < 1 << 16);
        CHECK(shape.arrival_flags() < static_cast<int64_t>(Immediate::kIndices));
        CHECK(shape.largest_put() >= shape.chunk_rows() * shape.row_bytes());
      }
}

TEST(immediate) {
  for (const auto kind : {Immediate::Kind::head, Immediate::Kind::body, Immediate::Kind::part})
    for (const uint32_t epoch : {0u, 5u, 7u})
      for (const uint32_t node : {0u, 1u, 4094u})
        for (const uint32_t index : {0u, 1u, Immediate::kIndices - 1}) {
          const Immediate back = Immediate::from(Immediate{kind, epoch + 8, node, index}.bits());
          CHECK(back.kind == kind && back.epoch == epoch && back.node == node && back.index == index);
          CHECK(Immediate({kind, epoch, node, index}).bits() != 0xffffffff);  // the hello of a connection
        }
}

}  // namespace

int main() { return moecomm::test::run(); }
