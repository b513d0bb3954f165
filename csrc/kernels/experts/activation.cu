// The experts' activation with the routing weight, forward and backward, each in one pass over memory.
//   - a team processes a row: a warp, or a block if rows are wide. Teams stride over the rows; the number of
//     real rows is read on the device
//   - thread t of a team of n loads pieces t, t + n, t + 2n and so on, 16 bytes each, several at once. If
//     a row's bytes or an address are not multiples of 16, it moves the same pieces element by element
//   - for the gradient of a row's weight a thread adds its terms in ascending order, then a warp adds its
//     threads' sums in a butterfly, then a block adds its warps' sums in ascending order
//   - the grid has several times the blocks that fit on the device at once: while communication holds some
//     SMs, other SMs run more of the blocks
#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>

#include "kernels/element.cuh"
#include "kernels/experts/activation.hpp"
#include "ptx/arithmetic.cuh"

namespace moecomm::experts {
namespace {

constexpr int kWarpBits = 5, kThreadBits = 8;
constexpr int kThreads = 1 << kThreadBits, kWarps = kThreads / 32;
constexpr int kGrids = 8;             // a grid has at most this many times the blocks that fit at once
constexpr int kWarpPieces = 16 * 32;  // a warp processes rows of up to so many pieces, a block wider ones
constexpr int kLoads = 8;             // a thread has at most this many loads of 16 bytes in flight

/// How many blocks an SM should hold at once. This limits the registers of a thread.
constexpr int kForwardBlocks = 4, kBackwardBlocks = 3;

// -- the functions ------------------------------------------------------------------------------------------

__device__ inline float sigmoid(float x) { return ptx::reciprocal(1.0f + expf(-x)); }

/// The normal distribution at a point x.
struct Normal {
  float below;  ///< the probability of values less than x
  float density;
};

/// For x < 0 the probability is exp(-x*x/2) * t * P(t) with t = 1 / (1 + c*|x|). The polynomial P of degree 8
/// is a minimax fit for |x| up to 15 (relative error 1.6e-8). The product stays precise far below zero, where
/// 1 + erf(x) loses all precision, and its exponential also gives the density.
__device__ inline Normal normal(float x) {
  constexpr float kFit[] = {0.105739318f,  0.105285518f, 0.10241814f,   0.0614444688f, 0.135229036f,
                            -0.112311751f, 0.214173809f, -0.142415792f, 0.030437246f};
  const float t = ptx::reciprocal(fmaf(0.264999986f, fabsf(x), 1.0f));
  float tail = kFit[8];
#pragma unroll
  for (int i = 7; i >= 0; --i) tail = fmaf(tail, t, kFit[i]);
  const float bell = expf(-0.5f * x * x);
  tail = __fmul_rn(tail, t * bell);  // not fused with what follows: forward and backward get the same bits
  return {x < 0 ? tail : 1.0f - tail, 0.398942280f * bell};
}

/// value() returns one column's result. slopes() returns it too, and writes its derivative with respect to
/// each input. kInterleaved: the inputs of a column are neighbours; else a row has all first inputs, then all
/// second inputs. The code says which operations are fused: the compiler's choice would change last bits.
template <Activation>
struct Function;

template <>
struct Function<Activation::swiglu> {
  static constexpr int kInputs = activation_inputs(Activation::swiglu);
  static constexpr bool kInterleaved = false;
  __device__ static float value(const float* in) { return in[0] * sigmoid(in[0]) * in[1]; }
  __device__ static float slopes(const float* in, float* out) {
    const float share = sigmoid(in[0]), silu = in[0] * share;
    out[0] = in[1] * (share * fma(in[0], 1 - share, 1.0f));
    out[1] = silu;
    return silu * in[1];
  }
};

template <>
struct Function<Activation::swiglu_interleaved> : Function<Activation::swiglu> {
  static constexpr bool kInterleaved = true;
};

template <>
struct Function<Activation::swiglu_clamped> {
  static constexpr int kInputs = activation_inputs(Activation::swiglu_clamped);
  static constexpr bool kInterleaved = true;
  static constexpr float kAlpha = 1.702f, kLimit = 7.0f;
  // Not fminf and fmaxf, which turn NaN into a number.
  __device__ static float below(float x) { return x > kLimit ? kLimit : x; }
  __device__ static float within(float x) { return x < -kLimit ? -kLimit : below(x); }
  __device__ static float value(const float* in) {
    const float gate = below(in[0]), silu = gate * sigmoid(__fmul_rn(kAlpha, gate));
    return fmaf(silu, within(in[1]), silu);
  }
  __device__ static float slopes(const float* in, float* out) {
    const float gate = below(in[0]), up = within(in[1]), x = __fmul_rn(kAlpha, gate);
    const float share = sigmoid(x), silu = gate * share;
    out[0] = in[0] <= kLimit ? __fadd_rn(up, 1.0f) * (share * fmaf(x, 1 - share, 1.0f)) : 0.0f;
    out[1] = fabsf(in[1]) <= kLimit ? silu : 0.0f;
    return fmaf(silu, up, silu);
  }
};

template <>
struct Function<Activation::gelu> {
  static constexpr int kInputs = activation_inputs(Activation::gelu);
  static constexpr bool kInterleaved = false;
  __device__ static float value(const float* in) { return in[0] * normal(in[0]).below; }
  __device__ static float slopes(const float* in, float* out) {
    const Normal found = normal(in[0]);
    out[0] = fma(in[0], found.density, found.below);
    return in[0] * found.below;
  }
};

// -- pieces of rows -----------------------------------------------------------------------------------------

/// Loads and stores pieces of a row of `width` elements: 16 bytes at once if `whole`, else element by
/// element, where elements past the row's end are loaded as zero and not stored.
template <DType dtype, bool whole>
struct Pieces {
  static constexpr int kVector = Element<dtype>::kVector;
  using Word = std::conditional_t<dtype_bytes(dtype) == 2, uint16_t, uint32_t>;

