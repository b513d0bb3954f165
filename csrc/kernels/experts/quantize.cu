// Converts the operands of products to e4m3, with a scale for each row or column.
//
// Rows: a team (a warp, or a block for wide rows) holds a row in registers, finds its largest magnitude and
// writes the result, so it reads the row once. Rows that do not fit in registers are read twice.
//
// Columns: a block takes a strip of a group, 128 bytes wide.
//   - the block reads the strip row by row, keeps the first rows in shared memory, and finds the largest
//     magnitude of each column: in each thread's rows, then in each warp's, then in the block's
//   - then the block goes over tiles of 128 rows. A thread takes 16 rows of one or two columns from shared
//     memory, or from global memory if they did not fit. It writes 16 bytes per column to the tile's result
//     in shared memory, from which the block writes 128 consecutive bytes of every column
//   - every block itself computes where its group begins among the padded groups, so one launch is enough
// A maximum does not depend on the order of comparisons, so neither do the bits of the result.
#include <algorithm>

#include "kernels/e4m3.cuh"
#include "kernels/element.cuh"
#include "kernels/experts/quantize.hpp"

namespace moecomm::experts {
namespace {

constexpr int kWarpBits = 5, kThreadBits = 8;
constexpr int kThreads = 1 << kThreadBits, kWarps = kThreads / 32;

__device__ inline float larger(float most, float value) { return fmaxf(most, fabsf(value)); }

// -- rows ---------------------------------------------------------------------------------------------------

constexpr int kHeld = 8;                 // pieces of 16 bytes that a thread holds in registers
constexpr int kWarpPieces = 32 * kHeld;  // a warp processes rows of up to so many pieces, a block wider ones
constexpr int kGrids = 8;                // a grid has at most this many times the blocks that fit at once
constexpr int kRowBlocks = 4;            // blocks that an SM should hold at once

/// Returns the largest `most` in a team's threads, to each of them. All threads of the team call it. `turn`,
/// 0 or 1, is equal in all threads of a block and changes from call to call.
__device__ inline float team_largest(int bits, float most, int turn) {
  // Two buffers alternate: the next call writes one while the maxima of this call are read.
  __shared__ float partial[2][kWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  if (bits == kWarpBits) return most;
  if (threadIdx.x % 32 == 0) partial[turn][threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) most = fmaxf(most, partial[turn][warp]);
  return most;
}

/// Converts 16 bytes of a row, `raw`, to e4m3 and stores them as piece number `piece` of the result `row`.
template <DType dtype>
__device__ inline void write_piece(std::byte* row, int piece, const uint4& raw, float inverse) {
  using E = Element<dtype>;
  float values[E::kVector];
  E::widen(raw, values);
  if constexpr (E::kVector == 8) {
    const uint2 out = {e4m3::write(values, inverse), e4m3::write(values + 4, inverse)};
    reinterpret_cast<uint2*>(row)[piece] = out;
  } else {
    reinterpret_cast<uint32_t*>(row)[piece] = e4m3::write(values, inverse);
  }
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads, kRowBlocks)
    rows_kernel(const __grid_constant__ QuantizeRows all, int bits) {
  using E = Element<dtype>;
  const int threads = 1 << bits, thread = static_cast<int>(threadIdx.x) & (threads - 1);
  const int64_t stride = (int64_t{gridDim.x} * kThreads) >> bits;
  const int count = all.real_rows == nullptr ? all.rows : min(all.rows, *all.real_rows);
  const int pieces = all.columns / E::kVector;
  const int64_t row_bytes = int64_t{all.columns} * dtype_bytes(dtype);
  int turn = 0;
  for (int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> bits; row < count;
       row += stride, turn ^= 1) {
    const uint4* const in = reinterpret_cast<const uint4*>(all.x + row * row_bytes);
    std::byte* const out = all.values + row * all.columns;
    uint4 raw[kHeld];
    float most = 0;
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (first + i * threads < pieces) raw[i] = __ldcs(in + first + i * threads);
    };
    for (int first = thread; first < pieces; first += kHeld * threads) {
      load(first);
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (first + i * threads < pieces) most = fmaxf(most, E::largest(raw[i]));
    }
    const float scale = e4m3::scale(team_largest(bits, most, turn)), inverse = e4m3::inverse(scale);
    if (thread == 0) all.scales[row] = scale;
    const bool held = pieces <= kHeld * threads;
    for (int first = thread; first < pieces; first += kHeld * threads) {
      if (!held) load(first);
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        if (first + i * threads < pieces) write_piece<dtype>(out, first + i * threads, raw[i], inverse);
    }
  }
}

// -- columns ------------------------------------------------------------------------------------------------

constexpr int kStripBytes = 128, kStripPieces = kStripBytes / 16;
constexpr int kTileRows = kWarps * 16;       // 16 rows per warp
constexpr int kTileStride = kTileRows + 16;  // bytes of a column; + 16 avoids bank conflicts
constexpr int kKeptRows = 6 * kTileRows;     // rows of a strip that stay in shared memory
constexpr int kLoads = 8;                    // rows that a thread loads at once
constexpr int kColumnBlocks = 2;             // blocks that an SM should hold at once

template <DType dtype>
struct Strip {
  static constexpr int kColumns = kStripBytes / static_cast<int>(dtype_bytes(dtype));
  static constexpr int kLaneColumns = kColumns / 32;  ///< columns in a lane's four bytes

