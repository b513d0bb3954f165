// The Python face of the runtime: pointers and sizes in, typed exceptions out.
#include <pybind11/pybind11.h>

#include "bindings/cpu.hpp"
#if defined(MOECOMM_CUDA_VERSION)
#include "bindings/cuda.hpp"
#endif
#include "common/error.hpp"
#include "kernels/cpu/heuristics.hpp"
#include "layout/window.hpp"
#include "runtime/rail.hpp"
#include "transport/fabric/library.hpp"
#include "transport/fabric/provider.hpp"
#include "transport/shm/window.hpp"

namespace py = pybind11;
using namespace moecomm;

namespace {

/// Runs Python's signal handlers (Ctrl-C) from within a wait; only the main thread has any to run.
void run_signal_handlers() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void set_python_error(const Error& error) {
  // A handler that is due must not run inside the import below: its exception would replace the typed error.
  if (PyErr_CheckSignals() != 0) return;
  const ErrorDetails& d = error.details();
  const py::object raised =
      py::module_::import("moecomm.errors")
          .attr("from_native")(static_cast<uint32_t>(error.kind()), error.what(), d.rank, d.peer, d.phase,
                               d.expected, d.seen, d.needed, d.available);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "moecomm's C++ runtime";
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const Error& error) {
      set_python_error(error);
    }
  });
#if defined(MOECOMM_CUDA_VERSION)
  m.attr("cuda_version") = MOECOMM_CUDA_VERSION;
#else
  m.attr("cuda_version") = py::none();
#endif
  m.attr("compiler") = __VERSION__;
  m.def(
      "cpu_heuristics", [](int ranks) { return cpu::choose_heuristics(ranks).text(); },
      py::arg("local_ranks"));
  m.def("shm_available_bytes", &shm::available_bytes);
  m.def("fabric_missing", []() -> py::object {
    try {
      fabric::library();
      return py::none();
    } catch (const Error& error) {
      return py::str(error.what());
    }
  });
  m.def("fabric_version", [] { return fabric::library().version_text(); });
  m.def("fabric_offers", [] {
    py::list out;
    for (const fabric::Offer& offer : fabric::list_offers())
      out.append(py::make_tuple(offer.provider, offer.domain, offer.address, offer.max_message,
                                offer.device_memory));
    return out;
  });

  py::enum_<DType>(m, "DType")
      .value("float32", DType::float32)
      .value("bfloat16", DType::bfloat16)
      .value("float16", DType::float16)
      .value("float64", DType::float64);
  py::enum_<RowLayout>(m, "RowLayout").value("expert", RowLayout::expert).value("rank", RowLayout::rank);
  py::enum_<ErrorKind>(m, "ErrorKind")
      .value("invalid_argument", ErrorKind::invalid_argument)
      .value("invalid_routing", ErrorKind::invalid_routing)
      .value("mismatched_arguments", ErrorKind::mismatched_arguments)
      .value("capacity_exceeded", ErrorKind::capacity_exceeded)
      .value("closed", ErrorKind::closed)
      .value("out_of_memory", ErrorKind::out_of_memory)
      .value("peer_timeout", ErrorKind::peer_timeout)
      .value("peer_lost", ErrorKind::peer_lost)
      .value("unsupported", ErrorKind::unsupported);

  py::class_<WindowShape>(m, "WindowShape")
      .def(py::init([](int32_t ranks, int32_t top_k, int64_t hidden, int64_t max_tokens, DType dtype,
                       int32_t ranks_per_node) {
             return WindowShape{ranks, top_k, hidden, max_tokens, dtype, ranks_per_node};
           }),
           py::kw_only(), py::arg("ranks"), py::arg("top_k"), py::arg("hidden"), py::arg("max_tokens"),
           py::arg("dtype"), py::arg("ranks_per_node"));
  m.def("window_sections", [](const WindowShape& shape) {
    py::list out;
    for (const Section& section : window_sections(shape))
      out.append(py::make_tuple(section.name, section.offset, section.bytes));
    return out;
  });
  m.def("window_bytes", [](const WindowShape& shape) {
    const WindowLayout layout = WindowLayout::make(shape);
    return py::make_tuple(layout.total_bytes, layout.committed_bytes);
  });

  py::class_<Rail>(m, "Rail")
      .def_property_readonly("endpoint_address",
                             [](const Rail& self) {
                               const auto endpoint_address = self.endpoint_address();
                               return py::bytes(reinterpret_cast<const char*>(endpoint_address.data()),
                                                endpoint_address.size());
                             })
      .def_property_readonly("endpoint", &Rail::endpoint);

  bind_cpu(m, run_signal_handlers);
#if defined(MOECOMM_CUDA_VERSION)
  bind_cuda(m, run_signal_handlers);
  bind_experts(m);
  bind_pool(m);
#endif
}
