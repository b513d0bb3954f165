// DeviceCommunicator: starts the two halves of operations on the caller's stream.
#include <algorithm>
#include <stdexcept>

#include "device/comm.cuh"
#include "kernels/gpu/common/pipe.cuh"
#include "runtime/cuda_calls.hpp"
#include "runtime/device_communicator.hpp"
#include "runtime/pinned_status.hpp"

namespace moecomm {
namespace {

cudaError_t launch_send(const gpu::Launch& launch, const device::Comm& comm,
                        const gpu::SendArguments& arguments) {
  return with_wire(arguments.quantises() ? comm.window.shape.wire : WireFormat::same, [&]<WireFormat wire>() {
    return gpu::launch_dispatch_send<wire>(launch, comm, arguments);
  });
}

/// Copies to the receiving side's arguments those that it shares with the sending side.
void take_sent(gpu::ReceiveArguments& received, const gpu::SendArguments& sent) {
  received.operation = sent.operation;
  received.x = sent.x;
  received.plan = sent.plan;
  received.layout = sent.layout;
}

/// Returns false if `capture` (0: none, it runs) recorded the first half of an operation on `stream` and has
/// ended without the second half: then nothing of it runs. Throws Error(invalid_argument) for a first half
/// that runs while its stream records now.
bool is_there(uint64_t capture, cudaStream_t stream) {
  const uint64_t now = capture_of(stream);
  if (capture == 0 && now != 0)
    throw Error(
        ErrorKind::invalid_argument,
        "an operation was begun on a stream before its capture and is not complete; wait for it before "
        "the capture");
  return capture == now;
}

}  // namespace

bool DeviceCommunicator::complete(cudaStream_t stream) {
  interrupted_ = false;
  if (!held_) return true;
  const DeviceGuard guard(config_.device);
  // A recorded half does not complete one that runs, nor the other way round.
  const bool alike = capture_of(stream) == held_->capture;
  const bool there = (held_->capture == 0 && alike) || is_there(held_->capture, held_->stream);
  const Held held = *held_;
  held_.reset();
  if (there) launch_sum(held.arguments, held.blocks, alike ? stream : held.stream);
  return there;
}

gpu::Launch DeviceCommunicator::launch(cudaStream_t stream, int blocks, bool overlapped) const {
  return {stream, blocks, overlapped, heuristics_.paired};
}

/// Runs before every operation on `stream`.
void DeviceCommunicator::end_earlier(cudaStream_t stream) {
  require_usable();
  complete(stream);
  abandon(stream);
}

/// Orders later work of `later` after the present work of `stream`.
void DeviceCommunicator::order(cudaStream_t later, cudaEvent_t event, cudaStream_t stream) {
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

/// Ends an operation that was begun and will not be completed, before later work on `stream`.
void DeviceCommunicator::abandon(cudaStream_t stream) {
  if (!pending_) return;
  const DeviceGuard guard(config_.device);
  const Begun begun = *pending_;
  const bool there = is_there(begun.capture, begun.stream);
  pending_.reset();
  if (!there) return;
  const gpu::SendArguments& sent = begun.arguments;
  // Other ranks may have received the dispatch, including rows that this rank had yet to send.
  const bool in_turn = comm(begun.wire)->window.stage_tokens < config_.shape.max_tokens;
  if (in_turn) given_up_ = begun.capture;
  const bool offered = begun.state != Begun::sent;
  check_cuda(gpu::launch_abandon(launch(begun.stream, 1, !offered), *comm(begun.wire), sent.operation,
                                 sent.tokens, offered),
             "launch of abandon");
  if (begun.later) order(begun.stream, join_, side_stream_);
  if (stream == begun.stream) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) return;  // who replays the graph orders it
  order(stream, fork_, begun.stream);
}

/// Returns the record bits for the operation that begins on `stream`, which say that this rank gave up the
/// previous dispatch: ranks that received it disagree, and all raise an error.
uint32_t DeviceCommunicator::after_given_up(cudaStream_t stream) {
  if (!given_up_ || *given_up_ != capture_of(stream)) return 0;
  given_up_.reset();
  return kAfterGivenUp;
}

const gpu::DispatchBlocks& DeviceCommunicator::divided(const gpu::SendArguments& arguments) const {
  return heuristics_.dispatch(arguments.layout == RowLayout::rank, arguments.work);
}

void DeviceCommunicator::send(WireFormat wire, gpu::SendArguments arguments, cudaStream_t stream) {
  const bool dispatch = arguments.operation == Operation::dispatch;
  const gpu::DispatchBlocks& divided = this->divided(arguments);
  arguments.warps = divided.send_warps;
  arguments.routes_first = divided.routes_first && nodes_.nodes() == 1;
  arguments.relay_blocks = heuristics_.relay_blocks;
  arguments.after = after_given_up(stream);
  // The number of tokens on other nodes is not known here.
  const int64_t most = nodes_.nodes() > 1 ? config_.shape.max_tokens : arguments.tokens;
  const bool later = most > comm(wire)->window.stage_tokens;
  if (later) order(side_stream_, fork_, stream);
  if (dispatch) launch_route(arguments, divided, stream);
  const int blocks = divided.send + heuristics_.relay_blocks;
  check_cuda(launch_send(launch(stream, blocks, dispatch), *comm(wire), arguments),
             "launch of a dispatch (sending)");
  pending_ = {Begun::sent, arguments, wire, blocks, later, stream, capture_of(stream)};
}

/// Starts to compute the routes of a dispatch, with blocks that will receive its rows, and its plan.
void DeviceCommunicator::launch_route(gpu::SendArguments& arguments, const gpu::DispatchBlocks& divided,
                                      cudaStream_t stream) {
  const bool few = gpu::routes_few(config_.shape, arguments.tokens, gpu::kRouteWords);
  const int most = few ? 1 : std::clamp<int>(divided.receive - 1, 1, kMaxRouteBlocks - 1);
  arguments.route_blocks = gpu::Heuristics::route_blocks(arguments.tokens, most);
  // A separate block makes the plan, if there is one more. The sum is at most an even number, since blocks of
  // the other kernels run faster next to blocks of the same kind (docs/history.md, "Blocks in pairs").
  const bool has_planner = divided.receive > arguments.route_blocks;
  const int others = arguments.route_blocks + arguments.relay_blocks, blocks = others + (has_planner ? 1 : 0);
  arguments.plan_block = has_planner ? others : 0;
  check_cuda(gpu::launch_dispatch_route(launch(stream, blocks, false), *comm(config_.shape.wire), arguments),
             "launch of a dispatch (routes)");
}

/// Receives the rows of the operation that was sent last. `directly`: as in finish_dispatch. If the caller's
/// kernel came in between, it may let this one start early while it still reads memory that this one writes
/// to (operands that were freed meanwhile): then it has to end first.
void DeviceCommunicator::receive(gpu::ReceiveArguments arguments, bool directly, cudaStream_t stream) {
  const Begun begun = *pending_;
  const bool beside = directly && stream == begun.stream && begun.state == Begun::sent;
  pending_.reset();
  if (begun.state == Begun::offered_in_one) {
    gpu::FusedArguments both{begun.arguments, arguments};
    both.again = true;
    return run_in_one(begun.wire, both, stream);
  }
  gpu::SendArguments sent = begun.arguments;
  take_sent(arguments, sent);
  arguments.senders = begun.later ? begun.blocks : 0;
  check_cuda(gpu::launch_dispatch_receive(launch(stream, divided(sent).receive, beside), *comm(begun.wire),
                                          arguments),
             "launch of a dispatch (receiving)");
  if (begun.later) {
    sent.later = true;
    check_cuda(launch_send(launch(side_stream_, begun.blocks, false), *comm(begun.wire), sent),
               "launch of a dispatch (sending what waits for room)");
    order(stream, join_, side_stream_);
  }
}

/// Returns the sending side's arguments of a dispatch, and counts it.
gpu::SendArguments DeviceCommunicator::sending(const DeviceDispatch& d) {
  gpu::SendArguments arguments{};
  arguments.operation = Operation::dispatch;
  arguments.x = d.x;
  arguments.x_scales = d.x_scales;
  arguments.ids = d.ids;
  arguments.wide_ids = d.wide_ids;
  arguments.weights = d.weights;
  arguments.plan = d.plan;
  arguments.tokens = d.tokens;
  arguments.alignment = d.alignment;
  arguments.capacity = d.capacity;
  arguments.positions = d.positions;
  arguments.caller = d.caller;
  arguments.layout = d.layout;
  arguments.ticket = ++ticket_;
  const bool quantises = config_.shape.wire != WireFormat::same && d.x_scales == nullptr;
  arguments.work = quantises ? gpu::RowWork::quantised : gpu::RowWork::none;
  ++stats_.dispatch_calls;
  ++stats_.plans_made;
  stats_.rows_in += d.tokens;
  return arguments;
}

gpu::ReceiveArguments DeviceCommunicator::receiving(int64_t rows, int64_t positions,
                                                    const DeviceOutput& output) const {
  gpu::ReceiveArguments arguments{};
  arguments.rows = rows;
  arguments.positions = positions;
  arguments.out = output.out;
  arguments.out_scales = output.out_scales;
  arguments.out_weights = output.out_weights;
  arguments.out_ids = output.out_ids;
  arguments.out_index = output.out_index;
  arguments.out_index_weights = output.out_index_weights;
  arguments.dequantise = config_.shape.wire != WireFormat::same && output.out_scales == nullptr;
  return arguments;
}

/// True where one kernel does a whole operation of `tokens` tokens with rows in `wire`.
bool DeviceCommunicator::fuses(WireFormat wire, int64_t tokens) const {
  return gpu::in_one_kernel(tokens, fused_tokens()) && tokens <= comm(wire)->window.stage_tokens;
}

/// Starts to send and to receive, in one kernel or two. Either the number of rows is known, or the rows may
/// exceed the offered output, and the operation is pending until their number is known.
void DeviceCommunicator::send_and_receive(WireFormat wire, const gpu::SendArguments& sent,
                                          gpu::ReceiveArguments received, cudaStream_t stream) {
  // Dot products with other rows are sums that one warp has to make in order.
  const bool in_one = received.other == nullptr && fuses(wire, sent.tokens);
  Begun begun{Begun::offered_in_one, sent, wire, 0, false, stream, 0};
  if (in_one) {
    run_in_one(wire, {sent, received}, stream);
  } else {
    send(wire, sent, stream);
    begun = *pending_;
    begun.state = Begun::offered;
    receive(received, true, stream);
  }
  if (received.offered) pending_ = begun;
}

/// Starts the one kernel of an operation whose two sides have their arguments.
void DeviceCommunicator::run_in_one(WireFormat wire, gpu::FusedArguments arguments, cudaStream_t stream) {
  gpu::SendArguments& sent = arguments.send;
  take_sent(arguments.receive, sent);
  if (!arguments.again) sent.after = after_given_up(stream);
  const int warps = gpu::kWarps;
  // The number of rows that are received again is known, and may include those of ranks with many tokens.
  const int64_t items = arguments.again ? arguments.receive.rows : sent.tokens * config_.shape.ranks;
  const int leads = gpu::leading_blocks(heuristics_.all_blocks());
  const int blocks = heuristics_.fused_blocks(items, sent.tokens, leads);
  const bool divides = sent.operation == Operation::dispatch && !arguments.again;
  arguments.senders =
      divides ? gpu::Heuristics::fused_senders(sent.tokens, blocks, sent.quantises(), config_.shape.ranks)
              : 0;
  arguments.team_warps = gpu::Heuristics::dispatch_team_warps(items, blocks - leads, warps, arguments.senders,
                                                              sent.quantises(), config_.shape.ranks);
  const device::Comm& comm = *this->comm(wire);
  check_cuda(with_wire(comm.window.shape.wire,
                       [&]<WireFormat travels>() {
                         return gpu::launch_dispatch_fused<travels>(launch(stream, blocks, false), comm,
                                                                    arguments);
                       }),
             "launch of a dispatch");
}

void DeviceCommunicator::dispatch(const DeviceDispatch& d, int64_t rows, int64_t positions,
                                  const DeviceOutput& output, cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  gpu::ReceiveArguments received = receiving(rows, positions, output);
  received.offered = d.capacity < 0;
  send_and_receive(config_.shape.wire, sending(d), received, stream);
}

std::pair<gpu::RowCounts, bool> DeviceCommunicator::offered_rows(int64_t tokens, RowLayout layout,
                                                                 int64_t alignment) const {
  const WireFormat wire = config_.shape.wire;
  const gpu::RecentRows& recent = recent_rows_[layout == RowLayout::rank];
  if (fuses(wire, tokens)) {
    const gpu::RowCounts few =
        few_fit_ ? gpu::offered_rows(tokens, layout, alignment, config_.shape) : gpu::RowCounts{};
    return {few.rows > 0 ? few : recent.offer(tokens, alignment, config_.shape), true};
  }
  // A kernel of its own sends chunks that wait for room; it must not start before the kernel that makes room.
  const bool waits = tokens > comm(wire)->window.stage_tokens;
  return {recent.offer(tokens, alignment, config_.shape), nodes_.nodes() == 1 && !waits};
}

void DeviceCommunicator::accept_rows() {
  require_begun();
  pending_.reset();
}

void DeviceCommunicator::begin_dispatch(const DeviceDispatch& d, cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  send(config_.shape.wire, sending(d), stream);
}

/// Throws Error(invalid_argument) unless a dispatch was begun and not received.
void DeviceCommunicator::require_begun() const {
  if (!pending_ || pending_->arguments.operation != Operation::dispatch)
    throw Error(ErrorKind::invalid_argument, "no dispatch was begun");
}

std::pair<int64_t, int64_t> DeviceCommunicator::wait_rows(cudaStream_t stream) {
  require_usable();
  require_begun();
  const uint64_t ticket = pending_->arguments.ticket;
  const DeviceGuard guard(config_.device);
  const BesideCaptures beside;
  ScopedSeconds waiting(stats_.host_wait_seconds);
  const HostStatus::Rows& rows = pinned_->status->rows;
  bool interrupting = false;
  try {
    // Earlier kernels in the stream may take as long as they like. This kernel's waits have deadlines, and it
    // reports in every case unless the device itself has failed, which is checked now and then.
    Clock::time_point look = Clock::now() + std::chrono::milliseconds(5);
    while (load_acquire(rows.ticket) != ticket) {
      if (Clock::now() < look) continue;
      look = Clock::now() + std::chrono::milliseconds(5);
      const cudaError_t error = cudaStreamQuery(watch_stream_);
      if (error != cudaErrorNotReady) check_cuda(error, "waiting for the row count of a dispatch");
      interrupting = true;
      if (interrupt_) interrupt_();
      interrupting = false;
      require_open();  // a signal handler may have closed it
    }
    check();
    // One block may report a failure and another the rows: the reason can come later.
    const Clock::time_point until = Clock::now() + std::chrono::seconds(10);
    while (rows.rows < 0) {
      check();
      if (Clock::now() > until)
        throw std::runtime_error("a dispatch failed, and the device does not say why");
      std::this_thread::yield();
    }
  } catch (...) {
    interrupted_ = interrupting;
    abandon(stream);  // at once: peers may wait for this rank to read what they sent
    if (load_acquire(rows.ticket) == ticket && rows.rows < 0) given_up_.reset();  // no rank has received it
    throw;
  }
  const gpu::SendArguments& sent = pending_->arguments;
  recent_rows_[sent.layout == RowLayout::rank].note(sent.tokens, {rows.rows, rows.positions});
  if (fuses(config_.shape.wire, sent.tokens)) {
    const gpu::RowCounts most = gpu::offered_rows(sent.tokens, sent.layout, sent.alignment, config_.shape);
    if (most.rows > 0) few_fit_ = rows.rows <= most.rows && rows.positions <= most.positions;
  }
  return {rows.rows, rows.positions};
}

void DeviceCommunicator::finish_dispatch(bool directly, int64_t rows, int64_t positions,
                                         const DeviceOutput& output, cudaStream_t stream) {
  require_usable();
  require_begun();
  const DeviceGuard guard(config_.device);
  if (pending_->capture != capture_of(stream)) {
    const bool ended = pending_->capture != 0 && !is_there(pending_->capture, pending_->stream);
    if (ended) pending_.reset();
    throw Error(ErrorKind::invalid_argument,
                ended
                    ? "the capture in which this dispatch was begun has ended without its second half; wait "
                      "for it within the capture"
                    : "a dispatch was begun outside of the capture in which it is received, or the other "
                      "way round; expected both halves within or both without");
  }
  receive(receiving(rows, positions, output), directly, stream);
}

void DeviceCommunicator::redispatch(const DeviceRedispatch& r, cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  gpu::SendArguments arguments{};
  arguments.operation = Operation::redispatch;
  arguments.x = r.x;
  arguments.plan = r.plan;
  arguments.tokens = r.tokens;
  arguments.layout = r.layout;
  const WireFormat wire = r.quantised ? config_.gradients : WireFormat::same;
  arguments.work = wire != WireFormat::same ? gpu::RowWork::quantised
                   : r.other != nullptr     ? gpu::RowWork::products
                   : r.scales != nullptr    ? gpu::RowWork::factors
                                            : gpu::RowWork::none;
  ++stats_.dispatch_calls;
  gpu::ReceiveArguments output{};
  output.dequantise = arguments.quantises();
  output.rows = r.rows;
  output.out = r.out;
  output.scales = r.scales;
  output.other = r.other;
  output.dots = r.dots;
  send_and_receive(wire, arguments, output, stream);
}

bool DeviceCommunicator::splits(int64_t tokens) const { return fuses(config_.shape.wire, tokens); }

void DeviceCommunicator::combine(const gpu::CombineArguments& arguments, bool quantised, bool held,
                                 cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  const device::Comm& comm = *this->comm(WireFormat::same);
  gpu::CombineArguments all = arguments;
  all.wire = quantised ? config_.sums : WireFormat::same;
  all.relay_blocks = heuristics_.relay_blocks;
  all.after = after_given_up(stream);
  ++stats_.combine_calls;
  if (!held && all.weight_grads == nullptr && all.tokens <= heuristics_.fused_sums &&
      fuses(WireFormat::same, all.tokens)) {
    // At their home, few tokens are shared by many warps.
    const int fused = heuristics_.fused_blocks(all.tokens, 0, 1);
    all.team_warps =
        gpu::Heuristics::sum_team_warps(all.tokens, fused - 1, gpu::kReduceWarps, config_.shape.ranks);
    all.flags_late = gpu::Heuristics::flags_late(all.tokens, config_.shape.ranks);
    all.parts = gpu::Heuristics::sum_parts(all.tokens, int64_t{fused - 1} * gpu::kReduceWarps,
                                           gpu::sum_strips(config_.shape.row_bytes()));
    check_cuda(gpu::launch_combine_fused(launch(stream, fused, false), comm, all), "launch of a combine");
    return;
  }
  const gpu::CombineBlocks& divided =
      heuristics_.combine(all.layout == RowLayout::rank, all.wire != WireFormat::same);
  all.reduce_list = divided.reduce_list;
  all.sum_list = divided.sum_list;
  check_cuda(
      gpu::launch_combine_reduce(launch(stream, divided.reduce + heuristics_.relay_blocks, false), comm, all),
      "launch of combine (owners)");
  if (held)
    held_ = {all, stream, capture_of(stream), divided.sum};
  else
    launch_sum(all, divided.sum, stream);
}

void DeviceCommunicator::launch_sum(const gpu::CombineArguments& arguments, int blocks, cudaStream_t stream) {
  check_cuda(gpu::launch_combine_sum(launch(stream, blocks, true), *comm(WireFormat::same), arguments),
             "launch of combine (home)");
}

void DeviceCommunicator::fail(ErrorKind kind, const std::string& text, cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  static_cast<void>(after_given_up(stream));  // all ranks raise an error anyway
  char* const target = pinned_->texts + (texts_++ % kTexts) * kErrorText;
  store_text(text, target, kErrorText);
  check_cuda(gpu::launch_announce(launch(stream, 1, false), *comm(WireFormat::same),
                                  static_cast<uint32_t>(kind), target),
             "launch of an error's announcement");
}

}  // namespace moecomm