  uint4 rows[kKeptRows][kStripPieces];
  alignas(16) std::byte tile[kColumns][kTileStride];
  float largest[kWarps][kColumns];
  float inverse[kColumns];
};

/// The rows of a group, and the position of its values in the result.
struct Group {
  int64_t first;  ///< the group's first row in x
  int count;      ///< number of rows in x
  int padded;     ///< number of values that a column has in the result, with padding
  int64_t out;    ///< position of the first value of the group's first column
  int64_t line;   ///< distance between columns, in values
};

/// The row of x at which group `g` ends and the next begins; 0 for g = -1. Bad `ends` are clamped to x.
__device__ inline int end_of(const QuantizeColumns& all, int g) {
  return g < 0 ? 0 : max(0, min(all.ends[g], all.rows));
}

__device__ inline int count_of(const QuantizeColumns& all, int g) {
  return max(0, end_of(all, g) - end_of(all, g - 1));
}

/// The number of rows in the groups before `g`, with padding. All threads of the block call it.
__device__ inline int padded_before(const QuantizeColumns& all, int g) {
  __shared__ int partial[kWarps];
  int sum = 0;
  for (int other = static_cast<int>(threadIdx.x); other < g; other += kThreads)
    sum += padded_rows(count_of(all, other));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
  return sum;
}

__device__ inline Group find_group(const QuantizeColumns& all, int g) {
  if (all.ends == nullptr)
    return {int64_t{g} * all.rows, all.rows, all.rows, int64_t{g} * all.columns * all.rows, all.rows};
  const int before = padded_before(all, g), count = count_of(all, g);
  return {end_of(all, g - 1), count, padded_rows(count), before, all.out_rows};
}

/// Reads a strip's `count` rows of `pieces` pieces, keeps the first kKeptRows, and finds its columns' scales.
template <DType dtype>
__device__ inline void find_scales(Strip<dtype>& strip, const std::byte* from, int64_t row_bytes, int count,
                                   int pieces, float* scales) {
  using E = Element<dtype>;
  constexpr int kStep = kThreads / kStripPieces;  // rows that the block reads at once
  const int piece = static_cast<int>(threadIdx.x) % kStripPieces, warp = static_cast<int>(threadIdx.x) / 32;
  float most[E::kVector] = {};
  if (piece < pieces) {
    for (int first = static_cast<int>(threadIdx.x) / kStripPieces; first < count; first += kLoads * kStep) {
      uint4 raw[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = first + i * kStep;
        if (row < count) raw[i] = *reinterpret_cast<const uint4*>(from + row * row_bytes + piece * 16);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int row = first + i * kStep;
        if (row >= count) break;
        if (row < kKeptRows) strip.rows[row][piece] = raw[i];
        float values[E::kVector];
        E::widen(raw[i], values);
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) most[e] = larger(most[e], values[e]);
      }
    }
  }
  // Lanes with the same piece lie kStripPieces apart.
#pragma unroll
  for (int e = 0; e < E::kVector; ++e) {
#pragma unroll
    for (int step = 16; step >= kStripPieces; step /= 2)
      most[e] = fmaxf(most[e], __shfl_xor_sync(0xffffffffu, most[e], step));
    if (threadIdx.x % 32 < kStripPieces) strip.largest[warp][piece * E::kVector + e] = most[e];
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column < pieces * E::kVector) {
    float found = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) found = fmaxf(found, strip.largest[w][column]);
    const float scale = e4m3::scale(found);
    scales[column] = scale;
    strip.inverse[column] = e4m3::inverse(scale);
  }
  __syncthreads();
}

/// Quantises this lane's columns of 16 rows, from `row` on, to byte `at` of the tile; 0 from row `count` on.
template <DType dtype>
__device__ inline void fill_tile(Strip<dtype>& strip, const std::byte* from, int64_t row_bytes, int count,
                                 int row, int at) {
  constexpr int kLaneColumns = Strip<dtype>::kLaneColumns;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t words[16];
  if (row < kKeptRows) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      words[i] = row + i < count ? reinterpret_cast<const uint32_t*>(strip.rows[row + i])[lane] : 0;
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      words[i] =
          row + i < count ? reinterpret_cast<const uint32_t*>(from + int64_t{row + i} * row_bytes)[lane] : 0;
  }
  float values[kLaneColumns][16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float column[kLaneColumns];
    Element<dtype>::widen_word(words[i], column);
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) values[c][i] = column[c];
  }
