// Bindings of the experts' and the router's kernels: take addresses, sizes and a stream. activation.py
// and routing.py of moecomm/kernels are the only callers.
#include <algorithm>

#include "bindings/communicators.hpp"
#include "common/error.hpp"
#include "kernels/experts/activation.hpp"
#include "kernels/experts/routing.hpp"
#include "runtime/cuda_calls.hpp"

namespace py = pybind11;

namespace moecomm {
namespace {

using experts::Activation;
using experts::ActivationGradients;
using experts::ActivationRows;

void check_between(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    throw Error(ErrorKind::invalid_argument,
                text_of(name, " is ", value, ", must be from ", least, " to ", most));
}

/// Returns the array at `address`, which must be a multiple of `bytes`. Address 0, where allowed, means null.
template <class T = std::byte>
T* pointer(const char* name, uintptr_t address, bool may_be_absent = false, int64_t bytes = sizeof(T)) {
  if (address == 0 && !may_be_absent)
    throw Error(ErrorKind::invalid_argument, std::string(name) + " has no address");
  if (address % static_cast<uintptr_t>(bytes) != 0)
    throw Error(ErrorKind::invalid_argument,
                text_of(name, " is at address ", address, ", must be a multiple of ", bytes));
  return reinterpret_cast<T*>(address);
}

/// Binds prepare(dtype), which loads kernels, under `name`. That function launches nothing, and may be
/// called during a capture of a CUDA graph. `what` goes into the text of an error.
void bind_prepare(py::module_& m, const char* name, const char* what, cudaError_t (*prepare)(DType)) {
  m.def(
      name,
      [what, prepare](DType dtype) {
        const BesideCaptures beside;
        check_cuda(prepare(dtype), what);
      },
      py::arg("dtype"));
}

/// Returns the address of the number of real rows, which is the last of the `groups` group ends at `ends`. If
/// `ends` is 0, all rows are real, and it returns null.
const int32_t* real_rows_at(uintptr_t ends, int64_t groups) {
  const int32_t* const first = pointer<int32_t>("ends", ends, true);
  if (first == nullptr) return nullptr;
  check_between("groups", groups, 1, INT32_MAX);
  return first + groups - 1;
}

ActivationRows rows_of(uintptr_t inner, uintptr_t weights, uintptr_t ends, int64_t groups, int64_t rows,
                       int64_t width, DType dtype, Activation activation) {
  check_between("rows", rows, 0, experts::kMostRows);
  check_between("width", width, 1, experts::kMostWidth);
  return {pointer("inner", inner, rows == 0, dtype_bytes(dtype)),
          pointer("weights", weights, true, weight_bytes(dtype)),
          real_rows_at(ends, groups),
          static_cast<int32_t>(rows),
          static_cast<int32_t>(width),
          dtype,
          activation};
}

experts::Routes routes_of(uintptr_t logits, int64_t parts, uintptr_t addends, uintptr_t biases,
                          int64_t tokens, int64_t number, int64_t top_k, experts::Scores scores,
                          bool normalize, float scale) {
  check_between("parts", parts, 1, 3);
  check_between("tokens", tokens, 0, experts::kMostRows);
  check_between("experts", number, 1, experts::kMostExperts);
  check_between("top_k", top_k, 1, std::min(number, experts::kMostChoices));
  return {pointer<float>("logits", logits, tokens == 0),
          pointer<float>("addends", addends, true),
          pointer<float>("biases", biases, true),
          static_cast<int32_t>(parts),
          static_cast<int32_t>(tokens),
          static_cast<int32_t>(number),
          static_cast<int32_t>(top_k),
          scores,
          normalize,
          scale};
}

}  // namespace

void bind_experts(py::module_& m) {
  py::enum_<Activation>(m, "Activation")
      .value("swiglu", Activation::swiglu)
      .value("swiglu_interleaved", Activation::swiglu_interleaved)
      .value("swiglu_clamped", Activation::swiglu_clamped)
      .value("gelu", Activation::gelu);
  // Functions take their arguments by position: keywords would take the caller longer.
  m.def("activation", [](uintptr_t inner, uintptr_t weights, uintptr_t ends, int64_t groups, int64_t rows,
                         int64_t width, DType dtype, Activation activation, uintptr_t z, Address stream) {
    const ActivationRows all = rows_of(inner, weights, ends, groups, rows, width, dtype, activation);
    check_cuda(experts::launch_activation(all, pointer("z", z, rows == 0, dtype_bytes(dtype)), stream),
               "activation");
  });
  m.def("activation_backward", [](uintptr_t inner, uintptr_t weights, uintptr_t ends, int64_t groups,
                                  int64_t rows, int64_t width, DType dtype, Activation activation,
                                  uintptr_t grad_z, uintptr_t grad_inner, uintptr_t grad_weights, uintptr_t z,
                                  Address stream) {
    const ActivationRows all = rows_of(inner, weights, ends, groups, rows, width, dtype, activation);
    const int64_t bytes = dtype_bytes(dtype);
    const ActivationGradients gradients{
        pointer("grad_z", grad_z, rows == 0, bytes), pointer("grad_inner", grad_inner, rows == 0, bytes),
        pointer("grad_weights", grad_weights, true, weight_bytes(dtype)), pointer("z", z, true, bytes)};
    check_cuda(experts::launch_activation_backward(all, gradients, stream), "activation backward");
  });
  bind_prepare(m, "prepare_activation", "loading the kernels of the experts", experts::prepare_activation);

  py::enum_<experts::Scores>(m, "Scores")
      .value("softmax", experts::Scores::softmax)
      .value("chosen_softmax", experts::Scores::chosen_softmax)
      .value("sigmoid", experts::Scores::sigmoid);
  m.def("routes", [](uintptr_t logits, int64_t parts, uintptr_t addends, uintptr_t biases, int64_t tokens,
                     int64_t number, int64_t top_k, experts::Scores scores, bool normalize, float scale,
                     uintptr_t ids, uintptr_t weights, uintptr_t out_scores, uintptr_t out_logits,
                     uintptr_t counts, Address stream) {
    const bool none = tokens == 0;
    const experts::Chosen chosen{pointer<int32_t>("ids", ids, none), pointer<float>("weights", weights, none),
                                 pointer<float>("scores", out_scores, none),
                                 pointer<float>("out_logits", out_logits, true),
                                 pointer<int64_t>("counts", counts)};
    const experts::Routes routes =
        routes_of(logits, parts, addends, biases, tokens, number, top_k, scores, normalize, scale);
    check_cuda(experts::launch_routes(routes, chosen, stream), "routes");
  });
  m.def("routes_backward", [](uintptr_t logits, int64_t tokens, int64_t number, int64_t top_k,
                              experts::Scores scores, bool normalize, float scale, uintptr_t ids,
                              uintptr_t grad_weights, uintptr_t grad_scores, uintptr_t grad_logits,
                              uintptr_t out, uintptr_t parts, Address stream) {
    const experts::RouteGradients gradients{pointer<int32_t>("ids", ids, tokens == 0),
                                            pointer<float>("grad_weights", grad_weights, true),
                                            pointer<float>("grad_scores", grad_scores, true),
                                            pointer<float>("grad_logits", grad_logits, true),
                                            pointer<float>("out", out, true),
                                            pointer("parts", parts, true, 2)};
    check_cuda(
        experts::launch_routes_backward(
            routes_of(logits, 1, 0, 0, tokens, number, top_k, scores, normalize, scale), gradients, stream),
        "routes backward");
  });
  m.def("split_weight", [](uintptr_t weight, int64_t count, bool backward, uintptr_t out, Address stream) {
    check_between("count", count, 4, experts::kMostExperts * experts::kMostWidth);
    check_cuda(experts::launch_split_weight(pointer<float>("weight", weight, false, 16), count, backward,
                                            pointer("out", out, false, 8), stream),
               "split weight");
  });
  bind_prepare(m, "prepare_routes", "loading the kernels of the router",
               [](DType) { return experts::prepare_routes(); });
}

}  // namespace moecomm
