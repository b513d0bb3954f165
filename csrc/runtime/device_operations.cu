// DeviceCommunicator: starts the two halves of operations, sending and receiving, on the caller's stream.
#include <cstdio>
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

/// Copies the arguments that both sides of an operation share from the sending to the receiving side.
void take_sent(gpu::ReceiveArguments& received, const gpu::SendArguments& sent) {
  received.operation = sent.operation;
  received.x = sent.x;
  received.plan = sent.plan;
  received.layout = sent.layout;
  received.wide_ids = sent.wide_ids;
}

/// Returns whether an operation can still get its second half. `capture`: id of the capture that recorded
/// its first half on `stream`; 0: not captured, it runs. False if the capture has ended: then nothing runs.
/// Throws Error(invalid_argument) if the first half runs and `stream` is being captured now.
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
  // Both halves must be in the same capture, or both in none.
  const bool alike = capture_of(stream) == held_->capture;
  const bool there = (held_->capture == 0 && alike) || is_there(held_->capture, held_->stream);
  const Held held = *held_;
  held_.reset();
  if (there) launch_sum(held.arguments, held.blocks, alike ? stream : held.stream);
  return there;
}

/// First step of every operation: completes a held combine, abandons a dispatch that was not received.
void DeviceCommunicator::end_earlier(cudaStream_t stream) {
  require_usable();
  complete(stream);
  abandon(stream);
}

/// Makes work put on stream `later` from now on wait for all work put on `stream` so far.
void DeviceCommunicator::order(cudaStream_t later, cudaEvent_t event, cudaStream_t stream) {
  check_cuda(cudaEventRecord(event, stream), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
}

/// Ends an operation that was begun and will not be received. Later work on `stream` runs after that end.
void DeviceCommunicator::abandon(cudaStream_t stream) {
  if (!pending_) return;
  const DeviceGuard guard(config_.device);
  const Begun begun = *pending_;
  const bool there = is_there(begun.capture, begun.stream);
  pending_.reset();
  if (!there) return;
  const gpu::SendArguments& sent = begun.arguments;
  // Chunks that wait for room will never be sent now, though other ranks may receive the dispatch.
  const bool in_turn = comm(begun.wire)->window.stage_tokens < config_.shape.max_tokens;
  if (in_turn) given_up_ = begun.capture;
  const bool offered = begun.state != Begun::sent;
  check_cuda(gpu::launch_abandon(launch(begun.stream, 1, !offered), *comm(begun.wire), sent.operation,
                                 sent.tokens, offered),
             "launch of abandon");
  if (begun.plan.later) order(begun.stream, join_, side_stream_);
  if (stream == begun.stream) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) return;  // whoever replays the graph orders both streams
  order(stream, fork_, begun.stream);
}

/// Returns kAfterGivenUp, for the record of the operation that begins on `stream`, if this rank gave up the
/// previous dispatch, else 0. A rank that received that dispatch announces 0, so all ranks raise an error.
uint32_t DeviceCommunicator::after_given_up(cudaStream_t stream) {
  if (!given_up_ || *given_up_ != capture_of(stream)) return 0;
  given_up_.reset();
  return kAfterGivenUp;
}

gpu::LaunchContext DeviceCommunicator::launch_context(WireFormat wire) const {
  return {heuristics_, config_.shape, fused_tokens(), comm(wire)->window.stage_tokens};
}

/// Returns the kernels of an operation whose rows travel in `wire`; after log_launches() also prints them.
gpu::DispatchPlan DeviceCommunicator::plan_of(WireFormat wire, const gpu::SendArguments& arguments,
                                              bool in_halves) {
  const bool dispatch = arguments.operation == Operation::dispatch;
  const gpu::DispatchPlan plan = gpu::plan_dispatch(
      launch_context(wire), {dispatch, arguments.tokens, arguments.layout, arguments.work, in_halves});
  if (logs_launches_)
    log_launch(dispatch ? "dispatch" : "redispatch", arguments.tokens, arguments.layout, plan.text());
  return plan;
}

void DeviceCommunicator::log_launch(const char* operation, int64_t tokens, RowLayout layout,
                                    const std::string& plan) {
  const std::string what =
      text_of(layout == RowLayout::rank ? " tokens by rank: " : " tokens by expert: ", plan, "\n");
  if (!logged_.insert(operation + what).second) return;
  const std::string line = text_of("moecomm: rank ", config_.rank, ": ", operation, " of ", tokens, what);
  std::fputs(line.c_str(), stderr);
}

