// The proxy of a rank: the thread that talks to the network for the computing threads. It turns commands into
// puts (remote writes) to the rail, the ranks with this rank's local index on the other nodes. It counts puts
// that arrive, and shows them to this node's ranks by the signals and flags for which they wait anyway. Data
// may arrive in any order: a record (an operation's announcement) is shown once its ids and weights are here,
// and each chunk of rows has its own flag.
//
// Control links tell it when a peer's process is gone. They also carry goodbye messages, so that a rank that
// closes does not leave others waiting for rows in flight.
#pragma once

#include <unistd.h>

#include <atomic>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "common/backoff.hpp"
#include "common/deadline.hpp"
#include "layout/window.hpp"
#include "runtime/command_ring.hpp"
#include "transport/shm/signal.hpp"
#include "transport/tcp/links.hpp"
#include "transport/transport.hpp"

namespace moecomm {

/// Counters of what went to other nodes, since construction or the last reset.
struct WireStats {
  std::atomic<int64_t> puts{0}, bytes{0}, row_bytes{0};

  void reset() { puts = bytes = row_bytes = 0; }
};

/// Throws Error(unsupported) if a network can't take puts as large as those between windows of `shape`.
void require_message_size(const Transport& transport, const WindowShape& shape);

class Proxy {
 public:
  /// Starts the thread. `base`: this rank's window. `transport` and `links` number peers by node. While this
  /// object lives, it tells the rail when this rank gives up on a peer. `signals` must outlive the proxy. The
  /// first record of each peer is that of `first_epoch`.
  Proxy(const WindowLayout& layout, int32_t rank, std::byte* base, shm::Signals& signals,
        std::unique_ptr<Transport> transport, std::unique_ptr<tcp::Links> links, double timeout_seconds,
        uint64_t first_epoch = 1);
  ~Proxy();

  /// Queues a command for the thread. Waits while the ring is full; Error(peer_timeout) after the timeout.
  void push(const Command& command);
  /// Word with the epoch up to which all data that the rail's rank on node `other` announced has arrived.
  uint64_t* all_here(int32_t other) { return progress().all_here(other); }
  /// Word that counts how often staging slot `slot` has become free.
  uint64_t* staging_done(int64_t slot) { return &staging_done_[slot]; }
  /// Tells the rail that this rank has given up on a peer. Any thread may call it.
  void announce_loss(int32_t peer, Cause cause) noexcept;
  /// Why rank `peer` of another node can't be reached; "" if the network has not said.
  std::string reason(int32_t peer) const;
  const TransportCaps& caps() const { return caps_; }
  WireStats& stats() { return stats_; }

  /// Ends the thread, which closes the connections to the rail, so that peers see the end even while handles
  /// and graphs keep this object alive. `drain`: the thread first waits until the rail has received all that
  /// was put, or is gone, or a deadline has passed.
  ///
  /// Returns false if the thread does not end in time, for example because the network library waits for a
  /// killed peer. The thread is then left behind: this object, `signals` and the window have to stay until
  /// the process ends.
  [[nodiscard]] bool close(bool drain) noexcept;

 private:
  struct Put {
    int64_t dst, src, bytes;
    uint32_t immediate;
    uint64_t context;
  };
  struct Outbound {
    std::deque<Put> ready;
    uint64_t put = 0, left = 0;  // puts started; puts whose source bytes are free again
    bool goodbye = false, gone = false;
  };
  struct Inbound {
    struct Epoch {
      uint64_t epoch = 0;
      bool head = false;
      int64_t bodies = 0;
      uint64_t parts = 0;
    } epochs[2];
    uint64_t delivered = 0;        // epoch of the last record shown
    uint64_t arrived = 0;          // puts that have arrived, over all epochs
    uint64_t last = ~uint64_t{0};  // all puts that the peer has sent, known from its goodbye
    bool gone = false;
    std::string failure;  // network failure that is not reported yet; see suspect()
    Clock::time_point tell{};
  };
  enum class Word : uint32_t { closing = 1, drained = 2, abort = 3 };

  void say(int32_t other, Word word, uint64_t value = 0, int32_t a = 0, int32_t b = 0) noexcept {
    links_->send(NodeMap::node_of_other(other, node_), {static_cast<uint32_t>(word), a, b, value});
  }
  void run();
  void talk();
  bool moving() const;
  bool take_commands();
  bool issue();
  bool take_events();
  void take_words();
  void translate(const Command& command);
  void arrived(uint32_t bits);
  bool show_next(int32_t other);
  void check_parts(int32_t other);
  void check_goodbye(int32_t other);
  void suspect(int32_t other, const std::string& text);
  void put_done(uint64_t context);
  void tell_failures(Clock::time_point now);
  void lose(int32_t other, Cause cause, std::string_view text);
  void say_goodbye(bool busy);
  bool finished() const;
  int32_t rail(int32_t other) const {
    return nodes_.rank_of(NodeMap::node_of_other(other, node_), nodes_.local_of(rank_));
  }
  RelayProgress& progress() const { return *reinterpret_cast<RelayProgress*>(base_ + layout_.progress); }
  Announcement& head(uint64_t epoch, int32_t other) const {
    return reinterpret_cast<Announcement*>(base_ + layout_.relay_head[epoch & 1])[other];
  }

  const WindowLayout layout_;
  const NodeMap nodes_;
  const int32_t rank_, node_, others_;
  std::byte* const base_;
  shm::Signals& signals_;
  std::unique_ptr<Transport> transport_;
  const TransportCaps caps_;
  std::unique_ptr<tcp::Links> links_;
  const double timeout_seconds_;

  CommandRing ring_;
  std::vector<uint64_t> staging_done_;
  WireStats stats_;
  std::atomic<int> stop_{0};  // 1: end after a goodbye, 2: end at once
  bool left_behind_ = false;  // the thread has not ended in time

  // Fields that only the proxy's thread uses.
  std::vector<Outbound> outbound_;
  std::vector<Inbound> inbound_;
  std::vector<int64_t> staged_rows_;  // rows of the chunk in each staging slot
  std::vector<TransportEvent> events_;
  std::vector<tcp::LinkEvent> words_;
  int32_t next_ = 0;
  Clock::time_point next_words_{};
  std::optional<Deadline> goodbye_;

  mutable std::mutex reasons_mutex_;
  std::vector<std::string> reasons_;  // [node]
  Backoff backoff_;

  const int owner_ = getpid();
  std::promise<void> ended_;  // set as the thread's last act
  std::unique_ptr<std::thread> thread_;
};

}  // namespace moecomm
