// Calls of the CUDA runtime from the host: errors as exceptions, the current device, and calls during a
// capture.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "common/error.hpp"

namespace moecomm {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears errors that are not sticky, so that no later call reports them
  const ErrorKind kind =
      error == cudaErrorMemoryAllocation ? ErrorKind::out_of_memory : ErrorKind::unsupported;
  throw Error(kind,
              std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

/// Returns the unique id of the capture that records `stream`; 0 if none does, or if the capture has failed.
inline uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id);
  if (error == cudaErrorStreamCaptureImplicit) {  // the default stream, during a capture of another stream
    static_cast<void>(cudaGetLastError());        // otherwise the next query would report this error
    return 0;
  }
  check_cuda(error, "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

/// Makes a device current during its lifetime.
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

/// During its lifetime this thread may call the driver while another thread captures a graph. The calls
/// do not become part of the graph.
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
