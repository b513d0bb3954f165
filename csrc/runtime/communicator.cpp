#include "runtime/communicator.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "common/deadline.hpp"
#include "kernels/cpu/combine.hpp"
#include "kernels/cpu/rows.hpp"
#include "layout/routing.hpp"
#include "runtime/disagreement.hpp"

namespace moecomm {
namespace {

// How many of the latest plans stay alive without a handle, so that a recomputed forward finds its plan.
constexpr size_t kRecentPlans = 16;

/// Copies ids to `out` as int32 and checks them. Returns what is wrong with the first bad id, or "".
template <class Id>
std::string take_ids(const Id* ids, int64_t tokens, int32_t top_k, int64_t num_experts, int32_t* out) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int32_t k = 0; k < top_k; ++k) {
      const auto place = [&] { return text_of("topk_idx[", t, ", ", k, "]"); };
      const Id id = ids[t * top_k + k];
      if (id < -1 || id >= num_experts)
        return text_of(place(), " is ", id, ", expected -1 (no expert) to ", num_experts - 1);
      out[t * top_k + k] = static_cast<int32_t>(id);
      if (id < 0) continue;
      for (int32_t j = 0; j < k; ++j)
        if (out[t * top_k + j] == id)
          return text_of(place(), " is ", id, ", which the token already has at k = ", j,
                         "; a token may name an expert once");
    }
  return {};
}

uint64_t hash_ids(const int32_t* ids, int64_t count) {
  return std::hash<std::string_view>{}(
      {reinterpret_cast<const char*>(ids), static_cast<size_t>(count) * sizeof(int32_t)});
}

}  // namespace

Communicator::Communicator(const CommunicatorConfig& config)
    : config_(config),
      layout_(WindowLayout::make(config.shape)),
      nodes_(config.shape.nodes()),
      local_experts_(static_cast<int32_t>(config.num_experts / config.shape.ranks)),
      pool_(config.threads),
      heuristics_(cpu::choose_heuristics(std::max(config.host_ranks, nodes_.local_ranks))),
      windows_(nodes_.local_ranks),
      epoch_(config.first_epoch - 1) {
  own_window() = shm::Window::create(layout_.total_bytes, layout_.committed_bytes);
}

Communicator::~Communicator() {
  if (close()) return;
  static_cast<void>(internode_.release());
  static_cast<void>(signals_.release());
  for (shm::Window& window : windows_) window.keep_mapped();
}

void Communicator::connect(const std::vector<std::string>& names, const std::vector<int64_t>& pids) {
  for (size_t i = 0; i < windows_.size(); ++i) {
    if (i != own_index()) windows_[i] = shm::Window::open(names[i], layout_.total_bytes);
    bases_.push_back(windows_[i].base());
  }
  make_signals(pids);
}

void Communicator::connect_threads(std::vector<std::byte*> bases) {
  bases_ = std::move(bases);
  make_signals(std::vector<int64_t>(bases_.size(), getpid()));
}

void Communicator::make_signals(const std::vector<int64_t>& pids) {
  signals_ = std::make_unique<shm::Signals>(layout_, bases_, config_.rank, pids, config_.timeout_seconds,
                                            config_.host_ranks, config_.absence_seconds);
  late_seconds_.resize(config_.shape.ranks);
}

void Communicator::connect_nodes(std::unique_ptr<Transport> transport, std::unique_ptr<tcp::Links> links) {
  require_message_size(*transport, layout_.shape);
  internode_ = std::make_unique<Internode>(layout_, config_.rank, bases_, *signals_, std::move(transport),
                                           std::move(links), config_.timeout_seconds, config_.first_epoch);
}

std::string Communicator::heuristics_text() const {
  return text_of(heuristics_.text(), ", ", pool_.threads(), (pool_.threads() == 1 ? " thread" : " threads"));
}

void Communicator::give_up() noexcept {
  if (signals_ && getpid() == owner_) signals_->stop_waiting();
}

bool Communicator::close() noexcept {
  leave(!broken_ && !under_way_);
  return !left_behind_;
}

