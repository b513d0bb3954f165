// Row verbs: every instruction set gives the bits of the plainest loop; conversions are right for every
// 16-bit value.
#include <cmath>
#include <cstring>
#include <vector>

#include "check.hpp"
#include "kernels/cpu/rows.hpp"

using namespace moecomm;
using cpu::RowKernels;

namespace {

constexpr auto kF32 = static_cast<int>(DType::float32), kBf16 = static_cast<int>(DType::bfloat16),
               kF16 = static_cast<int>(DType::float16), kF64 = static_cast<int>(DType::float64);

float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                               : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25));
}

float bfloat_value(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

/// The representable value nearest to `exact`, ties to the even one, by search among all finite ones.
template <class Value>
void test_conversion(const RowKernels& kernels, int dtype, const Value& value_of) {
  std::vector<uint16_t> all(65536), out(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  kernels.verbs[dtype].scale(out.data(), all.data(), 1.0, 65536, false);
  for (size_t i = 0; i < all.size(); ++i) {
    if (std::isnan(value_of(all[i])))
      CHECK(std::isnan(value_of(out[i])));
    else
      CHECK(out[i] == all[i]);
  }
  // Halfway and just off halfway between neighbours, made by a sum of two rows.
  for (uint32_t i = 0; i + 8 <= 0x7b00; i += 8) {
    uint16_t low[8], other[8], sum[8];
    const void* rows[2] = {low, other};
    for (uint32_t j = 0; j < 8; ++j) {
      low[j] = static_cast<uint16_t>(i + j);
      other[j] = static_cast<uint16_t>(i + j + 1);
    }
    const double halves[2] = {0.5, 0.5};
    kernels.verbs[dtype].sum(sum, rows, halves, 2, 8, false);
    for (uint32_t j = 0; j < 8; ++j) {
      const double exact = 0.5 * value_of(low[j]) + 0.5 * value_of(other[j]);
      if (static_cast<double>(static_cast<float>(0.5f * value_of(low[j])) +
                              static_cast<float>(0.5f * value_of(other[j]))) != exact)
        continue;  // rounded in float32 already
      const uint16_t even = low[j] % 2 == 0 ? low[j] : other[j];
      CHECK(sum[j] == even);
    }
  }
}

template <class Float>
void test_native(const RowKernels& kernels, int dtype, std::mt19937_64& random) {
  std::normal_distribution<Float> normal;
  for (const int64_t hidden : {4, 16, 100, 1024, 1028, 2880})
    for (const int n : {1, 2, 5}) {
      std::vector<std::vector<Float>> rows(n, std::vector<Float>(hidden));
      std::vector<const void*> sources;
      std::vector<double> scales;
      for (auto& row : rows) {
        for (Float& value : row) value = normal(random);
        sources.push_back(row.data());
        scales.push_back(normal(random));
      }
      for (const bool scaled : {false, true})
        for (const bool stream : {false, true}) {
          std::vector<Float> out(hidden + 4, Float{7});
          Float* aligned = out.data();
          while (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) ++aligned;
          kernels.verbs[dtype].sum(aligned, sources.data(), scaled ? scales.data() : nullptr, n, hidden,
                                   stream);
          kernels.fence();
          bool same = true;
          for (int64_t j = 0; j < hidden; ++j) {
            volatile Float total = scaled ? static_cast<Float>(scales[0]) * rows[0][j] : rows[0][j];
            for (int i = 1; i < n; ++i) {
              volatile Float term = scaled ? static_cast<Float>(scales[i]) * rows[i][j] : rows[i][j];
              total = total + term;
            }
            same = same && total == aligned[j];
          }
          CHECK(same);
        }
    }
}

void test_copies(const RowKernels& kernels) {
  std::vector<unsigned char> from(4096 + 64), to(4096 + 64);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 37 + 11);
  unsigned char* base = to.data();
  while (reinterpret_cast<uintptr_t>(base) % 64 != 0) ++base;
  for (const int64_t bytes : {16, 48, 64, 112, 2880})
    for (int64_t shift = 0; shift < 64; shift += 16)
      for (const bool stream : {false, true}) {
        std::memset(to.data(), 0, to.size());
        if (base + shift + bytes >= to.data() + to.size()) continue;
        kernels.copy(base + shift, from.data() + 1, bytes, stream);
        kernels.fence();
        CHECK(std::memcmp(base + shift, from.data() + 1, static_cast<size_t>(bytes)) == 0);
        CHECK(base[shift + bytes] == 0 && (shift == 0 || base[shift - 1] == 0));
      }
}

TEST(every_instruction_set) {
  std::mt19937_64 random(test::seed());
  for (const RowKernels* kernels : cpu::available_row_kernels()) {
    std::printf("instruction set %s\n", kernels->isa);
    test_conversion(*kernels, kF16, half_value);
    test_conversion(*kernels, kBf16, bfloat_value);
    test_native<float>(*kernels, kF32, random);
    test_native<double>(*kernels, kF64, random);
    test_copies(*kernels);
  }
}

TEST(same_bits) {
  std::mt19937_64 random(test::seed());
  const RowKernels& plain = *cpu::available_row_kernels().front();
  std::normal_distribution<double> normal;
  for (const int64_t hidden : {8, 104, 2880}) {
    std::vector<std::byte> a(hidden * 8), b(hidden * 8);
    for (int dtype = 0; dtype < kDTypes; ++dtype) {
      for (auto* row : {&a, &b})
        for (int64_t i = 0; i < hidden; ++i) {
          const double value = normal(random);
          if (dtype == kF64) reinterpret_cast<double*>(row->data())[i] = value;
          if (dtype == kF32) reinterpret_cast<float*>(row->data())[i] = static_cast<float>(value);
          if (dtype == kBf16 || dtype == kF16)  // finite bit patterns of either format
            reinterpret_cast<uint16_t*>(row->data())[i] = static_cast<uint16_t>(random() & 0xbbff);
        }
      const void* rows[2] = {a.data(), b.data()};
      const double scales[2] = {0.3, -1.7};
      std::vector<std::byte> expected(hidden * 8), out(hidden * 8);
      plain.verbs[dtype].sum(expected.data(), rows, scales, 2, hidden, false);
      const double dot = plain.verbs[dtype].dot(a.data(), b.data(), hidden);
      for (const RowKernels* kernels : cpu::available_row_kernels()) {
        kernels->verbs[dtype].sum(out.data(), rows, scales, 2, hidden, false);
        CHECK(out == expected);
        CHECK(kernels->verbs[dtype].dot(a.data(), b.data(), hidden) == dot);
      }
    }
  }
}

}  // namespace

int main() { return moecomm::test::run(); }