  __device__ static uint4 load(const std::byte* row, int piece, int width) {
    // The row is not read again soon, so caches should evict it first and keep the results.
    if constexpr (whole) return __ldcs(reinterpret_cast<const uint4*>(row) + piece);
    const Word* const from = reinterpret_cast<const Word*>(row) + int64_t{piece} * kVector;
    const int count = width - piece * kVector;
    Word words[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) words[i] = i < count ? from[i] : Word{0};
    uint4 raw;
    memcpy(&raw, words, sizeof raw);
    return raw;
  }
  __device__ static void store(std::byte* row, int piece, int width, const uint4& raw) {
    if constexpr (whole) {
      reinterpret_cast<uint4*>(row)[piece] = raw;
    } else {
      Word* const to = reinterpret_cast<Word*>(row) + int64_t{piece} * kVector;
      const int count = width - piece * kVector;
      Word words[kVector];
      memcpy(words, &raw, sizeof raw);
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (i < count) to[i] = words[i];
    }
  }
};

/// The position of a thread in its team, which has 2^bits threads.
struct Team {
  int threads;  ///< 32 or kThreads
  int thread;   ///< number of this thread in the team
  int row;      ///< the team's first row
  int stride;   ///< distance to the team's next row

  __device__ explicit Team(int bits)
      : threads(1 << bits),
        thread(static_cast<int>(threadIdx.x) & (threads - 1)),
        row(static_cast<int>((blockIdx.x * kThreads + threadIdx.x) >> bits)),
        stride(static_cast<int>((gridDim.x * kThreads) >> bits)) {}
};

__device__ inline int count_rows(const ActivationRows& rows) {
  return rows.real_rows == nullptr ? rows.rows : min(rows.rows, *rows.real_rows);
}

__device__ inline float weight_of(const ActivationRows& rows, int row) {
  return rows.weights == nullptr ? 1.0f : reinterpret_cast<const float*>(rows.weights)[row];
}

/// The inputs of one piece of the result: kInputs pieces, since each column of the result has kInputs inputs.
template <DType dtype, Activation activation, bool whole>
struct Inputs {
  using F = Function<activation>;
  using P = Pieces<dtype, whole>;
  static constexpr int kVector = P::kVector;
  float values[F::kInputs][kVector];

