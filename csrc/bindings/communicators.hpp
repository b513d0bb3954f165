// Shared by the bindings of CPU and GPU communicators: addresses, connections to other nodes, statistics.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/proxy.hpp"
#include "runtime/rail.hpp"

namespace moecomm {

/// A pointer that Python passes as a number.
struct Address {
  uintptr_t value;
  template <class T>
  operator T*() const {
    return reinterpret_cast<T*>(value);
  }
};

/// The type that a bound function takes for a C++ parameter of type T: Address for a pointer, else T.
template <class T>
using Given = std::conditional_t<std::is_pointer_v<T>, Address, T>;

/// Returns a function to bind: it calls the method, and takes a number (Address) for each pointer.
template <class Class, class Result, class... Parameters>
auto by_address(Result (Class::*method)(Parameters...)) {
  return [method](Class& self, Given<Parameters>... given) -> Result { return (self.*method)(given...); };
}

inline tcp::JobId job_id(const std::string& bytes) {
  tcp::JobId job{};
  if (bytes.size() != job.size())
    throw Error(ErrorKind::invalid_argument,
                text_of("a job's id has ", bytes.size(), " bytes, expected ", job.size()));
  std::memcpy(job.data(), bytes.data(), job.size());
  return job;
}

/// Makes the dict of statistics from `calls`, counted on the host, and `counters`, counted where rows move.
template <class Calls, class Counters>
pybind11::dict stats_dict(const Calls& calls, const Counters& counters,
                          const std::vector<double>& late_seconds, Proxy* proxy) {
  pybind11::dict out;
  out["dispatch_calls"] = calls.dispatch_calls;
  out["dispatch_seconds"] = counters.dispatch_seconds;
  out["combine_calls"] = calls.combine_calls;
  out["combine_seconds"] = counters.combine_seconds;
  out["wait_seconds"] = counters.wait_seconds;
  out["late_seconds"] = late_seconds;
  out["plans_made"] = calls.plans_made;
  out["rows_in"] = calls.rows_in;
  out["rows_out"] = counters.rows_out;
  out["bytes_wire"] = counters.bytes_wire;
  out["network_puts"] = proxy == nullptr ? 0 : proxy->stats().puts.load();
  out["network_bytes"] = proxy == nullptr ? 0 : proxy->stats().bytes.load();
  out["network_row_bytes"] = proxy == nullptr ? 0 : proxy->stats().row_bytes.load();
  return out;
}

/// Binds the methods that both communicators have: the name of shared memory, connections to other nodes,
/// check, close, reset_stats and descriptions. `interrupt` runs Python's signal handlers.
template <class Communicator, class Class>
void bind_common(Class& bound, void (*interrupt)()) {
  namespace py = pybind11;
  bound.def("link", &Communicator::link)
      .def("unlink", &Communicator::unlink)
      .def(
          "open_rail",
          [](Communicator& self, const py::bytes& job, const std::string& provider,
             const std::string& interface, int lanes) {
            const NodeMap nodes = self.config().shape.nodes();
            const int32_t rank = self.config().rank;
            fabric::ProviderOptions network{provider,          interface, "", nodes.local_of(rank),
                                            nodes.local_ranks, lanes};
            if constexpr (requires { self.gpu_bus_id(); }) network.gpu_bus_id = self.gpu_bus_id();
            const RailOptions options{job_id(job), nodes, rank, self.config().timeout_seconds, network};
            const py::gil_scoped_release release;
            return std::make_unique<Rail>(options, self.layout(), self.base());
          },
          py::kw_only(), py::arg("job"), py::arg("provider"), py::arg("interface"), py::arg("lanes"))
      .def(
          "connect_rail",
          [interrupt](Communicator& self, Rail& rail, const std::vector<std::vector<py::bytes>>& peers,
                      const std::vector<std::string>& endpoints) {
            std::vector<std::vector<fabric::AddressBytes>> addresses;
            for (const std::vector<py::bytes>& peer : peers) addresses.emplace_back(peer.begin(), peer.end());
            const py::gil_scoped_release release;
            rail.connect(addresses, endpoints, interrupt);
            self.connect_nodes(rail.take_network(), rail.take_links());
          },
          py::arg("rail"), py::arg("endpoint_addresses"), py::arg("endpoints"))
      .def("network",
           [](Communicator& self) {
             const Proxy* const proxy = self.proxy();
             return proxy == nullptr ? std::pair(std::string(), 0)
                                     : std::pair(proxy->caps().text(), proxy->caps().lanes);
           })
      .def("check", &Communicator::check)
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>())
      .def("reset_stats",
           [](Communicator& self) {
             self.reset_stats();
             if (Proxy* const proxy = self.proxy()) proxy->stats().reset();
           })
      .def("__str__", &Communicator::heuristics_text);
}

}  // namespace moecomm

namespace pybind11::detail {
template <>
struct type_caster<moecomm::Address> {
  PYBIND11_TYPE_CASTER(moecomm::Address, const_name("int"));
  bool load(handle source, bool convert) {
    make_caster<uintptr_t> number;
    if (!number.load(source, convert)) return false;
    value.value = number;
    return true;
  }
};
}  // namespace pybind11::detail
