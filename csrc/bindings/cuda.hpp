// The parts of the Python module moecomm._C that only builds with CUDA have.
#pragma once

#include <pybind11/pybind11.h>

namespace moecomm {

/// Binds WireFormat, DeviceShape, DeviceCommunicator and what belongs to them. `interrupt` runs Python's
/// signal handlers.
void bind_cuda(pybind11::module_& m, void (*interrupt)());

/// Binds the kernels of the experts and of the router, with their enumerations.
void bind_experts(pybind11::module_& m);

}  // namespace moecomm
