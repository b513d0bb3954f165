#include "transport/tcp/links.hpp"

#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <thread>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "transport/network_interface.hpp"

namespace moecomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr double kDestructorSeconds = 1.0;
constexpr size_t kEventsPerPoll = 64;

void set(int fd, int level, int option, unsigned value, const char* what) {
  if (setsockopt(fd, level, option, &value, sizeof(value)) != 0)
    throw Error(ErrorKind::unsupported, errno_text(what));
}

/// Makes the kernel send at once, and end the link when the other host has been silent for this long. If no
/// bytes are in flight, the kernel notices silence by probes.
void set_up(int fd, double silence_seconds) {
  const auto seconds = static_cast<unsigned>(std::ceil(silence_seconds));
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1, "setsockopt TCP_NODELAY");
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1, "setsockopt SO_KEEPALIVE");
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, std::max(1u, seconds / 3), "setsockopt TCP_KEEPIDLE");
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, std::max(1u, seconds / 6), "setsockopt TCP_KEEPINTVL");
  // TCP_USER_TIMEOUT also limits probing, so the number of probes does not matter.
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 1000 * seconds, "setsockopt TCP_USER_TIMEOUT");
}

const LinkOptions& checked(const LinkOptions& options) {
  if (options.peers < 1 || options.self < 0 || options.self >= options.peers)
    throw Error(ErrorKind::invalid_argument,
                text_of("peer ", options.self, " of ", options.peers, " does not exist"));
  // kLongestSilence is the most that the kernel accepts for TCP_KEEPIDLE.
  if (!(options.silence_seconds > 0 && options.silence_seconds <= kLongestSilence))
    throw Error(ErrorKind::invalid_argument, text_of("silence_seconds is ", options.silence_seconds,
                                                     ", expected more than 0 and at most 32767"));
  return options;
}

}  // namespace

