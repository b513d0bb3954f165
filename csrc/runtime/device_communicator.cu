#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/start_thread.hpp"
#include "device/comm.cuh"
#include "kernels/gpu/common/pipe.cuh"
#include "runtime/cuda_calls.hpp"
#include "runtime/device_communicator.hpp"
#include "runtime/pinned_status.hpp"

namespace moecomm {
namespace {

constexpr auto kWatchPeriod = std::chrono::milliseconds(10);

/// Shape of the host memory in which ranks notice each other's end; with several nodes also of what the proxy
/// and the kernels share.
WindowShape control_shape(const DeviceShape& shape) {
  if (shape.other_nodes() > 0) return host_window_shape(shape);
  return {shape.ranks, 1, 4, 1, DType::float32};
}

/// Loads the kernels that send rows in `wire`.
template <WireFormat wire>
cudaError_t prepare_wire(const DeviceShape& shape) {
  const cudaError_t error = gpu::prepare_dispatch_send<wire>(shape);
  return error != cudaSuccess ? error : gpu::prepare_dispatch_fused<wire>(shape);
}

/// Loads the kernels that send rows as they are, and those that bring them into the format of the shape.
cudaError_t prepare_send(const DeviceShape& shape) {
  const cudaError_t error = prepare_wire<WireFormat::same>(shape);
  if (error != cudaSuccess) return error;
  return with_wire(shape.wire, [&]<WireFormat wire>() { return prepare_wire<wire>(shape); });
}

cudaError_t launch_send(const gpu::Launch& launch, const device::Comm& comm,
                        const gpu::SendArguments& arguments) {
  return with_wire(arguments.quantises() ? comm.window.shape.wire : WireFormat::same, [&]<WireFormat wire>() {
    return gpu::launch_dispatch_send<wire>(launch, comm, arguments);
  });
}

/// Fills in what the receiving side of an operation has from its sending side.
void take_sent(gpu::ReceiveArguments& received, const gpu::SendArguments& sent) {
  received.operation = sent.operation;
  received.x = sent.x;
  received.plan = sent.plan;
  received.layout = sent.layout;
}

/// Returns false for the first half of an operation on `stream` that was recorded by `capture` (0: it runs),
/// if that capture has ended without the second half: nothing of it runs. Throws Error(invalid_argument) for
/// one that runs, while its stream records by now.
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

DeviceCommunicator::DeviceCommunicator(const DeviceConfig& config)
    : config_(config),
      window_(DeviceWindow::make(config.shape)),
      owner_(getpid()),
      nodes_(config.shape.nodes()),
      control_layout_(WindowLayout::make(control_shape(config.shape))),
      control_(static_cast<size_t>(nodes_.local_ranks)) {
  const DeviceShape& s = config_.shape;
  const DeviceGuard guard(config_.device);
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, config_.device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, config_.device),
             "cudaDeviceGetAttribute");
  if (major != 9 && major != 10)
    throw Error(ErrorKind::unsupported, "the GPU has compute capability " + std::to_string(major) +
                                            ".x, there are kernels for 9.0 and 10.x");
  // Where nothing is quantised any format will do.
  const WireFormat quantised = s.wire != WireFormat::same              ? s.wire
                               : config_.gradients != WireFormat::same ? config_.gradients
                                                                       : WireFormat::fp8;
  heuristics_ = gpu::choose_heuristics(sms_, config_.num_sms, gpu::most_fused_tokens(s.ranks, s.num_experts),
                                       s, quantised);
  const DeviceShape of_gradients = s.with_wire(config_.gradients);
  for (const cudaError_t error :
       {gpu::prepare_dispatch_route(s), prepare_send(s), gpu::prepare_dispatch_receive(s),
        prepare_send(of_gradients), gpu::prepare_dispatch_receive(of_gradients),
        gpu::prepare_combine_reduce(s, config_.sums), gpu::prepare_combine_sum(s, config_.sums),
        gpu::prepare_combine_fused(s, config_.sums), gpu::prepare_announce()})
    check_cuda(error, "loading the kernels");
  pinned_ = std::make_unique<Pinned>(s.ranks);
  control_[own_index()] =
      shm::Window::create(control_layout_.committed_bytes, control_layout_.committed_bytes);
  if (nodes_.nodes() == 1) return;
  check_cuda(cudaHostRegister(base(), static_cast<size_t>(control_layout_.committed_bytes),
                              cudaHostRegisterPortable | cudaHostRegisterMapped),
             "cudaHostRegister, which several nodes need");
  registered_ = true;
}

