#include "transport/fabric/transport.hpp"

#include <rdma/fi_errno.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "transport/fabric/endpoint.hpp"
#include "transport/fabric/library.hpp"
#include "transport/fabric/nic.hpp"
#include "transport/fabric/stale_files.hpp"

namespace moecomm::fabric {
namespace {

constexpr size_t kBatch = 64;                            // completions read at once
constexpr int kBatches = 16;                             // of them in one poll(), so that puts get their turn
constexpr double kEndSeconds = 1;                        // a peer that was forgotten has ended by then
constexpr double kCloseSeconds = 5;                      // the destructor's bound
constexpr auto kPause = std::chrono::microseconds(200);  // between polls that bring nothing, while connecting
constexpr auto kInterruptEvery = std::chrono::milliseconds(5);

}  // namespace

struct FabricTransport::State {
  // A write under way. libfabric owns `context` until its completion and gives back its address.
  struct Operation {
    fi_context2 context;
    int32_t peer;
    bool counted;  // in the limits; no longer once its peer has failed
    bool hello;
    int64_t bytes;
    uint64_t user;
  };
  static_assert(std::is_standard_layout_v<Operation> && offsetof(Operation, context) == 0,
                "an operation is found by the address of its context");

  struct Peer {
    EndpointAddress endpoint_address;
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    std::string name;     // for messages: "peer 3 (fi_sockaddr_in://192.0.2.7:4711)"
    bool dropped = true;  // failed, forgotten, or the rank itself
    bool forgotten = false;
    bool hello_sent = false;
  };

  State(const FabricOptions& given, Info chosen, void* base, int64_t bytes);

  bool write(int32_t index, const std::byte* source, int64_t bytes, void* descriptor,
             const RemoteRegion& region, int64_t offset, uint32_t immediate, bool hello, uint64_t user);
  void poll(std::vector<TransportEvent>& events);
  void completed(Operation& operation, std::vector<TransportEvent>& events);
  void fail(int32_t index, const std::string& what, std::vector<TransportEvent>& events);
  void drop(int32_t index);
  void remove_files();
  bool greeted() const;
  [[noreturn]] void not_greeted(double seconds) const;
  void release(Operation& operation);
  std::string where() const { return "fabric " + caps.provider + " on " + caps.interface; }

  FabricOptions options;
  std::byte* window;
  int64_t window_bytes;
  // Hellos: peer i writes its word to greetings[i]; the last one is this rank's own, to send from.
  std::vector<uint64_t> greetings = std::vector<uint64_t>(kMaxPeers + 1);
  std::vector<uint64_t> expected_greetings;
  // These fields stand before the endpoint, so that it closes first.
  std::deque<Operation> operations;
  std::vector<Operation*> free;

