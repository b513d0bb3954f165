// The loads and stores of csrc/ptx/memory.cuh, and what CUDA itself has, for waits that a test runs on the
// host.
#pragma once

#include <atomic>
#include <cstdint>

namespace moecomm::ptx {

template <class T>
T load_relaxed_sys(const T* address) {
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(std::memory_order_relaxed);
}
template <class T>
T load_acquire_sys(const T* address) {
  return std::atomic_ref<T>(*const_cast<T*>(address)).load(std::memory_order_acquire);
}
template <class T>
T load_relaxed_gpu(const T* address) {
  return load_relaxed_sys(address);
}
template <class T>
T load_acquire_gpu(const T* address) {
  return load_acquire_sys(address);
}
inline void store_release_sys(uint32_t* address, uint32_t value) {
  std::atomic_ref<uint32_t>(*address).store(value, std::memory_order_release);
}

}  // namespace moecomm::ptx

inline uint32_t atomicCAS(uint32_t* address, uint32_t before, uint32_t value) {
  std::atomic_ref<uint32_t>(*address).compare_exchange_strong(before, value);
  return before;
}

inline void __nanosleep(unsigned) {}
inline bool __syncthreads_or(bool own) { return own; }  // a block, and a warp, of one thread
inline bool __any_sync(uint32_t, bool own) { return own; }