DeviceCommunicator::~DeviceCommunicator() {
  const bool all_ended = close();
  if (getpid() != owner_) {  // a forked child has no business with the driver
    (void)pinned_.release();
    return;
  }
  // The thread that lets go of a communicator may have another GPU. To choose this one and go back there
  // would make a context on that one, so a thread of its own frees what the GPU has.
  try {
    start_thread([this] { free_device(); }, "freeing a communicator").join();
  } catch (...) {
    (void)pinned_.release();  // it stays until the process ends
  }
  if (all_ended) return;
  static_cast<void>(proxy_.release());
  static_cast<void>(signals_.release());
  for (shm::Window& window : control_) window.keep_mapped();
}

/// Frees events, streams and pinned memory; on a thread that has no GPU yet.
void DeviceCommunicator::free_device() noexcept {
  cudaSetDevice(config_.device);
  const BesideCaptures beside;
  if (fork_ != nullptr) cudaEventDestroy(fork_);
  if (join_ != nullptr) cudaEventDestroy(join_);
  if (side_stream_ != nullptr) cudaStreamDestroy(side_stream_);
  if (watch_stream_ != nullptr) cudaStreamDestroy(watch_stream_);
  if (registered_) cudaHostUnregister(base());
  pinned_.reset();
}

std::string DeviceCommunicator::link_control() {
  control_[own_index()].link();
  return control_[own_index()].name();
}

void DeviceCommunicator::unlink_control() noexcept { control_[own_index()].unlink(); }

