// csrc/ptx/grid.cuh for kernels on the host.
#pragma once

#include <cuda_runtime.h>

#include <chrono>

namespace moecomm::ptx {

inline void launch_dependents() {}  // they are started at once
inline void wait_for_previous_kernel() {
  const simt::Grid* const previous = simt::Block::now().grid.previous;
  while (previous != nullptr && previous->ended < previous->blocks) simt::Block::now().pause();
}
inline bool barrier_and(int number, int threads, bool value) {
  return simt::Block::now().barrier(number, static_cast<unsigned>(threads), value).all;
}
inline uint64_t global_nanoseconds() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(since).count());
}

}  // namespace moecomm::ptx
