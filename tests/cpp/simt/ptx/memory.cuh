// The loads, stores, fences and asynchronous copies of csrc/ptx/memory.cuh for kernels on the host. Who polls
// lets others go on. Copies are made as late as they may be.
#pragma once

#include <cuda_runtime.h>

#include <deque>

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
inline uint32_t load_acquire_block(const uint32_t* address) { return load_acquire_sys(address); }
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
inline void store_release_block(uint32_t* address, uint32_t value) { store_release_sys(address, value); }
inline uint64_t compare_swap_gpu(uint64_t* address, uint64_t before, uint64_t value) {
  return atomicCAS(address, before, value);
}
inline uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
inline void fence_sys() { std::atomic_thread_fence(std::memory_order_seq_cst); }

/// The copies that a thread has started, in groups.
struct AsyncCopies {
  struct Copy {
    void* to;
    const void* from;
    size_t bytes;
  };
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;

  static AsyncCopies& mine() {
    thread_local std::vector<AsyncCopies> of_threads;
    thread_local const simt::Block* block = nullptr;
    if (block != &simt::Block::now()) {
      block = &simt::Block::now();
      of_threads.assign(block->grid.threads, {});
    }
    return of_threads[block->thread().x];
  }
  void finish(size_t pending) {
    for (; groups.size() > pending; groups.pop_front())
      for (const Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
  }
};
template <int bytes>
void copy_async(void* shared, const void* global) {
  AsyncCopies::mine().open.push_back({shared, global, bytes});
}
inline void copy_async_16(void* shared, const void* global) { copy_async<16>(shared, global); }
inline void commit_async_copies() {
  AsyncCopies& copies = AsyncCopies::mine();
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}
template <int pending>
void wait_async_copies() {
  AsyncCopies::mine().finish(pending);
}
inline void wait_for_async_copies() {
  commit_async_copies();
  AsyncCopies::mine().finish(0);
}

}  // namespace moecomm::ptx