void DeviceCommunicator::connect(const std::vector<uintptr_t>& bases, const std::vector<std::string>& names,
                                 const std::vector<int64_t>& pids) {
  const DeviceGuard guard(config_.device);
  std::vector<std::byte*> control;
  for (size_t i = 0; i < control_.size(); ++i) {
    if (i != own_index()) control_[i] = shm::Window::open(names[i], control_layout_.committed_bytes);
    control.push_back(control_[i].base());
  }
  signals_ = std::make_unique<shm::Signals>(control_layout_, control, config_.rank, pids,
                                            config_.timeout_seconds, config_.host_ranks);

  device::NodeBases node_bases{};
  node_bases.first_rank = nodes_.first(nodes_.node_of(config_.rank));
  for (size_t i = 0; i < bases.size(); ++i) node_bases.of[i] = reinterpret_cast<std::byte*>(bases[i]);
  std::byte* const own = reinterpret_cast<std::byte*>(bases[own_index()]);
  DeviceState state{};
  state.bad_id = ~uint64_t{0};
  state.epoch = config_.first_epoch - 1;
  check_cuda(cudaMemcpy(own + window_.state, &state, sizeof(state), cudaMemcpyHostToDevice), "cudaMemcpy");
  // The side stream has high priority: beside a product that fills the GPU, what others wait for gets SMs
  // first.
  int least = 0, greatest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  check_cuda(cudaStreamCreateWithPriority(&side_stream_, cudaStreamNonBlocking, greatest),
             "cudaStreamCreate");
  check_cuda(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), "cudaEventCreate");
  check_cuda(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), "cudaEventCreate");

  for (const WireFormat wire : kWireFormats) {
    device::Comm comm{};
    comm.window = window_.with_wire(wire);
    comm.rank = config_.rank;
    comm.first_rank = node_bases.first_rank;
    comm.local_ranks = nodes_.local_ranks;
    comm.rail = rail();
    comm.derive();
    comm.bases = node_bases;
    comm.own = own;
    comm.host = pinned_->status;
    comm.timeout_ns = static_cast<uint64_t>(config_.timeout_seconds * 1e9);
    comm.absence_ns = static_cast<uint64_t>(config_.absence_seconds * 1e9);
    comm.plan_fields = DevicePlan::make(config_.shape);
    comms_[static_cast<int>(wire)] = std::make_unique<device::Comm>(comm);
  }
  losses_ = reinterpret_cast<PeerLoss*>(own + window_.losses);
  late_ns_ = reinterpret_cast<uint64_t*>(own + window_.late_ns);
  state_ = reinterpret_cast<DeviceState*>(own + window_.state);
  check_cuda(cudaStreamCreateWithFlags(&watch_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  watcher_ = start_thread([this] { watch(); }, "watching the GPU");
}

device::Rail DeviceCommunicator::rail() const {
  device::Rail rail{};
  rail.node = nodes_.node_of(config_.rank);
  rail.others = nodes_.nodes() - 1;
  if (rail.others == 0) return rail;
  void* memory = nullptr;
  check_cuda(cudaHostGetDevicePointer(&memory, base(), 0), "cudaHostGetDevicePointer");
  const WindowShape& shape = control_layout_.shape;
  rail.memory = static_cast<std::byte*>(memory);
  rail.layout = control_layout_;
  rail.chunk_rows = shape.chunk_rows();
  rail.chunks = shape.chunks(shape.max_tokens);
  rail.arrival_flags = shape.arrival_flags();
  rail.ids_bytes = shape.most_ids_bytes();
  rail.counts_bytes = shape.counts_bytes();
  rail.commands = shape.commands();
  return rail;
}

std::string DeviceCommunicator::gpu_bus_id() const {
  char text[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(text, sizeof(text), config_.device), "cudaDeviceGetPCIBusId");
  return text;
}

void DeviceCommunicator::connect_nodes(std::unique_ptr<Transport> transport,
                                       std::unique_ptr<tcp::Links> links) {
  require_message_size(*transport, control_layout_.shape);
  proxy_ = std::make_unique<Proxy>(control_layout_, config_.rank, base(), *signals_, std::move(transport),
                                   std::move(links), config_.timeout_seconds, config_.first_epoch);
}

/// Tells kernels which peers are gone, and peers if a kernel here gave up on somebody.
void DeviceCommunicator::watch() {
  cudaSetDevice(config_.device);  // before any other call, which would make a context on this thread's GPU, 0
  const BesideCaptures beside;
  bool told = false;
  while (!stop_.load(std::memory_order_acquire)) {
    for (int32_t peer = 0; peer < config_.shape.ranks; ++peer) {
      PeerLoss& out = pinned_->losses[peer];
      if (out.set != 0) continue;
      std::optional<shm::Signals::Loss> loss;
      if (stopped_.load())
        loss = shm::Signals::Loss{config_.rank, Cause::closed, config_.rank};
      else if (peer != config_.rank)
        loss = signals_->loss(peer);
      if (!loss) continue;
      // What a rank of another node has sent may still have to be handed on here.
      const bool elsewhere = !nodes_.same_node(peer, config_.rank);
      const bool left = loss->cause == Cause::closed && loss->peer == peer && elsewhere;
      out = {1, loss->peer, loss->cause, loss->first, left ? signals_->announced(peer) : 0};
      // A copy engine brings it there, also while all of the GPU waits, `set` after the rest: kernels may
      // look while it does. If even that fails, there are the deadlines.
      const auto copy = [&](auto* to, const auto* from, size_t bytes) {
        cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, watch_stream_);
      };
      copy(&losses_[peer].peer, &out.peer, sizeof(out) - offsetof(PeerLoss, peer));
      copy(&losses_[peer].set, &out.set, sizeof(out.set));
    }
    const HostStatus::Broken& broken = pinned_->status->broken;
    if (!told && load_acquire(broken.set) != 0) {
      told = true;
      signals_->announce_loss(broken.peer, broken.cause);
    }
    std::this_thread::sleep_for(kWatchPeriod);
  }
}

device::Comm* DeviceCommunicator::comm(WireFormat wire) const { return comms_[static_cast<int>(wire)].get(); }