Links::Links(const LinkOptions& options)
    : options_(checked(options)),
      generation_(Descriptor::current_generation()),
      own_(make_address(interface_address(options.interface), "0")),
      links_(options.peers) {
  const std::string where = endpoint_text(own_);
  const auto require = [&](bool holds, const char* call) {
    if (!holds) throw system_error(("links between nodes, listening on " + where + ": " + call).c_str());
  };
  listener_ =
      Descriptor::open([&] { return socket(own_.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  require(static_cast<bool>(listener_), "socket");
  require(bind(listener_.get(), own_.get(), own_.length) == 0, "bind");
  require(listen(listener_.get(), SOMAXCONN) == 0, "listen");
  Address bound;
  bound.length = sizeof(bound.storage);
  require(getsockname(listener_.get(), bound.get(), &bound.length) == 0, "getsockname");
  endpoint_ = endpoint_text(bound);
  epoll_ = Descriptor::open([] { return epoll_create1(EPOLL_CLOEXEC); });
  require(static_cast<bool>(epoll_), "epoll_create1");
}

Links::~Links() { close(kDestructorSeconds); }

void Links::connect(const std::vector<std::string>& endpoints, double timeout_seconds,
                    const std::function<void()>& interrupt) {
  if (!listener_)
    throw Error(ErrorKind::closed, "links: connect() was called before, or this process is a forked child");
  if (endpoints.size() != links_.size())
    throw Error(ErrorKind::invalid_argument,
                text_of("links: ", endpoints.size(), " endpoints, expected ", links_.size()));
  for (size_t peer = 0; peer < endpoints.size(); ++peer) {
    const std::string what = text_of("endpoint of peer ", peer);
    addresses_.push_back(parse_endpoint(what, endpoints[peer]));
    if (addresses_.back().family() != own_.family())
      throw Error(ErrorKind::invalid_argument,
                  what + " is " + endpoints[peer] + ", and this rank is at " + endpoint_ +
                      ": choose interfaces with addresses of one kind, IPv4 or IPv6, on all nodes");
    if (is_loopback(ip_text(addresses_.back().get())) != is_loopback(ip_text(own_.get()))) {
      throw Error(ErrorKind::mismatched_arguments,
                  what + " is " + endpoints[peer] + ", and this rank is at " + endpoint_ +
                      ": only its own host reaches a loopback address; set MOECOMM_FABRIC_INTERFACE to an "
                      "interface that is up and that the other nodes reach",
                  {.peer = static_cast<int32_t>(peer)});
    }
  }
  if (endpoints[options_.self] != endpoint_)
    throw Error(ErrorKind::invalid_argument,
                text_of("endpoint of peer ", options_.self, " is ", endpoints[options_.self],
                        ", expected this rank's own, ", endpoint_));
  // Listening ends here, also after an error.
  const Descriptor listener = std::move(listener_);
  Handshake meeting(options_.job, options_.self, own_, listener.get(), addresses_);
  std::vector<Descriptor> linked = meeting.run(timeout_seconds, interrupt);
  for (int32_t peer = 0; peer < options_.peers; ++peer) {
    if (peer == options_.self) continue;
    Link& link = links_[peer];
    set_up(linked[peer].get(), options_.silence_seconds);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u32 = static_cast<uint32_t>(peer);
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, linked[peer].get(), &event) != 0)
      throw Error(ErrorKind::unsupported, errno_text("epoll_ctl"));
    const std::lock_guard lock(link.mutex);
    link.fd = std::move(linked[peer]);
  }
}

// -- messages --------------------------------------------------------------------------------------------

void Links::send(int32_t peer, const LinkMessage& message) noexcept {
  assert(peer >= 0 && peer < options_.peers && peer != options_.self);
  if (inherited()) return;
  Link& link = links_[peer];
  const std::lock_guard lock(link.mutex);
  if (!link.fd || link.error != 0) return;
  // A socket has room for all messages of a run. If it is full, the peer reads none, and will not read this.
  ssize_t count;
  do {
    count = ::send(link.fd.get(), &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  if (count != static_cast<ssize_t>(sizeof(message))) stop_sending(link, count < 0 ? errno : ENOBUFS);
}

// What the peer sent before it ended still has to be read. So this marks the link, and receive() ends it.
void Links::stop_sending(Link& link, int error) noexcept {
  link.error = error;
  shutdown(link.fd.get(), SHUT_RDWR);
}

void Links::poll(std::vector<LinkEvent>& events) {
  if (!epoll_) return;
  std::array<epoll_event, kEventsPerPoll> ready;
  const int count = epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), 0);
  for (int i = 0; i < count; ++i) receive(static_cast<int32_t>(ready[i].data.u32), events);
}

// Reads one message at a time, so that a peer that sends much does not delay the others.
void Links::receive(int32_t peer, std::vector<LinkEvent>& events) {
  Link& link = links_[peer];
  auto* const bytes = reinterpret_cast<std::byte*>(&link.incoming);
  const ssize_t count =
      recv(link.fd.get(), bytes + link.received, sizeof(LinkMessage) - link.received, MSG_DONTWAIT);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  if (count <= 0) {
    const int failed = count < 0 ? errno : 0;
    int sending;
    {
      const std::lock_guard lock(link.mutex);
      sending = link.error;
    }
    if (failed == 0 && sending == 0)
      return drop(peer, "its process has ended, or it has closed its communicator", events);
    errno = failed != 0 ? failed : sending;
    return drop(peer, "the link broke (" + errno_text(failed != 0 ? "recv" : "send") + ")", events);
  }
  link.received += count;
  if (link.received < sizeof(LinkMessage)) return;
  link.received = 0;
  if (link.incoming.mark != LinkMessage().mark)
    return drop(peer, "it sent bytes that are no message", events);
  events.push_back({LinkEvent::Kind::message, peer, link.incoming, {}});
}

void Links::drop(int32_t peer, const std::string& why, std::vector<LinkEvent>& events) {
  events.push_back({LinkEvent::Kind::lost, peer, {}, peer_text(peer, addresses_[peer]) + ": " + why});
  Link& link = links_[peer];
  const std::lock_guard lock(link.mutex);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, link.fd.get(), nullptr);
  link.fd.reset();
}

// -- the end ---------------------------------------------------------------------------------------------

// True when the peer's host has received everything, or never will. A call reads only once, so that a peer
// that sends without end does not keep close() from its deadline.
bool Links::settled(Link& link) noexcept {
  if (!link.fd || link.error != 0) return true;
  // Unread bytes would turn the close into a reset, which can overtake what was sent.
  std::array<std::byte, 1 << 16> ignored;
  const ssize_t count = recv(link.fd.get(), ignored.data(), ignored.size(), MSG_DONTWAIT);
  if (count > 0 || (count < 0 && errno == EINTR)) return false;
  if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) return true;
  int unacknowledged = 0;
  return ioctl(link.fd.get(), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0;
}

void Links::cut() noexcept {
  if (inherited()) return;
  for (Link& link : links_) {
    const std::lock_guard lock(link.mutex);
    if (link.fd && link.error == 0) stop_sending(link, ECANCELED);
  }
}

void Links::close(double timeout_seconds) noexcept {
  if (inherited()) return;
  const Deadline deadline{std::chrono::duration<double>(timeout_seconds)};
  for (;;) {
    bool all = true;
    for (Link& link : links_) {
      const std::lock_guard lock(link.mutex);
      all = settled(link) && all;
    }
    if (all || deadline.passed()) break;
    std::this_thread::sleep_for(200us);
  }
  for (Link& link : links_) {
    const std::lock_guard lock(link.mutex);
    if (!link.fd) continue;
    shutdown(link.fd.get(), SHUT_WR);
    link.fd.reset();
  }
  listener_.reset();
  epoll_.reset();
}

}  // namespace moecomm::tcp
