#include "kernels/cpu/rows.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "kernels/cpu/heuristics.hpp"

namespace moecomm::cpu {

namespace baseline {
const RowKernels& kernels();
}
#if defined(__x86_64__)
namespace x86_64_v3 {
const RowKernels& kernels();
}
namespace x86_64_v4 {
const RowKernels& kernels();
}
#endif

const std::vector<const RowKernels*>& available_row_kernels() {
  static const std::vector<const RowKernels*> available = [] {
    std::vector<const RowKernels*> found = {&baseline::kernels()};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512cd");
    if (v3) found.push_back(&x86_64_v3::kernels());
    if (v4) found.push_back(&x86_64_v4::kernels());
#endif
    return found;
  }();
  return available;
}

const RowKernels& row_kernels() { return *available_row_kernels().back(); }

namespace {

/// Bytes of core 0's last-level cache, read from /sys: on some machines sysconf() adds up all sockets.
int64_t last_level_cache_bytes() {
  for (int index = 4; index >= 1; --index) {
    const auto path = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "r"), std::fclose);
    long long size = 0;
    char unit = 0;
    if (file && std::fscanf(file.get(), "%lld%c", &size, &unit) == 2)
      return size << (unit == 'M' ? 20 : unit == 'K' ? 10 : 0);
  }
  return int64_t{16} << 20;
}

}  // namespace

Heuristics choose_heuristics(int local_ranks) {
  Heuristics chosen;
  chosen.stream_bytes =
      std::max<int64_t>(last_level_cache_bytes() / (2 * std::max(local_ranks, 1)), int64_t{1} << 20);
  chosen.isa = row_kernels().isa;
  return chosen;
}

}  // namespace moecomm::cpu
