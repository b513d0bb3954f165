// The pool of pages in the Python face: addresses, sizes and a stream in. moecomm/nn/pages.py is its only
// caller.
#include <pybind11/stl.h>

#include <bit>
#include <utility>
#include <vector>

#include "bindings/arguments.hpp"
#include "bindings/cuda.hpp"
#include "kernels/pool/pages.hpp"

namespace py = pybind11;

namespace moecomm {
namespace {

using pool::Pages;
using pool::Rows;
using pool::Ticket;

/// Addresses, and bytes of a row.
using Tensors = std::vector<std::pair<uintptr_t, int64_t>>;

Pages pages_of(uintptr_t state, uintptr_t free, uintptr_t owner, uintptr_t device, uintptr_t host,
               int64_t device_pages, int64_t host_pages, int64_t page_bytes) {
  check_between("page_bytes", page_bytes, int64_t{1} << pool::kLeastPageBits,
                int64_t{1} << pool::kMostPageBits);
  if (!std::has_single_bit(static_cast<uint64_t>(page_bytes)))
    throw Error(ErrorKind::invalid_argument,
                "page_bytes is " + std::to_string(page_bytes) + ", must be a power of two");
  check_between("device_pages", device_pages, 0, pool::kMostPages / 2);
  check_between("host_pages", host_pages, 0, pool::kMostPages / 2);
  const bool none = device_pages + host_pages == 0;
  return {pointer<pool::State>("state", state, alignof(pool::State)),
          pointer<int32_t>("free", free, sizeof(int32_t), none),
          pointer<int64_t>("owner", owner, sizeof(int64_t), none),
          pointer("device", device, 16, device_pages == 0),
          pointer("host", host, 16, host_pages == 0),
          static_cast<int32_t>(device_pages),
          static_cast<int32_t>(host_pages),
          std::countr_zero(static_cast<uint64_t>(page_bytes))};
}

/// `ends`: of `groups` groups, the last of which is the number of rows that are real; 0: all are.
Rows rows_of(const Tensors& tensors, int64_t rows, uintptr_t ends, int64_t groups) {
  check_between("tensors", static_cast<int64_t>(tensors.size()), 1, pool::kMostTensors);
  check_between("rows", rows, 0, pool::kMostRows);
  Rows all{};
  for (const auto& [address, row_bytes] : tensors) {
    check_between("row_bytes", row_bytes, 1, pool::kMostRowBytes);
    all.data[all.count] = pointer("tensor", address, 16, rows == 0);
    all.row_bytes[all.count++] = row_bytes;
  }
  all.rows = static_cast<int32_t>(rows);
  if (ends != 0) {
    check_between("groups", groups, 1, INT32_MAX);
    all.real_rows = pointer<int32_t>("ends", ends, sizeof(int32_t)) + groups - 1;
  }
  return all;
}

Ticket* ticket_at(uintptr_t address) { return pointer<Ticket>("ticket", address, alignof(Ticket)); }

/// The ticket has room for all rows.
void check_room(const Pages& pages, const Rows& rows, int64_t room) {
  int64_t needed = 0;
  const int64_t page_bytes = int64_t{1} << pages.page_bits;
  for (int i = 0; i < rows.count; ++i)
    needed += (rows.rows * rows.row_bytes[i] + page_bytes - 1) >> pages.page_bits;
  check_between("pages of the rows", needed, 0, pool::kMostPages);
  check_between("pages of the ticket", room, needed, INT64_MAX);
}

cudaStream_t stream_of(uintptr_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

}  // namespace

void bind_pool(py::module_& m) {
  py::class_<Pages>(m, "PagePool")
      .def(py::init([](uintptr_t state, uintptr_t free, uintptr_t owner, uintptr_t device, uintptr_t host,
                       int64_t device_pages, int64_t host_pages, int64_t page_bytes) {
             load_kernels("loading the kernels of the pool", [] { return pool::prepare(); });
             return pages_of(state, free, owner, device, host, device_pages, host_pages, page_bytes);
           }),
           py::kw_only(), py::arg("state"), py::arg("free"), py::arg("owner"), py::arg("device"),
           py::arg("host"), py::arg("device_pages"), py::arg("host_pages"), py::arg("page_bytes"))
      .def_property_readonly_static(
          "ticket_words", [](const py::object&) { return sizeof(Ticket) / sizeof(int32_t); },
          "int32 words of a ticket before its pages.")
      .def_property_readonly_static("most_tensors", [](const py::object&) { return pool::kMostTensors; })
      .def("push",
           [](const Pages& self, const Tensors& tensors, int64_t rows, uintptr_t ends, int64_t groups,
              uintptr_t ticket, int64_t ticket_pages, uintptr_t stream) {
             const Rows all = rows_of(tensors, rows, ends, groups);
             check_room(self, all, ticket_pages);
             check_cuda(pool::launch_push(self, all, ticket_at(ticket), stream_of(stream)), "pool: push");
           })
      .def("pop",
           [](const Pages& self, const Tensors& tensors, int64_t rows, uintptr_t ticket, uintptr_t stream) {
             const Rows all = rows_of(tensors, rows, 0, 0);
             check_cuda(pool::launch_pop(self, all, ticket_at(ticket), stream_of(stream)), "pool: pop");
           })
      .def("drop",
           [](const Pages& self, uintptr_t ticket, uintptr_t stream) {
             check_cuda(pool::launch_drop(self, ticket_at(ticket), stream_of(stream)), "pool: drop");
           })
      .def_static(
          "capture", [](uintptr_t stream) { return capture_of(stream_of(stream)); },
          "A number of its own for the capture that a stream is in; 0: none.")
      .def("reset", [](const Pages& self, uintptr_t stream) {
        check_cuda(pool::launch_reset(self, stream_of(stream)), "pool: reset");
      });
}

}  // namespace moecomm
