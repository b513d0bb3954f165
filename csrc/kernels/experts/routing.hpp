// The router's choice from its logits on the device: scores, the best experts of each token, their weights,
// and how often each expert was chosen. In float32. Launches go to a stream and can be captured; they
// allocate nothing and wait for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moecomm::experts {

/// The most experts, and the most of them that a token may choose.
inline constexpr int64_t kMostExperts = 1024, kMostChoices = 32;

/// What weights are made of. softmax: of all logits; chosen_softmax: of the chosen logits alone, and the
/// scores are the softmax of all.
enum class Scores : int32_t { softmax, chosen_softmax, sigmoid };

struct Routes {
  const float* logits;   ///< (tokens, parts, experts); a logit is the sum of its parts
  const float* addends;  ///< (experts) added to the logits, or null
  const float* biases;   ///< (experts) added to what the experts are chosen by, or null
  int32_t parts;         ///< 1 or 3
  int32_t tokens, experts, top_k;
  Scores scores;
  bool normalize;  ///< weights are divided by their sum, but for chosen_softmax
  float scale;     ///< and multiplied by this
};

struct Chosen {
  int32_t* ids;     ///< (tokens, top_k), the best first; of equals the one with the lower number
  float* weights;   ///< (tokens, top_k)
  float* scores;    ///< (tokens, experts)
  float* logits;    ///< (tokens, experts), or null: the sums of their parts
  int64_t* counts;  ///< (experts) tokens that have chosen it
};

cudaError_t launch_routes(const Routes& routes, const Chosen& chosen, cudaStream_t stream);

/// The gradients of the results, each of which may be null, and those of the logits.
struct RouteGradients {
  const int32_t* ids;
  const float *weights, *scores, *logits;
  float* out;   ///< (tokens, experts), or null
  void* parts;  ///< (tokens, 4, experts) bfloat16, or null: the high part twice, the middle and the low one
};

/// Writes the gradients of the logits. Equal arguments give equal bits.
cudaError_t launch_routes_backward(const Routes& routes, const RouteGradients& gradients,
                                   cudaStream_t stream);

/// Writes `count` numbers, a multiple of 4, as bfloat16: all high parts, all middle and all low ones; or
/// `backward` all middle parts, and three times all high ones, by which (tokens, 4, experts) gradients become
/// those of rows.
cudaError_t launch_split_weight(const float* weight, int64_t count, bool backward, void* out,
                                cudaStream_t stream);

/// Loads the kernels onto the current device.
cudaError_t prepare_routes();

}  // namespace moecomm::experts