void DeviceCommunicator::send(WireFormat wire, gpu::SendArguments arguments, const gpu::DispatchPlan& plan,
                              cudaStream_t stream) {
  const bool dispatch = arguments.operation == Operation::dispatch;
  arguments.warps = plan.send_warps;
  arguments.routes_first = plan.routes_first;
  arguments.relay_blocks = plan.relay;
  arguments.route_blocks = plan.route;
  arguments.plan_block = plan.planner > 0 ? plan.route + plan.relay : 0;
  arguments.after = after_given_up(stream);
  if (plan.later) order(side_stream_, fork_, stream);
  if (dispatch)  // routes are computed on the SMs that receive rows afterwards
    check_cuda(gpu::launch_dispatch_route(launch(stream, plan.route_blocks(), false),
                                          *comm(config_.shape.wire), arguments),
               "launch of a dispatch (routes)");
  check_cuda(launch_send(launch(stream, plan.send_blocks(), dispatch), *comm(wire), arguments),
             "launch of a dispatch (sending)");
  pending_ = {Begun::sent, arguments, wire, plan, stream, capture_of(stream)};
}

/// Receives the rows of the operation that was sent last. `directly`: as in finish_dispatch. Otherwise a
/// kernel of the caller may precede the receiving kernel, let it start early, and still read freed memory
/// that is the output now. So the receiving kernel then starts only after the end of the kernel before it.
void DeviceCommunicator::receive(gpu::ReceiveArguments arguments, bool directly, cudaStream_t stream) {
  const Begun begun = *pending_;
  const bool beside = directly && stream == begun.stream && begun.state == Begun::sent;
  pending_.reset();
  if (begun.state == Begun::offered_in_one) {
    gpu::FusedArguments both{begun.arguments, arguments};
    both.again = true;
    // The launch depends on the known number of rows, since other ranks may have brought many tokens.
    const gpu::FusedDispatch plan =
        gpu::plan_fused_dispatch(launch_context(begun.wire), arguments.rows, begun.arguments.tokens, false,
                                 begun.arguments.quantises());
    return run_in_one(begun.wire, both, plan, stream);
  }
  gpu::SendArguments sent = begun.arguments;
  take_sent(arguments, sent);
  const gpu::DispatchPlan& plan = begun.plan;
  arguments.senders = plan.later ? plan.send_blocks() : 0;
  check_cuda(gpu::launch_dispatch_receive(launch(stream, plan.receive, beside), *comm(begun.wire), arguments),
             "launch of a dispatch (receiving)");
  if (plan.later) {
    sent.later = true;
    check_cuda(launch_send(launch(side_stream_, plan.send_blocks(), false), *comm(begun.wire), sent),
               "launch of a dispatch (sending what waits for room)");
    order(stream, join_, side_stream_);
  }
}

/// Returns a dispatch's sending arguments with `ticket` and `work` set. Counts the dispatch in `stats_`.
gpu::SendArguments DeviceCommunicator::counted(gpu::SendArguments dispatch) {
  dispatch.ticket = ++ticket_;
  const bool quantises = config_.shape.wire != WireFormat::same && dispatch.x_scales == nullptr;
  dispatch.work = quantises ? gpu::RowWork::quantised : gpu::RowWork::none;
  ++stats_.dispatch_calls;
  ++stats_.plans_made;
  stats_.rows_in += dispatch.tokens;
  return dispatch;
}

bool DeviceCommunicator::dequantises(const gpu::ReceiveArguments& output) const {
  return config_.shape.wire != WireFormat::same && output.out_scales == nullptr;
}

/// Starts to send and to receive, in one kernel or several. Rows may not fit an output that was offered
/// before their number is known. Such an operation is pending until accept_rows or finish_dispatch.
void DeviceCommunicator::send_and_receive(WireFormat wire, const gpu::SendArguments& sent,
                                          gpu::ReceiveArguments received, cudaStream_t stream) {
  const gpu::DispatchPlan plan = plan_of(wire, sent, false);
  Begun begun{Begun::offered_in_one, sent, wire, plan, stream, 0};
  if (plan.in_one) {
    run_in_one(wire, {sent, received}, plan.fused, stream);
  } else {
    send(wire, sent, plan, stream);
    begun = *pending_;
    begun.state = Begun::offered;
    receive(received, true, stream);
  }
  if (received.offered) pending_ = begun;
}

/// Starts the one kernel that does both sides of an operation.
void DeviceCommunicator::run_in_one(WireFormat wire, gpu::FusedArguments arguments,
                                    const gpu::FusedDispatch& plan, cudaStream_t stream) {
  gpu::SendArguments& sent = arguments.send;
  take_sent(arguments.receive, sent);
  if (!arguments.again) sent.after = after_given_up(stream);
  arguments.senders = plan.senders;
  arguments.team_warps = plan.team_warps;
  const device::Comm& comm = *this->comm(wire);
  check_cuda(with_wire(comm.window.shape.wire,
                       [&]<WireFormat travels>() {
                         return gpu::launch_dispatch_fused<travels>(launch(stream, plan.blocks, false), comm,
                                                                    arguments);
                       }),
             "launch of a dispatch");
}

