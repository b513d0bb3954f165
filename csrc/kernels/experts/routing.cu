// The router's choice and its gradient: one warp per token. Lane l has the logits of experts l, l + 32 and so
// on, and the token's l-th chosen expert. Lanes are summed in a butterfly, so always in the same order.
//
// Tensor cores multiply bfloat16 numbers. To multiply bfloat16 rows by float32 numbers, each of these is
// split into three bfloat16 parts that add up to it. Kernels here split and add up; torch.mm multiplies.
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "kernels/experts/routing.hpp"

namespace moecomm::experts {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int64_t kMostBlocks = 1024;
constexpr uint32_t kAll = 0xffffffffu;
constexpr float kLeast = 1e-20f;  // added to the sum by which scores are divided

__device__ inline float sum_of_lanes(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value += __shfl_xor_sync(kAll, value, width);
  return value;
}
__device__ inline float most_of_lanes(float value) {
#pragma unroll
  for (int width = 16; width > 0; width /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, width));
  return value;
}

/// A number that is larger for larger values, largest for NaN, and never 0.
__device__ inline uint32_t rank_of(float value) {
  if (isnan(value)) return ~0u;
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/// A float32 number as the sum of three bfloat16 parts. Each part rounds what the parts before it leave.
struct Parts {
  __nv_bfloat16 high, middle, low;

  explicit __device__ Parts(float value) : high(__float2bfloat16_rn(value)) {
    // If `high` is infinite or NaN, the other parts are zero.
    const float rest = isfinite(__bfloat162float(high)) ? value - __bfloat162float(high) : 0.0f;
    middle = __float2bfloat16_rn(rest);
    low = __float2bfloat16_rn(rest - __bfloat162float(middle));
  }
};

/// A token's logits, `each` per lane, and its scores and weights. All lanes construct it and call weight().
template <int each>
class Token {
 public:
  __device__ Token(const Routes& routes, int64_t token) : routes_(routes) {
    const float* const logits = routes.logits + token * routes.experts * routes.parts;
    float most = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      logit[i] = has(i) ? logits[expert(i)] : -INFINITY;
      if (has(i) && routes.parts > 1)
        logit[i] += logits[expert(i) + routes.experts] + logits[expert(i) + 2 * routes.experts];
      if (has(i) && routes.addends != nullptr) logit[i] += routes.addends[expert(i)];
      most = fmaxf(most, logit[i]);
    }
    most_ = most_of_lanes(most);
#pragma unroll
    for (int i = 0; i < each; ++i) sum += has(i) ? expf(logit[i] - most_) : 0.0f;
    sum_ = sum_of_lanes(sum);
  }

  __device__ static int expert(int i) { return static_cast<int>(threadIdx.x % 32) + 32 * i; }
  __device__ bool has(int i) const { return expert(i) < routes_.experts; }
  __device__ float score(float of) const {
    return routes_.scores == Scores::sigmoid ? 1.0f / (1.0f + expf(-of)) : expf(of - most_) / sum_;
  }
  /// Weight, before Routes::scale, of this lane's chosen logit `of`. Sets `divisor` to the score's divisor.
  __device__ float weight(float of, bool chosen, float& divisor) const {
    float own = chosen ? score(of) : 0.0f;
    divisor = 1.0f;
    if (routes_.scores == Scores::chosen_softmax) {
      const float most = most_of_lanes(chosen ? of : -INFINITY);
      own = chosen ? expf(of - most) : 0.0f;
      divisor = sum_of_lanes(own);
    } else if (routes_.normalize) {
      divisor = sum_of_lanes(own) + kLeast;
    }
    return own / divisor;
  }

  float logit[each];

 private:
  const Routes& routes_;
  float most_, sum_;
};