/// Closes. `drain`: before that, waits until all data from and to the rail's ranks has arrived.
void Communicator::leave(bool drain) noexcept {
  if (closed_) return;
  closed_ = true;
  pending_.reset();
  recent_.clear();
  plans_.clear();
  if (!signals_ || getpid() != owner_) return;
  if (internode_) {
    try {
      if (drain) internode_->wait_all_here(epoch_);
    } catch (...) {
      drain = false;  // a rank is gone: its data will not come
    }
    left_behind_ = !internode_->proxy().close(drain);
  }
  signals_->close();
}

void Communicator::require_usable() const {
  if (getpid() != owner_)
    throw Error(ErrorKind::closed, text_of("the communicator belongs to process ", owner_,
                                           "; a forked child has to build its own"));
  if (closed_) throw Error(ErrorKind::closed, "the communicator is closed");
  if (broken_) throw *broken_;
  if (!signals_ || (nodes_.nodes() > 1 && !internode_))
    throw Error(ErrorKind::closed, "the communicator is not connected");
}

void Communicator::check() {
  require_usable();
  if (!overflow_) return;
  const Error error = *overflow_;
  tell_overflow();
  throw error;
}

/// Marks a pending overflow as reported. Returns the last overflow's text, which another error may quote.
const std::string& Communicator::tell_overflow() {
  if (overflow_) told_overflow_ = std::exchange(overflow_, std::nullopt)->what();
  return told_overflow_;
}

/// Runs one operation. After an error that leaves ranks out of step, the communicator can't be used.
template <class Body>
auto Communicator::guarded(Body&& body) {
  const shm::Signals::Inside inside(*signals_);
  // A signal handler may call close() during the operation; close() then must not wait for other ranks.
  const bool outer = std::exchange(under_way_, true);
  struct Restore {
    bool &flag, before;
    ~Restore() { flag = before; }
  } const restore{under_way_, outer};
  try {
    return body();
  } catch (const Error& error) {
    pending_.reset();
    signals_->complete(epoch_);
    if (error.kind() == ErrorKind::peer_timeout || error.kind() == ErrorKind::peer_lost) {
      // The peer may have left because its check() raised an overflow, which is still pending here.
      broken_ =
          Error(error.kind(), after_error(error.what(), overflow_ ? overflow_->what() : ""), error.details());
      throw *broken_;
    }
    if (error.kind() == ErrorKind::closed) leave(false);  // give_up() has ended the wait
    throw;
  } catch (...) {
    leave(false);  // interrupted: this rank has left an operation that the others are in
    throw;
  }
}

SignalRecord Communicator::start(Operation operation, const Plan* plan) {
  signals_->require_going_on();
  pending_.reset();
  signals_->complete(epoch_);  // ends the earlier operation, also a dispatch that was never pulled
  // Rows of the last epoch, n-1, may still arrive if that epoch failed or was not pulled. Epoch n+1 reuses
  // their memory once all ranks have announced n. So this rank waits for the rows before it announces n.
  if (internode_) internode_->wait_all_here(epoch_);
  SignalRecord record{};
  record.epoch = ++epoch_;
  record.operation = operation;
  record.capacity = -1;
  if (plan != nullptr) {
    record.plan = plan->id;
    record.layout = plan->shape.layout;
  }
  return record;
}

/// Announces `record` to all ranks. `routes`: tokens for other nodes, or null; `text`: error text, or null.
void Communicator::signal(const SignalRecord& record, const RelayRoutes* routes, const char* text) {
  signals_->signal(record);
  if (internode_) internode_->announce(record, routes, text);
}

void Communicator::wait_records(const SignalRecord& record, const char* phase) {
  {
    ScopedSeconds waiting(stats_.wait_seconds);
    signals_->wait_all(record.epoch, phase, &late_seconds_);
  }
  compare_records(record.epoch);
}

