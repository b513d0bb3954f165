// Heuristics of the CPU kernels: every choice that affects speed and not results, in one printable place.
#pragma once

#include <cstdint>
#include <string>

#include "common/error.hpp"

namespace moecomm::cpu {

struct Heuristics {
  /// Outputs of at least this many bytes are written past the caches: otherwise they would evict data that is
  /// still needed, and an ordinary store first reads the cache line that it overwrites. Chosen as half of a
  /// rank's share of the last-level cache, at least 1 MiB.
  int64_t stream_bytes;
  /// Work that moves fewer bytes stays on one thread: to wake the others would take longer than they save.
  int64_t parallel_bytes = int64_t{1} << 20;
  std::string isa;  ///< instruction set of the row kernels

  bool parallel(int64_t bytes) const { return bytes >= parallel_bytes; }
  bool stream(int64_t output_bytes) const { return output_bytes >= stream_bytes; }
  std::string text() const {
    return text_of("row kernels ", isa, ", outputs of ", stream_bytes,
                   " bytes and more bypass the caches, of ", parallel_bytes, " and more use all threads");
  }
};

Heuristics choose_heuristics(int local_ranks);

}  // namespace moecomm::cpu
