// Dispatch, sending side: quantises rows, by all workers of a pipe together (QuantiseWork) or by lone workers
// (QuantiseAlone). move_pipe.cuh explains workers.
#pragma once

#include "kernels/gpu/common/wire_vector.cuh"
#include "kernels/gpu/dispatch/move_pipe.cuh"

namespace moecomm::gpu {

/// Quantises rows of `dtype` in their stages: values, then scales. All workers of a pipe share a row.
template <DType dtype, WireFormat wire>
class QuantiseWork {
  using V = WireVector<dtype, wire>;
  static constexpr int kSteps = MovePipe<kWorkers>::kPiece / 16 / kWorkerThreads;

 public:
  explicit __device__ QuantiseWork(const KernelShape& shape) : shape_(shape) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List&, int, int thread, float*) {
    const int vectors = static_cast<int>(shape_.row_bytes() / 16);
    uint4 raw[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      raw[s] = v < vectors ? reinterpret_cast<const uint4*>(stage)[v] : uint4{};
    }
    sync_workers();  // all have read: the values overwrite the row
    auto* const scales = reinterpret_cast<typename V::Scale*>(stage + shape_.wire_data_bytes());
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      const auto scale = V::block_scale(raw[s]);
      if (v >= vectors) continue;
      reinterpret_cast<typename V::Values*>(stage)[v] = V::write(raw[s], V::W::inverse(scale));
      if (v % V::kBlockLanes == 0) scales[v / V::kBlockLanes] = scale;
    }
  }

 private:
  const KernelShape& shape_;
};

/// Quantises rows of `dtype` by lone workers; each takes a whole row or a piece of it.
template <DType dtype, WireFormat wire>
class QuantiseAlone {
  using E = Element<dtype>;
  using V = WireVector<dtype, wire>;

 public:
  static constexpr bool kChanges = true;
  __device__ static LoneRows rows(const KernelShape& s, bool) {
    const Pieces loaded = row_pieces(s.row_bytes(), kLonePiece);
    const Pieces values = row_pieces(s.wire_data_bytes(), kLonePiece / 16 * E::kVector);
    const auto whole = static_cast<int32_t>(s.wire_row_bytes());
    if (values.count == 1) return {loaded, {}, 0, {1, whole, whole}, {}, 0, false};
    return {loaded, {}, 0, values, scale_pieces(s, values), s.wire_data_bytes(), false};
  }
  __device__ QuantiseAlone(const KernelShape& shape, const LoneShape& pieces)
      : shape_(pieces),
        scales_at_(min(pieces.rows.stored.bytes, static_cast<int32_t>(shape.wire_data_bytes()))) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List&, int, int piece) {
    const int vectors = static_cast<int>(shape_.pieces.size(piece) / 16);
    const auto* const from = reinterpret_cast<const uint4*>(stage + shape_.at);
    auto* const scales = reinterpret_cast<typename V::Scale*>(stage + scales_at_);
#pragma unroll 4
    for (int first = 0; first < vectors; first += 32) {
      const int v = first + lane_id();
      const uint4 raw = v < vectors ? from[v] : uint4{};
      const auto scale = V::block_scale(raw);
      if (v >= vectors) continue;
      reinterpret_cast<typename V::Values*>(stage)[v] = V::write(raw, V::W::inverse(scale));
      if (v % V::kBlockLanes == 0) scales[v / V::kBlockLanes] = scale;
    }
  }

 private:
  const LoneShape& shape_;
  const int32_t scales_at_;  ///< offset of the scales in a stage
};

}  // namespace moecomm::gpu