/// Throws if a record has an error or records disagree. All ranks see the same records and throw alike.
void Communicator::compare_records(uint64_t epoch) {
  for (int r = 0; r < config_.shape.ranks; ++r) {
    const SignalRecord& record = signals_->record(r, epoch);
    if (record.error == 0) continue;
    const char* text = is_local(r) ? reinterpret_cast<const char*>(at(r, layout_.error_text[epoch & 1]))
                                   : internode_->error_text(r, epoch);
    throw Error(static_cast<ErrorKind>(record.error),
                text_of("rank ", r, ": ", std::string(text, strnlen(text, kErrorText))), {.rank = r});
  }
  const SignalRecord& first = signals_->record(0, epoch);
  for (int r = 1; r < config_.shape.ranks; ++r) {
    const SignalRecord& other = signals_->record(r, epoch);
    const auto compare = [&](Disagreement about, auto at_first, auto here) {
      if (at_first != here)
        throw Error(ErrorKind::mismatched_arguments,
                    after_error(disagreement_text(about, r, static_cast<int64_t>(at_first),
                                                  static_cast<int64_t>(here)),
                                tell_overflow()),
                    {.rank = r});
    };
    compare(Disagreement::operation, first.operation, other.operation);
    compare(Disagreement::caller, first.caller, other.caller);
    compare(Disagreement::layout, first.layout, other.layout);
    compare(Disagreement::alignment, first.alignment, other.alignment);
    compare(Disagreement::capacity, first.capacity, other.capacity);
    compare(Disagreement::index_capacity, first.detail, other.detail);
    if (first.operation != Operation::dispatch) compare(Disagreement::plan, first.plan, other.plan);
    compare(Disagreement::carries, first.carries, other.carries);
  }
}

void Communicator::fail(ErrorKind kind, const std::string& text) {
  require_usable();
  SignalRecord record = guarded([&] { return start(Operation::none); });
  record.error = static_cast<uint32_t>(kind);
  auto* const target = reinterpret_cast<char*>(own(layout_.error_text[record.epoch & 1]));
  store_text(text, target, kErrorText);
  signal(record, nullptr, target);
  // Ranks stay in step only if this rank waits, too, though it reports its own error in any case.
  try {
    guarded([&] { signals_->wait_all(record.epoch, "error exchange"); });
  } catch (const Error&) {
    // The communicator is broken; the next call raises the error that broke it.
  }
  throw Error(kind, text, {.rank = config_.rank});
}

/// Copies the rows of x that peers need into this rank's window, unless x lies there. Returns their offset.
int64_t Communicator::publish(const std::byte* x, const int32_t* ids, int64_t tokens) {
  const int64_t in_window = input_offset(x);
  if (in_window >= 0) {
    input_epoch_[in_window >= layout_.input[1]] = epoch_;
    return in_window;
  }
  // Two sections alternate. Epoch n may overwrite the rows of n-2: all ranks have announced n-1, so all have
  // left n-2.
  const int64_t offset = layout_.rows[epoch_ & 1];
  stats_.bytes_staged +=
      cpu::dispatch_send(context(), x, ids, tokens, own(offset)) * layout_.shape.row_bytes();
  return offset;
}

/// Returns each rank's ids (their address in this process) and its number of tokens in the dispatch `epoch`.
std::vector<SourceIds> Communicator::all_ids(uint64_t epoch) const {
  std::vector<SourceIds> sources;
  for (int r = 0; r < config_.shape.ranks; ++r)
    sources.push_back({is_local(r) ? reinterpret_cast<const int32_t*>(at(r, layout_.ids[epoch & 1]))
                                   : internode_->ids(r, epoch),
                       signals_->record(r, epoch).tokens});
  return sources;
}

cpu::PullArguments Communicator::pull_arguments(uint64_t epoch, const std::byte* own, std::byte* out) const {
  cpu::PullArguments arguments;
  arguments.out = out;
  for (int r = 0; r < config_.shape.ranks; ++r)
    arguments.rows.push_back(r == config_.rank ? own
                             : is_local(r)     ? at(r, signals_->record(r, epoch).rows_offset)
                                               : internode_->rows(r, epoch));
  return arguments;
}

