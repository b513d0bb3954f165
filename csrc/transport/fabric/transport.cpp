#include "transport/fabric/transport.hpp"

#include <rdma/fi_errno.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <future>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "common/random.hpp"
#include "transport/fabric/library.hpp"
#include "transport/fabric/nic.hpp"

namespace moecomm::fabric {

constexpr size_t kBatch = 64;                            // completions read per call
constexpr int kBatches = 16;                             // most batches per poll(), so that puts go on too
constexpr double kCloseSeconds = 5;                      // time limit of the destructor
constexpr auto kPause = std::chrono::microseconds(200);  // between polls without result, while connecting
constexpr auto kInterruptEvery = std::chrono::milliseconds(5);

FabricTransport::FabricTransport(const FabricOptions& options, Info chosen, void* base, int64_t bytes)
    : options_(options),
      window_(static_cast<std::byte*>(base)),
      window_bytes_(bytes),
      endpoint_(std::move(chosen)) {
  static_assert(std::is_standard_layout_v<Operation> && offsetof(Operation, context) == 0,
                "an operation is found by the address of its context");
  if (base == nullptr || bytes <= 0 || options.max_in_flight_operations <= 0 ||
      options.max_in_flight_bytes <= 0)
    throw Error(ErrorKind::invalid_argument, "fabric: a window, and limits above zero, are needed");
  const fi_info& info = endpoint_.info();
  const Offer offer = describe(info);
  caps_.provider = offer.provider;
  caps_.version = version_text(library().version);
  caps_.interface = offer.domain + (offer.address.empty() ? "" : " " + offer.address);
  caps_.max_message = offer.max_message;
  caps_.cores = cores_near(pci_device(offer.bus_id));

  const Registration& registered = endpoint_.register_memory(base, bytes);
  window_descriptor_ = registered.descriptor();
  const auto greeting_bytes = static_cast<int64_t>(greetings_.size() * sizeof(uint64_t));
  const Registration& greeting_place = endpoint_.register_memory(greetings_.data(), greeting_bytes);
  greeting_descriptor_ = greeting_place.descriptor();

  own_.library = library().version;
  own_.protocol = info.ep_attr->protocol;
  own_.protocol_version = info.ep_attr->protocol_version;
  own_.window = {registered.key(), registered.remote_base(), bytes};
  own_.greetings = {greeting_place.key(), greeting_place.remote_base(), greeting_bytes};
  own_.hello = greetings_.back() = random_word("a hello") | 1;
  own_.provider = caps_.provider;
  own_.interface = caps_.interface;
  own_.address = endpoint_.address();
}

bool FabricTransport::write(int32_t index, const std::byte* source, int64_t bytes, void* descriptor,
                            const RemoteRegion& region, int64_t offset, uint32_t immediate, bool hello,
                            uint64_t user) {
  if (free_.empty()) free_.push_back(&operations_.emplace_back());
  Operation& operation = *free_.back();
  const ssize_t status =
      endpoint_.write(source, bytes, descriptor, immediate, peers_[index].address,
                      region.base + static_cast<uint64_t>(offset), region.key, &operation.context);
  if (status == -FI_EAGAIN) return false;
  if (status != 0) {
    fail(index, std::string("write refused: ") + library().strerror(static_cast<int>(-status)), early_);
    return true;
  }
  free_.pop_back();
  operation.peer = index;
  operation.counted = true;
  operation.hello = hello;
  operation.bytes = bytes;
  operation.user = user;
  ++counted_;
  counted_bytes_ += bytes;
  return true;
}

void FabricTransport::release(Operation& operation) {
  if (!std::exchange(operation.counted, false)) return;
  --counted_;
  counted_bytes_ -= operation.bytes;
}

void FabricTransport::drop(int32_t index) {
  peers_[index].dropped = true;
  for (Operation& operation : operations_)
    if (operation.peer == index) release(operation);
}

void FabricTransport::fail(int32_t index, const std::string& what, std::vector<TransportEvent>& events) {
  if (index < 0) {
    // If an error belongs to no write and only one peer is left, it is that peer's error.
    int32_t left = -1;
    int count = 0;
    for (size_t i = 0; i < peers_.size(); ++i)
      if (!peers_[i].dropped) left = static_cast<int32_t>(i), ++count;
    if (count == 1) index = left;
  }
  std::string name = "a peer that the provider does not name";
  if (index >= 0) {
    Peer& peer = peers_[index];
    if (peer.dropped) return;  // already reported
    name = peer.name;
    drop(index);
  }
  events.push_back({TransportEvent::Kind::failed, index, 0, 0, where() + ", " + name + ": " + what});
}

void FabricTransport::completed(Operation& operation, std::vector<TransportEvent>& events) {
  const bool wanted = operation.counted;  // false for a peer that failed or was forgotten
  release(operation);
  free_.push_back(&operation);
  if (operation.hello)
    peers_[operation.peer].hello_sent = true;
  else if (wanted)
    events.push_back({TransportEvent::Kind::sent, operation.peer, 0, operation.user, {}});
}

void FabricTransport::take_completions(std::vector<TransportEvent>& events) {
  std::array<fi_cq_data_entry, kBatch> entries;
  for (int batch = 0; batch < kBatches; ++batch) {
    const ssize_t count = endpoint_.read(entries.data(), entries.size());
    if (count == -FI_EAGAIN) return;
    if (count == -FI_EAVAIL) {
      Endpoint::Failure failure;
      if (!endpoint_.read_error(failure)) return;
      auto* operation = static_cast<Operation*>(failure.context);
      fail(operation != nullptr ? operation->peer : -1, failure.text, events);
      if (operation != nullptr) {
        release(*operation);
        free_.push_back(operation);
      }
      continue;
    }
    if (count < 0) {
      const std::string what =
          std::string("reading completions: ") + library().strerror(static_cast<int>(-count));
      for (size_t i = 0; i < peers_.size(); ++i) fail(static_cast<int32_t>(i), what, events);
      return;
    }
    for (ssize_t i = 0; i < count; ++i) {
      const fi_cq_data_entry& entry = entries[i];
      if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
        const auto immediate = static_cast<uint32_t>(entry.data);
        // Not a put: hellos are recognised by the word that they have written, see greeted().
        if (immediate != kHelloImmediate)
          events.push_back({TransportEvent::Kind::arrived, -1, immediate, 0, {}});
      } else if (entry.op_context != nullptr) {
        completed(*static_cast<Operation*>(entry.op_context), events);
      }
    }
    if (count < static_cast<ssize_t>(kBatch)) return;
  }
}