  Endpoint endpoint;
  void* window_descriptor = nullptr;
  void* greeting_descriptor = nullptr;
  TransportCaps caps;
  EndpointAddress own;
  std::vector<Peer> peers;
  int own_index = -1;
  int counted = 0;
  int64_t counted_bytes = 0;
  std::vector<TransportEvent> early;  // what arrived while others were still connecting
};

FabricTransport::State::State(const FabricOptions& given, Info chosen, void* base, int64_t bytes)
    : options(given),
      window(static_cast<std::byte*>(base)),
      window_bytes(bytes),
      endpoint(std::move(chosen)) {
  const fi_info& info = endpoint.info();
  const Offer offer = describe(info);
  caps.provider = offer.provider;
  caps.version = library().version_text();
  caps.interface = offer.domain + (offer.address.empty() ? "" : " " + offer.address);
  caps.max_message = offer.max_message;
  caps.device_memory = offer.device_memory;
  caps.cores = cores_near(pci_device(offer.bus_id));

  Memory memory;
  memory.base = base;
  memory.bytes = bytes;
  memory.cuda_device = given.cuda_device;
  const Registration& registered = endpoint.register_memory(memory);
  window_descriptor = registered.descriptor();
  Memory greeting;
  greeting.base = greetings.data();
  greeting.bytes = static_cast<int64_t>(greetings.size() * sizeof(uint64_t));
  const Registration& greeting_place = endpoint.register_memory(greeting);
  greeting_descriptor = greeting_place.descriptor();

  own.library = library().version;
  own.protocol = info.ep_attr->protocol;
  own.protocol_version = info.ep_attr->protocol_version;
  own.window = {registered.key(), registered.remote_base(), bytes};
  own.greetings = {greeting_place.key(), greeting_place.remote_base(), greeting.bytes};
  own.pid = own_process();
  own.pid_namespace = own_process_namespace();
  own.provider = caps.provider;
  own.interface = caps.interface;
  own.address = endpoint.address();
}

bool FabricTransport::State::write(int32_t index, const std::byte* source, int64_t bytes, void* descriptor,
                                   const RemoteRegion& region, int64_t offset, uint32_t immediate, bool hello,
                                   uint64_t user) {
  if (free.empty()) free.push_back(&operations.emplace_back());
  Operation& operation = *free.back();
  const ssize_t status = endpoint.write(
      source, static_cast<size_t>(bytes), descriptor, immediate, peers[static_cast<size_t>(index)].address,
      region.base + static_cast<uint64_t>(offset), region.key, &operation.context);
  if (status == -FI_EAGAIN) return false;
  if (status != 0) {
    fail(index, std::string("write refused: ") + library().strerror(static_cast<int>(-status)), early);
    return true;
  }
  free.pop_back();
  operation.peer = index;
  operation.counted = true;
  operation.hello = hello;
  operation.bytes = bytes;
  operation.user = user;
  ++counted;
  counted_bytes += bytes;
  return true;
}

void FabricTransport::State::release(Operation& operation) {
  if (operation.counted) {
    --counted;
    counted_bytes -= operation.bytes;
    operation.counted = false;
  }
}

void FabricTransport::State::drop(int32_t index) {
  peers[static_cast<size_t>(index)].dropped = true;
  for (Operation& operation : operations)
    if (operation.counted && operation.peer == index) release(operation);
}

void FabricTransport::State::fail(int32_t index, const std::string& what,
                                  std::vector<TransportEvent>& events) {
  if (index < 0) {
    // An error that belongs to no write: with one peer left there is no doubt whose it is.
    int32_t left = -1;
    int count = 0;
    for (size_t i = 0; i < peers.size(); ++i)
      if (!peers[i].dropped) left = static_cast<int32_t>(i), ++count;
    if (count == 1) index = left;
  }
  std::string name = "a peer that the provider does not name";
  if (index >= 0) {
    Peer& peer = peers[static_cast<size_t>(index)];
    if (peer.dropped) return;  // said already
    name = peer.name;
    drop(index);
  }
  events.push_back({TransportEvent::Kind::failed, index, 0, 0, where() + ", " + name + ": " + what});
}

void FabricTransport::State::completed(Operation& operation, std::vector<TransportEvent>& events) {
  const bool wanted = operation.counted;  // not of a peer that was reported as failed
  release(operation);
  free.push_back(&operation);
  if (operation.hello)
    peers[static_cast<size_t>(operation.peer)].hello_sent = true;
  else if (wanted)
    events.push_back({TransportEvent::Kind::sent, operation.peer, 0, operation.user, {}});
}

void FabricTransport::State::poll(std::vector<TransportEvent>& events) {
  std::array<fi_cq_data_entry, kBatch> entries;
  for (int batch = 0; batch < kBatches; ++batch) {
    const ssize_t count = endpoint.read(entries.data(), entries.size());
    if (count == -FI_EAGAIN) return;
    if (count == -FI_EAVAIL) {
      Endpoint::Failure failure;
      if (!endpoint.read_error(failure)) return;
      auto* operation = static_cast<Operation*>(failure.context);
      const int32_t peer = operation != nullptr ? operation->peer : -1;
      fail(peer, failure.text, events);
      if (operation != nullptr) {
        release(*operation);
        free.push_back(operation);
      }
      continue;
    }
    if (count < 0) {
      const std::string what =
          std::string("reading completions: ") + library().strerror(static_cast<int>(-count));
      for (size_t i = 0; i < peers.size(); ++i) fail(static_cast<int32_t>(i), what, events);
      return;
    }
    for (ssize_t i = 0; i < count; ++i) {
      const fi_cq_data_entry& entry = entries[static_cast<size_t>(i)];
      if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
        const auto immediate = static_cast<uint32_t>(entry.data);
        // Hellos are found by what they wrote, see greeted().
        if (immediate != kHelloImmediate)
          events.push_back({TransportEvent::Kind::arrived, -1, immediate, 0, {}});
      } else if (entry.op_context != nullptr) {
        completed(*static_cast<Operation*>(entry.op_context), events);
      }
    }
    if (count < static_cast<ssize_t>(kBatch)) return;
  }
}

