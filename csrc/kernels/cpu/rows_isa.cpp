// The row operations for one instruction set: compiled once for each value of MOECOMM_ISA, with that set's
// compiler flags. Plain loops over small blocks, which the compiler vectorises. Everything here has internal
// linkage, so that the linker can't replace a function by its twin for another instruction set.
#include <cstdint>
#include <cstring>

#include "kernels/cpu/rows.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moecomm::cpu::MOECOMM_ISA {
namespace {

constexpr int64_t kBlock = 1024;  // elements that are summed at a time: their sums stay in the L1 cache
constexpr int kLanes = 64;        // partial sums of a dot product

// ---- element types: stored bits, and conversions to and from the type of sums ----

template <class Float>
struct Native {
  using Bits = Float;
  using Sum = Float;
  static constexpr bool kElementwise = true;  // the compiler vectorises widen() in a loop
  static Sum widen(Bits value) { return value; }
  static void load(Sum* out, const Bits* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = in[i];
  }
  static void store(Bits* out, const Sum* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = in[i];
  }
};
using Float32 = Native<float>;
using Float64 = Native<double>;

template <class To, class From>
To bit_cast(From from) {  // std::bit_cast would have external linkage
  return __builtin_bit_cast(To, from);
}

struct BFloat16 {
  using Bits = uint16_t;
  using Sum = float;
  static constexpr bool kElementwise = true;
  static Sum widen(Bits value) { return bit_cast<float>(uint32_t{value} << 16); }
  static void load(Sum* out, const Bits* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = widen(in[i]);
  }
  static void store(Bits* out, const Sum* in, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = bit_cast<uint32_t>(in[i]);
      const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
      const uint32_t nan = (bits >> 16) | 0x40u;                             // quiet, sign and payload kept
      out[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
  }
};

struct Float16 {
  using Bits = uint16_t;
  using Sum = float;
  static constexpr bool kElementwise = false;  // the conversion instructions need load()
  static float widen(uint16_t half) {
    // Shifts the exponent into place, then corrects it by a product, which normalises subnormals exactly.
    const uint32_t sign = uint32_t{half & 0x8000u} << 16, magnitude = uint32_t{half & 0x7fffu} << 13;
    if (magnitude >= 0x0f800000u) return bit_cast<float>(sign | 0x70000000u | magnitude);    // infinity, NaN
    const float value = bit_cast<float>(magnitude) * bit_cast<float>(uint32_t{0x77800000});  // 2^112
    return bit_cast<float>(sign | bit_cast<uint32_t>(value));
  }
  static uint16_t narrow(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value), sign = (bits >> 16) & 0x8000u,
                   magnitude = bits & 0x7fffffffu;
    uint32_t out;
    if (magnitude > 0x7f800000u) {
      out = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
      out = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded result in the low bits
      out = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
      out = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
    }
    return static_cast<uint16_t>(sign | out);
  }
  static void load(Sum* out, const Bits* in, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    for (; i < n; ++i) out[i] = widen(in[i]);
  }
  static void store(Bits* out, const Sum* in, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) out[i] = narrow(in[i]);
  }
};

// ---- copies ----

void stream_copy(std::byte* dst, const std::byte* src, int64_t bytes) {
#if defined(__x86_64__)
  int64_t i = 0;
  const auto narrow = [&](int64_t end) {
    for (; i + 16 <= end; i += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(dst + i),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
  };
#if defined(__AVX512F__)
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & 63);
  narrow(head < bytes ? head : bytes);
  for (; i + 64 <= bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
#elif defined(__AVX2__)
  const int64_t head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) & 31);
  narrow(head < bytes ? head : bytes);
  for (; i + 32 <= bytes; i += 32)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
#endif
  narrow(bytes);
#else
  std::memcpy(dst, src, static_cast<size_t>(bytes));
#endif
}

void copy(void* dst, const void* src, int64_t bytes, bool stream) {
  if (stream)
    stream_copy(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), bytes);
  else
    std::memcpy(dst, src, static_cast<size_t>(bytes));
}

void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- arithmetic ----

