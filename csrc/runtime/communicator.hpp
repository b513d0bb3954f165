// The communicator of one CPU rank. It owns the rank's window and the mappings of its peers' windows, and
// runs dispatch and combine as sequences of kernels and signals (docs/protocol.md). It does not depend on
// torch: arguments are pointers and sizes.
//
// It runs one operation at a time; the caller serialises. Every operation, also with bad arguments, announces
// its epoch to all ranks in one record. So ranks stay in step, and an error of one rank is raised on all.
#pragma once

#include <unistd.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/error.hpp"
#include "common/thread_pool.hpp"
#include "kernels/cpu/dispatch.hpp"
#include "layout/plan.hpp"
#include "layout/window.hpp"
#include "runtime/internode.hpp"
#include "transport/shm/signal.hpp"
#include "transport/shm/window.hpp"

namespace moecomm {

struct CommunicatorConfig {
  WindowShape shape;
  int32_t rank;
  int64_t num_experts;
  int32_t threads;
  double timeout_seconds;
  int32_t host_ranks = 0;    ///< ranks on this host, which share its cores; 0: as many as the node has
  uint64_t first_epoch = 1;  ///< epoch of the first operation, on all ranks
  /// Longest wait for a live rank that has not begun the operation. A longer timeout takes its place.
  double absence_seconds = 0;
};

struct DispatchArguments {
  const std::byte* x;  ///< [tokens][hidden]
  const void* ids;     ///< [tokens][top_k], int64 if wide_ids, else int32
  bool wide_ids;
  const std::byte* weights;  ///< weight type [tokens][top_k], or null
  int64_t tokens;
  RowLayout layout;
  int64_t alignment;
  int64_t capacity;        ///< rows of the output; -1: as many as needed
  int64_t positions = -1;  ///< rank layout: room for (row, expert) pairs; expert layout: fixed rows of each
                           ///< expert's group, enough for any routing; -1: as many as needed
  uint16_t caller = 0;     ///< the layer that calls (SignalRecord::caller); 0: none
};

struct Stats {
  int64_t dispatch_calls = 0, combine_calls = 0, plans_made = 0, plans_reused = 0;
  int64_t rows_in = 0, rows_out = 0;
  int64_t bytes_wire = 0;    ///< bytes of rows that came from other ranks, or went to them
  int64_t bytes_staged = 0;  ///< bytes of rows copied to the window for other ranks of the node to pull
  double dispatch_seconds = 0, combine_seconds = 0, wait_seconds = 0;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// Makes this rank's window, without a name. If it throws Error(out_of_memory), no memory stays in use.
  explicit Communicator(const CommunicatorConfig& config);
  ~Communicator();

  /// Gives the window a name, by which the ranks of the node open it, and returns the name.
  std::string link() { return own_window().link(); }
  /// Maps the windows of the node's ranks. names[i], pids[i]: window name and process of the node's rank i.
  /// On one node operations may follow; with several, connect_nodes() comes first.
  void connect(const std::vector<std::string>& names, const std::vector<int64_t>& pids);
  /// Replaces connect() for ranks that are threads of one process. bases[i]: their mapping of window i.
  void connect_threads(std::vector<std::byte*> bases);
  /// With several nodes, after connect(): takes over the connections to the rail, the ranks with this rank's
  /// local index on the other nodes. Both arguments number peers by node.
  void connect_nodes(std::unique_ptr<Transport> transport, std::unique_ptr<tcp::Links> links);
  std::byte* base() const { return windows_[own_index()].base(); }
  /// Sets the function that waits call now and then, for Python's signal handlers. If it throws, ranks are
  /// out of step, and the communicator closes.
  void set_interrupt(std::function<void()> interrupt) { signals_->set_interrupt(std::move(interrupt)); }
  /// Removes the window's name, once all ranks have connected, so that nothing outlives the processes.
  void unlink() noexcept { own_window().unlink(); }

  /// Writes rows, ids and weights to this rank's window, waits for all ranks, and makes the plan or finds a
  /// kept one. Then pull() finishes the dispatch, with an output of plan->rows rows.
  std::shared_ptr<const Plan> begin_dispatch(const DispatchArguments& arguments);
  /// Receives the rows of the dispatch into `out` [rows][hidden]. The other outputs may be null: out_weights
  /// (weight type) as in pull_metadata; in the rank layout also out_ids, out_index [positions] as in
  /// Plan::index, and out_index_weights (weight type), which needs out_weights.
  void pull(std::byte* out, std::byte* out_weights, int32_t* out_ids, int32_t* out_index = nullptr,
            std::byte* out_index_weights = nullptr);

  /// Sends rows [plan.tokens][hidden] along a kept plan: the backward of combine. `scales`: factors of
  /// arriving rows. `other`: rows whose dot products with arriving rows go to `dots`. All three may be null.
  void redispatch(const std::shared_ptr<const Plan>& plan, const std::byte* rows, std::byte* out,
                  const std::byte* scales, const std::byte* other, std::byte* dots);

  /// Makes y [plan.tokens][hidden] from rows [plan.rows][hidden] and weights (weight type [plan.rows], or
  /// null). Unless null, `weight_grads` (see CombineArguments) go back to the tokens' ranks, into
  /// out_weight_grads [plan.tokens][top_k]. If rows and y are both null, gradients alone travel.
  void combine(const std::shared_ptr<const Plan>& plan, const std::byte* rows, const std::byte* weights,
               std::byte* y, const std::byte* weight_grads, std::byte* out_weight_grads);

