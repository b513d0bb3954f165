// What bindings of communicators of CPUs and GPUs share: addresses, and connections to other nodes.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "runtime/proxy.hpp"
#include "runtime/rail.hpp"

namespace moecomm {

template <class T = std::byte>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline tcp::JobId job_id(const std::string& bytes) {
  tcp::JobId job{};
  if (bytes.size() != job.size())
    throw Error(ErrorKind::invalid_argument, "a job's id has " + std::to_string(bytes.size()) +
                                                 " bytes, expected " + std::to_string(job.size()));
  std::memcpy(job.data(), bytes.data(), job.size());
  return job;
}

/// Adds the proxy's counters; zeros on one node.
inline void add_network_stats(pybind11::dict& out, const Proxy* proxy) {
  out["network_puts"] = proxy == nullptr ? 0 : proxy->stats().puts.load();
  out["network_bytes"] = proxy == nullptr ? 0 : proxy->stats().bytes.load();
  out["network_row_bytes"] = proxy == nullptr ? 0 : proxy->stats().row_bytes.load();
}

/// Adds open_rail, connect_rail, network and network_lanes. `interrupt` runs Python's signal handlers.
template <class Communicator, class Class>
void bind_network(Class& bound, void (*interrupt)()) {
  namespace py = pybind11;
  bound
      .def(
          "open_rail",
          [](Communicator& self, const py::bytes& job, const std::string& provider,
             const std::string& interface, int lanes) {
            RailOptions options{job_id(job),
                                self.config().shape.nodes(),
                                self.config().rank,
                                self.config().timeout_seconds,
                                provider,
                                interface,
                                "",
                                lanes};
            if constexpr (requires { self.gpu_bus_id(); }) options.gpu_bus_id = self.gpu_bus_id();
            const py::gil_scoped_release release;
            return std::make_unique<Rail>(options, self.layout(), self.base());
          },
          py::kw_only(), py::arg("job"), py::arg("provider"), py::arg("interface"), py::arg("lanes"))
      .def(
          "connect_rail",
          [interrupt](Communicator& self, Rail& rail, const std::vector<std::vector<py::bytes>>& peers,
                      const std::vector<std::string>& endpoints) {
            std::vector<std::vector<fabric::AddressBytes>> addresses;
            for (const std::vector<py::bytes>& peer : peers) {
              addresses.emplace_back();
              for (const std::string_view lane : peer) {
                const auto* const data = reinterpret_cast<const std::byte*>(lane.data());
                addresses.back().emplace_back(data, data + lane.size());
              }
            }
            const py::gil_scoped_release release;
            rail.connect(addresses, endpoints, interrupt);
            self.connect_nodes(rail.take_network(), rail.take_links());
          },
          py::arg("rail"), py::arg("endpoint_addresses"), py::arg("endpoints"))
      .def("network",
           [](Communicator& self) {
             const Proxy* const proxy = self.proxy();
             return proxy == nullptr ? std::string() : proxy->caps().text();
           })
      .def("network_lanes", [](Communicator& self) {
        const Proxy* const proxy = self.proxy();
        return proxy == nullptr ? 0 : proxy->caps().lanes;
      });
}

}  // namespace moecomm
