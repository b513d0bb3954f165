// Python bindings of the GPU communicator: they take addresses, sizes and streams. Their callers are
// moecomm/backends and moecomm/setup.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/communicators.hpp"
#include "runtime/device_communicator.hpp"

namespace py = pybind11;

namespace moecomm {
namespace {

/// Returns the fields of PlanFields (moecomm/backends/base.py).
py::dict plan_fields(const DeviceShape& shape) {
  const DevicePlan plan = DevicePlan::make(shape);
  const auto slice = [](int64_t first, int64_t count) { return py::slice(first, first + count, 1); };
  py::dict out;
  out["words"] = plan.total;
  out["overflow"] = plan.header + static_cast<int64_t>(offsetof(PlanHeader, overflow) / 4);
  out["expert_rows"] = slice(plan.expert_rows, shape.local_experts());
  out["expert_starts"] = slice(plan.expert_starts, 1 + shape.local_experts());
  out["source_ends"] = slice(plan.source_ends, shape.ranks);
  return out;
}

/// Reads the device's counters without the GIL, since the copy waits for earlier copies on its stream.
DeviceCounters counters_of(DeviceCommunicator& self) {
  const py::gil_scoped_release release;
  return self.counters();
}

py::dict stats_of(DeviceCommunicator& self) {
  const DeviceStats& stats = self.stats();
  const DeviceCounters counters = counters_of(self);
  py::dict out = stats_dict(stats, counters, counters.late_seconds, self.proxy());
  out["host_wait_seconds"] = stats.host_wait_seconds;
  return out;
}

py::dict phases_dict(DeviceCommunicator& self) {
  const DeviceCounters counters = counters_of(self);
  py::dict out;
  for (const Operation operation : {Operation::dispatch, Operation::combine}) {
    py::dict passed;
    for (int phase = 0; phase < kPhases; ++phase)
      if (const std::optional<double> seconds = counters.phases[clock_of(operation)][phase])
        passed[kPhaseNames[phase]] = *seconds;
    out[operation_name(operation)] = passed;
  }
  return out;
}

void bind_shapes(py::module_& m) {
  py::enum_<WireFormat> formats(m, "WireFormat");
  for (const WireFormat wire : kWireFormats) formats.value(wire_entry(wire).name, wire);
  py::class_<DeviceShape>(m, "DeviceShape")
      .def(py::init([](int32_t ranks, int64_t num_experts, int32_t top_k, int64_t hidden, int64_t max_tokens,
                       DType dtype, WireFormat wire, int32_t ranks_per_node, int32_t whole_sources) {
             const DeviceShape shape{ranks, top_k, num_experts,    hidden,       max_tokens,
                                     dtype, wire,  ranks_per_node, whole_sources};
             check_shape(shape);
             return shape;
           }),
           py::kw_only(), py::arg("ranks"), py::arg("num_experts"), py::arg("top_k"), py::arg("hidden"),
           py::arg("max_tokens"), py::arg("dtype"), py::arg("wire"), py::arg("ranks_per_node"),
           py::arg("whole_sources") = kWholeSources);
  m.def("device_host_bytes", [](const DeviceShape& shape) {
    return shape.other_nodes() == 0 ? 0 : WindowLayout::make(host_window_shape(shape)).committed_bytes;
  });
  m.def("device_window_sections", [](const DeviceShape& shape) {
    py::list out;
    for (const Section& section : device_window_sections(shape))
      out.append(py::make_tuple(section.name, section.offset, section.bytes));
    return out;
  });
  m.def("device_window_bytes",
        [](const DeviceShape& shape) { return DeviceWindow::make(shape).total_bytes; });
  m.def("device_plan_fields", &plan_fields);
}

}  // namespace

/// Binds WireFormat, DeviceShape, DeviceCommunicator and what belongs to them. `interrupt` runs Python's
/// signal handlers.
void bind_cuda(py::module_& m, void (*interrupt)()) {
  bind_shapes(m);
  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<DeviceCommunicator> communicator(m, "DeviceCommunicator");
  bind_common<DeviceCommunicator>(communicator, interrupt);
  communicator
      .def(py::init([](const DeviceShape& shape, int32_t rank, double timeout, int32_t num_sms,
                       int32_t device, int32_t host_ranks, uint64_t first_epoch, WireFormat sums,
                       WireFormat gradients, double absence) {
             return std::make_unique<DeviceCommunicator>(DeviceConfig{
                 shape, rank, timeout, num_sms, device, host_ranks, first_epoch, sums, gradients, absence});
           }),
           py::kw_only(), py::arg("shape"), py::arg("rank"), py::arg("timeout"), py::arg("num_sms"),
           py::arg("device"), py::arg("host_ranks"), py::arg("first_epoch") = 1,
           py::arg("sums") = WireFormat::same, py::arg("gradients") = WireFormat::same,
           py::arg("absence") = 0.0)
      .def(
          "connect",
          [interrupt](DeviceCommunicator& self, const std::vector<uintptr_t>& bases,
                      const std::vector<std::string>& names, const std::vector<int64_t>& pids) {
            self.connect(bases, names, pids);
            self.set_interrupt(interrupt);
          },
          py::arg("bases"), py::arg("names"), py::arg("pids"), Release())
      // Operations take their arguments by position: keywords would take the caller three times as long.
      .def("dispatch",
           [](DeviceCommunicator& self, Address x, Address x_scales, Address ids, bool wide_ids,
              Address weights, int64_t tokens, RowLayout layout, int64_t alignment, int64_t capacity,
              int64_t positions, uint16_t caller, Address plan, int64_t rows, int64_t out_positions,
              Address out, Address out_scales, Address out_weights, Address out_ids, Address out_index,
              Address out_index_weights, Address stream) {
             self.dispatch(
                 {Operation::dispatch, x, x_scales, ids, wide_ids, weights, plan, tokens, alignment, capacity,
                  positions, layout, caller},
                 {rows, out_positions, out, out_scales, out_weights, out_ids, out_index, out_index_weights},
                 stream);
           })
      .def("offered_rows",
           [](const DeviceCommunicator& self, int64_t tokens, RowLayout layout, int64_t alignment) {
             const auto [offered, at_once] = self.offered_rows(tokens, layout, alignment);
             return std::make_tuple(offered.rows, offered.positions, at_once);
           })
      .def("accept_rows", &DeviceCommunicator::accept_rows)
      .def("begin_dispatch",
           [](DeviceCommunicator& self, Address x, Address x_scales, Address ids, bool wide_ids,
              Address weights, int64_t tokens, RowLayout layout, int64_t alignment, int64_t capacity,
              int64_t positions, uint16_t caller, Address plan, Address stream) {
             self.begin_dispatch({Operation::dispatch, x, x_scales, ids, wide_ids, weights, plan, tokens,
                                  alignment, capacity, positions, layout, caller},
                                 stream);
           })
      .def("wait_rows", by_address(&DeviceCommunicator::wait_rows), Release())
      .def("host_counts", &DeviceCommunicator::host_counts)
      .def("finish_dispatch",
           [](DeviceCommunicator& self, bool directly, int64_t rows, int64_t positions, Address out,
              Address out_scales, Address out_weights, Address out_ids, Address out_index,
              Address out_index_weights, Address stream) {
             self.finish_dispatch(
                 directly,
                 {rows, positions, out, out_scales, out_weights, out_ids, out_index, out_index_weights},
                 stream);
           })
      .def_property_readonly("num_sms", &DeviceCommunicator::num_sms)
      .def("fuse_up_to", &DeviceCommunicator::fuse_up_to)
      .def_property_readonly("weighs_tokens", &DeviceCommunicator::weighs_tokens)
      .def("log_launches", &DeviceCommunicator::log_launches)
      .def("complete", by_address(&DeviceCommunicator::complete))
      .def("redispatch",
           [](DeviceCommunicator& self, Address plan, RowLayout layout, Address x, int64_t tokens,
              int64_t rows, Address out, Address scales, Address other, Address dots, bool quantised,
              Address stream) {
             self.redispatch({.operation = Operation::redispatch,
                              .x = x,
                              .plan = plan,
                              .tokens = tokens,
                              .layout = layout},
                             {.rows = rows, .out = out, .scales = scales, .other = other, .dots = dots},
                             quantised, stream);
           })
      .def("combine",
           [](DeviceCommunicator& self, Address plan, RowLayout layout, Address rows, Address weights,
              Address token_weights, int64_t tokens, Address y, Address weight_grads,
              Address out_weight_grads, bool quantised, bool held, Address stream) {
             gpu::CombineArguments arguments{rows, weights, weight_grads, y, out_weight_grads,
                                             plan, tokens,  layout};
             arguments.token_weights = token_weights;
             self.combine(arguments, quantised, held, stream);
           })
      .def("splits", &DeviceCommunicator::splits)
      .def("fail", by_address(&DeviceCommunicator::fail), py::arg("kind"), py::arg("text"), py::arg("stream"))
      .def("stop_waiting", &DeviceCommunicator::stop_waiting)
      .def_property_readonly("interrupted", &DeviceCommunicator::interrupted)
      .def("stats", &stats_of)
      .def("phases", &phases_dict);
}

}  // namespace moecomm