template <int each>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Routes routes, const Chosen out) {
  extern __shared__ int32_t counts[];
  for (int e = threadIdx.x; e < routes.experts; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  // Experts are ranked by logits where possible: scores rise with them, but unequal logits may score alike.
  const bool by_logits = routes.scores == Scores::chosen_softmax || routes.biases == nullptr;
  for (int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; t < routes.tokens;
       t += int64_t{gridDim.x} * kWarps) {
    const Token<each> token(routes, t);
    uint32_t rank[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (!token.has(i)) {
        rank[i] = 0;
        continue;
      }
      const int e = token.expert(i);
      const float score = token.score(token.logit[i]);
      out.scores[t * routes.experts + e] = score;
      if (out.logits != nullptr) out.logits[t * routes.experts + e] = token.logit[i];
      const float by = by_logits ? token.logit[i] : score;
      rank[i] = rank_of(routes.biases == nullptr ? by : by + routes.biases[e]);
    }
    float own = 0;
    int id = 0;
    for (int k = 0; k < routes.top_k; ++k) {
      uint64_t best = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const uint64_t one = uint64_t{rank[i]} << 32 | (kAll - static_cast<uint32_t>(token.expert(i)));
        best = rank[i] != 0 && one > best ? one : best;
      }
#pragma unroll
      for (int width = 16; width > 0; width /= 2) {
        const uint64_t other = __shfl_xor_sync(kAll, best, width);
        best = other > best ? other : best;
      }
      const int e = static_cast<int>(kAll - static_cast<uint32_t>(best));
      float logit = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        if (token.expert(i) != e) continue;
        logit = token.logit[i];
        rank[i] = 0;
      }
      logit = __shfl_sync(kAll, logit, e % 32);
      if (lane == k) {
        id = e;
        own = logit;
      }
    }
    float divisor;
    const bool chosen = lane < routes.top_k;
    const float weight = token.weight(own, chosen, divisor);
    if (!chosen) continue;
    out.ids[t * routes.top_k + lane] = id;
    out.weights[t * routes.top_k + lane] = weight * routes.scale;
    atomicAdd(&counts[id], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < routes.experts; e += kThreads)
    if (counts[e] != 0)
      atomicAdd(reinterpret_cast<unsigned long long*>(&out.counts[e]),
                static_cast<unsigned long long>(counts[e]));
}

template <int each>
__global__ void __launch_bounds__(kThreads) backward_kernel(const Routes routes, const RouteGradients given) {
  const int lane = threadIdx.x % 32;
  const bool chosen = lane < routes.top_k, after = routes.scores == Scores::chosen_softmax;
  for (int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; t < routes.tokens;
       t += int64_t{gridDim.x} * kWarps) {
    const Token<each> token(routes, t);
    const int64_t first = t * routes.experts;
    const int id = chosen ? given.ids[t * routes.top_k + lane] : 0;
    // Becomes the gradient with respect to the logit of this lane's expert if `after` (the softmax comes
    // after the choice), else with respect to its score.
    float own =
        chosen && given.weights != nullptr ? given.weights[t * routes.top_k + lane] * routes.scale : 0.0f;
    float divisor;
    const float weight = token.weight(chosen ? routes.logits[first + id] : 0.0f, chosen, divisor);
    const float dot = sum_of_lanes(own * weight);
    if (after)
      own = weight * (own - dot);
    else if (routes.normalize)
      own = (own - dot) / divisor;
    float of_choice[each], of_score[each], product = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) of_choice[i] = 0;
    for (int k = 0; k < routes.top_k; ++k) {
      const int e = __shfl_sync(kAll, id, k);
      const float gradient = __shfl_sync(kAll, own, k);
#pragma unroll
      for (int i = 0; i < each; ++i)
        if (token.expert(i) == e) of_choice[i] += gradient;
    }
#pragma unroll
    for (int i = 0; i < each; ++i) {
      of_score[i] = token.has(i) && given.scores != nullptr ? given.scores[first + token.expert(i)] : 0.0f;
      if (!after) of_score[i] += of_choice[i];
      if (token.has(i)) product += of_score[i] * token.score(token.logit[i]);
    }
    if (routes.scores != Scores::sigmoid) product = sum_of_lanes(product);
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (!token.has(i)) continue;
      const int e = token.expert(i);
      const float score = token.score(token.logit[i]);
      float slope = routes.scores == Scores::sigmoid ? of_score[i] * score * (1.0f - score)
                                                     : score * (of_score[i] - product);
      if (after) slope += of_choice[i];
      if (given.logits != nullptr) slope += given.logits[first + e];
      if (given.out != nullptr) given.out[first + e] = slope;
      if (given.parts == nullptr) continue;
      const Parts parts(slope);
      auto* const to = static_cast<__nv_bfloat16*>(given.parts) + 4 * first + e;
      to[0] = to[routes.experts] = parts.high;
      to[2 * routes.experts] = parts.middle;
      to[3 * routes.experts] = parts.low;
    }
  }
}

