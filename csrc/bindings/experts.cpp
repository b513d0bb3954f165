// The kernels of the experts in the Python face: addresses, sizes and a stream in. moecomm/activation.py is
// its only caller.
#include "bindings/arguments.hpp"
#include "bindings/cuda.hpp"
#include "kernels/experts/activation.hpp"

namespace py = pybind11;

namespace moecomm {
namespace {

using experts::Activation;
using experts::ActivationGradients;
using experts::ActivationRows;

/// `ends`: of `groups` groups, the last of which is the number of rows that are real; 0: all are.
ActivationRows rows_of(uintptr_t inner, uintptr_t weights, uintptr_t ends, int64_t groups, int64_t rows,
                       int64_t width, DType dtype, Activation activation) {
  check_between("rows", rows, 0, experts::kMostRows);
  check_between("width", width, 1, experts::kMostWidth);
  const int32_t* real_rows = pointer<int32_t>("ends", ends, sizeof(int32_t), true);
  if (real_rows != nullptr) {
    check_between("groups", groups, 1, INT32_MAX);
    real_rows += groups - 1;
  }
  return {pointer("inner", inner, dtype_bytes(dtype), rows == 0),
          pointer("weights", weights, weight_bytes(dtype), true),
          real_rows,
          static_cast<int32_t>(rows),
          static_cast<int32_t>(width),
          dtype,
          activation};
}

}  // namespace

void bind_experts(py::module_& m) {
  py::enum_<Activation>(m, "Activation").value("swiglu", Activation::swiglu).value("gelu", Activation::gelu);
  // By position, which costs the caller less than names.
  m.def("activation", [](uintptr_t inner, uintptr_t weights, uintptr_t ends, int64_t groups, int64_t rows,
                         int64_t width, DType dtype, Activation activation, uintptr_t z, uintptr_t stream) {
    const ActivationRows all = rows_of(inner, weights, ends, groups, rows, width, dtype, activation);
    check_cuda(experts::launch_activation(all, pointer("z", z, dtype_bytes(dtype), rows == 0),
                                          reinterpret_cast<cudaStream_t>(stream)),
               "activation");
  });
  m.def("activation_backward", [](uintptr_t inner, uintptr_t weights, uintptr_t ends, int64_t groups,
                                  int64_t rows, int64_t width, DType dtype, Activation activation,
                                  uintptr_t grad_z, uintptr_t grad_inner, uintptr_t grad_weights, uintptr_t z,
                                  uintptr_t stream) {
    const ActivationRows all = rows_of(inner, weights, ends, groups, rows, width, dtype, activation);
    const int64_t bytes = dtype_bytes(dtype);
    const ActivationGradients gradients{
        pointer("grad_z", grad_z, bytes, rows == 0), pointer("grad_inner", grad_inner, bytes, rows == 0),
        pointer("grad_weights", grad_weights, weight_bytes(dtype), true), pointer("z", z, bytes, true)};
    check_cuda(experts::launch_activation_backward(all, gradients, reinterpret_cast<cudaStream_t>(stream)),
               "activation backward");
  });
  m.def(
      "prepare_activation",
      [](DType dtype) {
        load_kernels("loading the kernels of the experts",
                     [dtype] { return experts::prepare_activation(dtype); });
      },
      py::arg("dtype"));
}

}  // namespace moecomm
