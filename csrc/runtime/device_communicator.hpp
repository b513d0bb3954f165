// The communicator of one rank on a GPU. It starts the kernels of dispatch and combine on the caller's stream
// (kernels/gpu), and reads what they report through pinned memory. It owns neither the window (device memory
// that the caller allocates and all ranks have mapped) nor outputs and plans. It does not depend on torch.
//
// It runs one call at a time; the caller serialises. An operation has two halves: the first sends, the second
// receives. Only wait_rows, and counters() for a small copy, wait for the device; no call synchronises it.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "kernels/gpu/common/arguments.hpp"
#include "kernels/gpu/common/launch_plan.hpp"
#include "layout/device_plan.hpp"
#include "layout/device_window.hpp"
#include "layout/host_status.hpp"
#include "runtime/proxy.hpp"
#include "transport/shm/signal.hpp"
#include "transport/shm/window.hpp"

namespace moecomm {

namespace device {
struct Rail;
}

struct DeviceConfig {
  DeviceShape shape;
  int32_t rank;
  double timeout_seconds;
  int32_t num_sms;  ///< SMs of one operation; 0: the heuristics choose
  int32_t device;
  int32_t host_ranks;                       ///< ranks of this host, which share its cores
  uint64_t first_epoch = 1;                 ///< epoch of the first operation, on all ranks
  WireFormat sums = WireFormat::same;       ///< wire format of sums in a combine with `quantised`
  WireFormat gradients = WireFormat::same;  ///< wire format of rows in a redispatch with `quantised`
  /// Longest wait for a live rank that has not begun the operation. A longer timeout takes its place.
  double absence_seconds = 0;
};

struct DeviceStats {
  int64_t dispatch_calls = 0, combine_calls = 0, plans_made = 0, rows_in = 0;
  double host_wait_seconds = 0;  ///< host's waits for row counts
};

struct DeviceCounters {
  uint64_t rows_out = 0, bytes_wire = 0;
  double dispatch_seconds = 0, combine_seconds = 0, wait_seconds = 0;
  std::vector<double> late_seconds;                ///< [rank] waits for that rank to begin operations
  std::optional<double> phases[kClocks][kPhases];  ///< [operation][phase] seconds since its last start
};

class DeviceCommunicator {
 public:
  explicit DeviceCommunicator(const DeviceConfig& config);
  ~DeviceCommunicator();

