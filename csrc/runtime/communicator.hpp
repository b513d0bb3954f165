// The communicator of one rank: owns its window and the mappings of its peers' windows, and runs dispatch and
// combine as sequences of kernels and signals (docs/protocol.md). Knows nothing of torch: arguments are
// pointers and sizes.
//
// One operation at a time; the caller serialises. Every operation announces one epoch to all ranks, also when
// its arguments are bad, so that ranks stay in step and an error of one is an error of all.
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
#include "runtime/dispatch_arguments.hpp"
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
  int32_t host_ranks = 0;    ///< ranks on this host, which share its cores; 0: those of the node
  uint64_t first_epoch = 1;  ///< of the first operation, on all ranks
  double absence_seconds =
      0;  ///< for a rank that lives and has not begun the operation, if above the timeout
};

struct Stats {
  int64_t dispatch_calls = 0, combine_calls = 0, plans_made = 0, plans_reused = 0;
  int64_t rows_in = 0, rows_out = 0;
  int64_t bytes_wire = 0;    ///< of rows that came from other ranks, or went to them
  int64_t bytes_staged = 0;  ///< of rows copied to the window for other ranks of the node to pull
  double dispatch_seconds = 0, combine_seconds = 0, wait_seconds = 0;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// Makes this rank's window, without a name. Error(out_of_memory), nothing left behind.
  explicit Communicator(const CommunicatorConfig& config);
  ~Communicator();

  /// Names the window, for the ranks of the node to open it by.
  std::string link_window() {
    own_window().link();
    return own_window().name();
  }
  /// Maps the windows of the node. names[i] and pids[i] are those of the node's rank i. On one node, ready
  /// for operations afterwards.
  void connect(const std::vector<std::string>& names, const std::vector<int64_t>& pids);
  /// Connects ranks that are threads of one process: they share each other's mappings. base() is this
  /// rank's.
  void connect_threads(std::vector<std::byte*> bases);
  /// Takes the connections to the rail, with several nodes, after connect(). Peers of both are numbered by
  /// node.
  void connect_nodes(std::unique_ptr<Transport> transport, std::unique_ptr<tcp::Links> links);
  std::byte* base() const { return windows_[own_index()].base(); }
  /// See shm::Signals::set_interrupt. After an interrupt ranks are out of step, and the communicator is
  /// closed.
  void set_interrupt(std::function<void()> interrupt) { signals_->set_interrupt(std::move(interrupt)); }
  /// Takes the name away again, once all ranks have connected: nothing of the window outlives the processes.
  void unlink_window() noexcept { own_window().unlink(); }

  /// Publishes, waits for all ranks and plans. Then pull() with an output of plan->rows rows finishes the
  /// dispatch.
  std::shared_ptr<const Plan> begin_dispatch(const DispatchArguments& arguments);
  /// out [rows][hidden]; out_weights (weight type) as pull_metadata says, or null. Rank layout, or null:
  /// out_ids; out_index [positions] as Plan::index, and out_index_weights (weight type), which needs
  /// out_weights.
  void pull(std::byte* out, std::byte* out_weights, int32_t* out_ids, int32_t* out_index = nullptr,
            std::byte* out_index_weights = nullptr);

  /// Sends rows [plan.tokens][hidden] again along a kept plan: the backward of combine. scales, other and
  /// dots as in PullArguments; null where not wanted.
  void redispatch(const std::shared_ptr<const Plan>& plan, const std::byte* rows, std::byte* out,
                  const std::byte* scales, const std::byte* other, std::byte* dots);

  /// y [plan.tokens][hidden] from rows [plan.rows][hidden], weights (weight type [plan.rows]) or null. With
  /// `weight_grads` (as CombineArguments says) they travel too, into out_weight_grads [plan.tokens][top_k].
  /// rows and y may both be null.
  void combine(const std::shared_ptr<const Plan>& plan, const std::byte* rows, const std::byte* weights,
               std::byte* y, const std::byte* weight_grads, std::byte* out_weight_grads);

  /// Announces to all ranks that this one's arguments are bad, waits for them, and throws Error(kind, text).
  [[noreturn]] void fail(ErrorKind kind, const std::string& text);
  /// Throws Error(capacity_exceeded) once if a dispatch since the last call passed its capacity on any rank,
  /// and the error that broke the communicator, if one did.
  void check();

  /// Memory in the window for [max_tokens][hidden] input rows, once all ranks have read what it held; it is
  /// free again when the last owner lets go. Error(out_of_memory) if both input sections are taken or
  /// /dev/shm is full.
  std::shared_ptr<std::byte> take_input();
  /// Offset of `pointer` in this rank's window if it lies in an input section, else -1.
  int64_t input_offset(const std::byte* pointer) const;

  /// Tells the peers; later operations throw Error(closed). Memory goes with the object. False: the proxy's
  /// thread had to be left behind (Proxy::close), and what it uses stays until the process ends.
  bool close() noexcept;
  /// Ends the operation under way, if it waits, and all later ones by Error(closed), and closes. Any thread
  /// may call it.
  void give_up() noexcept;

  Stats& stats() { return stats_; }
  /// By rank: seconds that this rank waited for it to begin its operations.
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
  /// Returns an address in the window of a rank of this node.
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
  std::vector<std::byte*> bases_;  // of the windows of the node's ranks as mapped here
  std::unique_ptr<shm::Signals> signals_;
  std::unique_ptr<Internode> internode_;  // with several nodes

  // A forked child may drop its copy, but neither use it nor speak for its parent.
  const int owner_ = getpid();
  uint64_t epoch_;  // of the last operation that has begun
  bool closed_ = false, left_behind_ = false;
  bool under_way_ = false;  // an operation is
  std::optional<Error> broken_;
  std::optional<Error> overflow_;     // of a dispatch, until an error that this rank raises has told it
  std::string told_overflow_;         // the text of the last one that was told
  uint64_t input_epoch_[2] = {0, 0};  // last epoch that published from an input section
  bool input_committed_ = false;
  std::atomic<bool> input_taken_[2] = {false, false};

  // A dispatch between begin_dispatch and pull.
  struct Pending {
    std::shared_ptr<const Plan> plan;
    const std::byte* x;
    uint64_t epoch;
  };
  std::optional<Pending> pending_;

  std::multimap<uint64_t, std::weak_ptr<const Plan>> plans_;  // live plans by hash of their ids
  std::vector<std::shared_ptr<const Plan>> recent_;           // kept alive for recomputation
  Stats stats_;
  std::vector<double> late_seconds_;
};

}  // namespace moecomm
