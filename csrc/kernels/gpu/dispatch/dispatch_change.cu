// Dispatch, receiving side, for rows that change on arrival: they are converted from the wire format, or
// split into values and scales. In the backward of a weighted combine each output row is the arrived row
// times a factor, and the arrived row's dot product with another row is taken. Also for unchanged rows, where
// a list does not hold a chunk. Pipes have workers (move_pipe.cuh): all workers share each row, or, where
// rows are short or need several pieces, each worker takes pieces alone (a lone worker).
#include "kernels/gpu/common/wire_vector.cuh"
#include "kernels/gpu/dispatch/receive_list.cuh"

namespace moecomm::gpu {
namespace {

/// Converts rows from a wire format to `dtype`; all workers of a pipe share a row.
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

/// Makes a row for each target of a source row of `dtype`: the source row times the target's factor. If a dot
/// product is wanted, the target's stage at first holds the row to multiply with. All workers of a pipe share
/// a row; each thread has an object, which keeps the thread's vectors of the source row.
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
    if (list.ends[entry] == first) {  // this entry is the source row
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

/// Lists arriving rows; for each of their output rows also its factor, and the row for a dot product if any.
template <int workers>
__device__ void list_scaled(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                            MoveLister<workers>& pipe) {
  const TokenLanes map = TokenLanes::of_many(comm.top_k());
  const int64_t row_bytes = comm.window.shape.wire_row_bytes();
  const auto* const scales = reinterpret_cast<const float*>(args.scales);
  auto* const dots = reinterpret_cast<float*>(args.dots);
  list_arriving<workers, Operation::redispatch>(
      comm, args, epoch, pipe, map, [&](const std::byte* source, int32_t row) {
        const bool wanted = row >= 0, products = args.other != nullptr;
        const float factor = wanted && scales != nullptr ? scales[row] : 1.0f;
        pipe.add_each(map, source, wanted, args.out + row * row_bytes, factor,
                      products ? args.other + row * row_bytes : nullptr, products ? dots + row : nullptr);
      });
}

/// Receives rows, multiplies them by the factor of each output row, and takes dot products. Whole block.
template <DType dtype>
__device__ void scale_by_pipe(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                              std::byte* shared) {
  const int64_t row_bytes = comm.window.shape.wire_row_bytes();
  run_move_pipe<kWorkers>(
      shared, MoveShape::of<kWorkers>(row_bytes, row_bytes).passing(), epoch,
      [&](MoveLister<kWorkers>& pipe) { list_scaled(comm, args, epoch, pipe); },
      [&] { zero_paddings(comm, args); }, ScaleWork<dtype>(args, row_bytes));
}

/// Converts rows from a wire format to `dtype`, by lone workers.
template <DType dtype, WireFormat wire>
class DequantiseAlone {
  using E = Element<dtype>;
  using V = WireVector<dtype, wire>;

 public:
  __device__ static LoneShape shape_of(const KernelShape& s) {
    const Pieces out = row_pieces(s.row_bytes(), kLonePiece);
    const Pieces values = row_pieces(s.wire_data_bytes(), kLonePiece / 16 * E::kVector);
    return LoneShape({values, scale_pieces(s, values), s.wire_data_bytes(), out, {}, 0, false});
  }
  explicit __device__ DequantiseAlone(const LoneShape& shape) : shape_(shape) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List&, int, int piece) {
    const int vectors = static_cast<int>(shape_.stored(piece) / 16);
    const std::byte* const loaded = stage + shape_.at;
    const auto* const scales = reinterpret_cast<const typename V::Scale*>(loaded + shape_.pieces.bytes);
#pragma unroll 4
    for (int v = lane_id(); v < vectors; v += 32)
      reinterpret_cast<uint4*>(stage)[v] = V::read(reinterpret_cast<const typename V::Values*>(loaded)[v],
                                                   V::W::factor(scales[v / V::kBlockLanes]));
  }

 private:
  const LoneShape& shape_;
};

/// Multiplies rows and takes dot products, by lone workers. The source row is loaded anew for each target.
template <DType dtype>
class ScaleAlone {
  using E = Element<dtype>;

