// TCP connections, one to each rail peer, the ranks of the same local index on the other nodes. They carry
// small control messages, and the end of one tells that a peer's process or host has gone. Rows never go
// here.
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

/// A control message; the caller gives the kinds their meaning. It travels as it is in memory.
struct LinkMessage {
  uint32_t kind = 0;
  int32_t a = 0, b = 0;
  uint32_t mark = 0x4b4e4c4d;  ///< the same in every message, so that a stream out of step is noticed
  uint64_t value = 0;
  LinkMessage() = default;
  LinkMessage(uint32_t its_kind, int32_t its_a, int32_t its_b, uint64_t its_value)
      : kind(its_kind), a(its_a), b(its_b), value(its_value) {}
  bool operator==(const LinkMessage&) const = default;
};
static_assert(sizeof(LinkMessage) == 24);

struct LinkEvent {
  enum class Kind : uint32_t {
    message,  ///< `peer` sent `message`; those of one peer come in the order they were sent
    lost,     ///< nothing more will come from `peer`; `text` says why
  };
  Kind kind;
  int32_t peer;
  LinkMessage message;
  std::string text;
};

inline constexpr double kLongestSilence = 32767;  ///< the most that the kernel takes as TCP_KEEPIDLE

struct LinkOptions {
  JobId job;              ///< random, the same for all peers of one communicator and for nobody else
  int32_t self;           ///< own index: the node
  int32_t peers;          ///< number of peers, this one included
  std::string interface;  ///< name or numeric address, see transport/network_interface.hpp; empty: chosen
  /// The time that a peer's host may be out of reach before the link counts as lost. A stopped process whose
  /// buffers are full of messages looks the same.
  double silence_seconds = 30;  ///< at most kLongestSilence
};

class Links {
 public:
  /// Listens on one address of the interface, at a port that the system chooses. Error(invalid_argument) for
  /// an interface that this host does not have.
  explicit Links(const LinkOptions& options);
  /// close() with a second of time.
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  /// Address at which peers reach this one, "10.0.0.3:4567".
  const std::string& endpoint() const { return endpoint_; }

  /// Connects to all peers, by their endpoint(); [self] is the own one. Everybody calls it, once. Then nobody
  /// listens any more. After an error only the destructor is left.
  ///
  /// Error(invalid_argument) for an endpoint that is none, Error(peer_timeout) that names who is missing,
  /// Error(mismatched_arguments) where somebody else answers for a peer. `interrupt` is called every 50 ms
  /// and may throw.
  void connect(const std::vector<std::string>& endpoints, double timeout_seconds,
               const std::function<void()>& interrupt = {});

  /// Sends a message; never blocks. Any thread. Messages to a lost peer are dropped. A peer that takes none
  /// any more, so that its socket is full, counts as lost.
  void send(int32_t peer, const LinkMessage& message) noexcept;

  /// Appends what has happened; never blocks. One thread, the same as for connect() and close(). It costs a
  /// system call.
  void poll(std::vector<LinkEvent>& events);

  /// Ends all links, after the hosts of the peers have got all that was sent; of those that take nothing,
  /// after the given time. The peers see `lost` behind the last message.
  void close(double timeout_seconds) noexcept;

  /// Lets the peers see the end of all links at once. Any thread: for when the one that polls is held up.
  void cut() noexcept;

 private:
  struct Link {
    std::mutex mutex;      // fd and error are changed under it
    Descriptor fd;         // empty: own index, not connected, or lost
    int error = 0;         // of sending: nothing more goes out, poll() finds the end
    LinkMessage incoming;  // and how much of it is here
    size_t received = 0;
  };

  bool inherited() const { return generation_ != Descriptor::current_generation(); }
  std::string name(int32_t peer) const;
  void stop_sending(Link& link, int error) noexcept;
  void receive(int32_t peer, std::vector<LinkEvent>& events);
  void drop(int32_t peer, const std::string& why, std::vector<LinkEvent>& events);
  bool settled(Link& link) noexcept;

  const LinkOptions options_;
  const uint32_t generation_;  // a forked child has no part in the links
  Address own_;
  std::string endpoint_;
  Descriptor listener_, epoll_;
  std::vector<Address> addresses_;
  std::vector<Link> links_;
};

}  // namespace moecomm::tcp
