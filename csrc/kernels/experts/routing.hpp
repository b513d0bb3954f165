// The router's choice on the device, in float32: computes from logits the scores, each token's best experts,
// their weights, and how many tokens have chosen each expert. Launches go to a stream and can be captured;
// they allocate nothing and wait for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moecomm::experts {

/// The most experts, and the most experts that a token may choose.
inline constexpr int64_t kMostExperts = 1024, kMostChoices = 32;

/// How routing weights are computed. softmax: of all logits; chosen_softmax: of the chosen logits alone,
/// while Chosen::scores are the softmax of all; sigmoid: of each logit.
enum class Scores : int32_t { softmax, chosen_softmax, sigmoid };

struct Routes {
  const float* logits;   ///< (tokens, parts, experts); a logit is the sum of its parts
  const float* addends;  ///< (experts) added to the logits, or null
  const float* biases;   ///< (experts) or null: for the choice, added to scores (chosen_softmax: to logits)
  int32_t parts;         ///< 1 or 3
  int32_t tokens, experts, top_k;
  Scores scores;
  bool normalize;  ///< weights are divided by their sum (for chosen_softmax that changes nothing)
  float scale;     ///< weights are multiplied by it
};

struct Chosen {
  int32_t* ids;     ///< (tokens, top_k), the best first; equally good experts by ascending number
  float* weights;   ///< (tokens, top_k)
  float* scores;    ///< (tokens, experts)
  float* logits;    ///< (tokens, experts), or null: the sums of their parts
  int64_t* counts;  ///< (experts) number of tokens that have chosen each expert
};

cudaError_t launch_routes(const Routes& routes, const Chosen& chosen, cudaStream_t stream);

/// Chosen::ids, gradients of the other results in Chosen (each may be null), and outputs for Routes::logits.
struct RouteGradients {
  const int32_t* ids;
  const float *weights, *scores, *logits;
  float* out;   ///< (tokens, experts), or null
  void* parts;  ///< (tokens, 4, experts) bfloat16, or null: high, high, middle and low part of each gradient
};

/// Writes the gradients of the logits. Equal arguments give equal bits.
cudaError_t launch_routes_backward(const Routes& routes, const RouteGradients& gradients,
                                   cudaStream_t stream);

/// Splits the `count` numbers of a router's weight (a multiple of 4) into bfloat16 parts. Writes all high
/// parts, then all middle parts, then all low parts; if `backward`, all middle parts, then all high parts
/// three times, whose product with RouteGradients::parts is the gradient of the rows.
cudaError_t launch_split_weight(const float* weight, int64_t count, bool backward, void* out,
                                cudaStream_t stream);

/// Loads the kernels onto the current device.
cudaError_t prepare_routes();

}  // namespace moecomm::experts
