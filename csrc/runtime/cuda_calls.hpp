// Calls of the CUDA runtime by the host: errors as exceptions, the current device, and calls beside a
// capture.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/error.hpp"

namespace moecomm {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // what is not sticky is reported here and not again elsewhere
  const ErrorKind kind =
      error == cudaErrorMemoryAllocation ? ErrorKind::out_of_memory : ErrorKind::unsupported;
  throw Error(kind,
              std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

/// Makes a device current for as long as it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// Lets this thread call the driver while another one captures a graph: what is called has nothing to do with
/// it.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace moecomm
