// The window's layout and the pure functions of routing, with the examples of their comments.
#include "check.hpp"
#include "layout/routing.hpp"
#include "layout/window.hpp"

using namespace moecomm;

namespace {

void test_routing_example() {
  const int32_t ids[] = {6, 1, 7, -1};
  CHECK(expert_owner(6, 2) == 3 && expert_owner(1, 2) == 0 && expert_owner(-1, 2) == -1);
  CHECK(first_of_owner(ids, 0, 2) && first_of_owner(ids, 1, 2) && !first_of_owner(ids, 2, 2) &&
        !first_of_owner(ids, 3, 2));
  CHECK(owners_below(ids, 4, 2, 0) == 0);
  CHECK(owners_below(ids, 4, 2, 3) == 1);
  CHECK(owners_below(ids, 4, 2, 4) == 2);
  static_assert(align_up(0, 8) == 0 && align_up(1, 8) == 8 && align_up(8, 8) == 8 && align_up(7, 1) == 7);
}

void test_sections() {
  for (const int32_t ranks : {1, 3, 64})
    for (const int32_t top_k : {1, 8})
      for (const DType dtype : {DType::bfloat16, DType::float64}) {
        const WindowShape shape{ranks, top_k, 24, 1000, dtype};
        const WindowLayout layout = WindowLayout::make(shape);
        int64_t end = 0;
        for (const Section& section : window_sections(shape)) {
          CHECK(section.offset == end && section.offset % 4096 == 0 && section.bytes >= 0);
          end = section.offset + section.bytes;
        }
        CHECK(end == layout.total_bytes);
        CHECK(layout.committed_bytes == layout.input[0] && layout.committed_bytes < layout.total_bytes);
        CHECK(layout.slots[1] - layout.slots[0] == align_up(1000 * shape.slots() * shape.row_bytes(), 4096));
        CHECK(shape.slots() == (ranks < top_k ? ranks : top_k));
      }
}

void test_worked_example() {
  // docs/memory.md: 2 ranks, top-2, hidden 8 float32, 100 tokens.
  const WindowShape shape{2, 2, 8, 100, DType::float32};
  const WindowLayout layout = WindowLayout::make(shape);
  CHECK(shape.row_bytes() == 32 && shape.slots() == 2);
  // 2 pages of signals, 14 sections of which rows and input take 3200 bytes, slots 6400, the others under a
  // page.
  CHECK(layout.committed_bytes == 4096 * (2 + 2 + 2 + 2 + 2 + 2 + 4));
  CHECK(layout.total_bytes == layout.committed_bytes + 2 * 4096);
}

}  // namespace

int main() {
  test_routing_example();
  test_sections();
  test_worked_example();
  return test::finish();
}
