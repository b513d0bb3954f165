// The pinned host memory through which a DeviceCommunicator's kernels and the host exchange messages.
#pragma once

#include <atomic>
#include <cstring>

#include "layout/host_status.hpp"
#include "layout/routing.hpp"
#include "runtime/cuda_calls.hpp"
#include "runtime/device_communicator.hpp"

namespace moecomm {

inline constexpr uint32_t kTexts = 8;  ///< error texts that kernels may still be announcing at once

template <class T>
T load_acquire(const T& value) {
  return std::atomic_ref<T>(const_cast<T&>(value)).load(std::memory_order_acquire);
}

template <class T>
void store_release(T& value, T to) {
  std::atomic_ref<T>(value).store(to, std::memory_order_release);
}

struct DeviceCommunicator::Pinned {
  Pinned(int32_t ranks, int32_t local_experts) {
    const auto counts = static_cast<size_t>(align_up(int64_t{local_experts} * 4, kLine));
    const size_t bytes =
        sizeof(HostStatus) + counts + static_cast<size_t>(ranks) * sizeof(PeerLoss) + kTexts * kErrorText;
    void* memory = nullptr;
    check_cuda(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
    std::memset(memory, 0, bytes);
    status = static_cast<HostStatus*>(memory);
    losses = reinterpret_cast<PeerLoss*>(reinterpret_cast<std::byte*>(status + 1) + counts);
    texts = reinterpret_cast<char*>(losses + ranks);
  }
  ~Pinned() { cudaFreeHost(status); }
  HostStatus* status;
  PeerLoss* losses;
  char* texts;
};

}  // namespace moecomm
