// Dispatch, receiving side, for rows that change on arrival: they are converted from the wire format, or, in
// the backward of a combine with weights, multiplied by the factor of each place, with the dot products of
// rows and those at the places. Uses a pipe with workers (move_pipe.cuh), for rows that fit one stage.
#include "kernels/gpu/common/wire_vector.cuh"
#include "kernels/gpu/dispatch/receive_list.cuh"

namespace moecomm::gpu {
namespace {

/// Converts rows from a wire format to `dtype`. For the workers of a pipe.
template <DType dtype, WireFormat wire>
class DequantiseWork {
  using V = WireVector<dtype, wire>;
  static constexpr int kSteps = MovePipe<kWorkers>::kPiece / 16 / kWorkerThreads;

 public:
  explicit __device__ DequantiseWork(const KernelShape& shape) : shape_(shape) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List&, int, int thread, float*) {
    const int vectors = static_cast<int>(shape_.row_bytes() / 16);
    const auto* const scales = reinterpret_cast<const typename V::Scale*>(stage + shape_.wire_data_bytes());
    typename V::Values packed[kSteps];
    float factors[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      if (v >= vectors) continue;
      packed[s] = reinterpret_cast<const typename V::Values*>(stage)[v];
      factors[s] = V::W::factor(scales[v / V::kBlockLanes]);
    }
    sync_workers();  // the result overwrites what was read
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      if (v < vectors) reinterpret_cast<uint4*>(stage)[v] = V::read(packed[s], factors[s]);
    }
  }

 private:
  const KernelShape& shape_;
};

/// Receives rows in a wire format and converts them to `dtype`. Whole block.
template <DType dtype, WireFormat wire>
__device__ void dequantise_by_pipe(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                                   std::byte* shared) {
  run_move_pipe<kWorkers>(
      shared,
      MoveShape::of<kWorkers>(comm.window.shape.wire_row_bytes(), comm.window.shape.row_bytes()).passing(),
      epoch, [&](MoveLister<kWorkers>& pipe) { list_rows_to_places(comm, args, epoch, pipe); },
      [&] { zero_paddings(comm, args); }, DequantiseWork<dtype, wire>(comm.window.shape));
}

/// Makes from one row of `dtype` a row for each of its places, times the place's factor. The place's stage
/// may hold another row before, for the dot product with it. For the workers of a pipe; holds what a thread
/// keeps of the row.
template <DType dtype>
class ScaleWork {
  using E = Element<dtype>;
  static constexpr int kSteps = MovePipe<kWorkers>::kPiece / 16 / kWorkerThreads;

 public:
  __device__ ScaleWork(const ReceiveArguments& args, int64_t row_bytes)
      : scales_(args.scales != nullptr), vectors_(static_cast<int>(row_bytes / 16)) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List& list, int entry, int thread, float* parts) {
    auto* const values = reinterpret_cast<uint4*>(stage);
    const int first = entry > 0 ? list.ends[entry - 1] : 0;
    if (list.ends[entry] == first) {  // this entry is the token's row
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
        if (s * kWorkerThreads + thread < vectors_) row_[s] = values[s * kWorkerThreads + thread];
      return;
    }
    const bool products = list.products[entry] != nullptr;
    const float factor = list.factors[entry];
    float dot = 0;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int v = s * kWorkerThreads + thread;
      if (v >= vectors_) continue;
      float row[E::kVector];
      E::widen(row_[s], row);
      if (products) {
        float with[E::kVector];
        E::widen(values[v], with);
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) dot = __fmaf_rn(row[e], with[e], dot);
      }
#pragma unroll
      for (int e = 0; e < E::kVector; ++e) row[e] = scales_ ? multiply(row[e], factor) : row[e];
      values[v] = E::narrow(row);
    }
    if (!products) return;
    for (int width = 16; width > 0; width /= 2) dot = add(dot, __shfl_xor_sync(0xffffffffu, dot, width));
    if (lane_id() == 0) parts[thread / 32] = dot;
  }

 private:
  const bool scales_;
  const int vectors_;
  uint4 row_[kSteps];
};

/// Receives rows multiplied by the factors of their places, and their dot products. Whole block.
template <DType dtype>
__device__ void scale_by_pipe(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              std::byte* shared) {
  const int64_t row_bytes = comm.window.shape.wire_row_bytes();
  run_move_pipe<kWorkers>(
      shared, MoveShape::of<kWorkers>(row_bytes, row_bytes).passing(), epoch,
      [&](MoveLister<kWorkers>& pipe) {
        const TokenLanes map = TokenLanes::of_many(comm.top_k());
        const auto* const scales = reinterpret_cast<const float*>(args.scales);
        auto* const dots = reinterpret_cast<float*>(args.dots);
        list_arriving<kWorkers, Operation::redispatch>(
            comm, args, epoch, pipe, map, [&](const std::byte* source, int32_t row) {
              const bool wanted = row >= 0, products = args.other != nullptr;
              const float factor = wanted && scales != nullptr ? scales[row] : 1.0f;
              pipe.add_each(map, source, wanted, args.out + row * row_bytes, factor,
                            products ? args.other + row * row_bytes : nullptr,
                            products ? dots + row : nullptr);
            });
      },
      [&] { zero_paddings(comm, args); }, ScaleWork<dtype>(args, row_bytes));
}

/// The kernel for rows times factors.
template <DType dtype>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_scale_kernel(const __grid_constant__ Comm comm, const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args, [&](uint64_t epoch) { scale_by_pipe<dtype>(comm, args, epoch, shared); });
}

/// The kernel for rows in a wire format.
template <DType dtype, WireFormat wire>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_dequantise_kernel(const __grid_constant__ Comm comm,
                               const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args,
                  [&](uint64_t epoch) { dequantise_by_pipe<dtype, wire>(comm, args, epoch, shared); });
}

/// Calls use.operator()<kernel>() with the kernel for this change of rows.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, Arrival arrival, const Use& use) {
  constexpr int kPipeThreads = MovePipe<kWorkers>::kThreads;
  constexpr size_t kBytes = sizeof(MovePipe<kWorkers>::Memory);
  if (arrival == Arrival::scaled)
    return with_dtype(shape.dtype, [&]<DType dtype>() {
      return use.template operator()<&dispatch_scale_kernel<dtype>>(kPipeThreads, kBytes);
    });
  return with_conversion(shape, [&]<DType dtype, WireFormat wire>() {
    return use.template operator()<&dispatch_dequantise_kernel<dtype, wire>>(kPipeThreads, kBytes);
  });
}

}  // namespace

cudaError_t launch_dispatch_change(const Launch& launch, const Comm& comm, const ReceiveArguments& args) {
  return with_kernel(comm.window.shape, arrival_of(args), Start(launch, comm, args));
}

cudaError_t prepare_dispatch_change(const DeviceShape& shape, Arrival arrival) {
  return with_kernel(shape, arrival, Prepare{});
}

}  // namespace moecomm::gpu
