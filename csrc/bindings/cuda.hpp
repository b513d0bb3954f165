// The CUDA part of the Python face.
#pragma once

#include <pybind11/pybind11.h>

namespace moecomm {

/// Adds WireFormat, DeviceShape, DeviceCommunicator and what goes with them. `interrupt` runs Python's signal
/// handlers.
void bind_cuda(pybind11::module_& m, void (*interrupt)());

/// Adds Activation and the kernels of the experts.
void bind_experts(pybind11::module_& m);

}  // namespace moecomm