/// Pulls rows of this node first, while those of other nodes arrive.
void Communicator::pull_rows(const Plan& plan, uint64_t epoch, const cpu::PullArguments& arguments) {
  const int32_t first = nodes_.first(nodes_.node_of(config_.rank));
  const auto pull = [&](cpu::EntryRange range) { cpu::dispatch_receive(context(), plan, arguments, range); };
  cpu::zero_padding(context(), plan, arguments);
  pull({plan.source_begin[first], plan.source_begin[first + nodes_.local_ranks]});
  if (internode_) internode_->pull(plan, epoch, pull);
  count_wire(plan);
}

/// Counts the row bytes that a dispatch brings here from other ranks, or that a combine sends back to them.
void Communicator::count_wire(const Plan& plan) {
  const int64_t own = plan.source_begin[config_.rank + 1] - plan.source_begin[config_.rank];
  stats_.bytes_wire += (plan.entries() - own) * layout_.shape.row_bytes();
}

std::shared_ptr<const Plan> Communicator::begin_dispatch(const DispatchArguments& arguments) {
  check();
  return guarded([&] {
    ScopedSeconds timer(stats_.dispatch_seconds);
    ++stats_.dispatch_calls;
    const int32_t top_k = config_.shape.top_k;
    const int parity = static_cast<int>((epoch_ + 1) & 1);
    auto* const ids = reinterpret_cast<int32_t*>(own(layout_.ids[parity]));
    const std::string wrong = arguments.wide_ids
                                  ? take_ids(static_cast<const int64_t*>(arguments.ids), arguments.tokens,
                                             top_k, config_.num_experts, ids)
                                  : take_ids(static_cast<const int32_t*>(arguments.ids), arguments.tokens,
                                             top_k, config_.num_experts, ids);
    if (!wrong.empty()) fail(ErrorKind::invalid_routing, wrong);

    SignalRecord record = start(Operation::dispatch);
    if (arguments.weights != nullptr)
      std::memcpy(own(layout_.weights[parity]), arguments.weights,
                  arguments.tokens * top_k * weight_bytes(config_.shape.dtype));
    const PlanShape shape{config_.rank,       config_.shape.ranks, local_experts_,     top_k,
                          arguments.layout,   arguments.alignment, arguments.capacity, nodes_.local_ranks,
                          arguments.positions};
    // Each caller (layer) has plans of its own: ranks that combine for different layers then get an error.
    const uint64_t hash = hash_ids(ids, arguments.tokens * top_k) + arguments.caller;
    std::shared_ptr<const Plan> plan = reusable_plan(hash, shape, ids, arguments.tokens);
    record.rows_offset = publish(arguments.x, ids, arguments.tokens);
    record.tokens = static_cast<int32_t>(arguments.tokens);
    record.layout = arguments.layout;
    record.alignment = static_cast<int32_t>(arguments.alignment);
    record.capacity = arguments.capacity;
    record.detail = arguments.positions;
    record.caller = arguments.caller;
    record.carries = kCarriesRows | (arguments.weights != nullptr ? uint32_t{kCarriesWeights} : 0);
    record.plan = plan ? plan->id : 0;
    RelayRoutes made_routes;
    if (!plan) made_routes = make_routes(shape, {ids, arguments.tokens});
    const RelayRoutes& routes = plan ? plan->routes : made_routes;
    signal(record, &routes);
    if (internode_) internode_->send_rows(context(), routes, arguments.x, record.epoch);
    wait_records(record, "dispatch");

    // The kept plan is valid if all ranks name it: then every rank's ids are those of that dispatch.
    bool reuse = plan != nullptr;
    for (int r = 0; r < config_.shape.ranks && reuse; ++r)
      reuse = signals_->record(r, record.epoch).plan == plan->id;
    if (reuse) {
      ++stats_.plans_reused;
    } else {
      auto made = std::make_shared<Plan>(make_plan(shape, all_ids(record.epoch), routes));
      made->id = record.epoch;
      if (made->by_expert) std::const_pointer_cast<Plan>(made->by_expert)->id = record.epoch;
      plan = std::move(made);
      ++stats_.plans_made;
    }
    remember(hash, plan);
    pending_ = Pending{plan, arguments.x, record.epoch};
    if (arguments.capacity >= 0 && plan->by_expert) note_overflow(*plan->by_expert, "expert_capacity");
    if (arguments.capacity >= 0) note_overflow(*plan, "capacity");
    return plan;
  });
}

