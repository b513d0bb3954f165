#include "transport/tcp/handshake.hpp"

#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "common/error.hpp"

namespace moecomm::tcp {

using namespace std::chrono_literals;

constexpr int kPollMilliseconds = 50;
// A caller must identify itself within this time, or it is dropped. A peer that was too slow calls again.
constexpr auto kHelloTime = 2s;
// The most callers besides the peers that wait to identify themselves. A further caller displaces the oldest.
constexpr size_t kStrangers = 64;
constexpr auto kFirstPause = 20ms, kLongestPause = 1000ms;

constexpr const char* kPhase = "construction: links";

Handshake::Handshake(const JobId& job, int32_t self, const Address& own, int listener,
                     std::vector<Address> endpoints)
    : job_(job),
      self_(self),
      peers_(static_cast<int32_t>(endpoints.size())),
      own_(own),
      listener_(listener),
      endpoints_(std::move(endpoints)),
      linked_(endpoints_.size()) {
  for (int32_t peer = 0; peer < self_; ++peer) {
    calls_.emplace_back().peer = peer;
    calls_.back().pause = kFirstPause;
  }
}

std::vector<Descriptor> Handshake::run(double timeout_seconds, const std::function<void()>& interrupt) {
  const Deadline deadline{std::chrono::duration<double>(timeout_seconds)};
  std::vector<pollfd> polled;
  while (!complete()) {
    if (interrupt) interrupt();
    if (deadline.passed()) give_up(timeout_seconds);

    polled.assign(1, {listener_, POLLIN, 0});
    for (Call& call : calls_) {
      if (linked_[call.peer]) continue;
      if (!call.fd && Clock::now() >= call.next) start(call);
      if (call.fd)
        polled.push_back({call.fd.get(), static_cast<short>(call.connected ? POLLIN : POLLOUT), 0});
    }
    for (const Caller& caller : callers_) polled.push_back({caller.fd.get(), POLLIN, 0});
    // Short, so that the next attempts, the deadline and interrupts are checked in time.
    if (::poll(polled.data(), polled.size(), kPollMilliseconds) < 0 && errno != EINTR)
      throw Error(ErrorKind::unsupported, errno_text("poll of the links to rail peers"));

    // Since poll() no descriptor was closed or made, so every `fd` is found with its own result.
    const auto ready = [&](const Descriptor& fd) {
      return std::any_of(polled.begin(), polled.end(),
                         [&](const pollfd& each) { return each.fd == fd.get() && each.revents != 0; });
    };
    for (Call& call : calls_)
      if (call.fd && ready(call.fd)) advance(call);
    for (Caller& caller : callers_) {
      if (ready(caller.fd)) advance(caller);
      if (Clock::now() >= caller.until) caller.fd.reset();
    }
    std::erase_if(callers_, [](const Caller& caller) { return !caller.fd; });
    if (polled[0].revents != 0) take_callers();
  }
  return std::move(linked_);
}

bool Handshake::complete() const {
  for (int32_t peer = 0; peer < peers_; ++peer)
    if (peer != self_ && !linked_[peer]) return false;
  return true;
}

void Handshake::give_up(double timeout_seconds) const {
  int32_t first = -1, missing = 0;
  for (int32_t peer = 0; peer < peers_; ++peer) {
    if (peer == self_ || linked_[peer]) continue;
    if (first < 0) first = peer;
    ++missing;
  }
  const std::string trouble = first < self_ ? calls_[first].trouble : "it has not called";
  std::array<char, 32> seconds{};
  std::snprintf(seconds.data(), seconds.size(), "%g", timeout_seconds);
  throw Error(ErrorKind::peer_timeout,
              std::string(kPhase) + ": no link to " + peer_text(first, endpoints_[first]) +
                  (missing > 1 ? " and " + std::to_string(missing - 1) + " more" : "") + " within " +
                  seconds.data() + " s (" + (trouble.empty() ? "no answer" : trouble) +
                  "); its process has to run, and firewalls between the nodes have to let these ports pass",
              {.rank = self_, .peer = first, .phase = kPhase});
}

Hello Handshake::hello(int32_t from, int32_t to) const {
  Hello hello;
  hello.job = job_;
  hello.from = from;
  hello.to = to;
  return hello;
}

/// Sends the hello, for which a new connection has room. False if it was not sent.
bool Handshake::say_hello(const Descriptor& fd, int32_t to) const {
  const Hello own = hello(self_, to);
  return send(fd.get(), &own, sizeof(own), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(own));
}

/// Reads more of a hello; returns `wrong` as soon as the other side is certain not to be a rank of this job.
Handshake::Read Handshake::read_hello(Incoming& incoming) const {
  auto* const bytes = reinterpret_cast<std::byte*>(&incoming.hello);
  bool ended = false;
  while (incoming.received < sizeof(Hello) && !ended) {
    const ssize_t count =
        recv(incoming.fd.get(), bytes + incoming.received, sizeof(Hello) - incoming.received, 0);
    if (count > 0)
      incoming.received += count;
    else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
      break;
    else
      ended = count == 0 || errno != EINTR;
  }
  const Hello wanted = hello(0, 0);
  if (std::memcmp(bytes, &wanted, std::min(incoming.received, offsetof(Hello, from))) != 0)
    return Read::wrong;
  if (incoming.received == sizeof(Hello)) return Read::whole;
  return ended ? Read::ended : Read::more;
}

// -- calling peers with lower numbers --------------------------------------------------------------------

void Handshake::start(Call& call) {
  const Address& to = endpoints_[call.peer];
  call.received = 0;
  call.connected = false;
  call.fd =
      Descriptor::open([&] { return socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!call.fd) throw system_error("a socket for a link between nodes");
  // The kernel then chooses the port at connect(), and may take one that is in use for other destinations.
  const int on = 1;
  setsockopt(call.fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  if (bind(call.fd.get(), own_.get(), own_.length) != 0) return retry(call, errno_text("bind"));
  if (::connect(call.fd.get(), to.get(), to.length) != 0 && errno != EINPROGRESS)
    retry(call, errno_text("connect"));
}

void Handshake::retry(Call& call, const std::string& trouble) {
  call.fd.reset();
  call.trouble = trouble;
  call.next = Clock::now() + call.pause;
  call.pause = std::min<Clock::duration>(2 * call.pause, kLongestPause);
}

void Handshake::advance(Call& call) {
  if (!call.connected) {
    int failed = 0;
    socklen_t size = sizeof(failed);
    getsockopt(call.fd.get(), SOL_SOCKET, SO_ERROR, &failed, &size);
    errno = failed;
    if (failed != 0) return retry(call, errno_text("connect"));
    if (!say_hello(call.fd, call.peer)) return retry(call, errno_text("send of the hello"));
    call.connected = true;
    return;
  }
  const Read read = read_hello(call);
  if (read == Read::more) return;
  if (read == Read::ended) return retry(call, "it closed the connection without an answer");
  if (read == Read::whole && call.hello == hello(call.peer, self_)) {
    linked_[call.peer] = std::move(call.fd);
    return;
  }
  // A call to a port without a listener can connect to itself, if the kernel chooses that port for it.
  if (read == Read::whole && call.hello == hello(self_, call.peer))
    return retry(call, "the call came back to itself");
  throw Error(
      ErrorKind::mismatched_arguments,
      std::string(kPhase) + ": what answers for " + peer_text(call.peer, endpoints_[call.peer]) +
          " is not that rank of this job; another program has that port, or a proxy stands between the nodes",
      {.rank = self_, .peer = call.peer, .phase = kPhase});
}

// -- called by peers with higher numbers -----------------------------------------------------------------

void Handshake::take_callers() {
  for (;;) {
    Descriptor fd =
        Descriptor::open([&] { return accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (!fd) {
      if (errno == EINTR) continue;
      if (errno != EMFILE && errno != ENFILE) return;  // no caller is left, or the caller has already gone
      if (callers_.empty()) throw system_error("accept of a link");
      callers_.erase(callers_.begin());
      return;
    }
    if (callers_.size() >= kStrangers + static_cast<size_t>(peers_)) callers_.erase(callers_.begin());
    Caller& caller = callers_.emplace_back();
    caller.fd = std::move(fd);
    caller.until = Clock::now() + kHelloTime;
  }
}

void Handshake::advance(Caller& caller) {
  const Read read = read_hello(caller);
  if (read == Read::more) return;
  const int32_t from = caller.hello.from;
  const bool expected = read == Read::whole && caller.hello.to == self_ && from > self_ && from < peers_;
  // A peer whose call ended before the answer came calls again.
  if (expected && !linked_[from] && say_hello(caller.fd, from)) linked_[from] = std::move(caller.fd);
  caller.fd.reset();
}

}  // namespace moecomm::tcp