  /// Names the control segment, shared host memory that shows which ranks have ended. Returns the name.
  std::string link() { return control_[own_index()].link(); }
  void unlink() noexcept { control_[own_index()].unlink(); }
  /// Connects the ranks of the node. For the node's rank i, bases[i]: address of its window here, memory that
  /// was zeroed before use; names[i]: control segment; pids[i]: process. On one node operations may follow.
  void connect(const std::vector<uintptr_t>& bases, const std::vector<std::string>& names,
               const std::vector<int64_t>& pids);
  /// With several nodes, after connect(): takes over the connections to the rail, the ranks with this rank's
  /// local index on the other nodes. Both arguments number peers by node.
  void connect_nodes(std::unique_ptr<Transport> transport, std::unique_ptr<tcp::Links> links);
  /// Layout of the control segment. Data between nodes passes through this segment.
  const WindowLayout& layout() const { return control_layout_; }
  std::byte* base() const { return control_[own_index()].base(); }
  /// PCI address of the GPU.
  std::string gpu_bus_id() const;
  void set_interrupt(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

  /// SMs that an operation holds while it runs.
  int32_t num_sms() const { return heuristics_.all_blocks(); }
  /// True if a combine may have token_weights. It may if one kernel does every combine on all ranks.
  bool weighs_tokens() const;
  /// Lets one kernel do a whole operation for at most `tokens` tokens of this rank. This can only lower the
  /// limit of the heuristics. Ranks need not agree on it.
  void fuse_up_to(int64_t tokens) { most_fused_ = tokens; }
  /// From now on prints on stderr which kernels an operation launches, each choice once.
  void log_launches() { logs_launches_ = true; }
  /// The most tokens of this rank for which one kernel does a whole operation.
  int64_t fused_tokens() const { return std::min<int64_t>(heuristics_.fused_tokens, most_fused_); }
  /// In the arguments of operations the caller sets rows, outputs, sizes, the plan's memory and the layout;
  /// all addresses are in this device's memory. This object sets the other fields.
  ///
  /// Sends and receives: begin_dispatch and finish_dispatch in one call. For a dropless dispatch the caller
  /// offers an output of the size that offered_rows returns. Kernels fill it only if all rows fit. The caller
  /// then calls wait_rows, and next accept_rows if all fit, else finish_dispatch with a larger output.
  void dispatch(const gpu::SendArguments& dispatch, gpu::ReceiveArguments output, cudaStream_t stream);
  /// Returns the size of the output to allocate before a dropless dispatch; zero rows: allocate after
  /// wait_rows. Second result: true if dispatch() may take that output, false if only begin_dispatch and
  /// finish_dispatch may. Allocate it before them: kernels may still read memory that is freed later.
  std::pair<gpu::RowCounts, bool> offered_rows(int64_t tokens, RowLayout layout, int64_t alignment) const;
  /// Ends a dispatch, after wait_rows, if all its rows fit the output that was offered.
  void accept_rows();
  /// Starts to send rows and make the plan. Without finish_dispatch the next operation abandons the dispatch.
  void begin_dispatch(const gpu::SendArguments& dispatch, cudaStream_t stream);
  /// Waits for the counts of a dispatch without capacity: its rows, and its (row, expert) pairs. If it
  /// throws, e.g. because ranks disagree, it has abandoned the dispatch on `stream`.
  std::pair<int64_t, int64_t> wait_rows(cudaStream_t stream);
  /// Number of rows of each local expert, without padding, in the last dispatch that wait_rows waited for.
  std::vector<int32_t> host_counts() const;
  /// Starts to receive into `output`.
  /// `directly`: since begin_dispatch, nothing else was put on `stream`, so that receiving can start while
  /// rows are still being sent. Both halves have to be in the same capture, or in none.
  void finish_dispatch(bool directly, const gpu::ReceiveArguments& output, cudaStream_t stream);

  /// If a combine was `held`, starts to receive its sums: its output is ready at this point of `stream`.
  /// Every operation calls this first. Returns false if a capture recorded the combine's first half and has
  /// ended without the second half: then nothing of this combine runs.
  bool complete(cudaStream_t stream);
  /// Sends rows along a kept plan: the backward of combine. `quantised`: rows travel in the format
  /// DeviceConfig::gradients, and output.scales and output.other are null.
  void redispatch(gpu::SendArguments sent, gpu::ReceiveArguments output, bool quantised, cudaStream_t stream);
  /// `quantised`: sums travel in the format DeviceConfig::sums, else in their dtype. `held`: this call only
  /// sends sums, and complete() starts the kernel that waits for the sums of other ranks.
  void combine(const gpu::CombineArguments& arguments, bool quantised, bool held, cudaStream_t stream);
  /// True if one kernel would do a whole operation of `tokens` tokens. As all its blocks would wait for
  /// other ranks, an asynchronous caller asks for two halves, the second when it needs the result.
  bool splits(int64_t tokens) const { return fuses(config_.shape.wire, tokens); }
  /// Announces to all ranks that this rank's arguments are bad.
  void fail(ErrorKind kind, const std::string& text, cudaStream_t stream);

  /// Throws, once, what the device has reported: arguments on which ranks disagree, bad ids, an exceeded
  /// capacity. Throws on every call the error that broke the communicator.
  void check();

  /// Ends the waits of this rank's kernels and tells the peers that the rank leaves. Call it before a close()
  /// that comes during an operation.
  void stop_waiting() noexcept { stopped_.store(true); }
  /// True if a wait for a row count was interrupted, and no operation has followed.
  bool interrupted() const { return interrupted_; }
  /// Closes, and tells the peers. Running kernels must have ended before the window is freed. False: the
  /// proxy's thread does not end (Proxy::close); the window and all else that this thread uses must stay.
  bool close() noexcept;
  const DeviceStats& stats() const { return stats_; }
  void reset_stats() { stats_ = {}; }
  /// Returns the counters of finished kernels; waits for a small copy.
  DeviceCounters counters();
  std::string heuristics_text() const;
  const DeviceConfig& config() const { return config_; }
  /// The proxy, which sends to other nodes; null on one node.
  Proxy* proxy() { return proxy_.get(); }

 private:
  struct Pinned;  // HostStatus, losses, texts
  /// An operation that has begun, and whose rows may still have to be received.
  struct Begun {
    /// sent: its rows are only sent. offered: they are also received, by a further kernel, if they fit the
    /// offered output. offered_in_one: one kernel sends rows and, if they fit, receives them.
    enum State { sent, offered, offered_in_one } state;
    gpu::SendArguments arguments;
    WireFormat wire;
    gpu::DispatchPlan plan;
    cudaStream_t stream;
    uint64_t capture;  ///< id of the capture that recorded it; 0: not captured, it runs
  };
  /// A combine whose sums complete() still has to receive.
  struct Held {
    gpu::CombineArguments arguments;
    cudaStream_t stream;
    uint64_t capture;  ///< id of the capture that recorded the first half; 0: not captured, it runs
    int blocks;
  };
  device::Comm* comm(WireFormat wire) const { return comms_[static_cast<int>(wire)].get(); }
  size_t own_index() const { return nodes_.local_of(config_.rank); }
  device::Rail rail() const;
  gpu::Launch launch(cudaStream_t stream, int blocks, bool overlapped) const {
    return {stream, blocks, overlapped, heuristics_.paired};
  }
  static void order(cudaStream_t later, cudaEvent_t event, cudaStream_t stream);
  gpu::SendArguments counted(gpu::SendArguments dispatch);
  bool dequantises(const gpu::ReceiveArguments& output) const;
  /// True if one kernel does a whole operation of `tokens` tokens whose rows travel in `wire`.
  bool fuses(WireFormat wire, int64_t tokens) const { return launch_context(wire).fuses(tokens); }
  void send_and_receive(WireFormat wire, const gpu::SendArguments& sent, gpu::ReceiveArguments received,
                        cudaStream_t stream);
  gpu::LaunchContext launch_context(WireFormat wire) const;
  gpu::DispatchPlan plan_of(WireFormat wire, const gpu::SendArguments& arguments, bool in_halves);
  void log_launch(const char* operation, int64_t tokens, RowLayout layout, const std::string& plan);
  void run_in_one(WireFormat wire, gpu::FusedArguments arguments, const gpu::FusedDispatch& plan,
                  cudaStream_t stream);
  void send(WireFormat wire, gpu::SendArguments arguments, const gpu::DispatchPlan& plan,
            cudaStream_t stream);
  void receive(gpu::ReceiveArguments arguments, bool directly, cudaStream_t stream);
  void launch_sum(const gpu::CombineArguments& arguments, int blocks, cudaStream_t stream);
  void end_earlier(cudaStream_t stream);
  void abandon(cudaStream_t stream);
  uint32_t after_given_up(cudaStream_t stream);
  void require_begun() const;
  void watch();
  void free_device() noexcept;
  void require_open() const;  // throws if the communicator is closed
  void require_usable();      // throws if it is closed, broken, not connected, or a forked child's
  void note_broken();
  std::optional<Error> take_overflow();
  [[noreturn]] void throw_verdict();
  std::string describe(const HostStatus::Verdict& verdict) const;

  DeviceConfig config_;
  DeviceWindow window_;
  gpu::Heuristics heuristics_;
  int64_t most_fused_ = gpu::kMostFusedTokens;
  const int owner_;
  const NodeMap nodes_;

  std::unique_ptr<Pinned> pinned_;
  std::unique_ptr<device::Comm> comms_[kWireFormatCount];  // by WireFormat
  cudaStream_t side_stream_ = nullptr;                     // sends rows that wait for room
  cudaEvent_t fork_ = nullptr, join_ = nullptr;

  WindowLayout control_layout_;
  std::vector<shm::Window> control_;
  bool registered_ = false;  // this rank's control segment is registered for the GPU
  std::unique_ptr<shm::Signals> signals_;
  std::unique_ptr<Proxy> proxy_;  // null on one node
  std::thread watcher_;
  cudaStream_t watch_stream_ = nullptr;
  PeerLoss* losses_ = nullptr;    // in the window
  DeviceState* state_ = nullptr;  // in the window
  uint64_t* late_ns_ = nullptr;   // in the window
  std::atomic<bool> stop_{false};
  std::atomic<bool> stopped_{false};
  bool interrupted_ = false;

  std::function<void()> interrupt_;
  bool closed_ = false, left_behind_ = false;
  std::optional<Error> broken_;
  std::string raised_;  ///< the text of the last error that left the communicator usable
  uint64_t ticket_ = 0;
  uint32_t texts_ = 0;
  std::optional<Begun> pending_;
  std::optional<Held> held_;
  gpu::RecentRows recent_rows_[2];    ///< [RowLayout] row counts of recent dropless dispatches
  bool few_fit_ = true;               ///< rows of the last dispatch of few tokens fit gpu::offered_rows()
  std::optional<uint64_t> given_up_;  ///< if the last dispatch was given up: its capture's id, or 0
  bool logs_launches_ = false;
  std::set<std::string> logged_;  ///< what log_launches has printed
  DeviceStats stats_;
};

}  // namespace moecomm