struct alignas(8) Four {
  __nv_bfloat16 of[4];
};

/// Splits 4 * `count` numbers into bfloat16 parts (see launch_split_weight), four at a time in each thread.
__global__ void __launch_bounds__(kThreads)
    split_kernel(const float4* weight, int64_t count, bool backward, Four* out) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * kThreads) {
    const float4 values = weight[i];
    const Parts all[] = {Parts(values.x), Parts(values.y), Parts(values.z), Parts(values.w)};
    Four high, middle, low;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      high.of[j] = all[j].high;
      middle.of[j] = all[j].middle;
      low.of[j] = all[j].low;
    }
    out[i] = backward ? middle : high;
    out[i + count] = backward ? high : middle;
    out[i + 2 * count] = backward ? high : low;
    if (backward) out[i + 3 * count] = high;
  }
}

/// Calls use.operator()<each>() with `each`, the number of logits per lane.
template <class Use>
cudaError_t with_each(int32_t experts, const Use& use) {
  if (experts <= 32) return use.template operator()<1>();
  if (experts <= 64) return use.template operator()<2>();
  if (experts <= 128) return use.template operator()<4>();
  if (experts <= 256) return use.template operator()<8>();
  if (experts <= 512) return use.template operator()<16>();
  return use.template operator()<32>();
}

unsigned blocks_of(const Routes& routes) {
  return static_cast<unsigned>(std::min<int64_t>((routes.tokens + kWarps - 1) / kWarps, kMostBlocks));
}

}  // namespace

cudaError_t launch_routes(const Routes& routes, const Chosen& chosen, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(chosen.counts, 0, sizeof(int64_t) * routes.experts, stream);
  if (error != cudaSuccess || routes.tokens == 0) return error;
  return with_each(routes.experts, [&]<int each>() {
    forward_kernel<each>
        <<<blocks_of(routes), kThreads, sizeof(int32_t) * routes.experts, stream>>>(routes, chosen);
    return cudaGetLastError();
  });
}

cudaError_t launch_routes_backward(const Routes& routes, const RouteGradients& gradients,
                                   cudaStream_t stream) {
  if (routes.tokens == 0) return cudaSuccess;
  return with_each(routes.experts, [&]<int each>() {
    backward_kernel<each><<<blocks_of(routes), kThreads, 0, stream>>>(routes, gradients);
    return cudaGetLastError();
  });
}

cudaError_t launch_split_weight(const float* weight, int64_t count, bool backward, void* out,
                                cudaStream_t stream) {
  const int64_t fours = count / 4, blocks = std::min((fours + kThreads - 1) / kThreads, kMostBlocks);
  split_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      reinterpret_cast<const float4*>(weight), fours, backward, static_cast<Four*>(out));
  return cudaGetLastError();
}

cudaError_t prepare_routes() {
  cudaFuncAttributes attributes;
  for (const int32_t experts : {32, 64, 128, 256, 512, 1024}) {
    const cudaError_t error = with_each(experts, [&]<int each>() {
      const cudaError_t forward = cudaFuncGetAttributes(&attributes, forward_kernel<each>);
      return forward != cudaSuccess ? forward : cudaFuncGetAttributes(&attributes, backward_kernel<each>);
    });
    if (error != cudaSuccess) return error;
  }
  return cudaFuncGetAttributes(&attributes, split_kernel);
}

}  // namespace moecomm::experts