void Communicator::note_overflow(const Plan& plan, const char* capacity) {
  if (plan.max_needed <= plan.shape.capacity) return;
  overflow_ =
      Error(ErrorKind::capacity_exceeded,
            text_of("a dispatch needed ", plan.max_needed, " rows on rank ", plan.max_needed_rank, ", its ",
                    capacity, " was ", plan.shape.capacity, "; the rows past it were left out"),
            {.rank = plan.max_needed_rank, .needed = plan.max_needed, .available = plan.shape.capacity});
}

void Communicator::pull(std::byte* out, std::byte* out_weights, int32_t* out_ids, int32_t* out_index,
                        std::byte* out_index_weights) {
  require_usable();
  if (!pending_)
    throw Error(
        ErrorKind::invalid_argument,
        "the dispatch has ended, as another operation of this communicator came after begin_dispatch: "
        "receive its rows before the next operation");
  ScopedSeconds timer(stats_.dispatch_seconds);
  const auto [plan, x, epoch] = *std::exchange(pending_, std::nullopt);
  guarded([&] { pull_rows(*plan, epoch, pull_arguments(epoch, x, out)); });
  if (out_index != nullptr) std::copy(plan->index.begin(), plan->index.end(), out_index);
  if (out_weights != nullptr || out_ids != nullptr) {
    std::vector<const std::byte*> weights;
    for (int r = 0; r < config_.shape.ranks; ++r)
      weights.push_back(is_local(r) ? at(r, layout_.weights[epoch & 1]) : internode_->weights(r, epoch));
    cpu::pull_metadata(context(), *plan, weights, out_weights, out_ids);
    if (out_index_weights != nullptr)
      cpu::pull_metadata(context(), *plan->by_expert, weights, out_index_weights, nullptr);
  }
  signals_->complete(epoch);
  stats_.rows_in += plan->tokens;
  stats_.rows_out += std::min(plan->needed_rows, plan->rows);
}

void Communicator::redispatch(const std::shared_ptr<const Plan>& plan, const std::byte* rows, std::byte* out,
                              const std::byte* scales, const std::byte* other, std::byte* dots) {
  require_usable();
  guarded([&] {
    ScopedSeconds timer(stats_.dispatch_seconds);
    ++stats_.dispatch_calls;
    SignalRecord record = start(Operation::redispatch, plan.get());
    record.carries = kCarriesRows;
    record.tokens = static_cast<int32_t>(plan->tokens);
    record.rows_offset = publish(rows, plan->local_topk_idx.data(), plan->tokens);
    signal(record, &plan->routes);
    if (internode_) internode_->send_rows(context(), plan->routes, rows, record.epoch);
    wait_records(record, "backward of combine");
    cpu::PullArguments arguments = pull_arguments(record.epoch, rows, out);
    arguments.scales = scales;
    arguments.other = other;
    arguments.dots = dots;
    pull_rows(*plan, record.epoch, arguments);
    signals_->complete(record.epoch);
  });
}