bool DeviceCommunicator::complete(cudaStream_t stream) {
  interrupted_ = false;
  if (!receive_held_) return true;
  const DeviceGuard guard(config_.device);
  // What runs is not completed by what is only recorded, and the other way round.
  const bool alike = capture_of(stream) == held_capture_;
  if ((held_capture_ != 0 || !alike) && !is_there(held_capture_, held_stream_)) {
    receive_held_ = nullptr;
    return false;
  }
  std::exchange(receive_held_, nullptr)(alike ? stream : held_stream_);
  return true;
}

/// Leaves the second half of an operation, whose first one is on `stream`, to complete().
void DeviceCommunicator::hold(std::function<void(cudaStream_t)> receive, cudaStream_t stream) {
  held_capture_ = capture_of(stream);
  held_stream_ = stream;
  receive_held_ = std::move(receive);
}

gpu::Launch DeviceCommunicator::launch(cudaStream_t stream, int blocks, bool overlapped) const {
  return {stream, blocks, overlapped, heuristics_.paired};
}

/// Orders later work on the side stream after what `stream` holds now, and beside what it holds later.
void DeviceCommunicator::fork_side(cudaStream_t stream) {
  check_cuda(cudaEventRecord(fork_, stream), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(side_stream_, fork_, 0), "cudaStreamWaitEvent");
}

/// `stream` goes on when the side stream has ended as well.
void DeviceCommunicator::join_side(cudaStream_t stream) {
  check_cuda(cudaEventRecord(join_, side_stream_), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(stream, join_, 0), "cudaStreamWaitEvent");
}

/// Ends what was begun and will not be completed, before what follows on `stream`.
void DeviceCommunicator::abandon(cudaStream_t stream) {
  if (!pending_) return;
  const Sent begun = *pending_;
  const bool there = is_there(begun.capture, pending_stream_);
  pending_.reset();
  if (!there) return;
  const gpu::SendArguments& sent = begun.arguments;
  // Others may have received it, this rank's rows that were yet to be sent among them.
  const bool in_turn = comm(begun.wire)->window.stage_tokens < config_.shape.max_tokens;
  if (in_turn) given_up_ = begun.capture;
  check_cuda(gpu::launch_abandon(launch(pending_stream_, 1, !begun.offered), *comm(begun.wire),
                                 sent.operation, sent.tokens, begun.offered),
             "launch of abandon");
  if (begun.later) join_side(pending_stream_);
  if (stream == pending_stream_) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  if (capture != cudaStreamCaptureStatusNone) return;  // who replays a graph puts it after what came before
  check_cuda(cudaEventRecord(fork_, pending_stream_), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(stream, fork_, 0), "cudaStreamWaitEvent");
}

/// Returns what the record of the operation that begins on `stream` says of a dispatch that this rank gave up
/// before it: who has received that disagrees, and all raise.
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
  // The number of tokens that other nodes bring is not known here.
  const int64_t most = nodes_.nodes() > 1 ? config_.shape.max_tokens : arguments.tokens;
  const bool later = most > comm(wire)->window.stage_tokens;
  if (later) fork_side(stream);
  if (dispatch) launch_route(arguments, divided, stream);
  const int blocks = divided.send + heuristics_.relay_blocks;
  check_cuda(launch_send(launch(stream, blocks, dispatch), *comm(wire), arguments),
             "launch of a dispatch (sending)");
  pending_ = {arguments, wire, blocks, later};
  pending_->capture = capture_of(stream);
  pending_stream_ = stream;
}

/// Starts to work out the routes of a dispatch, by blocks that will receive its rows, and its plan.
void DeviceCommunicator::launch_route(gpu::SendArguments& arguments, const gpu::DispatchBlocks& divided,
                                      cudaStream_t stream) {
  const bool few = gpu::routes_few(config_.shape, arguments.tokens, gpu::kRouteWords);
  const int most = few ? 1 : std::clamp<int>(divided.receive - 1, 1, kMaxRouteBlocks - 1);
  arguments.route_blocks = gpu::Heuristics::route_blocks(arguments.tokens, most);
  // A block of its own makes the plan, if there is one more. Together they are an even number at most, since
  // blocks of the other kernels seem to want neighbours of their kind (docs/history.md, "Blocks in pairs").
  const bool has_planner = divided.receive > arguments.route_blocks;
  const int others = arguments.route_blocks + arguments.relay_blocks, blocks = others + (has_planner ? 1 : 0);
  arguments.plan_block = has_planner ? others : 0;
  check_cuda(gpu::launch_dispatch_route(launch(stream, blocks, false), *comm(config_.shape.wire), arguments),
             "launch of a dispatch (routes)");
}

