// The CPU part of the Python face.
#pragma once

#include <pybind11/pybind11.h>

namespace moecomm {

/// Adds Plan, HostBuffer, HostPool and Communicator. `interrupt` runs Python's signal handlers.
void bind_cpu(pybind11::module_& m, void (*interrupt)());

}  // namespace moecomm