void FabricTransport::State::remove_files() {
  // The system closes a killed process's sockets, by which others notice, before it counts the process as
  // ended.
  const Deadline deadline{std::chrono::duration<double>(kEndSeconds)};
  while (true) {
    bool running = false;
    for (const Peer& peer : peers)
      running |= remove_stale_file(own, peer.endpoint_address) == StaleFile::in_use && peer.forgotten;
    if (!running || deadline.passed()) return;
    std::this_thread::sleep_for(kPause);
  }
}

bool FabricTransport::State::greeted() const {
  for (size_t i = 0; i < peers.size(); ++i) {
    if (static_cast<int>(i) == own_index) continue;
    // Written by the provider, or by a peer's process with shm.
    uint64_t word = 0;
    __atomic_load(&greetings[i], &word, __ATOMIC_ACQUIRE);
    if (word != expected_greetings[i] || !peers[i].hello_sent) return false;
  }
  return true;
}

void FabricTransport::State::not_greeted(double seconds) const {
  std::string silent, unsent;
  ErrorDetails details;
  details.rank = own_index;
  details.phase = "connecting";
  const auto add = [&](std::string& list, size_t i) {
    if (details.peer < 0) details.peer = static_cast<int>(i);
    list += (list.empty() ? "" : ", ") + peers[i].name;
  };
  for (size_t i = 0; i < peers.size(); ++i) {
    if (static_cast<int>(i) == own_index) continue;
    details.expected += 1;
    if (greetings[i] != expected_greetings[i])
      add(silent, i);
    else
      details.seen += 1;
    if (!peers[i].hello_sent) add(unsent, i);
  }
  char span[32];
  std::snprintf(span, sizeof(span), "%g s", seconds);
  std::string text = where() + ": not connected after " + span;
  if (!silent.empty()) text += "; nothing came from " + silent;
  if (!unsent.empty()) text += "; nothing could be sent to " + unsent;
  text += own.provider == "shm" ? ". Are these ranks running on this host, with the same /dev/shm?"
                                : ". Are these ranks running, and can their hosts reach " + own.interface +
                                      "? MOECOMM_FABRIC_INTERFACE names another interface, or an address.";
  throw Error(ErrorKind::peer_timeout, text, details);
}

FabricTransport::FabricTransport(const FabricOptions& options, void* base, int64_t bytes)
    : FabricTransport(options, choose_provider(options.provider), base, bytes) {}

FabricTransport::FabricTransport(const FabricOptions& options, Info chosen, void* base, int64_t bytes) {
  if (base == nullptr || bytes <= 0 || options.max_in_flight_operations <= 0 ||
      options.max_in_flight_bytes <= 0)
    throw Error(ErrorKind::invalid_argument, "fabric: a window, and limits above zero, are needed");
  state_ = std::make_shared<State>(options, std::move(chosen), base, bytes);
}