 public:
  __device__ static LoneShape shape_of(const Comm& comm, const ReceiveArguments& args) {
    const Pieces pieces = row_pieces(comm.window.shape.row_bytes(), kLonePiece);
    return LoneShape({pieces, args.other != nullptr ? pieces : Pieces{}, 0, pieces, {}, 0, true});
  }
  __device__ ScaleAlone(const ReceiveArguments& args, const LoneShape& shape)
      : scales_(args.scales != nullptr), shape_(shape) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List& list, int entry, int piece) {
    const int vectors = static_cast<int>(shape_.pieces.size(piece) / 16);
    auto* const values = reinterpret_cast<uint4*>(stage);
    const auto* const others = reinterpret_cast<const uint4*>(stage + shape_.pieces.bytes);
    const bool products = list.products[entry] != nullptr;
    const float factor = list.factors[entry];
    if (piece == 0) dot_ = 0;
#pragma unroll 4
    for (int v = lane_id(); v < vectors; v += 32) {
      float row[E::kVector];
      E::widen(values[v], row);
      if (products) {
        float with[E::kVector];
        E::widen(others[v], with);
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) dot_ = add(dot_, multiply(row[e], with[e]));
      }
#pragma unroll
      for (int e = 0; e < E::kVector; ++e) row[e] = scales_ ? multiply(row[e], factor) : row[e];
      values[v] = E::narrow(row);
    }
    if (!products || piece + 1 < shape_.pieces.count) return;
    float dot = dot_;
    for (int width = 16; width > 0; width /= 2) dot = add(dot, __shfl_xor_sync(0xffffffffu, dot, width));
    if (lane_id() == 0) *list.products[entry] = dot;
  }

 private:
  const bool scales_;
  const LoneShape& shape_;
  float dot_ = 0;  ///< this lane's share of a row's dot product, over the pieces so far
};

/// Copies a row's scales, if it has any, to `out_scales` for each of its output rows. For lone workers.
class ScalesAlone {
 public:
  __device__ static LoneShape shape_of(const KernelShape& s) {
    const Pieces values = row_pieces(s.wire_data_bytes(), kLonePiece);
    return LoneShape({values, scale_pieces(s, values), s.wire_data_bytes(), values, {}, 0, true});
  }
  __device__ ScalesAlone(const KernelShape& shape, const ReceiveArguments& args, const LoneShape& pieces)
      : args_(args), pieces_(pieces), bytes_(shape.wire_scale_bytes()) {}

  template <class List>
  __device__ void operator()(std::byte* stage, const List& list, int entry, int piece) {
    if (bytes_ == 0) return;
    const int64_t offset = pieces_.rows.with.offset(piece);
    const auto bytes = static_cast<uint32_t>(min(int64_t{pieces_.rows.with.size(piece)}, bytes_ - offset));
    for (int at = entry > 0 ? list.ends[entry - 1] : 0; at < list.ends[entry]; ++at) {
      const int64_t row = (list.targets[at] - args_.out) / pieces_.pieces.total;
      std::byte* const to = args_.out_scales + row * bytes_ + offset;
      const std::byte* const from = stage + pieces_.pieces.bytes;
      // Rows' scales have no padding between them: words fit if a row has a multiple of 4 bytes.
      if (bytes_ % 4 == 0)
        for (uint32_t i = lane_id(); i < bytes / 4; i += 32)
          reinterpret_cast<uint32_t*>(to)[i] = reinterpret_cast<const uint32_t*>(from)[i];
      else
        for (uint32_t i = lane_id(); i < bytes; i += 32) to[i] = from[i];
    }
  }

 private:
  const ReceiveArguments& args_;
  const LoneShape& pieces_;
  const int64_t bytes_;
};

/// The kernel that multiplies rows by factors; all workers share each row.
template <DType dtype>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_scale_kernel(const __grid_constant__ Comm comm, const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args, [&](uint64_t epoch) { scale_by_pipe<dtype>(comm, args, epoch, shared); });
}

