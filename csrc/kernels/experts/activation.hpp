// The activation of the experts' feed-forward networks with the routing weight inside, on the device:
//   z[p, f] = weight[p] * act(inner[p])[f]
// computed in float32 (float64 for float64) and rounded once. The kernels' launches are put on a stream and
// can be captured; they allocate nothing and wait for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "common/dtype.hpp"

namespace moecomm::experts {

/// Bounds of the rows of a launch and of their columns.
inline constexpr int64_t kMostRows = 1 << 30, kMostWidth = 1 << 27;

/// swiglu: silu of the first half of a row times its second half (arXiv 2002.05202). swiglu_interleaved: silu
/// of the even columns times the odd ones. gelu: x times the normal distribution function of x.
/// swiglu_clamped: with the gate, an even column, at most 7, and up, the odd one beside it, between -7 and 7,
/// gate * sigmoid(1.702 * gate) * (up + 1), as gpt-oss has it.
enum class Activation : int32_t { swiglu = 0, gelu = 1, swiglu_interleaved = 2, swiglu_clamped = 3 };

/// Columns of `inner` for each column of the result.
constexpr int activation_inputs(Activation activation) { return activation == Activation::gelu ? 1 : 2; }

/// Rows lie behind each other without gaps. Absent pointers are null.
struct ActivationRows {
  const std::byte* inner;    ///< (rows, activation_inputs * width)
  const std::byte* weights;  ///< (rows) of weight_bytes(dtype) each; absent: 1
  const int32_t* real_rows;  ///< if present, rows from *real_rows on are neither read nor written
  int32_t rows;
  int32_t width;  ///< at least 1
  DType dtype;
  Activation activation;
};

/// Addresses of the gradients; those that are not wanted are null.
struct ActivationGradients {
  const std::byte* grad_z;  ///< (rows, width)
  std::byte* grad_inner;    ///< shape as inner
  std::byte* grad_weights;  ///< shape as weights: the sum over f of grad_z[p, f] * act(inner[p])[f]
  std::byte* z;             ///< (rows, width): the forward's result again, the same bits
};

/// Writes z (rows, width).
cudaError_t launch_activation(const ActivationRows& rows, std::byte* z, cudaStream_t stream);

/// Equal arguments give equal bits. The order of the sums depends on width and dtype alone.
cudaError_t launch_activation_backward(const ActivationRows& rows, const ActivationGradients& gradients,
                                       cudaStream_t stream);

/// Loads the kernels for a dtype onto the current device. Before their first launch: loading at the launch
/// may wait for kernels under way.
cudaError_t prepare_activation(DType dtype);

}  // namespace moecomm::experts
