// TCP connections to the rail peers (the ranks with the same local index on the other nodes), one each. They
// carry small control messages, never rows. The end of a connection shows that the peer's process or host is
// gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "common/descriptor.hpp"
#include "transport/tcp/address.hpp"
#include "transport/tcp/handshake.hpp"

namespace moecomm::tcp {

/// A control message, whose kinds the caller defines. It is sent as it is in memory.
struct LinkMessage {
  uint32_t kind = 0;
  int32_t a = 0, b = 0;
  uint32_t mark = 0x4b4e4c4d;  ///< the same in every message, so that a misaligned stream is noticed
  uint64_t value = 0;
  LinkMessage() = default;
  LinkMessage(uint32_t its_kind, int32_t its_a, int32_t its_b, uint64_t its_value)
      : kind(its_kind), a(its_a), b(its_b), value(its_value) {}
  bool operator==(const LinkMessage&) const = default;
};
static_assert(sizeof(LinkMessage) == 24);

struct LinkEvent {
  enum class Kind : uint32_t {
    message,  ///< `peer` sent `message`; messages of one peer arrive in order
    lost,     ///< nothing more will arrive from `peer`; `text` says why
  };
  Kind kind;
  int32_t peer;
  LinkMessage message;
  std::string text;
};

inline constexpr double kLongestSilence = 32767;  ///< the largest TCP_KEEPIDLE that the kernel accepts

struct LinkOptions {
  JobId job;              ///< random; equal for all peers of one communicator, and unknown to other programs
  int32_t self;           ///< this rank's index among the peers: the number of its node
  int32_t peers;          ///< number of peers, including this rank
  std::string interface;  ///< name or numeric address (transport/network_interface.hpp); empty: chosen
  /// How long a peer's host may be unreachable before its link counts as lost. A peer that is stopped and
  /// has buffers full of unread messages counts as unreachable.
  double silence_seconds = 30;  ///< at most kLongestSilence
};

class Links {
 public:
  /// Listens on one address of the interface, at a port that the system chooses. Throws
  /// Error(invalid_argument) for an interface that this host does not have.
  explicit Links(const LinkOptions& options);
  /// close() with a limit of one second.
  ~Links();

  /// Address at which peers reach this rank, "10.0.0.3:4567".
  const std::string& endpoint() const { return endpoint_; }

  /// Connects to all peers. endpoints[i]: endpoint() of peer i, at [self] this rank's own. Every peer calls
  /// it once. Listening ends with the call. After an error the object can only be destroyed.
  ///
  /// Throws Error(invalid_argument) for a malformed endpoint, Error(peer_timeout), which names the missing
  /// peers, and Error(mismatched_arguments) where another program answers for a peer. `interrupt` is called
  /// every 50 ms and may throw.
  void connect(const std::vector<std::string>& endpoints, double timeout_seconds,
               const std::function<void()>& interrupt = {});

  /// Sends a message; never blocks. Any thread may call it. Messages to a lost peer are dropped. A peer that
  /// accepts none any more, so that its socket is full, counts as lost.
  void send(int32_t peer, const LinkMessage& message) noexcept;

  /// Appends the events so far; never blocks. Only the thread of connect() and close() may call it. It costs
  /// a system call.
  void poll(std::vector<LinkEvent>& events);

  /// Ends all links once the peers' hosts have received all that was sent; links of peers that accept nothing
  /// end after the given time. The peers see `lost` after the last message.
  void close(double timeout_seconds) noexcept;

  /// Ends all links at once, also for the peers. Any thread may call it while the polling thread is blocked.
  void cut() noexcept;

 private:
  struct Link {
    std::mutex mutex;      // guards changes of fd and error
    Descriptor fd;         // empty: own index, not connected, or lost
    int error = 0;         // error of sending: nothing more is sent, and poll() finds the end of the link
    LinkMessage incoming;  // a message that is arriving
    size_t received = 0;   // bytes of `incoming` that have arrived
  };

  bool inherited() const { return generation_ != Descriptor::current_generation(); }
  void stop_sending(Link& link, int error) noexcept;
  void receive(int32_t peer, std::vector<LinkEvent>& events);
  void drop(int32_t peer, const std::string& why, std::vector<LinkEvent>& events);
  bool settled(Link& link) noexcept;

  const LinkOptions options_;
  const uint32_t generation_;  // a forked child does not use the links
  Address own_;
  std::string endpoint_;
  Descriptor listener_, epoll_;
  std::vector<Address> addresses_;
  std::vector<Link> links_;
};

}  // namespace moecomm::tcp