/// Receives the rows of the operation that was sent last.
/// `directly`: as in finish_dispatch. A kernel of others that comes between may let this one start, and have
/// memory that this one writes to (its operands, freed by now): it has to end first.
void DeviceCommunicator::receive(gpu::ReceiveArguments arguments, bool directly, cudaStream_t stream) {
  const Sent begun = *pending_;
  const bool beside = directly && stream == pending_stream_ && !begun.offered;
  if (begun.in_one) {
    pending_.reset();
    gpu::FusedArguments both{begun.arguments, arguments};
    both.again = true;
    return run_in_one(begun.wire, both, stream);
  }
  gpu::SendArguments sent = begun.arguments;
  take_sent(arguments, sent);
  arguments.senders = begun.later ? begun.blocks : 0;
  pending_.reset();
  check_cuda(gpu::launch_dispatch_receive(launch(stream, divided(sent).receive, beside), *comm(begun.wire),
                                          arguments),
             "launch of a dispatch (receiving)");
  if (begun.later) {
    sent.later = true;
    check_cuda(launch_send(launch(side_stream_, begun.blocks, false), *comm(begun.wire), sent),
               "launch of a dispatch (sending what waits for room)");
    join_side(stream);
  }
}

/// Returns the arguments of a dispatch on its sending side, and counts it.
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

/// True where one kernel does all of an operation of `tokens` tokens whose rows travel in `wire`.
bool DeviceCommunicator::fuses(WireFormat wire, int64_t tokens) const {
  return gpu::in_one_kernel(tokens, fused_tokens()) && tokens <= comm(wire)->window.stage_tokens;
}

/// Starts to send and to receive, in one kernel or two: what is known before to be so many rows, or what may
/// be more than the output that is offered holds, and is pending until somebody knows.
void DeviceCommunicator::send_and_receive(WireFormat wire, const gpu::SendArguments& sent,
                                          gpu::ReceiveArguments received, cudaStream_t stream) {
  // The products with other rows are sums, which one warp has to make in its order.
  const bool in_one = received.other == nullptr && fuses(wire, sent.tokens);
  Sent begun{sent, wire, 0, false};
  if (in_one) {
    run_in_one(wire, {sent, received}, stream);
  } else {
    send(wire, sent, stream);
    begun = *pending_;
    receive(received, true, stream);
  }
  if (!received.offered) return;
  begun.offered = true;
  begun.in_one = in_one;
  pending_ = begun;
  pending_stream_ = stream;
}

/// Starts the one kernel of an operation whose two sides have their arguments.
void DeviceCommunicator::run_in_one(WireFormat wire, gpu::FusedArguments arguments, cudaStream_t stream) {
  gpu::SendArguments& sent = arguments.send;
  take_sent(arguments.receive, sent);
  if (!arguments.again) sent.after = after_given_up(stream);
  const int warps = gpu::kWarps;
  // What is received again is known, and may be what others with many tokens have sent.
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
  require_usable();
  const DeviceGuard guard(config_.device);
  complete(stream);
  abandon(stream);
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
  // Chunks that wait for room are sent by a kernel that must not be there before the one that gives it.
  const bool waits = tokens > comm(wire)->window.stage_tokens;
  return {recent.offer(tokens, alignment, config_.shape), nodes_.nodes() == 1 && !waits};
}

void DeviceCommunicator::accept_rows() {
  require_begun();
  pending_.reset();
}

void DeviceCommunicator::begin_dispatch(const DeviceDispatch& d, cudaStream_t stream) {
  require_usable();
  const DeviceGuard guard(config_.device);
  complete(stream);
  abandon(stream);
  send(config_.shape.wire, sending(d), stream);
}