#pragma unroll
  for (int c = 0; c < kLaneColumns; ++c) {
    const int column = lane * kLaneColumns + c;
    const float inverse = strip.inverse[column];
    const uint4 out = {e4m3::write(values[c], inverse), e4m3::write(values[c] + 4, inverse),
                       e4m3::write(values[c] + 8, inverse), e4m3::write(values[c] + 12, inverse)};
    *reinterpret_cast<uint4*>(&strip.tile[column][at]) = out;
  }
}

template <DType dtype>
__global__ void __launch_bounds__(kThreads, kColumnBlocks)
    columns_kernel(const __grid_constant__ QuantizeColumns all, int strips) {
  using E = Element<dtype>;
  using S = Strip<dtype>;
  extern __shared__ uint4 memory[];
  S& strip = *reinterpret_cast<S*>(memory);
  const int g = static_cast<int>(blockIdx.x) / strips,
            first = static_cast<int>(blockIdx.x) % strips * S::kColumns;
  const int columns = min(S::kColumns, all.columns - first);
  const int64_t row_bytes = int64_t{all.columns} * dtype_bytes(dtype);
  const Group group = find_group(all, g);
  if (all.ends != nullptr && first == 0 && threadIdx.x == 0)
    all.padded_ends[g] = static_cast<int>(group.out) + group.padded;
  const std::byte* const from = all.x + group.first * row_bytes + first * dtype_bytes(dtype);
  find_scales<dtype>(strip, from, row_bytes, group.count, columns / E::kVector,
                     all.scales + int64_t{g} * all.columns + first);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  std::byte* const to = all.values + group.out + first * group.line;
  for (int tile = 0; tile < group.padded; tile += kTileRows) {
    const int row = tile + warp * 16;
    if (row < group.padded && lane * S::kLaneColumns < columns)
      fill_tile<dtype>(strip, from, row_bytes, group.count, row, warp * 16);
    __syncthreads();
    const int chunks = min(kTileRows, group.padded - tile) / 16;
    for (int i = static_cast<int>(threadIdx.x); i < columns * (kTileRows / 16); i += kThreads) {
      const int column = i / (kTileRows / 16), chunk = i % (kTileRows / 16);
      if (chunk < chunks)
        *reinterpret_cast<uint4*>(to + column * group.line + tile + chunk * 16) =
            *reinterpret_cast<const uint4*>(&strip.tile[column][chunk * 16]);
    }
    __syncthreads();
  }
}

// -- launches -----------------------------------------------------------------------------------------------

template <DType dtype>
cudaError_t allow_memory() {
  static_assert(sizeof(Strip<dtype>) <= 112 * 1024, "two blocks an SM");
  return cudaFuncSetAttribute(columns_kernel<dtype>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(sizeof(Strip<dtype>)));
}

}  // namespace

cudaError_t launch_quantize_rows(const QuantizeRows& rows, cudaStream_t stream) {
  if (rows.rows == 0) return cudaSuccess;
  int device = 0, sms = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  if (const cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
      error != cudaSuccess)
    return error;
  const int64_t pieces = rows.columns * dtype_bytes(rows.dtype) / 16;
  const int bits = pieces <= kWarpPieces ? kWarpBits : kThreadBits;
  const int64_t teams = kThreads >> bits, needed = (rows.rows + teams - 1) / teams;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min(needed, int64_t{sms} * kRowBlocks * kGrids)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return with_dtype(
      rows.dtype, [&]<DType dtype>() { return cudaLaunchKernelEx(&config, rows_kernel<dtype>, rows, bits); });
}

cudaError_t launch_quantize_columns(const QuantizeColumns& columns, cudaStream_t stream) {
  return with_dtype(columns.dtype, [&]<DType dtype>() {
    if (const cudaError_t error = allow_memory<dtype>(); error != cudaSuccess) return error;
    const int strips = (columns.columns + Strip<dtype>::kColumns - 1) / Strip<dtype>::kColumns;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(strips) * static_cast<unsigned>(columns.groups));
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = sizeof(Strip<dtype>);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, columns_kernel<dtype>, columns, strips);
  });
}

cudaError_t prepare_quantize(DType dtype) {
  return with_dtype(dtype, [&]<DType d>() {
    cudaFuncAttributes loaded;
    if (const cudaError_t error = cudaFuncGetAttributes(&loaded, rows_kernel<d>); error != cudaSuccess)
      return error;
    if (const cudaError_t error = cudaFuncGetAttributes(&loaded, columns_kernel<d>); error != cudaSuccess)
      return error;
    return allow_memory<d>();
  });
}

}  // namespace moecomm::experts