/// Removes the name of the shm provider's file in /dev/shm, which a killed process would leave there. Called
/// when all peers have mapped the file, so that nobody needs the name. Does nothing with other providers.
void FabricTransport::unlink_file() const {
  const std::string name(own_.address.c_str());
  if (const size_t scheme = name.find("://"); own_.provider == "shm" && scheme != std::string::npos)
    unlink(("/dev/shm/" + name.substr(scheme + 3)).c_str());
}

bool FabricTransport::greeted() const {
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (static_cast<int>(i) == own_index_) continue;
    // Read atomically: the provider writes the word or, with shm, a peer's process.
    uint64_t word = 0;
    __atomic_load(&greetings_[i], &word, __ATOMIC_ACQUIRE);
    if (word != peers_[i].endpoint_address.hello || !peers_[i].hello_sent) return false;
  }
  return true;
}

void FabricTransport::not_greeted(double seconds) const {
  std::string silent, unsent;
  ErrorDetails details{.rank = own_index_, .phase = "connecting"};
  const auto add = [&](std::string& list, size_t i) {
    if (details.peer < 0) details.peer = static_cast<int>(i);
    list += (list.empty() ? "" : ", ") + peers_[i].name;
  };
  for (size_t i = 0; i < peers_.size(); ++i) {
    if (static_cast<int>(i) == own_index_) continue;
    details.expected += 1;
    if (greetings_[i] != peers_[i].endpoint_address.hello)
      add(silent, i);
    else
      details.seen += 1;
    if (!peers_[i].hello_sent) add(unsent, i);
  }
  char span[32];
  std::snprintf(span, sizeof(span), "%g s", seconds);
  std::string text = where() + ": not connected after " + span;
  if (!silent.empty()) text += "; nothing came from " + silent;
  if (!unsent.empty()) text += "; nothing could be sent to " + unsent;
  text += own_.provider == "shm" ? ". Are these ranks running on this host, with the same /dev/shm?"
                                 : ". Are these ranks running, and can their hosts reach " + own_.interface +
                                       "? MOECOMM_FABRIC_INTERFACE names another interface, or an address.";
  throw Error(ErrorKind::peer_timeout, text, details);
}

void CloseInTime::operator()(FabricTransport* transport) const {
  std::shared_ptr<FabricTransport> lane(transport);
  // An rxm endpoint crashes (seen with libfabric 1.17 and 2.1) if it closes with unpolled arrivals, and a
  // peer may have sent any number. So it stays open until the process ends; its memory is deregistered.
  if (lane->caps_.provider.ends_with("ofi_rxm")) {
    static std::mutex mutex;
    static auto* const left_open = new std::vector<std::shared_ptr<FabricTransport>>;
    lane->endpoint_.deregister();
    const std::lock_guard lock(mutex);
    left_open->push_back(std::move(lane));
    return;
  }

  const auto closed = std::make_shared<std::promise<void>>();
  std::thread closer;
  try {
    closer = std::thread([closed, lane = std::move(lane)]() mutable {
      lane.reset();
      closed->set_value();
    });
  } catch (const std::system_error&) {
    return;  // no thread is available: the lane has closed here, with the lambda
  }
  if (closed->get_future().wait_for(std::chrono::duration<double>(kCloseSeconds)) ==
      std::future_status::ready)
    closer.join();
  else
    closer.detach();
}