/// The kernel that converts rows from a wire format; all workers share each row.
template <DType dtype, WireFormat wire>
__global__ void __launch_bounds__(MovePipe<kWorkers>::kThreads, 1)
    dispatch_dequantise_kernel(const __grid_constant__ Comm comm,
                               const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args,
                  [&](uint64_t epoch) { dequantise_by_pipe<dtype, wire>(comm, args, epoch, shared); });
}

/// Kernels with lone workers: this one multiplies rows, the next converts them, the last splits off scales.
template <DType dtype>
__global__ void __launch_bounds__(MovePipe<kLoneWorkers>::kThreads, 1)
    dispatch_scale_alone_kernel(const __grid_constant__ Comm comm,
                                const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args, [&](uint64_t epoch) {
    const LoneShape shape = ScaleAlone<dtype>::shape_of(comm, args);
    run_move_pipe<kLoneWorkers>(
        shared, shape, epoch, [&](MoveLister<kLoneWorkers>& pipe) { list_scaled(comm, args, epoch, pipe); },
        [&] { zero_paddings(comm, args); }, ScaleAlone<dtype>(args, shape));
  });
}

/// Copies arriving rows to all their output rows; lone workers first change each by `work`. Whole block.
template <class Work>
__device__ void change_alone(const Comm& comm, const ReceiveArguments& args, uint64_t epoch,
                             std::byte* shared, const LoneShape& shape, const Work& work) {
  run_move_pipe<kLoneWorkers>(
      shared, shape, epoch,
      [&](MoveLister<kLoneWorkers>& pipe) { list_rows_to_places(comm, args, epoch, pipe); },
      [&] { zero_paddings(comm, args); }, work);
}

template <DType dtype, WireFormat wire>
__global__ void __launch_bounds__(MovePipe<kLoneWorkers>::kThreads, 1)
    dispatch_dequantise_alone_kernel(const __grid_constant__ Comm comm,
                                     const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args, [&](uint64_t epoch) {
    using Work = DequantiseAlone<dtype, wire>;
    const LoneShape shape = Work::shape_of(comm.window.shape);
    change_alone(comm, args, epoch, shared, shape, Work(shape));
  });
}

__global__ void __launch_bounds__(MovePipe<kLoneWorkers>::kThreads, 1)
    dispatch_apart_kernel(const __grid_constant__ Comm comm, const __grid_constant__ ReceiveArguments args) {
  extern __shared__ __align__(128) std::byte shared[];
  receive_and_end(comm, args, [&](uint64_t epoch) {
    const LoneShape shape = ScalesAlone::shape_of(comm.window.shape);
    change_alone(comm, args, epoch, shared, shape, ScalesAlone(comm.window.shape, args, shape));
  });
}

/// Calls use.operator()<kernel>() with the kernel for `arrival` and the shape's rows.
template <class Use>
cudaError_t with_kernel(const DeviceShape& shape, Arrival arrival, const Use& use) {
  const auto with_pipe = [&]<auto kernel, int workers>() {
    return use.template operator()<kernel>(MovePipe<workers>::kThreads,
                                           sizeof(typename MovePipe<workers>::Memory));
  };
  const bool together = work_together(shape) && lists_hold(shape, shape.top_k);
  if (arrival == Arrival::apart || arrival == Arrival::as_it_is)
    return with_pipe.template operator()<&dispatch_apart_kernel, kLoneWorkers>();
  if (arrival == Arrival::scaled)
    return with_dtype(shape.dtype, [&]<DType dtype>() {
      return together ? with_pipe.template operator()<&dispatch_scale_kernel<dtype>, kWorkers>()
                      : with_pipe.template operator()<&dispatch_scale_alone_kernel<dtype>, kLoneWorkers>();
    });
  return with_conversion(shape, [&]<DType dtype, WireFormat wire>() {
    return together
               ? with_pipe.template operator()<&dispatch_dequantise_kernel<dtype, wire>, kWorkers>()
               : with_pipe
                     .template operator()<&dispatch_dequantise_alone_kernel<dtype, wire>, kLoneWorkers>();
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
