// Handshake of the peers of a rail: each calls the peers below it and is called by those above it. Both sides
// begin with a hello; a caller that is no rank of this job is told so and does not hold up the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/deadline.hpp"
#include "common/descriptor.hpp"
#include "transport/tcp/address.hpp"
#include "transport/tcp/messages.hpp"

namespace moecomm::tcp {

class Handshake {
 public:
  /// `listener` is bound to own and listens; `refused` counts callers that were turned away.
  Handshake(const JobId& job, int32_t self, const Address& own, int listener, std::vector<Address> endpoints,
            std::atomic<int64_t>& refused);

  /// A connection to each peer, none at `self`. Error(peer_timeout) that names the first missing peer;
  /// Error(mismatched_arguments) if a peer refuses this rank. `interrupt` is called at least every 50 ms and
  /// may throw.
  std::vector<Descriptor> run(double timeout_seconds, const std::function<void()>& interrupt);

 private:
  /// A peer below this one, which this one calls until it answers.
  struct Call {
    int32_t peer;
    Descriptor fd;
    bool connected = false;  // the hello is out
    HelloBytes answer{};
    size_t received = 0;
    Clock::time_point next{};  // attempt, while there is no fd
    Clock::duration pause{};
    std::string trouble;  // why the last attempt came to nothing
  };

  /// Somebody who called this rank and has not shown yet that it is a peer.
  struct Caller {
    Descriptor fd;
    Clock::time_point until;
    HelloBytes hello{};
    size_t received = 0;
    bool refused = false;
  };

  bool complete() const;
  [[noreturn]] void give_up(double timeout_seconds) const;
  std::string name(int32_t peer) const;

  void start(Call& call);
  void advance(Call& call);
  void read_answer(Call& call);
  void retry(Call& call, const std::string& trouble);

  void take_callers();
  void advance(Caller& caller);
  void judge_hello(Caller& caller);
  void refuse(Caller& caller, Answer answer);
  void turn_away(Caller& caller, const void* words, size_t size);

  const JobId job_;
  const int32_t self_, peers_;
  const Address own_;
  const int listener_;
  const std::vector<Address> endpoints_;
  std::atomic<int64_t>& refused_;
  std::vector<Descriptor> linked_;
  std::vector<Call> calls_;
  std::vector<Caller> callers_;
};

}  // namespace moecomm::tcp
