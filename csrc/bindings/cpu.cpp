// The CPU part of the Python face: addresses and sizes in. moecomm/backends/cpu.py is its only caller.
#include "bindings/cpu.hpp"

#include <pybind11/stl.h>

#include "bindings/network.hpp"
#include "runtime/communicator.hpp"
#include "runtime/host_pool.hpp"

namespace py = pybind11;

namespace moecomm {
namespace {

/// Memory that Python sees as a writable buffer; tensors made from it keep it alive.
struct HostBuffer {
  std::shared_ptr<std::byte> memory;
  int64_t bytes;
};

py::dict stats_dict(Communicator& communicator) {
  const Stats& s = communicator.stats();
  py::dict out;
  out["dispatch_calls"] = s.dispatch_calls;
  out["dispatch_seconds"] = s.dispatch_seconds;
  out["combine_calls"] = s.combine_calls;
  out["combine_seconds"] = s.combine_seconds;
  out["wait_seconds"] = s.wait_seconds;
  out["rows_in"] = s.rows_in;
  out["rows_out"] = s.rows_out;
  out["bytes_wire"] = s.bytes_wire;
  out["plans_made"] = s.plans_made;
  out["plans_reused"] = s.plans_reused;
  add_network_stats(out, communicator.proxy());
  return out;
}

}  // namespace

void bind_cpu(py::module_& m, void (*interrupt)()) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def_readonly("id", &Plan::id)
      .def_readonly("rows", &Plan::rows)
      .def_readonly("needed_rows", &Plan::needed_rows)
      .def_readonly("tokens", &Plan::tokens)
      .def_property_readonly("layout", [](const Plan& plan) { return plan.shape.layout; })
      .def_readonly("expert_rows", &Plan::expert_rows)
      .def_readonly("offsets", &Plan::offsets);

  py::class_<HostBuffer>(m, "HostBuffer", py::buffer_protocol())
      .def_buffer([](HostBuffer& buffer) {
        return py::buffer_info(buffer.memory.get(), 1, py::format_descriptor<uint8_t>::format(), 1,
                               {buffer.bytes}, {1});
      })
      .def_readonly("bytes", &HostBuffer::bytes);
  py::class_<HostPool, std::shared_ptr<HostPool>>(m, "HostPool")
      .def(py::init<>())
      .def("take", [](HostPool& pool, int64_t bytes) { return HostBuffer{pool.take(bytes), bytes}; });

  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<Communicator, std::shared_ptr<Communicator>> communicator(m, "Communicator");
  bind_network<Communicator>(communicator, interrupt);
  communicator
      .def(py::init([](const WindowShape& shape, int32_t rank, int64_t num_experts, int32_t threads,
                       double timeout, int32_t host_ranks, uint64_t first_epoch) {
             return std::make_shared<Communicator>(
                 CommunicatorConfig{shape, rank, num_experts, threads, timeout, host_ranks, first_epoch});
           }),
           py::kw_only(), py::arg("shape"), py::arg("rank"), py::arg("num_experts"), py::arg("threads"),
           py::arg("timeout"), py::arg("host_ranks"), py::arg("first_epoch") = 1)
      .def("link_window", &Communicator::link_window)
      .def(
          "connect",
          [interrupt](Communicator& self, const std::vector<std::string>& names,
                      const std::vector<int64_t>& pids) {
            self.connect(names, pids);
            self.set_interrupt(interrupt);
          },
          py::arg("names"), py::arg("pids"), Release())
      .def("unlink_window", &Communicator::unlink_window)
      .def(
          "begin_dispatch",
          [](Communicator& self, uintptr_t x, uintptr_t ids, bool wide_ids, uintptr_t weights, int64_t tokens,
             RowLayout layout, int64_t alignment, int64_t capacity) {
            // Python's Plan is read-only, so the missing const costs nothing.
            return std::const_pointer_cast<Plan>(
                self.begin_dispatch({pointer(x), pointer<void>(ids), wide_ids, pointer(weights), tokens,
                                     layout, alignment, capacity}));
          },
          py::kw_only(), py::arg("x"), py::arg("ids"), py::arg("wide_ids"), py::arg("weights"),
          py::arg("tokens"), py::arg("layout"), py::arg("alignment"), py::arg("capacity"), Release())
      .def(
          "pull",
          [](Communicator& self, uintptr_t out, uintptr_t weights, uintptr_t ids) {
            self.pull(pointer(out), pointer(weights), pointer<int32_t>(ids));
          },
          py::kw_only(), py::arg("out"), py::arg("weights"), py::arg("ids"), Release())
      .def(
          "redispatch",
          [](Communicator& self, const std::shared_ptr<Plan>& plan, uintptr_t rows, uintptr_t out,
             uintptr_t scales, uintptr_t other, uintptr_t dots) {
            self.redispatch(plan, pointer(rows), pointer(out), pointer(scales), pointer(other),
                            pointer(dots));
          },
          py::arg("plan"), py::kw_only(), py::arg("rows"), py::arg("out"), py::arg("scales"),
          py::arg("other"), py::arg("dots"), Release())
      .def(
          "combine",
          [](Communicator& self, const std::shared_ptr<Plan>& plan, uintptr_t rows, uintptr_t weights,
             uintptr_t y, uintptr_t weight_grads, uintptr_t out_weight_grads) {
            self.combine(plan, pointer(rows), pointer(weights), pointer(y), pointer(weight_grads),
                         pointer(out_weight_grads));
          },
          py::arg("plan"), py::kw_only(), py::arg("rows"), py::arg("weights"), py::arg("y"),
          py::arg("weight_grads"), py::arg("out_weight_grads"), Release())
      .def(
          "fail", [](Communicator& self, ErrorKind kind, const std::string& text) { self.fail(kind, text); },
          py::arg("kind"), py::arg("text"), Release())
      .def("check", &Communicator::check)
      .def(
          "take_input",
          [](Communicator& self, int64_t tokens) {
            return HostBuffer{self.take_input(), tokens * self.layout().shape.row_bytes()};
          },
          py::arg("tokens"), Release())
      .def("close", &Communicator::close, Release())
      .def("stats", &stats_dict)
      .def("reset_stats",
           [](Communicator& self) {
             self.stats() = Stats{};
             if (Proxy* const proxy = self.proxy()) proxy->stats().reset();
           })
      .def("__str__", &Communicator::heuristics_text);
}

}  // namespace moecomm
