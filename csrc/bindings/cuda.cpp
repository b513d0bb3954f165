// The CUDA part of the Python face: addresses, sizes and streams in. moecomm/backends/cuda.py is its only
// caller.
#include "bindings/cuda.hpp"

#include <pybind11/stl.h>

#include "bindings/network.hpp"
#include "runtime/device_communicator.hpp"

namespace py = pybind11;

namespace moecomm {
namespace {

cudaStream_t stream_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

py::dict plan_fields(const DeviceShape& shape) {
  const DevicePlan plan = DevicePlan::make(shape);
  const int64_t local = shape.local_experts();
  py::dict out;
  const auto add = [&](const char* name, int64_t offset, int64_t count) {
    out[name] = py::make_tuple(offset, count);
  };
  add("needed_rows", plan.header + static_cast<int64_t>(offsetof(PlanHeader, needed_rows) / 4), 1);
  add("overflow", plan.header + static_cast<int64_t>(offsetof(PlanHeader, overflow) / 4), 1);
  add("expert_rows", plan.expert_rows, local);
  add("expert_starts", plan.expert_starts, 1 + local);
  add("source_ends", plan.source_ends, shape.ranks);
  add("total", 0, plan.total);
  return out;
}

/// The counters of the device, without the GIL: they are behind whatever else is copied from there.
DeviceCounters counters_of(DeviceCommunicator& self) {
  const py::gil_scoped_release release;
  return self.counters();
}

py::dict stats_dict(DeviceCommunicator& self) {
  const DeviceStats& s = self.stats();
  const DeviceCounters counters = counters_of(self);
  py::dict out;
  out["dispatch_calls"] = s.dispatch_calls;
  out["dispatch_seconds"] = counters.dispatch_seconds;
  out["combine_calls"] = s.combine_calls;
  out["combine_seconds"] = counters.combine_seconds;
  out["wait_seconds"] = counters.wait_seconds;
  out["late_seconds"] = counters.late_seconds;
  out["host_wait_seconds"] = s.host_wait_seconds;
  out["plans_made"] = s.plans_made;
  out["rows_in"] = s.rows_in;
  out["rows_out"] = counters.rows_out;
  out["bytes_wire"] = counters.bytes_wire;
  add_network_stats(out, self.proxy());
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

DeviceDispatch dispatch_of(uintptr_t x, uintptr_t x_scales, uintptr_t ids, bool wide_ids, uintptr_t weights,
                           int64_t tokens, RowLayout layout, int64_t alignment, int64_t capacity,
                           int64_t positions, uint16_t caller, uintptr_t plan) {
  return {pointer(x), pointer(x_scales), pointer<void>(ids), wide_ids,  pointer(weights),       tokens,
          layout,     alignment,         capacity,           positions, pointer<int32_t>(plan), caller};
}

DeviceOutput output_of(uintptr_t out, uintptr_t out_scales, uintptr_t out_weights, uintptr_t out_ids,
                       uintptr_t out_index, uintptr_t out_index_weights) {
  return {pointer(out),
          pointer(out_scales),
          pointer(out_weights),
          pointer<int32_t>(out_ids),
          pointer<int32_t>(out_index),
          pointer(out_index_weights)};
}

void begin_dispatch(DeviceCommunicator& self, uintptr_t x, uintptr_t x_scales, uintptr_t ids, bool wide_ids,
                    uintptr_t weights, int64_t tokens, RowLayout layout, int64_t alignment, int64_t capacity,
                    int64_t positions, uint16_t caller, uintptr_t plan, uintptr_t stream) {
  self.begin_dispatch(dispatch_of(x, x_scales, ids, wide_ids, weights, tokens, layout, alignment, capacity,
                                  positions, caller, plan),
                      stream_of(stream));
}

void finish_dispatch(DeviceCommunicator& self, bool directly, int64_t rows, int64_t positions, uintptr_t out,
                     uintptr_t out_scales, uintptr_t out_weights, uintptr_t out_ids, uintptr_t out_index,
                     uintptr_t out_index_weights, uintptr_t stream) {
  self.finish_dispatch(directly, rows, positions,
                       output_of(out, out_scales, out_weights, out_ids, out_index, out_index_weights),
                       stream_of(stream));
}

}  // namespace

void bind_cuda(py::module_& m, void (*interrupt)()) {
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

  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<DeviceCommunicator> communicator(m, "DeviceCommunicator");
  bind_network<DeviceCommunicator>(communicator, interrupt);
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
      .def("link_control", &DeviceCommunicator::link_control)
      .def("unlink_control", &DeviceCommunicator::unlink_control)
      .def(
          "connect",
          [interrupt](DeviceCommunicator& self, const std::vector<uintptr_t>& bases,
                      const std::vector<std::string>& names, const std::vector<int64_t>& pids) {
            self.connect(bases, names, pids);
            self.set_interrupt(interrupt);
          },
          py::arg("bases"), py::arg("names"), py::arg("pids"), Release())
      // Operations take their arguments by position, which costs the caller a third of what names cost.
      .def("dispatch",
           [](DeviceCommunicator& self, uintptr_t x, uintptr_t x_scales, uintptr_t ids, bool wide_ids,
              uintptr_t weights, int64_t tokens, RowLayout layout, int64_t alignment, int64_t capacity,
              int64_t positions, uint16_t caller, uintptr_t plan, int64_t rows, int64_t out_positions,
              uintptr_t out, uintptr_t out_scales, uintptr_t out_weights, uintptr_t out_ids,
              uintptr_t out_index, uintptr_t out_index_weights, uintptr_t stream) {
             self.dispatch(dispatch_of(x, x_scales, ids, wide_ids, weights, tokens, layout, alignment,
                                       capacity, positions, caller, plan),
                           rows, out_positions,
                           output_of(out, out_scales, out_weights, out_ids, out_index, out_index_weights),
                           stream_of(stream));
           })
      .def("offered_rows",
           [](const DeviceCommunicator& self, int64_t tokens, RowLayout layout, int64_t alignment) {
             const auto [offered, at_once] = self.offered_rows(tokens, layout, alignment);
             return std::make_tuple(offered.rows, offered.positions, at_once);
           })
      .def("accept_rows", &DeviceCommunicator::accept_rows)
      .def("begin_dispatch", &begin_dispatch)
      .def(
          "wait_rows",
          [](DeviceCommunicator& self, uintptr_t stream) { return self.wait_rows(stream_of(stream)); },
          Release())
      .def("finish_dispatch", &finish_dispatch)
      .def_property_readonly("num_sms", &DeviceCommunicator::num_sms)
      .def("fuse_up_to", &DeviceCommunicator::fuse_up_to)
      .def("complete",
           [](DeviceCommunicator& self, uintptr_t stream) { return self.complete(stream_of(stream)); })
      .def("redispatch",
           [](DeviceCommunicator& self, uintptr_t plan, RowLayout layout, uintptr_t x, int64_t tokens,
              int64_t rows, uintptr_t out, uintptr_t scales, uintptr_t other, uintptr_t dots, bool quantised,
              uintptr_t stream) {
             self.redispatch({pointer<int32_t>(plan), layout, pointer(x), tokens, rows, pointer(out),
                              pointer(scales), pointer(other), pointer(dots), quantised},
                             stream_of(stream));
           })
      .def("combine",
           [](DeviceCommunicator& self, uintptr_t plan, RowLayout layout, uintptr_t rows, uintptr_t weights,
              int64_t tokens, uintptr_t y, uintptr_t weight_grads, uintptr_t out_weight_grads, bool quantised,
              bool held, uintptr_t stream) {
             self.combine({pointer(rows), pointer(weights), pointer(weight_grads), pointer(y),
                           pointer(out_weight_grads), pointer<int32_t>(plan), tokens, layout},
                          quantised, held, stream_of(stream));
           })
      .def("splits", &DeviceCommunicator::splits)
      .def(
          "fail",
          [](DeviceCommunicator& self, ErrorKind kind, const std::string& text, uintptr_t stream) {
            self.fail(kind, text, stream_of(stream));
          },
          py::arg("kind"), py::arg("text"), py::arg("stream"))
      .def("check", &DeviceCommunicator::check)
      .def("stop_waiting", &DeviceCommunicator::stop_waiting)
      .def_property_readonly("interrupted", &DeviceCommunicator::interrupted)
      .def("close", &DeviceCommunicator::close, Release())
      .def("stats", &stats_dict)
      .def("phases", &phases_dict)
      .def("reset_stats",
           [](DeviceCommunicator& self) {
             self.stats() = DeviceStats{};
             if (Proxy* const proxy = self.proxy()) proxy->stats().reset();
           })
      .def("__str__", &DeviceCommunicator::heuristics_text);
}

}  // namespace moecomm
