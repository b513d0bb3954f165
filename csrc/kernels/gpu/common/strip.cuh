// Sums of rows by plain loads. A warp takes one strip (some bytes) of all rows of a token at a time, so that
// many loads are in flight. Sums run left to right, with each product and each sum rounded, as on the CPU.
// Used for few tokens, between nodes, and for sums in a wire format; sum_pipe.cuh makes all other sums.
#pragma once

#include <type_traits>

#include "kernels/gpu/common/kernel.cuh"
#include "kernels/gpu/common/wire_vector.cuh"

namespace moecomm::gpu {

/// A strip: `steps` times 512 bytes of a row, 16 bytes of each 512 in a lane.
template <int steps>
struct Strip {
  uint4 raw[steps];

  __device__ void load(const std::byte* row, int first, int vectors, int64_t = 0) {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const int v = first + s * 32 + lane_id();
      if (v < vectors) raw[s] = __ldcg(reinterpret_cast<const uint4*>(row) + v);
    }
  }
  __device__ void store(std::byte* row, int first, int vectors, int64_t = 0) const {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const int v = first + s * 32 + lane_id();
      if (v < vectors) __stcg(reinterpret_cast<uint4*>(row) + v, raw[s]);
    }
  }
};

/// A strip of a sum in a wire format. `scales_at`: byte offset of the scales in a row.
template <DType dtype, WireFormat wire, int steps>
class WireStrip {
  using E = Element<dtype>;
  using W = Wire<wire>;
  using Values = typename WireVector<dtype, wire>::Values;
  static constexpr int kBlockLanes = WireVector<dtype, wire>::kBlockLanes;

 public:
  __device__ void load(const std::byte* row, int first, int vectors, int64_t scales_at) {
    const auto* const scales = reinterpret_cast<const typename W::Scale*>(row + scales_at);
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const int v = first + s * 32 + lane_id();
      if (v >= vectors) continue;
      raw_[s] = __ldcg(reinterpret_cast<const Values*>(row) + v);
      scales_[s] = __ldcg(scales + v / kBlockLanes);
    }
  }
  /// Quantises float32 values, [steps][E::kVector] of each lane. All lanes.
  __device__ void take(const float (*values)[E::kVector], int first, int vectors) {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      float most = 0;
      if (first + s * 32 + lane_id() < vectors)
        for (int e = 0; e < E::kVector; ++e) most = fmaxf(most, fabsf(values[s][e]));
#pragma unroll
      for (int width = kBlockLanes / 2; width > 0; width /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, width));
      scales_[s] = W::scale(most);
      const float inverse = W::inverse(scales_[s]);
      auto* const words = reinterpret_cast<uint32_t*>(&raw_[s]);
#pragma unroll
      for (int e = 0; e < E::kVector; e += 4) words[e / 4] = W::write(values[s] + e, inverse);
    }
  }
  __device__ void store(std::byte* row, int first, int vectors, int64_t scales_at) const {
    auto* const scales = reinterpret_cast<typename W::Scale*>(row + scales_at);
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const int v = first + s * 32 + lane_id();
      if (v >= vectors) continue;
      __stcg(reinterpret_cast<Values*>(row) + v, raw_[s]);
      if (v % kBlockLanes == 0) __stcg(scales + v / kBlockLanes, scales_[s]);
    }
  }
  __device__ void read(int s, float* out) const {
    const auto* const words = reinterpret_cast<const uint32_t*>(&raw_[s]);
#pragma unroll
    for (int e = 0; e < E::kVector; e += 4) W::read(words[e / 4], W::factor(scales_[s]), out + e);
  }

 private:
  Values raw_[steps];
  typename W::Scale scales_[steps];
};

/// A strip of a sum in the form in which it travels from an owner of experts to the token's own rank.
template <DType dtype, WireFormat wire, int steps>
using SumStrip = std::conditional_t<wire == WireFormat::same, Strip<steps>, WireStrip<dtype, wire, steps>>;

/// Bytes from one sum to the next, in memory for sums that cross the network in format `wire`.
__device__ inline int64_t sum_row_bytes(const Comm& comm, WireFormat wire) {
  return comm.window.shape.with_wire(wire).wire_row_bytes();
}
/// Byte offset of the scales in a sum in format `wire`.
__device__ inline int64_t sum_scales_at(const Comm& comm, WireFormat wire) {
  return comm.window.shape.with_wire(wire).wire_data_bytes();
}

