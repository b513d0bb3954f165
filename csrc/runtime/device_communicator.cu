#include <unistd.h>

#include <algorithm>

#include "common/start_thread.hpp"
#include "device/comm.cuh"
#include "runtime/cuda_calls.hpp"
#include "runtime/device_communicator.hpp"
#include "runtime/pinned_status.hpp"

namespace moecomm {
namespace {

constexpr auto kWatchPeriod = std::chrono::milliseconds(10);

/// Shape of the control segment, host memory in which ranks notice that another rank has ended. With several
/// nodes it also holds the data that kernels and the proxy exchange.
WindowShape control_shape(const DeviceShape& shape) {
  if (shape.other_nodes() > 0) return host_window_shape(shape);
  return {shape.ranks, 1, 4, 1, DType::float32};
}

/// Loads the kernels that send rows in format `wire`.
template <WireFormat wire>
cudaError_t prepare_wire(const DeviceShape& shape) {
  const cudaError_t error = gpu::prepare_dispatch_send<wire>(shape);
  return error != cudaSuccess ? error : gpu::prepare_dispatch_fused<wire>(shape);
}

/// Loads the kernels that send rows unchanged, and those that quantise them to the format of the shape.
cudaError_t prepare_send(const DeviceShape& shape) {
  const cudaError_t error = prepare_wire<WireFormat::same>(shape);
  if (error != cudaSuccess) return error;
  return with_wire(shape.wire, [&]<WireFormat wire>() { return prepare_wire<wire>(shape); });
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
  int sms = 0, major = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, config_.device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, config_.device),
             "cudaDeviceGetAttribute");
  if (major != 9 && major != 10)
    throw Error(ErrorKind::unsupported,
                text_of("the GPU has compute capability ", major, ".x, there are kernels for 9.0 and 10.x"));
  // If no rows are quantised, any format will do.
  const WireFormat quantised = s.wire != WireFormat::same              ? s.wire
                               : config_.gradients != WireFormat::same ? config_.gradients
                                                                       : WireFormat::fp8;
  heuristics_ = gpu::choose_heuristics(sms, config_.num_sms, gpu::most_fused_tokens(s.ranks, s.num_experts),
                                       s, quantised);
  const DeviceShape of_gradients = s.with_wire(config_.gradients);
  for (const cudaError_t error :
       {gpu::prepare_dispatch_route(s), prepare_send(s), gpu::prepare_dispatch_receive(s),
        prepare_send(of_gradients), gpu::prepare_dispatch_receive(of_gradients),
        gpu::prepare_combine_reduce(s, config_.sums), gpu::prepare_combine_sum(s, config_.sums),
        gpu::prepare_combine_fused(s, config_.sums), gpu::prepare_announce()})
    check_cuda(error, "loading the kernels");
  pinned_ = std::make_unique<Pinned>(s.ranks, static_cast<int32_t>(s.local_experts()));
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
  if (getpid() != owner_) {  // a forked child must not call the driver
    (void)pinned_.release();
    return;
  }
  // The calling thread may have another current GPU. Switching from it and back would create a context on
  // that other GPU, so a new thread frees the memory of this GPU.
  try {
    start_thread([this] { free_device(); }, "freeing a communicator").join();
  } catch (...) {
    (void)pinned_.release();  // the memory stays until the process ends
  }
  if (all_ended) return;
  static_cast<void>(proxy_.release());
  static_cast<void>(signals_.release());
  for (shm::Window& window : control_) window.keep_mapped();
}

/// Frees events, streams and pinned memory; runs on a thread without a current GPU.
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
  // The side stream has high priority, so that sends for which other ranks wait get SMs before a product that
  // fills the GPU.
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
  if (nodes_.nodes() == 1) return {};
  void* memory = nullptr;
  check_cuda(cudaHostGetDevicePointer(&memory, base(), 0), "cudaHostGetDevicePointer");
  return device::Rail::of(control_layout_, config_.rank, static_cast<std::byte*>(memory));
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

/// Tells this rank's kernels which peers are gone, and tells the peers if a kernel here gave up on a rank.
void DeviceCommunicator::watch() {
  cudaSetDevice(config_.device);  // first, since any other call would create a context on GPU 0
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
      // A rank of another node may have left after sends that this node's ranks still have to forward.
      const bool elsewhere = !nodes_.same_node(peer, config_.rank);
      const bool left = loss->cause == Cause::closed && loss->peer == peer && elsewhere;
      out = {1, loss->peer, loss->cause, loss->first, left ? signals_->announced(peer) : 0};
      // A copy engine writes the loss into the window, even while kernels that wait fill the GPU. `set` comes
      // last, since kernels may look at any time. If a copy fails, deadlines end the waits.
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

std::string DeviceCommunicator::heuristics_text() const {
  gpu::Heuristics used = heuristics_;
  used.fused_tokens = static_cast<int>(fused_tokens());
  used.fused_sums = std::min(used.fused_sums, used.fused_tokens);
  return used.text();
}

bool DeviceCommunicator::close() noexcept {
  if (closed_) return !left_behind_;
  closed_ = true;
  held_.reset();
  pending_.reset();  // nothing may be received or abandoned once the window is gone
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