void DeviceCommunicator::dispatch(const gpu::SendArguments& dispatch, gpu::ReceiveArguments output,
                                  cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  output.dequantise = dequantises(output);
  output.offered = dispatch.capacity < 0;
  send_and_receive(config_.shape.wire, counted(dispatch), output, stream);
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
  // A separate kernel sends chunks that wait for room. The kernel that makes room must start before it.
  const bool waits = tokens > comm(wire)->window.stage_tokens;
  return {recent.offer(tokens, alignment, config_.shape), nodes_.nodes() == 1 && !waits};
}

void DeviceCommunicator::accept_rows() {
  require_begun();
  pending_.reset();
}

void DeviceCommunicator::begin_dispatch(const gpu::SendArguments& dispatch, cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  const gpu::SendArguments arguments = counted(dispatch);
  send(config_.shape.wire, arguments, plan_of(config_.shape.wire, arguments, true), stream);
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
    // Earlier kernels in the stream may run for any time. The kernel that makes the plan has deadlines and
    // always reports, unless the device itself has failed; the loop looks for such a failure now and then.
    Clock::time_point look = Clock::now() + std::chrono::milliseconds(5);
    while (load_acquire(rows.ticket) != ticket) {
      if (Clock::now() < look) continue;
      look = Clock::now() + std::chrono::milliseconds(5);
      const cudaError_t error = cudaStreamQuery(watch_stream_);
      if (error != cudaErrorNotReady) check_cuda(error, "waiting for the row count of a dispatch");
      interrupting = true;
      if (interrupt_) interrupt_();
      interrupting = false;
      require_open();  // a signal handler may have closed the communicator
    }
    check();
    // rows.rows is -1 after a failure. Another block may report the reason later; check() throws that.
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
    if (load_acquire(rows.ticket) == ticket && rows.rows < 0) given_up_.reset();  // no rank received it
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

std::vector<int32_t> DeviceCommunicator::host_counts() const {
  const int32_t* const counts = moecomm::host_counts(pinned_->status);
  return {counts, counts + config_.shape.local_experts()};
}

void DeviceCommunicator::finish_dispatch(bool directly, const gpu::ReceiveArguments& output,
                                         cudaStream_t stream) {
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
  gpu::ReceiveArguments received = output;
  received.dequantise = dequantises(output);
  receive(received, directly, stream);
}

void DeviceCommunicator::redispatch(gpu::SendArguments sent, gpu::ReceiveArguments output, bool quantised,
                                    cudaStream_t stream) {
  end_earlier(stream);
  const DeviceGuard guard(config_.device);
  const WireFormat wire = quantised ? config_.gradients : WireFormat::same;
  sent.work = wire != WireFormat::same   ? gpu::RowWork::quantised
              : output.other != nullptr  ? gpu::RowWork::products
              : output.scales != nullptr ? gpu::RowWork::factors
                                         : gpu::RowWork::none;
  ++stats_.dispatch_calls;
  output.dequantise = sent.quantises();
  send_and_receive(wire, sent, output, stream);
}

bool DeviceCommunicator::weighs_tokens() const {
  const int64_t most = config_.shape.max_tokens;
  return most <= heuristics_.fused_sums && fuses(WireFormat::same, most);
}

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
  const gpu::CombinePlan plan = gpu::plan_combine(
      launch_context(WireFormat::same),
      {all.tokens, all.layout, all.wire != WireFormat::same, all.weight_grads != nullptr, held});
  if (logs_launches_) log_launch("combine", all.tokens, all.layout, plan.text());
  if (all.token_weights != nullptr && !plan.in_one)
    throw Error(ErrorKind::unsupported, "weights of tokens are for a combine in one kernel");
  if (plan.in_one) {
    all.team_warps = plan.team_warps;
    all.flags_late = plan.flags_late;
    all.parts = plan.parts;
    check_cuda(gpu::launch_combine_fused(launch(stream, plan.blocks, false), comm, all),
               "launch of a combine");
    return;
  }
  all.reduce_list = plan.reduce_list;
  all.sum_list = plan.sum_list;
  check_cuda(gpu::launch_combine_reduce(launch(stream, plan.reduce_blocks(), false), comm, all),
             "launch of combine (owners)");
  if (held)
    held_ = {all, stream, capture_of(stream), plan.sum};
  else
    launch_sum(all, plan.sum, stream);
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
