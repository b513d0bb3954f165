// The CUDA part of the Python bindings.
#pragma once

#include <pybind11/pybind11.h>

namespace moecomm {

/// Binds WireFormat, DeviceShape, DeviceCommunicator and what belongs to them. `interrupt` runs Python's
/// signal handlers.
void bind_cuda(pybind11::module_& m, void (*interrupt)());

/// Binds Activation and the kernels of the experts.
void bind_experts(pybind11::module_& m);

}  // namespace moecomm
