// What the kernels take of CUDA, for the host (simt.hpp). Types and conversions of numbers are the toolkit's.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "simt.hpp"

#undef __shared__
#define __shared__ thread_local  // a block is a thread of the system
#define __noinline__
#define __launch_bounds__(...)

namespace simt {
/// A number that is another one for each thread.
template <auto get>
struct Own {
  operator unsigned() const { return get(Block::now()); }
};
inline constexpr auto of_thread = [](const Block& block) { return block.thread().x; };
inline constexpr auto of_block = [](const Block& block) { return block.index.x; };
inline constexpr auto threads = [](const Block& block) { return block.grid.threads; };
inline constexpr auto blocks = [](const Block& block) { return block.grid.blocks; };
}  // namespace simt

inline constexpr struct {
  simt::Own<simt::of_thread> x;
} threadIdx{};
inline constexpr struct {
  simt::Own<simt::of_block> x;
} blockIdx{};
inline constexpr struct {
  simt::Own<simt::threads> x;
} blockDim{};
inline constexpr struct {
  simt::Own<simt::blocks> x;
} gridDim{};

namespace moecomm::gpu {
namespace {
[[maybe_unused]] alignas(128) thread_local std::byte shared[227 * 1024];  // that which a launch asks for
}
}  // namespace moecomm::gpu

struct CUstream_st : simt::Stream {
  using simt::Stream::Stream;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  const bool beside = std::any_of(config->attrs, config->attrs + config->numAttrs, [](const auto& attribute) {
    return attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization;
  });
  config->stream->launch(
      config->gridDim.x, config->blockDim.x,
      [kernel, all = std::make_tuple(arguments...)] { std::apply(kernel, all); }, beside);
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

using std::max;
using std::min;

// -- warps and blocks

enum SimtKind {
  kShuffle = 1,
  kShuffleUp,
  kShuffleXor,
  kBallot,
  kAll,
  kAny,
  kMatch,
  kMost,
  kAdd,
  kLeast,
  kOr,
  kWarp
};

template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return simt::shuffle(kShuffle, value, from);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  const int lane = static_cast<int>(simt::lane());
  return simt::shuffle(kShuffleUp, value, lane % width < by ? lane : lane - by);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int with) {
  return simt::shuffle(kShuffleXor, value, static_cast<int>(simt::lane()) ^ with);
}
inline unsigned __ballot_sync(unsigned, bool value) { return simt::ballot(kBallot, value); }
inline int __any_sync(unsigned, bool value) { return simt::ballot(kAny, value) != 0; }
inline int __all_sync(unsigned, bool value) { return simt::ballot(kAll, !value) == 0; }
template <class T>
unsigned __match_any_sync(unsigned, T value) {
  uint32_t present, same = 0;
  const auto values = simt::Block::now().meet(kMatch, value, present);
  for (uint32_t i = 0; i < 32; ++i)
    if ((present >> i & 1) != 0 && values[i] == value) same |= 1u << i;
  return same;
}
template <class T>
T __reduce_add_sync(unsigned, T value) {
  return simt::reduce(kAdd, value, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_max_sync(unsigned, T value) {
  return simt::reduce(kMost, value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_min_sync(unsigned, T value) {
  return simt::reduce(kLeast, value, [](T a, T b) { return std::min(a, b); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return simt::reduce(kOr, value, [](unsigned a, unsigned b) { return a | b; });
}
inline void __syncwarp(unsigned = 0xffffffffu) { simt::ballot(kWarp, true); }
inline void __syncthreads() { simt::Block::now().barrier(0, 0, true); }
inline int __syncthreads_and(bool value) { return simt::Block::now().barrier(0, 0, value).all; }
inline int __syncthreads_or(bool value) { return simt::Block::now().barrier(0, 0, value).any; }
inline int64_t clock64() { return simt::Block::now().clock(); }
inline void __nanosleep(unsigned) { simt::Block::now().pause(); }

// -- memory

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcg(T* address, T value) {
  *address = value;
}
template <class T>
T atomicAdd(T* address, T value) {
  return std::atomic_ref<T>(*address).fetch_add(value);
}
template <class T>
T atomicOr(T* address, T value) {
  return std::atomic_ref<T>(*address).fetch_or(value);
}
template <class T>
T atomicCAS(T* address, T before, T value) {
  std::atomic_ref<T>(*address).compare_exchange_strong(before, value);
  return before;
}
template <class T>
T atomicMax(T* address, T value) {
  T seen = std::atomic_ref<T>(*address).load();
  while (seen < value && !std::atomic_ref<T>(*address).compare_exchange_weak(seen, value)) {
  }
  return seen;
}
template <class T>
T atomicMin(T* address, T value) {
  T seen = std::atomic_ref<T>(*address).load();
  while (value < seen && !std::atomic_ref<T>(*address).compare_exchange_weak(seen, value)) {
  }
  return seen;
}

// -- numbers

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
