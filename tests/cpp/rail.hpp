// Peers of a rail and sockets that speak what a test says, for the tests of control links.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "check.hpp"
#include "transport/tcp/links.hpp"

namespace moecomm::tcp::test_rail {

using test::eventually;
using test::kLong;

inline const std::string kHere = "127.0.0.1";

inline JobId random_job() {
  static std::mt19937_64 random(moecomm::test::seed());
  JobId job;
  for (std::byte& each : job) each = static_cast<std::byte>(random());
  return job;
}

/// The peers of a rail, all in this process.
struct Rail {
  std::vector<std::unique_ptr<Links>> links;
  std::vector<std::string> endpoints;

  explicit Rail(int32_t peers, const std::string& interface = kHere, const JobId& job = random_job(),
                double silence_seconds = 30) {
    for (int32_t self = 0; self < peers; ++self) {
      links.push_back(std::make_unique<Links>(LinkOptions{job, self, peers, interface, silence_seconds}));
      endpoints.push_back(links.back()->endpoint());
    }
  }

  void connect() {
    test::at_once(static_cast<int>(links.size()), [&](int peer) { links[peer]->connect(endpoints, kLong); });
  }
};

/// Polls until `count` events have come.
inline std::vector<LinkEvent> take(Links& links, size_t count) {
  std::vector<LinkEvent> events;
  CHECK(eventually([&] {
    links.poll(events);
    return events.size() >= count;
  }));
  return events;
}

inline bool is_lost(const LinkEvent& event, int32_t peer, const std::string& part) {
  const bool holds = event.kind == LinkEvent::Kind::lost && event.peer == peer && test::has(event.text, part);
  if (!holds)
    std::printf("kind %u, peer %d, '%s'\n", static_cast<unsigned>(event.kind), event.peer,
                event.text.c_str());
  return holds;
}

/// A socket that speaks what the test says: a stray, or one side of a link.
class Raw {
 public:
  explicit Raw(const std::string& endpoint) : Raw(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const Address to = parse_endpoint("endpoint", endpoint);
    CHECK(connect(fd_, to.get(), to.length) == 0);
  }
  explicit Raw(int fd) : fd_(fd) {
    const timeval patience{static_cast<time_t>(kLong), 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  Raw(Raw&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ~Raw() {
    if (fd_ >= 0) close(fd_);
  }

  template <class Bytes>
  void say(const Bytes& bytes, size_t size) {
    CHECK(send(fd_, bytes.data(), size, MSG_NOSIGNAL) == static_cast<ssize_t>(size));
  }
  template <class Bytes>
  void say(const Bytes& bytes) {
    say(bytes, bytes.size());
  }

  /// All until the other side closes.
  std::string rest() {
    std::string text;
    std::array<char, 4096> piece;
    for (;;) {
      const ssize_t count = recv(fd_, piece.data(), piece.size(), 0);
      if (count > 0)
        text.append(piece.data(), count);
      else
        return count == 0 || errno == ECONNRESET ? text : text + " [" + std::strerror(errno) + "]";
    }
  }

  Hello hello() {
    Hello hello;
    CHECK(recv(fd_, &hello, sizeof(hello), MSG_WAITALL) == static_cast<ssize_t>(sizeof(hello)));
    return hello;
  }

  /// Sent away without a word.
  bool refused() { return rest().empty(); }

 private:
  int fd_;
};

/// A listener that the test answers for.
class RawListener {
 public:
  RawListener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    Address address = make_address(kHere, "0");
    CHECK(bind(fd_, address.get(), address.length) == 0 && listen(fd_, 8) == 0);
    CHECK(getsockname(fd_, address.get(), &address.length) == 0);
    endpoint = endpoint_text(address);
  }
  ~RawListener() { close(fd_); }
  Raw accept() {
    pollfd polled{fd_, POLLIN, 0};
    CHECK(::poll(&polled, 1, static_cast<int>(kLong * 1000)) == 1);
    return Raw(::accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC));
  }
  std::string endpoint;

 private:
  int fd_;
};

using HelloBytes = std::array<std::byte, sizeof(Hello)>;
using MessageBytes = std::array<std::byte, sizeof(LinkMessage)>;

inline HelloBytes hello_of(const JobId& job, int32_t from, int32_t to) {
  Hello hello;
  hello.job = job;
  hello.from = from;
  hello.to = to;
  return std::bit_cast<HelloBytes>(hello);
}

inline MessageBytes bytes_of(const LinkMessage& message) { return std::bit_cast<MessageBytes>(message); }

}  // namespace moecomm::tcp::test_rail
