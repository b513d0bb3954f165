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
/// No order: for polling host memory, and values that only this device writes.
MOECOMM_LOAD(load_relaxed_sys, "relaxed.sys", uint32_t, "u32", "r")
MOECOMM_LOAD(load_relaxed_sys, "relaxed.sys", uint64_t, "u64", "l")
MOECOMM_LOAD(load_relaxed_gpu, "relaxed.gpu", uint64_t, "u64", "l")
#undef MOECOMM_LOAD

#define MOECOMM_STORE(name, order, type, width, letter)                                               \
  __device__ __forceinline__ void name(type* address, type value) {                                   \
    asm volatile("st." order ".global." width " [%0], %1;" ::"l"(address), letter(value) : "memory"); \
  }
/// Everything this thread wrote, or saw written, before is visible to whoever acquires `value`; and what that
/// one writes afterwards is not seen by loads that this thread, or threads it has met at a barrier, did
/// before.
MOECOMM_STORE(store_release_sys, "release.sys", uint32_t, "u32", "r")
MOECOMM_STORE(store_release_sys, "release.sys", uint64_t, "u64", "l")
MOECOMM_STORE(store_release_gpu, "release.gpu", uint64_t, "u64", "l")
/// No order: behind a fence.
MOECOMM_STORE(store_relaxed_sys, "relaxed.sys", uint64_t, "u64", "l")
#undef MOECOMM_STORE

/// 16 bytes that are stored, and loaded, whole. No order.
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

/// Puts `value` where `before` was, without order; returns what was there.
__device__ __forceinline__ uint64_t compare_swap_gpu(uint64_t* address, uint64_t before, uint64_t value) {
  uint64_t seen;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(seen)
               : "l"(address), "l"(before), "l"(value)
               : "memory");
  return seen;
}

/// Adds with release and acquire: the last of several arrivals sees what all the others wrote.
__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

/// Starts to copy 4 or 8 bytes, whose addresses are multiples of that, to shared memory.
template <int bytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "n"(bytes)
               : "memory");
}
/// What this thread has started to copy is there, for itself.
__device__ __forceinline__ void wait_for_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void fence_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

}  // namespace moecomm::ptx
