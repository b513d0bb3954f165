// The module moecomm._C: binds the CPU communicator, its memory, enumerations and facts about the build.
// Calls take pointers and sizes, and throw typed exceptions. Callers: moecomm/backends/cpu.py, moecomm/setup.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "bindings/communicators.hpp"
#include "kernels/cpu/heuristics.hpp"
#include "runtime/communicator.hpp"
#include "runtime/host_pool.hpp"
#include "transport/fabric/network.hpp"

namespace py = pybind11;
using namespace moecomm;

#if defined(MOECOMM_CUDA_VERSION)
namespace moecomm {
void bind_cuda(py::module_& m, void (*interrupt)());
void bind_experts(py::module_& m);
}  // namespace moecomm
#endif

namespace {

/// Memory that Python sees as a writable buffer. Tensors made from the buffer keep the memory alive.
struct HostBuffer {
  std::shared_ptr<std::byte> memory;
  int64_t bytes;
};

/// Runs Python's signal handlers (Ctrl-C) from within a wait. Python runs them on the main thread only.
void run_signal_handlers() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void set_python_error(const Error& error) {
  // A due signal handler must not run inside the import below: its exception would replace the typed error.
  if (PyErr_CheckSignals() != 0) return;
  const ErrorDetails& d = error.details();
  const auto text = py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(error.what(), static_cast<Py_ssize_t>(std::strlen(error.what())), "replace"));
  const py::object raised =
      py::module_::import("moecomm.errors")
          .attr("from_native")(static_cast<uint32_t>(error.kind()), text, d.rank, d.peer, d.phase, d.expected,
                               d.seen, d.needed, d.available);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
}

/// Binds facts: CUDA version and compiler of this build, CPU heuristics, free shared memory, libfabric.
void bind_facts(py::module_& m) {
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
      fabric::installed_version();
      return py::none();
    } catch (const Error& error) {
      return py::str(error.what());
    }
  });
  m.def("fabric_version", &fabric::installed_version);
  m.def("fabric_offers", &fabric::offers_text);
}

void bind_enumerations(py::module_& m) {
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
}

/// Binds the shape and sizes of a window, plans, and pooled memory for output rows.
void bind_memory(py::module_& m) {
  py::class_<WindowShape>(m, "WindowShape")
      .def(py::init<int32_t, int32_t, int64_t, int64_t, DType, int32_t>(), py::kw_only(), py::arg("ranks"),
           py::arg("top_k"), py::arg("hidden"), py::arg("max_tokens"), py::arg("dtype"),
           py::arg("ranks_per_node"));
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

  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def_readonly("rows", &Plan::rows)
      .def_readonly("needed_rows", &Plan::needed_rows)
      .def_readonly("tokens", &Plan::tokens)
      .def_readonly("expert_rows", &Plan::expert_rows)
      .def_readonly("offsets", &Plan::offsets)
      .def_property_readonly("by_expert",
                             [](const Plan& plan) { return std::const_pointer_cast<Plan>(plan.by_expert); });

  py::class_<HostBuffer>(m, "HostBuffer", py::buffer_protocol()).def_buffer([](HostBuffer& buffer) {
    return py::buffer_info(buffer.memory.get(), 1, py::format_descriptor<uint8_t>::format(), 1,
                           {buffer.bytes}, {1});
  });
  py::class_<HostPool, std::shared_ptr<HostPool>>(m, "HostPool")
      .def(py::init<>())
      .def("take", [](HostPool& pool, int64_t bytes) { return HostBuffer{pool.take(bytes), bytes}; });
}

void bind_communicator(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Rail>(m, "Rail")
      .def_property_readonly("endpoint_addresses",
                             [](const Rail& self) {
                               const auto lanes = self.endpoint_addresses();
                               return std::vector<py::bytes>(lanes.begin(), lanes.end());
                             })
      .def_property_readonly("endpoint", &Rail::endpoint);

  py::class_<Communicator, std::shared_ptr<Communicator>> communicator(m, "Communicator");
  bind_common<Communicator>(communicator, run_signal_handlers);
  communicator
      .def(py::init([](const WindowShape& shape, int32_t rank, int64_t num_experts, int32_t threads,
                       double timeout, int32_t host_ranks, uint64_t first_epoch, double absence) {
             return std::make_shared<Communicator>(CommunicatorConfig{
                 shape, rank, num_experts, threads, timeout, host_ranks, first_epoch, absence});
           }),
           py::kw_only(), py::arg("shape"), py::arg("rank"), py::arg("num_experts"), py::arg("threads"),
           py::arg("timeout"), py::arg("host_ranks"), py::arg("first_epoch") = 1, py::arg("absence") = 0.0)
      .def(
          "connect",
          [](Communicator& self, const std::vector<std::string>& names, const std::vector<int64_t>& pids) {
            self.connect(names, pids);
            self.set_interrupt(run_signal_handlers);
          },
          py::arg("names"), py::arg("pids"), Release())
      .def(
          "begin_dispatch",
          [](Communicator& self, Address x, Address ids, bool wide_ids, Address weights, int64_t tokens,
             RowLayout layout, int64_t alignment, int64_t capacity, int64_t positions, uint16_t caller) {
            // Python's Plan is read-only, so casting const away is safe.
            return std::const_pointer_cast<Plan>(self.begin_dispatch(
                {x, ids, wide_ids, weights, tokens, layout, alignment, capacity, positions, caller}));
          },
          py::kw_only(), py::arg("x"), py::arg("ids"), py::arg("wide_ids"), py::arg("weights"),
          py::arg("tokens"), py::arg("layout"), py::arg("alignment"), py::arg("capacity"),
          py::arg("positions"), py::arg("caller"), Release())
      .def("pull", by_address(&Communicator::pull), Release())
      .def("redispatch", by_address(&Communicator::redispatch), Release())
      .def("combine", by_address(&Communicator::combine), Release())
      .def("fail", &Communicator::fail, py::arg("kind"), py::arg("text"), Release())
      .def(
          "take_input",
          [](Communicator& self, int64_t tokens) {
            return HostBuffer{self.take_input(), tokens * self.layout().shape.row_bytes()};
          },
          py::arg("tokens"), Release())
      .def("give_up", &Communicator::give_up)
      .def("stats", [](Communicator& self) {
        const Stats& stats = self.stats();
        py::dict out = stats_dict(stats, stats, self.late_seconds(), self.proxy());
        out["bytes_staged"] = stats.bytes_staged;
        out["plans_reused"] = stats.plans_reused;
        return out;
      });
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
  bind_facts(m);
  bind_enumerations(m);
  bind_memory(m);
  bind_communicator(m);
#if defined(MOECOMM_CUDA_VERSION)
  bind_cuda(m, run_signal_handlers);
  bind_experts(m);
#endif
}
