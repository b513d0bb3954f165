// Loads, stores and fences with a stated order and scope. `sys` reaches other GPUs and the host, `gpu` the
// other blocks of this device.
#pragma once

#include <cstdint>

namespace moecomm::ptx {

#define MOECOMM_LOAD(name, order, type, width, letter)                                                     \
  __device__ __forceinline__ type name(const type* address) {                                              \
    type value;                                                                                            \
    asm volatile("ld." order ".global." width " %0, [%1];" : "=" letter(value) : "l"(address) : "memory"); \
    return value;                                                                                          \
  }
MOECOMM_LOAD(load_acquire_sys, "acquire.sys", uint32_t, "u32", "r")
MOECOMM_LOAD(load_acquire_sys, "acquire.sys", uint64_t, "u64", "l")
MOECOMM_LOAD(load_acquire_gpu, "acquire.gpu", uint32_t, "u32", "r")
MOECOMM_LOAD(load_acquire_gpu, "acquire.gpu", uint64_t, "u64", "l")
/// Relaxed loads order nothing: for polling, and for values that only this device writes.
MOECOMM_LOAD(load_relaxed_sys, "relaxed.sys", uint32_t, "u32", "r")
MOECOMM_LOAD(load_relaxed_sys, "relaxed.sys", uint64_t, "u64", "l")
MOECOMM_LOAD(load_relaxed_gpu, "relaxed.gpu", uint64_t, "u64", "l")
#undef MOECOMM_LOAD

#define MOECOMM_STORE(name, order, type, width, letter)                                               \
  __device__ __forceinline__ void name(type* address, type value) {                                   \
    asm volatile("st." order ".global." width " [%0], %1;" ::"l"(address), letter(value) : "memory"); \
  }
/// A thread that acquires `value` sees everything that this thread wrote, or saw written, before. Earlier
/// loads of this thread, or of threads it met at a barrier, do not see what the acquiring thread then writes.
MOECOMM_STORE(store_release_sys, "release.sys", uint32_t, "u32", "r")
MOECOMM_STORE(store_release_sys, "release.sys", uint64_t, "u64", "l")
MOECOMM_STORE(store_release_gpu, "release.gpu", uint64_t, "u64", "l")
/// A relaxed store orders nothing: for use after a fence.
MOECOMM_STORE(store_relaxed_sys, "relaxed.sys", uint64_t, "u64", "l")
#undef MOECOMM_STORE

/// 16 bytes. The functions below store and load them as a whole, and order nothing.
struct Pair {
  uint64_t low, high;
};
__device__ __forceinline__ void store_relaxed_sys_pair(void* address, Pair value) {
  asm volatile(
      "{\n\t.reg .b128 all;\n\tmov.b128 all, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], all;\n\t}" ::"l"(
          address),
      "l"(value.low), "l"(value.high)
      : "memory");
}
__device__ __forceinline__ Pair load_relaxed_sys_pair(const void* address) {
  Pair value;
  asm volatile("{\n\t.reg .b128 all;\n\tld.relaxed.sys.global.b128 all, [%2];\n\tmov.b128 {%0, %1}, all;\n\t}"
               : "=l"(value.low), "=l"(value.high)
               : "l"(address)
               : "memory");
  return value;
}

/// Atomically stores `value` if the word equals `before`, with relaxed order. Returns the word's old value.
__device__ __forceinline__ uint64_t compare_swap_gpu(uint64_t* address, uint64_t before, uint64_t value) {
  uint64_t seen;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(seen)
               : "l"(address), "l"(before), "l"(value)
               : "memory");
  return seen;
}

/// Adds with release and acquire, and returns the old value. The last adder sees what others wrote before.
__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

/// Starts to copy 4 or 8 bytes to shared memory; both addresses are multiples of the size.
template <int bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "n"(bytes)
               : "memory");
}
/// Waits for the copies that this thread has started; this thread alone then sees what was copied.
__device__ __forceinline__ void wait_for_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace moecomm::ptx