FabricTransport::~FabricTransport() {
  if (!state_) return;
  if (state_->own.provider == "shm") state_->remove_files();

  // An rxm endpoint crashes when it closes with arrivals that were not polled for, seen with libfabric 1.17
  // and 2.1, and nobody can know what a peer has sent. So it stays open until the process ends, without the
  // window.
  if (state_->caps.provider.ends_with("ofi_rxm")) {
    static std::mutex mutex;
    static auto* const left_open = new std::vector<std::shared_ptr<State>>;
    state_->endpoint.deregister();
    const std::lock_guard lock(mutex);
    left_open->push_back(std::move(state_));
    return;
  }

  struct Closing {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto closing = std::make_shared<Closing>();
  std::thread closer;
  try {
    closer = std::thread([closing, state = std::move(state_)]() mutable {
      state.reset();
      const std::lock_guard lock(closing->mutex);
      closing->done = true;
      closing->changed.notify_all();
    });
  } catch (const std::system_error&) {
    state_.reset();  // no thread to be had: close here
    return;
  }
  std::unique_lock lock(closing->mutex);
  const bool done = closing->changed.wait_for(lock, std::chrono::duration<double>(kCloseSeconds),
                                              [&] { return closing->done; });
  lock.unlock();
  if (done)
    closer.join();
  else
    closer.detach();
}

std::vector<std::byte> FabricTransport::endpoint_address() const { return state_->own.to_bytes(); }

void FabricTransport::insert_peers(const std::vector<std::vector<std::byte>>& endpoint_addresses,
                                   int own_index) {
  State& state = *state_;
  const int count = static_cast<int>(endpoint_addresses.size());
  if (!state.peers.empty() || own_index < 0 || own_index >= count || count > kMaxPeers)
    throw Error(ErrorKind::invalid_argument,
                "fabric: insert_peers() is called once, with up to " + std::to_string(kMaxPeers) +
                    " endpoint addresses and the own index among them; here " + std::to_string(count) +
                    " endpoint addresses, index " + std::to_string(own_index));
  const std::vector<std::byte> own_endpoint_address = state.own.to_bytes();
  // A wrong own endpoint address is refused here, not by peers that cannot answer it.
  if (endpoint_addresses[static_cast<size_t>(own_index)] != own_endpoint_address)
    throw Error(ErrorKind::invalid_argument, "fabric: the endpoint address of peer " +
                                                 std::to_string(own_index) +
                                                 " is not what this rank gave to the rendezvous");
  state.own_index = own_index;
  std::vector<State::Peer> peers(endpoint_addresses.size());
  state.expected_greetings.assign(endpoint_addresses.size(), 0);
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    if (i == own_index) continue;
    State::Peer& peer = peers[at];
    peer.endpoint_address = EndpointAddress::from_bytes(endpoint_addresses[at]);
    require_compatible(state.own, own_index, peer.endpoint_address, i);
    const auto needed = static_cast<int64_t>(sizeof(uint64_t)) * count;
    if (peer.endpoint_address.greetings.bytes < needed)
      throw Error(ErrorKind::invalid_argument, "not a fabric endpoint address: no place for hellos");
    peer.address = state.endpoint.insert(peer.endpoint_address.address);
    peer.name = "peer " + std::to_string(i) + " (" + state.endpoint.print(peer.endpoint_address.address) +
                ", " + peer.endpoint_address.interface + ")";
    peer.dropped = false;
    // A hello is the sum of its sender's endpoint address: it cannot come from anybody who was not asked.
    state.expected_greetings[at] = checksum(endpoint_addresses[at].data(), endpoint_addresses[at].size()) | 1;
  }
  state.peers = std::move(peers);
  state.greetings.back() = checksum(own_endpoint_address.data(), own_endpoint_address.size()) | 1;
}

