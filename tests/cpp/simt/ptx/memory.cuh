// The loads, stores, fences and asynchronous copies of csrc/ptx/memory.cuh for kernels on the host. Who polls
// lets others go on. Copies are made as late as they may be.
#pragma once

#include <cuda_runtime.h>

namespace moecomm::ptx {

template <class T>
T load_acquire_sys(const T* address) {
  simt::Block::now().pause();
  return std::atomic_ref<T>(*const_cast<T*>(address)).load();
}
template <class T>
T load_acquire_gpu(const T* address) {
  return load_acquire_sys(address);
}
template <class T>
T load_relaxed_sys(const T* address) {
  return load_acquire_sys(address);
}
template <class T>
T load_relaxed_gpu(const T* address) {
  return load_acquire_sys(address);
}
template <class T, class V>
void store_release_sys(T* address, V value) {
  std::atomic_ref<T>(*address).store(static_cast<T>(value));
}
template <class T, class V>
void store_relaxed_sys(T* address, V value) {
  store_release_sys(address, value);
}
template <class T, class V>
void store_release_gpu(T* address, V value) {
  store_release_sys(address, value);
}
struct Pair {
  uint64_t low, high;
};
/// The upper half says that the lower is there: it is stored last, and loaded first.
inline void store_relaxed_sys_pair(void* address, Pair value) {
  auto* const words = static_cast<uint64_t*>(address);
  store_release_sys(words, value.low);
  store_release_sys(words + 1, value.high);
}
inline Pair load_relaxed_sys_pair(const void* address) {
  const auto* const words = static_cast<const uint64_t*>(address);
  const uint64_t high = load_acquire_sys(words + 1);
  return {load_acquire_sys(words), high};
}
inline uint64_t compare_swap_gpu(uint64_t* address, uint64_t before, uint64_t value) {
  return atomicCAS(address, before, value);
}
inline uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
inline void fence_sys() { std::atomic_thread_fence(std::memory_order_seq_cst); }

struct AsyncCopy {
  void* to;
  const void* from;
  size_t bytes;
};
/// The copies that this thread has started and not waited for.
inline std::vector<AsyncCopy>& async_copies() {
  thread_local std::vector<std::vector<AsyncCopy>> of_threads;
  thread_local const simt::Block* block = nullptr;
  if (block != &simt::Block::now()) {
    block = &simt::Block::now();
    of_threads.assign(block->grid.threads, {});
  }
  return of_threads[block->thread().x];
}
template <int bytes>
void copy_async(void* shared, const void* global) {
  async_copies().push_back({shared, global, bytes});
}
inline void wait_for_async_copies() {
  for (const AsyncCopy& copy : async_copies()) std::memcpy(copy.to, copy.from, copy.bytes);
  async_copies().clear();
}

}  // namespace moecomm::ptx
