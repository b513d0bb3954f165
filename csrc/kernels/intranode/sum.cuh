// Sums of rows in registers, and the order in which their pieces are loaded: both sides of combine use them.
#pragma once

#include "kernels/intranode/element.cuh"
#include "kernels/intranode/kernel.cuh"

namespace moecomm::intranode {

/// Walks (token, piece, source) of the tokens in a mask; token i has counts[i] sources.
struct SourceCursor {
  uint32_t tokens;
  const int32_t* counts;
  int piece = 0, source = 0;

  /// Tokens without sources have nothing to load.
  __device__ void skip_empty() {
    while (tokens != 0 && counts[token()] == 0) tokens &= tokens - 1;
  }
  __device__ bool done() const { return tokens == 0; }
  __device__ int token() const { return __ffs(static_cast<int>(tokens)) - 1; }
  __device__ void advance(int pieces) {
    if (++source < counts[token()]) return;
    source = 0;
    if (++piece < pieces) return;
    piece = 0;
    tokens &= tokens - 1;
    skip_empty();
  }
};

/// Fills the ring with the next pieces; source(i, j) is the j-th row of token i.
template <class Source>
__device__ inline void load_ahead(LoadRing<kSumStages, kSumPiece>& ring, SourceCursor& load,
                                  const Pieces& pieces, const Source& source) {
  while (!load.done() && ring.in_flight() < kSumStages) {
    ring.load(source(load.token(), load.source) + pieces.offset(load.piece), pieces.size(load.piece));
    load.advance(pieces.count);
  }
}

/// The sum of one piece of several rows, spread over the lanes: left to right, each product and each sum
/// rounded.
template <DType dtype>
class RowSum {
  using E = Element<dtype>;
  static constexpr int kSteps = kSumPiece / 512;

 public:
  using Sum = typename E::Sum;

  __device__ bool empty() const { return empty_; }
  __device__ void clear() { empty_ = true; }

  /// Adds a row's piece, times weights[row] if there are weights.
  __device__ void add_row(const std::byte* piece, uint32_t bytes, const std::byte* weights, int32_t row) {
    const Sum weight = weights != nullptr ? __ldg(reinterpret_cast<const Sum*>(weights) + row) : Sum{1};
    const uint4* const in = reinterpret_cast<const uint4*>(piece);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t v = step * 32 + lane_id();
      if (v * 16 >= bytes) continue;
      Sum values[E::kVector];
      E::widen(in[v], values);
      if (weights != nullptr)
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) values[e] = multiply(values[e], weight);
      add_values(step, values);
    }
    empty_ = false;
  }

  /// Adds another sum, rounded to the row's type first, as if it had travelled.
  __device__ void add_rounded(const RowSum& other, uint32_t bytes) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t v = step * 32 + lane_id();
      if (v * 16 >= bytes) continue;
      Sum values[E::kVector];
      E::widen(E::narrow(other.total_[step]), values);
      add_values(step, values);
    }
    empty_ = false;
  }

  /// The sum, rounded; zero if nothing was added.
  __device__ void write(std::byte* piece, uint32_t bytes) const {
    uint4* const out = reinterpret_cast<uint4*>(piece);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t v = step * 32 + lane_id();
      if (v * 16 >= bytes) continue;
      out[v] = empty_ ? uint4{} : E::narrow(total_[step]);
    }
  }

 private:
  __device__ void add_values(int step, const Sum* values) {
#pragma unroll
    for (int e = 0; e < E::kVector; ++e)
      total_[step][e] = empty_ ? values[e] : add(total_[step][e], values[e]);
  }

  Sum total_[kSteps][E::kVector];
  bool empty_ = true;
};

/// Whether a lane's row is a term of the sum here: in the rank layout every k of this rank names the same
/// row.
__device__ inline bool counts_in_sum(RowLayout layout, int32_t row) {
  const bool here = row >= 0;
  if (layout == RowLayout::expert) return here;
  return (__ballot_sync(0xffffffffu, here) & ((1u << lane_id()) - 1)) == 0 && here;
}

/// Writes the gradient of this lane's (token, k), which is at `row` here, to `section` [tokens][top_k].
__device__ inline void put_weight_grad(const Comm& comm, const CombineArguments& args, std::byte* section,
                                       int64_t token, int32_t row) {
  const int64_t to = token * comm.top_k() + lane_id();
  const int64_t from = args.layout == RowLayout::expert ? row : int64_t{row} * comm.top_k() + lane_id();
  if (comm.window.shape.dtype == DType::float64)
    reinterpret_cast<double*>(section)[to] =
        row < 0 ? 0.0 : reinterpret_cast<const double*>(args.weight_grads)[from];
  else
    reinterpret_cast<float*>(section)[to] =
        row < 0 ? 0.0f : reinterpret_cast<const float*>(args.weight_grads)[from];
}

}  // namespace moecomm::intranode
