// Moves rows of few tokens by teams (warps that share a row) with plain loads and stores; may convert rows to
// or from a wire format, or multiply them. The lanes in a mask `targets` hold the targets of a row.
#pragma once

#include "kernels/gpu/common/kernel.cuh"
#include "kernels/gpu/common/team.cuh"
#include "kernels/gpu/common/wire_vector.cuh"

namespace moecomm::gpu {

inline constexpr int kBatch = 8;  ///< loads of a thread in flight together

/// Calls use(value) with the value of each lane in `mask`. All lanes.
template <class Value, class Use>
__device__ void for_each_target(uint32_t mask, Value value, const Use& use) {
  for (; mask != 0; mask &= mask - 1) use(__shfl_sync(0xffffffffu, value, __ffs(static_cast<int>(mask)) - 1));
}

/// The part of a row that a team moves: number `number` of 2^shift parts, if as many teams share the row.
struct RowPart {
  int number = 0, shift = 0;

  __device__ int first(int vectors) const { return vectors * number >> shift; }
  __device__ int end(int vectors) const { return vectors * (number + 1) >> shift; }
};

/// 16-byte vectors of a row in registers, `batch` per thread. A thread has every team.threads()-th vector.
template <int batch>
struct Vectors {
  uint4 values[batch];

  /// Loads vectors [base, end) of `row`, as far as registers reach. Vectors past `end` are 0.
  __device__ void load(const Team& team, const uint4* row, int base, int end) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int v = base + i * team.threads() + team.thread();
      values[i] = v < end ? __ldcg(row + v) : uint4{};
    }
  }
  /// Stores the vectors to the rows of all targets. A lane in `targets` has the row's address in `to`.
  __device__ void store(const Team& team, int base, int end, uint32_t targets, unsigned long long to) const {
    for_each_target(targets, to, [&](unsigned long long address) {
#pragma unroll
      for (int i = 0; i < batch; ++i) {
        const int v = base + i * team.threads() + team.thread();
        if (v < end) __stcg(reinterpret_cast<uint4*>(address) + v, values[i]);
      }
    });
  }
};

/// A row or a part of it, whose first vectors are loaded before its targets are known.
struct RowAhead {
  const uint4* row;
  int first, end;
  Vectors<kBatch> loaded;

  /// `bytes`: size of the whole row.
  __device__ void load(const Team& team, const RowPart& part, const std::byte* from, int64_t bytes) {
    const int all = static_cast<int>(bytes / 16);
    row = reinterpret_cast<const uint4*>(from);
    first = part.first(all);
    end = part.end(all);
    loaded.load(team, row, first, end);
  }
  /// Loads the vectors that are still missing, and copies all to each target, as Vectors::store does.
  __device__ void copy(const Team& team, uint32_t targets, unsigned long long to) {
    // Where a thread has at most one vector, fewer instructions suffice.
    if (end - first <= team.threads())
      return Vectors<1>{{loaded.values[0]}}.store(team, first, end, targets, to);
    for (int base = first; base < end; base += kBatch * team.threads()) {
      if (base != first) loaded.load(team, row, base, end);
      loaded.store(team, base, end, targets, to);
    }
  }
};

/// Copies the scales of a row in the wire format to all targets, by the team's first warp. `to`: addresses.
__device__ inline void copy_scales_of_row(const Team& team, const std::byte* from, int64_t bytes,
                                          uint32_t targets, unsigned long long to) {
  if (!team.leads()) return;
  for_each_target(targets, to, [&](unsigned long long address) {
    copy_scales(reinterpret_cast<std::byte*>(address), from, static_cast<uint32_t>(bytes), bytes);
  });
}

/// Converts rows of `dtype` to and from a wire format, 16 bytes of `dtype` per lane at a time.
template <DType dtype, WireFormat wire>
struct Convert {
  using V = WireVector<dtype, wire>;
  using W = typename V::W;
  using Scale = typename V::Scale;
  using Values = typename V::Values;
  static constexpr int kBlockLanes = V::kBlockLanes;

