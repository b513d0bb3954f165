// The activation of the experts' feed-forward networks, times the routing weight, on the device:
//   z[p, f] = weight[p] * act(inner[p])[f]
// computed in float32 and rounded once (float64: cudaErrorInvalidValue). Launches go to a stream and can be
// captured; they allocate nothing and wait for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.hpp"

namespace moecomm::experts {

/// The most rows, and the most columns of a result, that a launch accepts.
inline constexpr int64_t kMostRows = 1 << 30, kMostWidth = 1 << 27;

/// swiglu: silu of a row's first half, times its second half (arXiv 2002.05202). swiglu_interleaved: silu of
/// the even columns, times the odd columns. gelu: x times the normal distribution function of x.
/// swiglu_clamped (gpt-oss): gate * sigmoid(1.702 * gate) * (up + 1), with gate, an even column, clamped to
/// at most 7, and up, the odd column after it, to -7 .. 7.
enum class Activation : int32_t { swiglu = 0, gelu = 1, swiglu_interleaved = 2, swiglu_clamped = 3 };

/// Columns of `inner` for each column of the result.
constexpr int activation_inputs(Activation activation) { return activation == Activation::gelu ? 1 : 2; }

/// Rows are contiguous. Absent pointers are null.
struct ActivationRows {
  const std::byte* inner;    ///< (rows, activation_inputs * width)
  const std::byte* weights;  ///< (rows) of float32; absent: all 1
  const int32_t* real_rows;  ///< if present, rows from *real_rows on are neither read nor written
  int32_t rows;
  int32_t width;  ///< at least 1
  DType dtype;
  Activation activation;
};

/// grad_z is an input. The other fields are outputs; grad_weights and z may be null.
struct ActivationGradients {
  const std::byte* grad_z;  ///< (rows, width)
  std::byte* grad_inner;    ///< shape as inner
  std::byte* grad_weights;  ///< shape as weights: the sum over f of grad_z[p, f] * act(inner[p])[f]
  std::byte* z;             ///< (rows, width): the forward's result, recomputed with the same bits
};

/// Writes z (rows, width).
cudaError_t launch_activation(const ActivationRows& rows, std::byte* z, cudaStream_t stream);

/// Writes the gradients. Equal arguments give equal bits: the order of sums depends on width and dtype alone.
cudaError_t launch_activation_backward(const ActivationRows& rows, const ActivationGradients& gradients,
                                       cudaStream_t stream);

/// Loads the kernels for a dtype onto the current device. Call it before their first launch, which might
/// otherwise wait for running kernels to end.
cudaError_t prepare_activation(DType dtype);

}  // namespace moecomm::experts