void FabricTransport::connect(double timeout_seconds, const std::function<void()>& interrupt) {
  State& state = *state_;
  const int count = static_cast<int>(state.peers.size()), own_index = state.own_index;
  if (count == 0) throw Error(ErrorKind::invalid_argument, "fabric: connect() comes after insert_peers()");
  const Deadline deadline{std::chrono::duration<double>(timeout_seconds)};
  auto next_interrupt = Clock::now() + kInterruptEvery;
  std::vector<int> waiting;  // for room, or for the connection
  for (int i = 0; i < count; ++i)
    if (i != own_index) waiting.push_back(i);
  std::vector<TransportEvent> events;
  while (true) {
    std::erase_if(waiting, [&](int i) {
      const State::Peer& peer = state.peers[static_cast<size_t>(i)];
      return state.write(i, reinterpret_cast<const std::byte*>(&state.greetings.back()), sizeof(uint64_t),
                         state.greeting_descriptor, peer.endpoint_address.greetings,
                         static_cast<int64_t>(sizeof(uint64_t)) * own_index, kHelloImmediate, true, 0);
    });
    events.clear();
    state.poll(events);
    state.early.insert(state.early.end(), events.begin(), events.end());
    for (const TransportEvent& event : state.early) {
      if (event.kind != TransportEvent::Kind::failed) continue;
      ErrorDetails details;
      details.rank = own_index;
      details.peer = event.peer;
      details.phase = "connecting";
      throw Error(ErrorKind::peer_lost, event.text + " (while connecting)", details);
    }
    if (state.greeted()) return;
    if (deadline.passed()) state.not_greeted(timeout_seconds);
    if (interrupt && Clock::now() >= next_interrupt) {
      interrupt();
      next_interrupt = Clock::now() + kInterruptEvery;
    }
    if (events.empty()) std::this_thread::sleep_for(kPause);
  }
}

const TransportCaps& FabricTransport::caps() const { return state_->caps; }

bool FabricTransport::put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes,
                          uint32_t immediate, uint64_t context) {
  State& state = *state_;
  const auto outside = [bytes](int64_t offset, int64_t window) {
    return offset < 0 || bytes < 0 || offset > window || bytes > window - offset;
  };
  if (peer < 0 || static_cast<size_t>(peer) >= state.peers.size() || peer == state.own_index)
    throw Error(ErrorKind::invalid_argument, "fabric: put to peer " + std::to_string(peer) + " of " +
                                                 std::to_string(state.peers.size()) + ", which is none");
  const State::Peer& to = state.peers[static_cast<size_t>(peer)];
  if (outside(src_offset, state.window_bytes) || outside(dst_offset, to.endpoint_address.window.bytes) ||
      bytes > state.caps.max_message || immediate == kHelloImmediate)
    throw Error(ErrorKind::invalid_argument,
                "fabric: put of " + std::to_string(bytes) + " bytes from " + std::to_string(src_offset) +
                    " of " + std::to_string(state.window_bytes) + " to " + std::to_string(dst_offset) +
                    " of " + std::to_string(to.endpoint_address.window.bytes) + " at " + to.name +
                    ", immediate " + std::to_string(immediate) + ", largest message " +
                    std::to_string(state.caps.max_message) + ": out of bounds");
  if (to.dropped) return true;
  const bool room = state.counted < state.options.max_in_flight_operations &&
                    (state.counted == 0 || bytes <= state.options.max_in_flight_bytes - state.counted_bytes);
  if (!room) return false;
  return state.write(peer, state.window + src_offset, bytes, state.window_descriptor,
                     to.endpoint_address.window, dst_offset, immediate, false, context);
}

void FabricTransport::poll(std::vector<TransportEvent>& events) {
  State& state = *state_;
  state.poll(events);
  if (state.early.empty()) return;
  events.insert(events.end(), std::make_move_iterator(state.early.begin()),
                std::make_move_iterator(state.early.end()));
  state.early.clear();
}

void FabricTransport::forget(int32_t peer) {
  State& state = *state_;
  if (peer < 0 || static_cast<size_t>(peer) >= state.peers.size() || peer == state.own_index)
    throw Error(ErrorKind::invalid_argument,
                "fabric: forget of peer " + std::to_string(peer) + ", which is none");
  state.drop(peer);
  State::Peer& gone = state.peers[static_cast<size_t>(peer)];
  gone.forgotten = true;
  if (state.own.provider == "shm") remove_stale_file(state.own, gone.endpoint_address);
}

int FabricTransport::in_flight() const { return state_->counted; }
int64_t FabricTransport::bytes_in_flight() const { return state_->counted_bytes; }

}  // namespace moecomm::fabric