  /// Converts a whole row to the wire format, and stores it to all targets.
  __device__ static void send(const Comm& comm, const Team& team, RowAhead& ahead, uint32_t targets,
                              unsigned long long to) {
    const KernelShape& s = comm.window.shape;
    const int vectors = ahead.end;
    const int64_t scales_at = s.wire_data_bytes();
    for (int base = 0; base < vectors; base += kBatch * team.threads()) {
      if (base != 0) ahead.loaded.load(team, ahead.row, base, vectors);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int v = base + i * team.threads() + team.thread();
        if (base + i * team.threads() >= vectors) break;
        const uint4 raw = ahead.loaded.values[i];
        const Scale scale = V::block_scale(raw);
        const Values packed = V::write(raw, W::inverse(scale));
        for_each_target(targets, to, [&](unsigned long long address) {
          if (v >= vectors) return;
          reinterpret_cast<Values*>(address)[v] = packed;
          if (v % kBlockLanes == 0) reinterpret_cast<Scale*>(address + scales_at)[v / kBlockLanes] = scale;
        });
      }
    }
  }

  __device__ static void receive(const Comm& comm, const Team& team, const RowPart& part,
                                 const std::byte* from, std::byte* out, uint32_t targets, int32_t row) {
    const KernelShape& s = comm.window.shape;
    const int all = static_cast<int>(s.row_bytes() / 16), vectors = part.end(all);
    const auto* const scales = reinterpret_cast<const Scale*>(from + s.wire_data_bytes());
    for (int base = part.first(all); base < vectors; base += kBatch * team.threads()) {
      Values packed[kBatch];
      Scale scale[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int v = base + i * team.threads() + team.thread();
        if (v >= vectors) continue;
        packed[i] = __ldcg(reinterpret_cast<const Values*>(from) + v);
        scale[i] = __ldcg(scales + v / kBlockLanes);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int v = base + i * team.threads() + team.thread();
        if (base + i * team.threads() >= vectors) break;
        uint4 raw{};
        if (v < vectors) raw = V::read(packed[i], W::factor(scale[i]));
        for_each_target(targets, row, [&](int32_t to) {
          if (v < vectors) __stcg(reinterpret_cast<uint4*>(out + to * s.row_bytes()) + v, raw);
        });
      }
    }
  }
};

/// Stores a part of a row to each target, times the target's factor (backward of a weighted combine).
template <DType dtype>
__device__ void scale_row(const Comm& comm, const Team& team, const RowPart& part,
                          const ReceiveArguments& args, const std::byte* from, uint32_t targets,
                          int32_t row) {
  using E = Element<dtype>;
  constexpr int kScaleBatch = 4;  // a larger batch makes the kernel spill registers
  const int64_t row_bytes = comm.window.shape.row_bytes();
  const int all = static_cast<int>(row_bytes / 16), vectors = part.end(all);
  const float factor = targets >> lane_id() & 1 ? reinterpret_cast<const float*>(args.scales)[row] : 0.0f;
  for (int base = part.first(all); base < vectors; base += kScaleBatch * team.threads()) {
    uint4 raw[kScaleBatch];
#pragma unroll
    for (int i = 0; i < kScaleBatch; ++i) {
      const int v = base + i * team.threads() + team.thread();
      if (v < vectors) raw[i] = __ldcg(reinterpret_cast<const uint4*>(from) + v);
    }
    for (uint32_t left = targets; left != 0; left &= left - 1) {
      const int lane = __ffs(static_cast<int>(left)) - 1;
      const float times = __shfl_sync(0xffffffffu, factor, lane);
      std::byte* const out = args.out + __shfl_sync(0xffffffffu, row, lane) * row_bytes;
#pragma unroll
      for (int i = 0; i < kScaleBatch; ++i) {
        const int v = base + i * team.threads() + team.thread();
        if (v >= vectors) continue;
        float values[E::kVector];
        E::widen(raw[i], values);
#pragma unroll
        for (int e = 0; e < E::kVector; ++e) values[e] = multiply(values[e], times);
        __stcg(reinterpret_cast<uint4*>(out) + v, E::narrow(values));
      }
    }
  }
}

}  // namespace moecomm::gpu