/// The sum of several strips, in float32.
template <DType dtype, int steps>
class StripSum {
  using E = Element<dtype>;

 public:
  /// Sets the sum to zero.
  __device__ void clear() {
#pragma unroll
    for (int s = 0; s < steps; ++s)
#pragma unroll
      for (int e = 0; e < E::kVector; ++e) total_[s][e] = 0;
  }
  template <WireFormat wire>
  __device__ void add_strip(const WireStrip<dtype, wire, steps>& strip, bool first) {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      float values[E::kVector];
      strip.read(s, values);
      accumulate(s, values, first);
    }
  }
  /// Returns the sum as it travels, in format `wire`. All lanes.
  template <WireFormat wire>
  __device__ SumStrip<dtype, wire, steps> travelling(int first, int vectors) const {
    if constexpr (wire == WireFormat::same) {
      return rounded();
    } else {
      WireStrip<dtype, wire, steps> strip;
      strip.take(total_, first, vectors);
      return strip;
    }
  }
  __device__ void add_strip(const Strip<steps>& strip, bool first) {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      float values[E::kVector];
      E::widen(strip.raw[s], values);
      accumulate(s, values, first);
    }
  }
  __device__ void add_strip(const Strip<steps>& strip, float weight, bool first) {
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      float values[E::kVector];
      E::widen(strip.raw[s], values);
#pragma unroll
      for (int e = 0; e < E::kVector; ++e) values[e] = multiply(values[e], weight);
      accumulate(s, values, first);
    }
  }
  /// The sum, rounded to the row's type.
  __device__ Strip<steps> rounded() const {
    Strip<steps> strip;
#pragma unroll
    for (int s = 0; s < steps; ++s) strip.raw[s] = E::narrow(total_[s]);
    return strip;
  }

 private:
  __device__ void accumulate(int s, const float* values, bool first) {
#pragma unroll
    for (int e = 0; e < E::kVector; ++e) total_[s][e] = first ? values[e] : add(total_[s][e], values[e]);
  }

  float total_[steps][E::kVector];
};

/// Sums one strip of `count` rows; row(j) is the address of row j. Row j is multiplied by weights[j] unless
/// `weights` is null. Without rows the sum is zero. `batch` rows are loaded at once.
template <DType dtype, int steps, int batch, class Row>
__device__ inline StripSum<dtype, steps> sum_rows(int count, const Row& row, const float* weights, int first,
                                                  int vectors) {
  StripSum<dtype, steps> sum;
  if (count == 0) sum.clear();
  for (int base = 0; base < count; base += batch) {
    Strip<steps> strips[batch];
#pragma unroll
    for (int j = 0; j < batch; ++j)
      if (base + j < count) strips[j].load(row(base + j), first, vectors);
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      if (base + j >= count) continue;
      if (weights != nullptr)
        sum.add_strip(strips[j], weights[base + j], base + j == 0);
      else
        sum.add_strip(strips[j], base + j == 0);
    }
  }
  return sum;
}

/// For a token of rank `home`: this rank's row that has the weight gradient of this lane's k; < 0: none.
__device__ inline int32_t weight_grad_row(const Comm& comm, const CombineArguments& args, int32_t home,
                                          int64_t token) {
  const PlanView plan{args.plan, comm.plan_fields};
  const int64_t entry = home * comm.window.shape.max_tokens + token;
  const int32_t position = plan.at(plan.fields.positions)[entry * comm.top_k() + lane_id()];
  const bool by_expert = args.layout == RowLayout::expert || position == kRowElsewhere;
  return by_expert ? position : plan.at(plan.fields.rows)[entry];
}

/// Writes the weight gradient of this lane's (token, k) to `section` [tokens][top_k]. `row`: the row on this
/// rank that has it; negative: the gradient is zero.
__device__ inline void put_weight_grad(const Comm& comm, const CombineArguments& args, std::byte* section,
                                       int64_t token, int32_t row) {
  const int64_t to = token * comm.top_k() + lane_id();
  const int64_t from = args.layout == RowLayout::expert ? row : int64_t{row} * comm.top_k() + lane_id();
  reinterpret_cast<float*>(section)[to] =
      row < 0 ? 0.0f : reinterpret_cast<const float*>(args.weight_grads)[from];
}

}  // namespace moecomm::gpu