void FabricTransport::insert_peers(const std::vector<AddressBytes>& endpoint_addresses, int own_index) {
  const int count = static_cast<int>(endpoint_addresses.size());
  if (!peers_.empty() || own_index < 0 || own_index >= count || count > kMaxPeers)
    throw Error(ErrorKind::invalid_argument,
                text_of("fabric: insert_peers() is called once, with up to ", kMaxPeers,
                        " endpoint addresses and the own index among them; here ", count,
                        " endpoint addresses, index ", own_index));
  own_index_ = own_index;
  std::vector<Peer> peers(endpoint_addresses.size());
  for (int i = 0; i < count; ++i) {
    if (i == own_index) continue;
    Peer& peer = peers[i];
    peer.endpoint_address = EndpointAddress::from_bytes(endpoint_addresses[i]);
    require_compatible(own_, own_index, peer.endpoint_address, i);
    peer.address = endpoint_.insert(peer.endpoint_address.address);
    peer.name = "peer " + std::to_string(i) + " (" + endpoint_.print(peer.endpoint_address.address) + ", " +
                peer.endpoint_address.interface + ")";
    peer.dropped = false;
  }
  peers_ = std::move(peers);
}

void FabricTransport::connect(double timeout_seconds, const std::function<void()>& interrupt) {
  const int count = static_cast<int>(peers_.size());
  if (count == 0) throw Error(ErrorKind::invalid_argument, "fabric: connect() comes after insert_peers()");
  const Deadline deadline{std::chrono::duration<double>(timeout_seconds)};
  auto next_interrupt = Clock::now() + kInterruptEvery;
  std::vector<int> waiting;  // peers to which the hello could not be sent yet
  for (int i = 0; i < count; ++i)
    if (i != own_index_) waiting.push_back(i);
  std::vector<TransportEvent> events;
  while (true) {
    std::erase_if(waiting, [&](int i) {
      return write(i, reinterpret_cast<const std::byte*>(&greetings_.back()), sizeof(uint64_t),
                   greeting_descriptor_, peers_[i].endpoint_address.greetings,
                   static_cast<int64_t>(sizeof(uint64_t)) * own_index_, kHelloImmediate, true, 0);
    });
    events.clear();
    take_completions(events);
    early_.insert(early_.end(), events.begin(), events.end());
    for (const TransportEvent& event : early_) {
      if (event.kind != TransportEvent::Kind::failed) continue;
      throw Error(ErrorKind::peer_lost, event.text + " (while connecting)",
                  {.rank = own_index_, .peer = event.peer, .phase = "connecting"});
    }
    if (greeted()) return unlink_file();
    if (deadline.passed()) not_greeted(timeout_seconds);
    if (interrupt && Clock::now() >= next_interrupt) {
      interrupt();
      next_interrupt = Clock::now() + kInterruptEvery;
    }
    if (events.empty()) std::this_thread::sleep_for(kPause);
  }
}

const FabricTransport::Peer& FabricTransport::known(const char* call, int32_t peer) const {
  if (peer < 0 || static_cast<size_t>(peer) >= peers_.size() || peer == own_index_)
    throw Error(ErrorKind::invalid_argument,
                text_of("fabric: ", call, " to peer ", peer, " of ", peers_.size(), ", which is none"));
  return peers_[peer];
}

bool FabricTransport::put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes,
                          uint32_t immediate, uint64_t context) {
  const Peer& to = known("put", peer);
  const RemoteRegion& region = to.endpoint_address.window;
  const auto outside = [bytes](int64_t offset, int64_t window) {
    return offset < 0 || bytes < 0 || offset > window || bytes > window - offset;
  };
  if (outside(src_offset, window_bytes_) || outside(dst_offset, region.bytes) || bytes > caps_.max_message ||
      immediate == kHelloImmediate)
    throw Error(ErrorKind::invalid_argument,
                text_of("fabric: put of ", bytes, " bytes from ", src_offset, " of ", window_bytes_, " to ",
                        dst_offset, " of ", region.bytes, " at ", to.name, ", immediate ", immediate,
                        ", largest message ", caps_.max_message, ": out of bounds"));
  if (to.dropped) return true;
  const bool room = counted_ < options_.max_in_flight_operations &&
                    (counted_ == 0 || bytes <= options_.max_in_flight_bytes - counted_bytes_);
  return room && write(peer, window_ + src_offset, bytes, window_descriptor_, region, dst_offset, immediate,
                       false, context);
}

void FabricTransport::poll(std::vector<TransportEvent>& events) {
  take_completions(events);
  if (early_.empty()) return;
  events.insert(events.end(), std::make_move_iterator(early_.begin()), std::make_move_iterator(early_.end()));
  early_.clear();
}

void FabricTransport::forget(int32_t peer) {
  known("forget", peer);
  drop(peer);
}

}  // namespace moecomm::fabric