/// total += scale * in; if `first`, total = scale * in. The scale is left out unless `scaled`.
template <class T, bool first, bool scaled>
void accumulate(typename T::Sum* __restrict total, const typename T::Bits* __restrict in,
                typename T::Sum scale, int64_t count) {
  using Sum = typename T::Sum;
  const auto step = [&](int64_t j, Sum value) {
    const Sum term = scaled ? value * scale : value;
    total[j] = first ? term : total[j] + term;
  };
  if constexpr (T::kElementwise) {
    for (int64_t j = 0; j < count; ++j) step(j, T::widen(in[j]));
  } else {
    alignas(64) Sum wide[kBlock];
    T::load(wide, in, count);
    for (int64_t j = 0; j < count; ++j) step(j, wide[j]);
  }
}

template <class T>
void sum(void* dst, const void* const* src, const double* scales, int n, int64_t hidden, bool stream) {
  using Sum = typename T::Sum;
  using Bits = typename T::Bits;
  alignas(64) Sum total[kBlock];
  alignas(64) Bits out[kBlock];
  for (int64_t begin = 0; begin < hidden; begin += kBlock) {
    const int64_t count = hidden - begin < kBlock ? hidden - begin : kBlock;
    for (int i = 0; i < n; ++i) {
      const Bits* const in = static_cast<const Bits*>(src[i]) + begin;
      if (scales != nullptr) {
        const Sum scale = static_cast<Sum>(scales[i]);
        i == 0 ? accumulate<T, true, true>(total, in, scale, count)
               : accumulate<T, false, true>(total, in, scale, count);
      } else {
        i == 0 ? accumulate<T, true, false>(total, in, Sum{1}, count)
               : accumulate<T, false, false>(total, in, Sum{1}, count);
      }
    }
    Bits* const target = static_cast<Bits*>(dst) + begin;
    if (stream) {
      T::store(out, total, count);
      stream_copy(reinterpret_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(out),
                  count * static_cast<int64_t>(sizeof(Bits)));
    } else {
      T::store(target, total, count);
    }
  }
}

template <class T>
void scale(void* dst, const void* src, double scale, int64_t hidden, bool stream) {
  sum<T>(dst, &src, &scale, 1, hidden, stream);
}

template <class T>
double dot(const void* a, const void* b, int64_t hidden) {
  using Sum = typename T::Sum;
  using Bits = typename T::Bits;
  alignas(64) Sum lanes[kLanes] = {};
  for (int64_t begin = 0; begin < hidden; begin += kLanes) {
    const int64_t count = hidden - begin < kLanes ? hidden - begin : kLanes;
    const Bits* const x = static_cast<const Bits*>(a) + begin;
    const Bits* const y = static_cast<const Bits*>(b) + begin;
    if constexpr (T::kElementwise) {
      if (count == kLanes)
        for (int j = 0; j < kLanes; ++j) lanes[j] += T::widen(x[j]) * T::widen(y[j]);
      else
        for (int64_t j = 0; j < count; ++j) lanes[j] += T::widen(x[j]) * T::widen(y[j]);
    } else {
      alignas(64) Sum wide_x[kLanes], wide_y[kLanes];
      T::load(wide_x, x, count);
      T::load(wide_y, y, count);
      for (int64_t j = 0; j < count; ++j) lanes[j] += wide_x[j] * wide_y[j];
    }
  }
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  return static_cast<double>(lanes[0]);
}

template <class T>
constexpr RowVerbs verbs() {
  return {scale<T>, sum<T>, dot<T>};
}

#define MOECOMM_TEXT_(name) #name
#define MOECOMM_TEXT(name) MOECOMM_TEXT_(name)
constexpr RowKernels kKernels = {MOECOMM_TEXT(MOECOMM_ISA),
                                 {verbs<Float32>(), verbs<BFloat16>(), verbs<Float16>(), verbs<Float64>()},
                                 copy,
                                 fence};

}  // namespace

const RowKernels& kernels() { return kKernels; }

}  // namespace moecomm::cpu::MOECOMM_ISA
