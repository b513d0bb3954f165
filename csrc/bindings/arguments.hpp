// Checks of the addresses and sizes that Python passes to the bindings of kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/error.hpp"
#include "runtime/cuda_calls.hpp"

namespace moecomm {

inline void check_between(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw Error(ErrorKind::invalid_argument,
                text_of(name, " is ", value, ", must be from ", least, " to ", most));
}

/// The array at `address`, of elements of `bytes` each; for an absent one address 0 becomes null.
template <class T = std::byte>
T* pointer(const char* name, uintptr_t address, int64_t bytes, bool may_be_absent = false) {
  if (address == 0 && !may_be_absent)
    throw Error(ErrorKind::invalid_argument, std::string(name) + " has no address");
  if (address % static_cast<uintptr_t>(bytes) != 0)
    throw Error(ErrorKind::invalid_argument,
                text_of(name, " is at address ", address, ", must be a multiple of ", bytes));
  return reinterpret_cast<T*>(address);
}

/// Runs `load`, which launches nothing, also while this thread captures a CUDA graph.
template <class Load>
void load_kernels(const char* what, const Load& load) {
  const BesideCaptures beside;
  check_cuda(load(), what);
}

}  // namespace moecomm