void Communicator::combine(const std::shared_ptr<const Plan>& plan, const std::byte* rows,
                           const std::byte* weights, std::byte* y, const std::byte* weight_grads,
                           std::byte* out_weight_grads) {
  require_usable();
  guarded([&] {
    ScopedSeconds timer(stats_.combine_seconds);
    ++stats_.combine_calls;
    SignalRecord record = start(Operation::combine, plan.get());
    record.carries = (y != nullptr ? uint32_t{kCarriesRows} : 0) |
                     (out_weight_grads != nullptr ? uint32_t{kCarriesWeights} : 0);
    const int parity = static_cast<int>(record.epoch & 1);
    cpu::CombineArguments arguments;
    arguments.rows = rows;
    arguments.weights = weights;
    arguments.weight_grads = weight_grads;
    for (std::byte* base : bases_) arguments.slots.push_back(base + layout_.slots[parity]);
    for (int r = 0; r < config_.shape.ranks; ++r)
      arguments.home_weight_grads.push_back(is_local(r) ? at(r, layout_.weight_grads[parity])
                                                        : internode_->outgoing_grads(r, record.epoch));
    std::vector<const std::byte*> grads;  // [node] gradients that arrive
    for (int32_t node = 0; node < nodes_.nodes(); ++node) {
      const bool here = node == nodes_.node_of(config_.rank);
      grads.push_back(here ? own(layout_.weight_grads[parity]) : internode_->grads(node, record.epoch));
      if (!here) arguments.relayed_rows.push_back(internode_->sums(node, record.epoch));
    }
    // No sum goes to another node before all ranks are known to use the same plan.
    if (internode_) {
      signal(record);
      wait_records(record, "combine");
      if (y != nullptr) internode_->relay(context(), *plan, arguments, record.epoch);
    }
    // Two sections of slots alternate: a token's rank read the slots of epoch n-2 before it announced n-1.
    if (y != nullptr) cpu::combine_reduce(context(), *plan, arguments);
    if (out_weight_grads != nullptr) cpu::push_weight_grads(context(), *plan, arguments);
    if (internode_) {
      internode_->node_barrier(record.epoch);
      if (out_weight_grads != nullptr) internode_->send_grads(*plan, record.epoch);
    } else {
      signal(record);
      wait_records(record, "combine");
    }
    if (y != nullptr) {
      const auto sum = [&](int64_t first, int64_t end) {
        cpu::combine_sum(context(), *plan, arguments, y, first, end);
      };
      if (internode_)
        internode_->combine_sum(*plan, record.epoch, sum);
      else
        sum(0, plan->tokens);
      count_wire(*plan);
    }
    if (out_weight_grads != nullptr) {
      if (internode_) internode_->wait_grads(*plan, record.epoch);
      cpu::collect_weight_grads(context(), *plan, grads, out_weight_grads);
    }
    signals_->complete(record.epoch);
  });
}

std::shared_ptr<const Plan> Communicator::reusable_plan(uint64_t hash, const PlanShape& shape,
                                                        const int32_t* ids, int64_t tokens) {
  const int64_t count = tokens * shape.top_k;
  const auto [begin, end] = plans_.equal_range(hash);
  std::shared_ptr<const Plan> newest;
  for (auto it = begin; it != end; ++it) {
    auto plan = it->second.lock();
    if (plan && plan->shape == shape && plan->tokens == tokens && (!newest || plan->id > newest->id) &&
        std::equal(ids, ids + count, plan->local_topk_idx.begin()))
      newest = std::move(plan);
  }
  return newest;
}

void Communicator::remember(uint64_t hash, const std::shared_ptr<const Plan>& plan) {
  std::erase_if(recent_, [&](const auto& other) { return other == plan; });
  if (recent_.size() == kRecentPlans) recent_.erase(recent_.begin());
  recent_.push_back(plan);
  std::erase_if(plans_, [&](const auto& item) { return item.second.expired(); });
  const auto [begin, end] = plans_.equal_range(hash);
  if (std::none_of(begin, end, [&](const auto& item) { return item.second.lock() == plan; }))
    plans_.emplace(hash, plan);
}

std::shared_ptr<std::byte> Communicator::take_input() {
  require_usable();
  // Ends a dispatch that was never pulled: otherwise this rank would wait for itself below.
  pending_.reset();
  signals_->complete(epoch_);
  const int index = input_taken_[0] ? 1 : 0;
  if (input_taken_[index])
    throw Error(ErrorKind::out_of_memory,
                "empty_input: both input buffers of the window are in use; let go of a tensor that it "
                "returned before");
  if (!input_committed_) {
    own_window().commit(layout_.input[0], layout_.total_bytes - layout_.input[0]);
    input_committed_ = true;
  }
  guarded([&] { signals_->wait_completed(input_epoch_[index], "empty_input"); });
  input_taken_[index] = true;
  return {own(layout_.input[index]),
          [self = shared_from_this(), index](std::byte*) { self->input_taken_[index] = false; }};
}

int64_t Communicator::input_offset(const std::byte* pointer) const {
  const std::byte* const base = this->base();
  if (pointer < base + layout_.input[0] || pointer >= base + layout_.total_bytes) return -1;
  return pointer - base;
}

}  // namespace moecomm
