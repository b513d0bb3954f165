// Handshake of the peers of a rail (ranks with the same local index, one a node): each opens connections to
// the peers with lower numbers (calls them). Both sides begin with a hello. A caller that is not a rank of
// this job is rejected and does not delay the others.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/deadline.hpp"
#include "common/descriptor.hpp"
#include "transport/tcp/address.hpp"

namespace moecomm::tcp {

using JobId = std::array<std::byte, 16>;

/// What each side of a connection sends first. Its bytes are sent as they are in memory.
struct Hello {
  std::array<char, 8> magic{'m', 'o', 'e', 'c', 'o', 'm', 'm', '\x1a'};
  JobId job{};
  int32_t from = 0, to = 0;
  bool operator==(const Hello&) const = default;
};
static_assert(sizeof(Hello) == 32);

class Handshake {
 public:
  /// `listener` is bound to `own` and listens.
  Handshake(const JobId& job, int32_t self, const Address& own, int listener, std::vector<Address> endpoints);

  /// Returns a connection to each peer, empty at `self`. Throws Error(peer_timeout), which names the first
  /// missing peer; Error(mismatched_arguments) if another program answers for a peer. `interrupt` is called
  /// at least every 50 ms and may throw.
  std::vector<Descriptor> run(double timeout_seconds, const std::function<void()>& interrupt);

 private:
  enum class Read { more, whole, ended, wrong };

  /// Input from a connection that is not known yet to lead to a peer.
  struct Incoming {
    Descriptor fd;
    Hello hello;
    size_t received = 0;
  };
  /// A peer with a lower number, which this rank calls until it answers.
  struct Call : Incoming {
    int32_t peer = 0;
    bool connected = false;    // the hello is sent
    Clock::time_point next{};  // time of the next attempt, while there is no fd
    Clock::duration pause{};
    std::string trouble;  // why the last attempt failed
  };
  /// A connection that another process has opened to this rank.
  struct Caller : Incoming {
    Clock::time_point until{};
  };

  bool complete() const;
  [[noreturn]] void give_up(double timeout_seconds) const;
  Hello hello(int32_t from, int32_t to) const;
  bool say_hello(const Descriptor& fd, int32_t to) const;
  Read read_hello(Incoming& incoming) const;

  void start(Call& call);
  void advance(Call& call);
  void retry(Call& call, const std::string& trouble);
  void take_callers();
  void advance(Caller& caller);

  const JobId job_;
  const int32_t self_, peers_;
  const Address own_;
  const int listener_;
  const std::vector<Address> endpoints_;
  std::vector<Descriptor> linked_;
  std::vector<Call> calls_;
  std::vector<Caller> callers_;
};

}  // namespace moecomm::tcp