/// Throws Error(invalid_argument) unless a dispatch was begun and is to be received.
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
    // Kernels before this one in the stream may take as long as they like. The waits of this one have
    // deadlines, and it reports in any case, unless the device itself has failed: that is looked for now and
    // then.
    Clock::time_point look = Clock::now() + std::chrono::milliseconds(5);
    while (load_acquire(rows.ticket) != ticket) {
      if (Clock::now() < look) continue;
      look = Clock::now() + std::chrono::milliseconds(5);
      const cudaError_t error = cudaStreamQuery(watch_stream_);
      if (error != cudaErrorNotReady) check_cuda(error, "waiting for the row count of a dispatch");
      interrupting = true;
      if (interrupt_) interrupt_();
      interrupting = false;
      require_open();  // a signal's handler may have closed it
    }
    check();
    // The block that reports a failure and the one that reports the rows may be two: the reason can come
    // later.
    const Clock::time_point until = Clock::now() + std::chrono::seconds(10);
    while (rows.rows < 0) {
      check();
      if (Clock::now() > until)
        throw std::runtime_error("a dispatch failed, and the device does not say why");
      std::this_thread::yield();
    }
  } catch (...) {
    interrupted_ = interrupting;
    abandon(stream);  // at once: peers may wait for what is sent here to be read
    if (load_acquire(rows.ticket) == ticket && rows.rows < 0) given_up_.reset();  // nobody has received it
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
    const bool ended = pending_->capture != 0 && !is_there(pending_->capture, pending_stream_);
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
  require_usable();
  const DeviceGuard guard(config_.device);
  complete(stream);
  abandon(stream);
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
  require_usable();
  const DeviceGuard guard(config_.device);
  complete(stream);
  abandon(stream);
  const device::Comm& comm = *this->comm(WireFormat::same);
  gpu::CombineArguments all = arguments;
  all.wire = quantised ? config_.sums : WireFormat::same;
  all.relay_blocks = heuristics_.relay_blocks;
  all.after = after_given_up(stream);
  ++stats_.combine_calls;
  if (!held && all.weight_grads == nullptr && all.tokens <= heuristics_.fused_sums &&
      fuses(WireFormat::same, all.tokens)) {
    // At their home few tokens are shared by many warps.
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
  const auto sum = [this, all, blocks = divided.sum](cudaStream_t on) {
    check_cuda(gpu::launch_combine_sum(launch(on, blocks, true), *this->comm(WireFormat::same), all),
               "launch of combine (home)");
  };
  if (held)
    hold(sum, stream);
  else
    sum(stream);
}

void DeviceCommunicator::fail(ErrorKind kind, const std::string& text, cudaStream_t stream) {
  require_usable();
  const DeviceGuard guard(config_.device);
  complete(stream);
  abandon(stream);
  static_cast<void>(after_given_up(stream));  // all raise without it
  char* const target = pinned_->texts + (texts_++ % kTexts) * kErrorText;
  store_text(text, target, kErrorText);
  check_cuda(gpu::launch_announce(launch(stream, 1, false), *comm(WireFormat::same),
                                  static_cast<uint32_t>(kind), target),
             "launch of an error's announcement");
}

std::string DeviceCommunicator::heuristics_text() const {
  gpu::Heuristics used = heuristics_;
  used.fused_tokens = static_cast<int>(fused_tokens());
  used.fused_sums = std::min(used.fused_sums, used.fused_tokens);
  return used.text();
}

bool DeviceCommunicator::close() noexcept {
  if (closed_) return !left_behind_;
  closed_ = true;
  receive_held_ = nullptr;
  pending_.reset();  // nothing is received from now on, nor abandoned, in a window that is gone
  if (getpid() != owner_) {
    if (watcher_.joinable()) watcher_.detach();
    return true;
  }
  stop_.store(true, std::memory_order_release);
  if (watcher_.joinable()) watcher_.join();
  if (proxy_) left_behind_ = !proxy_->close(!broken_ && load_acquire(pinned_->status->broken.set) == 0);
  if (signals_) signals_->close();
  return !left_behind_;
}

}  // namespace moecomm