  /// Loads input piece number `i` for piece `piece` of the result, which has `width` columns.
  __device__ static uint4 load(const std::byte* row, int i, int piece, int width) {
    if constexpr (F::kInterleaved) return P::load(row, piece * F::kInputs + i, width * F::kInputs);
    return P::load(row + int64_t{i} * width * dtype_bytes(dtype), piece, width);
  }
  __device__ void store(std::byte* row, int i, int piece, int width) const {
    const uint4 raw = Element<dtype>::narrow(values[i]);
    if constexpr (F::kInterleaved)
      P::store(row, piece * F::kInputs + i, width * F::kInputs, raw);
    else
      P::store(row + int64_t{i} * width * dtype_bytes(dtype), piece, width, raw);
  }
  /// Input number `i` of a column in the piece.
  __device__ float& of(int column, int i) {
    const int at = column * F::kInputs + i;
    return F::kInterleaved ? values[at / kVector][at % kVector] : values[i][column];
  }
  __device__ void pick(int column, float* in) {
#pragma unroll
    for (int i = 0; i < F::kInputs; ++i) in[i] = of(column, i);
  }
};

// -- kernels ------------------------------------------------------------------------------------------------

template <DType dtype, Activation activation, bool whole>
__global__ void __launch_bounds__(kThreads, kForwardBlocks)
    forward_kernel(const __grid_constant__ ActivationRows rows, std::byte* z, int team_bits) {
  using E = Element<dtype>;
  using F = Function<activation>;
  using P = Pieces<dtype, whole>;
  using I = Inputs<dtype, activation, whole>;
  constexpr int kBatch = kLoads / F::kInputs;
  const Team team(team_bits);
  const int width = rows.width, pieces = (width + E::kVector - 1) / E::kVector;
  const int count = count_rows(rows), row_bytes = width * static_cast<int>(dtype_bytes(dtype));
  for (int row = team.row; row < count; row += team.stride) {
    const std::byte* const in = rows.inner + int64_t{row} * row_bytes * F::kInputs;
    std::byte* const out = z + int64_t{row} * row_bytes;
    const float weight = weight_of(rows, row);
    for (int first = team.thread; first < pieces; first += kBatch * team.threads) {
      uint4 raw[kBatch][F::kInputs];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int piece = first + b * team.threads;
        if (piece >= pieces) break;
#pragma unroll
        for (int i = 0; i < F::kInputs; ++i) raw[b][i] = I::load(in, i, piece, width);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int piece = first + b * team.threads;
        if (piece >= pieces) break;
        I inputs;
        float results[E::kVector], column[F::kInputs];
#pragma unroll
        for (int i = 0; i < F::kInputs; ++i) E::widen(raw[b][i], inputs.values[i]);
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) {
          inputs.pick(e, column);
          results[e] = weight * F::value(column);
        }
        P::store(out, piece, width, E::narrow(results));
      }
    }
  }
}

/// Returns the sum of `value` over a team's threads, but only to the team's first thread. All threads of the
/// team call it. `turn`, 0 or 1, is equal in all threads of a block and changes from call to call.
__device__ inline float team_sum(const Team& team, float value, int turn) {
  // Two buffers alternate: the next call writes one while the sums of this call are read.
  __shared__ float partial[2][kWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (team.threads == 32) return value;
  if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = value;
  __syncthreads();
  float total{0};
  if (team.thread == 0)
    for (int warp = 0; warp < kWarps; ++warp) total += partial[turn][warp];
  return total;
}

template <DType dtype, Activation activation, bool whole>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    backward_kernel(const __grid_constant__ ActivationRows rows,
                    const __grid_constant__ ActivationGradients to, int team_bits) {
  using E = Element<dtype>;
  using F = Function<activation>;
  using P = Pieces<dtype, whole>;
  using I = Inputs<dtype, activation, whole>;
  constexpr int kBatch = kLoads / (F::kInputs + 1);
  const Team team(team_bits);
  const int width = rows.width, pieces = (width + E::kVector - 1) / E::kVector;
  const int count = count_rows(rows), row_bytes = width * static_cast<int>(dtype_bytes(dtype));
  int turn = 0;
  for (int row = team.row; row < count; row += team.stride, turn ^= 1) {
    const std::byte* const in = rows.inner + int64_t{row} * row_bytes * F::kInputs;
    const std::byte* const grad = to.grad_z + int64_t{row} * row_bytes;
    std::byte* const out = to.grad_inner + int64_t{row} * row_bytes * F::kInputs;
    const float weight = weight_of(rows, row);
    float dot{0};
    for (int first = team.thread; first < pieces; first += kBatch * team.threads) {
      uint4 raw[kBatch][F::kInputs], raw_grad[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int piece = first + b * team.threads;
        if (piece >= pieces) break;
#pragma unroll
        for (int i = 0; i < F::kInputs; ++i) raw[b][i] = I::load(in, i, piece, width);
        raw_grad[b] = P::load(grad, piece, width);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int piece = first + b * team.threads;
        if (piece >= pieces) break;
        I inputs;
        float grads[E::kVector], column[F::kInputs], slopes[F::kInputs];
#pragma unroll
        for (int i = 0; i < F::kInputs; ++i) E::widen(raw[b][i], inputs.values[i]);
        E::widen(raw_grad[b], grads);
        float results[E::kVector];
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) {
          inputs.pick(e, column);
          const float value = F::slopes(column, slopes), scaled = weight * grads[e];
          dot = fma(grads[e], value, dot);
          results[e] = weight * value;
#pragma unroll
          for (int i = 0; i < F::kInputs; ++i) inputs.of(e, i) = scaled * slopes[i];
        }
#pragma unroll
        for (int i = 0; i < F::kInputs; ++i) inputs.store(out, i, piece, width);
        if (to.z != nullptr) P::store(to.z + int64_t{row} * row_bytes, piece, width, E::narrow(results));
      }
    }
    if (to.grad_weights == nullptr) continue;
    dot = team_sum(team, dot, turn);
    if (team.thread == 0) reinterpret_cast<float*>(to.grad_weights)[row] = dot;
  }
}

