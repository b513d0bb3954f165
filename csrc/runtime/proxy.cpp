#include "runtime/proxy.hpp"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <new>
#include <utility>

#include "common/start_thread.hpp"

namespace moecomm {
namespace {

constexpr auto kWordsInterval = std::chrono::milliseconds(2);  // between polls of the control links
constexpr double kGoodbyeSeconds = 10.0;                       // the longest wait at close() for peers
constexpr double kLinksSeconds = 1.0;  // after that, most time for the links to send the rest
// The thread's time for closing links and network, in addition to the timeout that bounds its goodbye.
constexpr double kEndSeconds = 3.0;
// A peer that ends, closes or gives up says so over its link. A network failure may come first, and is
// reported after this time if no link explains it.
constexpr auto kExplanationTime = std::chrono::milliseconds(100);
// The longest sleep of a CPU rank's proxy, and of a GPU's. A command from the host ends a sleep, and each
// operation on the CPU begins with such a command. Arrivals and kernels do not, so sleeps have to be short.
constexpr auto kLongSleep = std::chrono::microseconds(500), kDeviceSleep = std::chrono::microseconds(100);
constexpr uint64_t kNoContext = ~uint64_t{0};

CommandRing make_ring(const WindowLayout& layout, std::byte* base) {
  if (!layout.shape.for_device()) return {};
  return {base + layout.commands, layout.shape.commands()};
}

}  // namespace

void require_message_size(const Transport& transport, const WindowShape& shape) {
  const TransportCaps& caps = transport.caps();
  if (caps.max_message < shape.largest_put())
    throw Error(ErrorKind::unsupported,
                text_of("provider ", caps.provider, " takes messages of at most ", caps.max_message,
                        " bytes, rows travel in pieces of up to ", shape.largest_put()));
}

Proxy::Proxy(const WindowLayout& layout, int32_t rank, std::byte* base, shm::Signals& signals,
             std::unique_ptr<Transport> transport, std::unique_ptr<tcp::Links> links, double timeout_seconds,
             uint64_t first_epoch)
    : layout_(layout),
      nodes_(layout.shape.nodes()),
      rank_(rank),
      node_(nodes_.node_of(rank)),
      others_(nodes_.nodes() - 1),
      base_(base),
      signals_(signals),
      transport_(std::move(transport)),
      caps_(transport_->caps()),
      links_(std::move(links)),
      timeout_seconds_(timeout_seconds),
      ring_(make_ring(layout, base)),
      staging_done_(layout.shape.staging_chunks(), 0),
      outbound_(others_),
      inbound_(others_),
      staged_rows_(layout.shape.staging_chunks(), 0),
      reasons_(nodes_.nodes()),
      backoff_(layout.shape.for_device() ? kDeviceSleep : kLongSleep, signals.crowded()) {
  for (int32_t other = 0; other < others_; ++other)
    *progress().all_here(other) = inbound_[other].delivered = first_epoch - 1;
  signals_.set_on_abort([this](int peer, Cause cause) { announce_loss(peer, cause); });
  signals_.set_reason([this](int peer) { return reason(peer); });
  try {
    thread_ = std::make_unique<std::thread>(start_thread([this] { run(); }, "the proxy"));
  } catch (...) {
    signals_.set_on_abort({});
    signals_.set_reason({});
    throw;
  }
}

Proxy::~Proxy() {
  if (getpid() != owner_) {
    // A forked child has no such thread, and must not use the parent's network resources.
    static_cast<void>(transport_.release());
    static_cast<void>(links_.release());
    static_cast<void>(thread_.release());
    return;
  }
  static_cast<void>(close(false));
}

void Proxy::push(const Command& command) {
  const Deadline deadline{std::chrono::duration<double>(timeout_seconds_)};
  while (!ring_.push(command)) {
    if (deadline.passed())
      throw Error(
          ErrorKind::peer_timeout,
          text_of("rank ", rank_, ": the network takes no more work (waited ", timeout_seconds_, " s)"));
    std::this_thread::yield();
  }
  backoff_.wake();
}

void Proxy::announce_loss(int32_t peer, Cause cause) noexcept {
  for (int32_t other = 0; other < others_; ++other)
    say(other, Word::abort, 0, peer, static_cast<int32_t>(cause));
}

std::string Proxy::reason(int32_t peer) const {
  const std::lock_guard lock(reasons_mutex_);
  return reasons_[nodes_.node_of(peer)];
}

bool Proxy::close(bool drain) noexcept {
  if (!thread_ || getpid() != owner_) return !left_behind_;
  stop_ = drain ? 1 : 2;
  const std::chrono::duration<double> bound(timeout_seconds_ + kEndSeconds);
  if (ended_.get_future().wait_for(bound) == std::future_status::ready) {
    thread_->join();
  } else {
    left_behind_ = true;
    stop_ = 2;
    links_->cut();
    thread_->detach();
  }
  thread_.reset();
  return !left_behind_;
}

/// The thread's main function. It also closes the network: the library may block there, and then blocks this
/// thread alone.
void Proxy::run() {
  begin_polling("moecomm-proxy", caps_.cores);
  try {
    talk();
  } catch (const std::exception& error) {
    // The network library has thrown, or memory has run out: no peer can be reached any more.
    for (int32_t other = 0; other < others_; ++other) lose(other, Cause::unreachable, error.what());
  }
  links_->close(kLinksSeconds);
  transport_.reset();
  ended_.set_value();
}

void Proxy::talk() {
  while (true) {
    // `stop_` is read before the commands. So all commands that were pushed before close() are taken, and the
    // goodbye counts them.
    const int stop = stop_.load();
    if (stop == 2) return;
    const bool busy =
        static_cast<int>(take_commands()) | static_cast<int>(issue()) | static_cast<int>(take_events());
    if (const auto now = Clock::now(); now >= next_words_) {
      take_words();
      tell_failures(now);
      next_words_ = now + kWordsInterval;
    }
    if (stop == 1) {
      say_goodbye(busy);
      if (finished()) return;
    }
    // While bytes are in flight a GPU's proxy stays awake, since the ranks' own threads do not need the cores
    // then.
    const bool stay_awake = layout_.shape.for_device() && (busy || moving());
    transport_->stay_awake(stay_awake);
    backoff_.turn(busy, stay_awake);
  }
}

/// True if source bytes of a put are not free yet, or rows that a peer announced have not arrived.
bool Proxy::moving() const {
  for (int32_t other = 0; other < others_; ++other) {
    const Outbound& out = outbound_[other];
    const Inbound& in = inbound_[other];
    if (!out.gone && out.left < out.put) return true;
    if (!in.gone && *progress().all_here(other) < in.delivered) return true;
  }
  return false;
}

bool Proxy::take_commands() {
  bool busy = false;
  for (int i = 0; i < 256; ++i) {
    const auto command = ring_.pop();
    if (!command) break;
    translate(*command);
    busy = true;
  }
  return busy;
}

/// Queues the put for a command; the put of a chunk only when all rows of the chunk are staged.
void Proxy::translate(const Command& command) {
  const WindowShape& shape = layout_.shape;
  const int parity = command.epoch & 1;
  const int32_t other = command.other;
  // The number of this node, as the other node counts (NodeMap::other).
  const int32_t mine = NodeMap::other(node_, NodeMap::node_of_other(other, node_));
  const int64_t piece = command.index * WindowShape::kPieceBytes;
  Immediate immediate{Immediate::Kind::body, command.epoch, static_cast<uint32_t>(node_), command.index};
  Put put{0, 0, command.a, 0, kNoContext};
  switch (command.kind) {
    case Command::Kind::head:
      immediate.kind = Immediate::Kind::head;
      put.src = WindowLayout::relayed_head(layout_.announcement[parity], other);
      put.dst = WindowLayout::relayed_head(layout_.relay_head[parity], mine);
      break;
    case Command::Kind::ids:
      put.src = layout_.ids[parity] + piece;
      put.dst = layout_.relayed_ids(command.epoch, mine) + piece;
      break;
    case Command::Kind::weights:
      put.src = layout_.weights[parity] + piece;
      put.dst = layout_.relayed_weights(layout_.relay_weights[parity], mine) + piece;
      break;
    case Command::Kind::index:
      put.src = layout_.relayed_index(layout_.index[parity], other) + piece;
      put.dst = layout_.relayed_index(layout_.relay_index[parity], mine) + piece;
      break;
    case Command::Kind::grads:
      immediate.kind = Immediate::Kind::part;
      immediate.index = static_cast<uint32_t>(shape.chunks(shape.max_tokens) + command.index);
      put.src = layout_.relayed_weights(layout_.outgoing_grads[parity], other) + piece;
      put.dst = layout_.relayed_weights(layout_.relay_grads[parity], mine) + piece;
      break;
    default: {  // a chunk of rows
      const int64_t slot = command.a, rows = command.b & 0xffff;
      int64_t& staged = staged_rows_[slot];
      staged += command.b >> 16;
      if (staged < rows) return;
      staged = 0;
      const int64_t chunk_bytes = shape.chunk_rows() * shape.row_bytes();
      immediate.kind = Immediate::Kind::part;
      put.src = layout_.staging + slot * chunk_bytes;
      put.dst = layout_.relayed_rows(command.epoch, mine) + command.index * chunk_bytes;
      put.bytes = rows * shape.row_bytes_in(chunk_format(command.kind));
      put.context = static_cast<uint64_t>(slot);
      stats_.row_bytes.fetch_add(put.bytes, std::memory_order_relaxed);
      break;
    }
  }
  put.immediate = immediate.bits();
  outbound_[other].ready.push_back(put);
}

/// Starts as many puts as the network takes, one per peer in turn.
bool Proxy::issue() {
  bool busy = false;
  int32_t refused = 0;
  while (refused < others_) {
    const int32_t other = next_;
    next_ = (next_ + 1) % others_;
    Outbound& out = outbound_[other];
    if (out.ready.empty()) {
      ++refused;
      continue;
    }
    const Put& put = out.ready.front();
    if (out.gone) {
      // The peer will not read the bytes. Whoever waits for the slot learns of the loss by signals.
      put_done(put.context);
    } else {
      if (!transport_->put(NodeMap::node_of_other(other, node_), put.dst, put.src, put.bytes, put.immediate,
                           put.context)) {
        ++refused;
        continue;
      }
      ++out.put;
      stats_.puts.fetch_add(1, std::memory_order_relaxed);
      stats_.bytes.fetch_add(put.bytes, std::memory_order_relaxed);
    }
    out.ready.pop_front();
    refused = 0;
    busy = true;
  }
  return busy;
}

/// Counts a put whose source bytes may be overwritten. `context`: its staging slot, now free, or kNoContext.
void Proxy::put_done(uint64_t context) {
  uint64_t& put = progress().put;
  std::atomic_ref(put).store(put + 1, std::memory_order_release);
  if (context != kNoContext) signals_.store_own(&staging_done_[context], staging_done_[context] + 1);
}

bool Proxy::take_events() {
  events_.clear();
  transport_->poll(events_);
  for (const TransportEvent& event : events_) {
    switch (event.kind) {
      case TransportEvent::Kind::sent:
        ++outbound_[NodeMap::other(event.peer, node_)].left;
        put_done(event.context);
        break;
      case TransportEvent::Kind::arrived:
        arrived(event.immediate);
        break;
      case TransportEvent::Kind::failed:
        for (int32_t other = 0; other < others_; ++other)
          if (event.peer < 0 || NodeMap::node_of_other(other, node_) == event.peer)
            suspect(other, event.text);
        break;
    }
  }
  return !events_.empty();
}

void Proxy::arrived(uint32_t bits) {
  const Immediate immediate = Immediate::from(bits);
  const auto node = static_cast<int32_t>(immediate.node);
  // Only a broken peer or a stranger sends such an immediate; its bytes still lie within the window.
  if (node >= nodes_.nodes() || node == node_) return;
  const int32_t other = NodeMap::other(node, node_);
  Inbound& in = inbound_[other];
  ++in.arrived;
  // The immediate has low bits of the epoch, which is from in.delivered - 1 (late rows) to in.delivered + 2.
  const uint64_t ahead = (immediate.epoch + 1 - in.delivered) % Immediate::kEpochs;
  const uint64_t epoch = in.delivered + ahead - 1;
  Inbound::Epoch& state = in.epochs[epoch & 1];
  if (state.epoch != epoch) state = {epoch};
  if (ahead > 3 ||
      (immediate.kind == Immediate::Kind::part && immediate.index >= layout_.shape.arrival_flags())) {
    lose(other, Cause::unreachable, caps_.provider + ": a message that no rank sends");
    return;
  }
  switch (immediate.kind) {
    case Immediate::Kind::head:
      state.head = true;
      break;
    case Immediate::Kind::body:
      ++state.bodies;
      break;
    case Immediate::Kind::part:
      signals_.store(reinterpret_cast<uint64_t*>(base_ + layout_.arrival(epoch, other, immediate.index)),
                     epoch);
      ++state.parts;
      break;
  }
  while (show_next(other)) {
  }
  check_parts(other);
  check_goodbye(other);
}

/// Shows this node's ranks the next record of a peer. False if the record, its ids or weights are not here.
bool Proxy::show_next(int32_t other) {
  Inbound& in = inbound_[other];
  const uint64_t epoch = in.delivered + 1;
  const Inbound::Epoch& state = in.epochs[epoch & 1];
  if (in.gone || state.epoch != epoch || !state.head) return false;
  const WindowShape& shape = layout_.shape;
  Announcement& announcement = head(epoch, other);
  const SignalRecord& record = announcement.record;
  if (record.epoch != epoch || record.tokens < 0 || record.tokens > shape.max_tokens ||
      announcement.parts > static_cast<uint64_t>(shape.arrival_flags())) {
    lose(other, Cause::unreachable, caps_.provider + ": a record that no rank sends");
    return false;
  }
  int64_t bodies = 0;
  if (record.operation == Operation::dispatch) {
    bodies = WindowShape::pieces(shape.ids_bytes(record.tokens, record.layout)) +
             WindowShape::pieces(shape.index_bytes(record.tokens));
    if ((record.carries & kCarriesWeights) != 0)
      bodies += WindowShape::pieces(int64_t{record.tokens} * shape.top_k * weight_bytes(shape.dtype));
  }
  if (state.bodies < bodies) return false;
  in.delivered = epoch;
  announcement.text[kErrorText - 1] = 0;
  signals_.deliver(rail(other), record);
  return true;
}

/// Advances all_here() to the epoch up to which all chunks and gradients of the shown records have arrived.
void Proxy::check_parts(int32_t other) {
  Inbound& in = inbound_[other];
  uint64_t* const all_here = progress().all_here(other);
  while (*all_here < in.delivered) {
    const uint64_t epoch = *all_here + 1;
    if (in.epochs[epoch & 1].parts < head(epoch, other).parts) return;
    signals_.store_own(all_here, epoch);
  }
}

/// If a peer has closed and its last put has arrived: counts the peer as gone, and tells it that it may end.
void Proxy::check_goodbye(int32_t other) {
  Inbound& in = inbound_[other];
  if (in.gone || in.arrived != in.last) return;
  in.gone = true;
  signals_.deliver_gone(rail(other), Cause::closed);
  say(other, Word::drained);
}

void Proxy::take_words() {
  words_.clear();
  links_->poll(words_);
  for (const tcp::LinkEvent& event : words_) {
    const int32_t other = NodeMap::other(event.peer, node_);
    if (event.kind == tcp::LinkEvent::Kind::lost) {
      lose(other, Cause::ended, event.text);
      continue;
    }
    switch (static_cast<Word>(event.message.kind)) {
      case Word::closing:
        inbound_[other].last = event.message.value;
        check_goodbye(other);
        break;
      case Word::drained:
        outbound_[other].gone = true;
        break;
      case Word::abort:
        if (event.message.a >= 0 && event.message.a < nodes_.ranks && event.message.b >= 0 &&
            event.message.b <= static_cast<int32_t>(Cause::unreachable))
          signals_.deliver_abort(rail(other), event.message.a, static_cast<Cause>(event.message.b));
        break;
    }
  }
}

void Proxy::suspect(int32_t other, const std::string& text) {
  Inbound& in = inbound_[other];
  if (in.gone || !in.failure.empty()) return;
  in.failure = text.empty() ? caps_.provider + ": failed" : text;
  in.tell = Clock::now() + kExplanationTime;
}

void Proxy::tell_failures(Clock::time_point now) {
  for (int32_t other = 0; other < others_; ++other) {
    Inbound& in = inbound_[other];
    if (!in.failure.empty() && now >= in.tell) lose(other, Cause::unreachable, std::exchange(in.failure, {}));
  }
}

void Proxy::lose(int32_t other, Cause cause, std::string_view text) {
  Inbound& in = inbound_[other];
  outbound_[other].gone = true;
  if (cause == Cause::ended) transport_->forget(NodeMap::node_of_other(other, node_));
  if (in.gone) return;
  in.gone = true;
  {
    const std::lock_guard lock(reasons_mutex_);
    std::string& reason = reasons_[NodeMap::node_of_other(other, node_)];
    try {
      reason = text;
    } catch (const std::bad_alloc&) {  // the loss is reported all the same
      reason = "out of memory";        // short enough to need no memory
    }
  }
  signals_.deliver_gone(rail(other), cause);
}

/// Tells each peer the number of puts to it, once all have started. `busy`: more commands may come.
void Proxy::say_goodbye(bool busy) {
  if (!goodbye_) goodbye_.emplace(std::chrono::duration<double>(std::min(timeout_seconds_, kGoodbyeSeconds)));
  if (busy) return;
  for (int32_t other = 0; other < others_; ++other) {
    Outbound& out = outbound_[other];
    if (out.goodbye || out.gone || !out.ready.empty()) continue;
    out.goodbye = true;
    say(other, Word::closing, out.put);
  }
}

bool Proxy::finished() const {
  return goodbye_->passed() ||
         std::all_of(outbound_.begin(), outbound_.end(), [](const Outbound& out) { return out.gone; });
}

}  // namespace moecomm
