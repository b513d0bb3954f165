// A communicator as its kernels see it: plain data, passed by value.
#pragma once

#include <cstdint>

#include "layout/device_plan.hpp"
#include "layout/device_window.hpp"
#include "layout/host_status.hpp"

namespace moecomm::device {

struct Comm {
  DeviceWindow window;
  int32_t rank;
  int32_t local_experts;
  std::byte* const* bases;  ///< [ranks] windows as mapped here, in device memory
  std::byte* own;           ///< bases[rank]
  HostStatus* host;
  uint64_t timeout_ns;
  DevicePlan plan_fields;

  __device__ DeviceState& state() const { return *reinterpret_cast<DeviceState*>(own + window.state); }
  __device__ int32_t ranks() const { return window.shape.ranks; }
  __device__ int32_t top_k() const { return window.shape.top_k; }

  /// Rows that change their format on the way do so also where source and owner are one.
  __device__ bool own_rows_travel() const { return window.shape.wire != WireFormat::same; }

  template <class T>
  __device__ T* at(std::byte* base, int64_t offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
  template <class T>
  __device__ T* mine(int64_t offset) const {
    return reinterpret_cast<T*>(own + offset);
  }
  /// The record that `writer` leaves in the window at `base`.
  __device__ SignalRecord& record(std::byte* base, int32_t writer, uint64_t epoch) const {
    return at<SourceLines>(base, window.sources)[writer].record[epoch & 1];
  }
  /// Dispatch: where the row of `source`'s token lies in the staging section of the window at `base`.
  __device__ std::byte* staged_row(std::byte* base, uint64_t epoch, int32_t source, int64_t token) const {
    return base + window.rows[epoch & 1] +
           (source * window.stage_tokens + token % window.stage_tokens) * window.wire_bytes;
  }
  /// Combine: slot `slot` of a token in its home's window at `base`.
  __device__ std::byte* slot_row(std::byte* base, uint64_t epoch, int64_t token, int32_t slot) const {
    return base + window.rows[epoch & 1] + (token * window.shape.slots() + slot) * window.shape.row_bytes();
  }
  __device__ uint32_t* flag(std::byte* base, int64_t section, int32_t writer, int64_t chunk) const {
    return at<uint32_t>(base, section) + writer * (window.shape.max_chunks() + 1) + chunk;
  }
};

/// A plan in device memory.
struct PlanView {
  int32_t* words;
  DevicePlan fields;

  __device__ PlanHeader& header() const { return *reinterpret_cast<PlanHeader*>(words + fields.header); }
  __device__ int32_t* at(int64_t field) const { return words + field; }
};

}  // namespace moecomm::device