// -- launches -----------------------------------------------------------------------------------------------

constexpr Activation kActivations[] = {Activation::swiglu, Activation::swiglu_interleaved,
                                       Activation::swiglu_clamped, Activation::gelu};

/// Calls use.operator()<dtype, activation, whole>().
template <size_t number = 0, class Use>
cudaError_t with_variant(DType dtype, Activation activation, bool whole, const Use& use) {
  if constexpr (number == std::size(kActivations)) {
    return cudaErrorInvalidValue;
  } else {
    if (activation != kActivations[number]) return with_variant<number + 1>(dtype, activation, whole, use);
    return with_dtype(dtype, [&]<DType d>() {
      return whole ? use.template operator()<d, kActivations[number], true>()
                   : use.template operator()<d, kActivations[number], false>();
    });
  }
}

/// True if `row_bytes` and all addresses are multiples of 16, so that every row's address is one.
bool in_whole_pieces(int64_t row_bytes, std::initializer_list<const std::byte*> addresses) {
  return row_bytes % 16 == 0 && std::all_of(addresses.begin(), addresses.end(), [](const std::byte* address) {
           return reinterpret_cast<uintptr_t>(address) % 16 == 0;
         });
}

/// Launches kernel(arguments..., log2 of a team's threads). `blocks`: how many blocks an SM holds at once.
template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), int blocks, const ActivationRows& rows, cudaStream_t stream,
                  const Arguments&... arguments) {
  int device = 0, sms = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  // The team's size fixes the order of sums, so it depends on a row's bytes alone.
  const int64_t pieces = (rows.width * dtype_bytes(rows.dtype) + 15) / 16;
  const int bits = pieces <= kWarpPieces ? kWarpBits : kThreadBits;
  const int64_t teams = kThreads >> bits, needed = (rows.rows + teams - 1) / teams;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(needed, int64_t{sms} * blocks * kGrids)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments..., bits);
}

}  // namespace

cudaError_t launch_activation(const ActivationRows& rows, std::byte* z, cudaStream_t stream) {
  if (rows.rows == 0) return cudaSuccess;
  const bool aligned = in_whole_pieces(rows.width * dtype_bytes(rows.dtype), {rows.inner, z});
  return with_variant(
      rows.dtype, rows.activation, aligned, [&]<DType dtype, Activation activation, bool whole>() {
        return start(forward_kernel<dtype, activation, whole>, kForwardBlocks, rows, stream, rows, z);
      });
}

cudaError_t launch_activation_backward(const ActivationRows& rows, const ActivationGradients& gradients,
                                       cudaStream_t stream) {
  if (rows.rows == 0) return cudaSuccess;
  const bool aligned = in_whole_pieces(rows.width * dtype_bytes(rows.dtype),
                                       {rows.inner, gradients.grad_z, gradients.grad_inner, gradients.z});
  return with_variant(rows.dtype, rows.activation, aligned,
                      [&]<DType dtype, Activation activation, bool whole>() {
                        return start(backward_kernel<dtype, activation, whole>, kBackwardBlocks, rows, stream,
                                     rows, gradients);
                      });
}

cudaError_t prepare_activation(DType dtype) {
  for (const Activation activation : kActivations)
    for (const bool whole : {true, false}) {
      const auto load = [&]<DType d, Activation a, bool w>() {
        cudaFuncAttributes loaded;
        const cudaError_t error = cudaFuncGetAttributes(&loaded, forward_kernel<d, a, w>);
        return error != cudaSuccess ? error : cudaFuncGetAttributes(&loaded, backward_kernel<d, a, w>);
      };
      const cudaError_t error = with_variant(dtype, activation, whole, load);
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

}  // namespace moecomm::experts
