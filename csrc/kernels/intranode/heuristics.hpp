// Every choice of the kernels inside a node that is a matter of speed and not of results, in one printable
// place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace moecomm::intranode {

/// Blocks, one an SM, of the two sides of each operation.
struct Heuristics {
  int send_blocks, receive_blocks;  ///< of dispatch and the backward of combine
  int reduce_blocks, sum_blocks;    ///< of combine
  int route_blocks;                 ///< of the send blocks, those that first work out where rows go; at most

  std::string text() const {
    return "dispatch on " + std::to_string(send_blocks) + " sending + " + std::to_string(receive_blocks) +
           " receiving SMs, combine on " + std::to_string(reduce_blocks) + " reducing + " +
           std::to_string(sum_blocks) + " summing SMs";
  }
};

/// `sms`: those of the device; `budget`: those that one operation may use, 0 for the default.
inline Heuristics choose_heuristics(int sms, int budget) {
  const int total = std::max(2, std::min(budget > 0 ? budget : sms * 3 / 4, sms));
  Heuristics h{};
  // A third of the stores of a dispatch go out, two thirds are expert rows here (docs/performance.md).
  h.send_blocks = std::max(1, total / 3);
  h.receive_blocks = total - h.send_blocks;
  h.reduce_blocks = std::max(1, (total + 1) / 2);
  h.sum_blocks = total - h.reduce_blocks;
  h.route_blocks = 16;
  return h;
}

}  // namespace moecomm::intranode