  /// Announces to all ranks that this rank's arguments are bad, waits for all, and throws Error(kind, text).
  [[noreturn]] void fail(ErrorKind kind, const std::string& text);
  /// Throws the error that broke the communicator, if one did. Else throws Error(capacity_exceeded), once, if
  /// a dispatch since the last call exceeded its capacity on any rank.
  void check();

  /// Ends a dispatch that was not pulled, and returns memory in the window for [max_tokens][hidden] input
  /// rows, once all ranks have read its previous contents. It can be taken again when its last owner
  /// has released it. Error(out_of_memory) if both input sections are in use or /dev/shm is full.
  std::shared_ptr<std::byte> take_input();
  /// Offset of `pointer` in this rank's window if it lies in an input section, else -1.
  int64_t input_offset(const std::byte* pointer) const;

  /// Closes, and tells the peers; later operations throw Error(closed). The destructor frees the memory.
  /// False: the proxy's thread does not end (Proxy::close); memory that it uses stays until the process ends.
  bool close() noexcept;
  /// Makes the running operation, or else the next, throw Error(closed) and close. Any thread may call it.
  void give_up() noexcept;

  Stats& stats() { return stats_; }
  /// [rank]: seconds that this rank has waited for that rank to begin operations.
  const std::vector<double>& late_seconds() const { return late_seconds_; }
  void reset_stats() {
    stats_ = Stats{};
    late_seconds_.assign(late_seconds_.size(), 0.0);
  }
  /// The proxy, which sends to other nodes; null on one node.
  Proxy* proxy() { return internode_ ? &internode_->proxy() : nullptr; }
  const CommunicatorConfig& config() const { return config_; }
  const WindowLayout& layout() const { return layout_; }
  std::string heuristics_text() const;

 private:
  cpu::Context context() { return {layout_.shape, pool_, heuristics_, config_.rank, local_experts_}; }
  size_t own_index() const { return nodes_.local_of(config_.rank); }
  shm::Window& own_window() { return windows_[own_index()]; }
  bool is_local(int rank) const { return nodes_.same_node(rank, config_.rank); }
  /// Returns the address at `offset` in the window of `rank`, a rank of this node.
  std::byte* at(int rank, int64_t offset) const { return bases_[nodes_.local_of(rank)] + offset; }
  std::byte* own(int64_t offset) const { return at(config_.rank, offset); }
  void leave(bool drain) noexcept;
  void make_signals(const std::vector<int64_t>& pids);
  SignalRecord start(Operation operation, const Plan* plan = nullptr);
  void signal(const SignalRecord& record, const RelayRoutes* routes = nullptr, const char* text = nullptr);
  void wait_records(const SignalRecord& record, const char* phase);
  void compare_records(uint64_t epoch);
  void require_usable() const;
  std::vector<SourceIds> all_ids(uint64_t epoch) const;
  cpu::PullArguments pull_arguments(uint64_t epoch, const std::byte* own, std::byte* out) const;
  void pull_rows(const Plan& plan, uint64_t epoch, const cpu::PullArguments& arguments);
  void note_overflow(const Plan& plan, const char* capacity);
  const std::string& tell_overflow();
  void count_wire(const Plan& plan);
  int64_t publish(const std::byte* x, const int32_t* ids, int64_t tokens);
  std::shared_ptr<const Plan> reusable_plan(uint64_t hash, const PlanShape& shape, const int32_t* ids,
                                            int64_t tokens);
  void remember(uint64_t hash, const std::shared_ptr<const Plan>& plan);
  template <class Body>
  auto guarded(Body&& body);

  CommunicatorConfig config_;
  WindowLayout layout_;
  NodeMap nodes_;
  int32_t local_experts_;
  ThreadPool pool_;
  cpu::Heuristics heuristics_;
  std::vector<shm::Window> windows_;
  std::vector<std::byte*> bases_;  // mappings of the windows of the node's ranks
  std::unique_ptr<shm::Signals> signals_;
  std::unique_ptr<Internode> internode_;  // null on one node

  // A forked child may destroy its copy of this object, but must neither use it nor act for its parent.
  const int owner_ = getpid();
  uint64_t epoch_;  // epoch of the last operation that has begun
  bool closed_ = false, left_behind_ = false;
  bool under_way_ = false;  // an operation is running
  std::optional<Error> broken_;
  std::optional<Error> overflow_;     // an overflow that this rank has not reported yet
  std::string told_overflow_;         // text of the last overflow that was reported
  uint64_t input_epoch_[2] = {0, 0};  // [input section] last epoch whose rows lie in it
  bool input_committed_ = false;
  std::atomic<bool> input_taken_[2] = {false, false};

  // A dispatch between begin_dispatch and pull.
  struct Pending {
    std::shared_ptr<const Plan> plan;
    const std::byte* x;
    uint64_t epoch;
  };
  std::optional<Pending> pending_;

  std::multimap<uint64_t, std::weak_ptr<const Plan>> plans_;  // live plans, by hash of their ids
  std::vector<std::shared_ptr<const Plan>> recent_;           // latest plans, kept alive for recomputation
  Stats stats_;
  std::vector<double> late_seconds_;
};

}  // namespace moecomm
