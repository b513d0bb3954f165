#include "transport/tcp/handshake.hpp"

#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <span>
#include <string_view>

#include "common/error.hpp"

namespace moecomm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr int kPollMilliseconds = 50;
// A caller says who it is within this time, or makes room. A peer that was too slow calls again.
constexpr auto kHelloTime = 2s;
// Callers that may be silent at the same time, besides the peers; past it the oldest makes room.
constexpr size_t kStrangers = 64;
constexpr auto kFirstPause = 20ms, kLongestPause = 1000ms;

constexpr const char* kPhase = "construction: links";
constexpr std::string_view kWordsForStrangers = "moecomm: refused, this is no rank of the job\n";

std::string system_text(const char* call, int number) {
  errno = number;
  return errno_text(call);
}

}  // namespace

Handshake::Handshake(const JobId& job, int32_t self, const Address& own, int listener,
                     std::vector<Address> endpoints, std::atomic<int64_t>& refused)
    : job_(job),
      self_(self),
      peers_(static_cast<int32_t>(endpoints.size())),
      own_(own),
      listener_(listener),
      endpoints_(std::move(endpoints)),
      refused_(refused),
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
    // Short, so that the next attempts, the deadline and interrupts are looked at in time.
    if (::poll(polled.data(), polled.size(), kPollMilliseconds) < 0 && errno != EINTR)
      throw Error(ErrorKind::unsupported, errno_text("poll of the links to rail peers"));

    // Descriptors are not closed and made anew between here and poll(), so each finds its own result.
    const auto ready = [&](const Descriptor& fd) {
      return std::any_of(polled.begin(), polled.end(),
                         [&](const pollfd& each) { return each.fd == fd.get() && each.revents != 0; });
    };
    for (Call& call : calls_)
      if (call.fd && ready(call.fd)) advance(call);
    for (Caller& caller : callers_) {
      if (ready(caller.fd)) advance(caller);
      if (!caller.fd || Clock::now() < caller.until) continue;
      if (!caller.refused) turn_away(caller, kWordsForStrangers.data(), kWordsForStrangers.size());
      caller.fd.reset();
    }
    std::erase_if(callers_, [](const Caller& caller) { return !caller.fd; });
    if (polled[0].revents != 0) take_callers();
  }
  for (Caller& caller : callers_)
    if (!caller.refused) turn_away(caller, kWordsForStrangers.data(), kWordsForStrangers.size());
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
  ErrorDetails details;
  details.rank = self_;
  details.peer = first;
  details.phase = kPhase;
  throw Error(ErrorKind::peer_timeout,
              std::string(kPhase) + ": no link to " + name(first) +
                  (missing > 1 ? " and " + std::to_string(missing - 1) + " more" : "") + " within " +
                  seconds.data() + " s (" + (trouble.empty() ? "no answer" : trouble) +
                  "); its process has to run, and firewalls between the nodes have to let these ports pass",
              details);
}

std::string Handshake::name(int32_t peer) const {
  return "peer " + std::to_string(peer) + " (" + endpoint_text(endpoints_[peer]) + ")";
}

// -- calling the peers below -----------------------------------------------------------------------------

void Handshake::start(Call& call) {
  const Address& to = endpoints_[call.peer];
  call.received = 0;
  call.connected = false;
  call.fd =
      Descriptor::open([&] { return socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!call.fd) throw system_error("a socket for a link between nodes");
  // The kernel finds a free port when it connects: it may then be in use for other destinations.
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
  if (call.connected) return read_answer(call);
  int failed = 0;
  socklen_t size = sizeof(failed);
  getsockopt(call.fd.get(), SOL_SOCKET, SO_ERROR, &failed, &size);
  if (failed != 0) return retry(call, system_text("connect", failed));
  Hello hello;
  hello.job = job_;
  hello.from = self_;
  hello.to = call.peer;
  hello.peers = peers_;
  const HelloBytes bytes = encode(hello);
  // A new connection has room for it.
  if (send(call.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(bytes.size()))
    return retry(call, errno_text("send of the hello"));
  call.connected = true;
}

void Handshake::read_answer(Call& call) {
  while (call.received < kHelloBytes) {
    const ssize_t count = recv(call.fd.get(), &call.answer[call.received], kHelloBytes - call.received, 0);
    if (count > 0) {
      call.received += static_cast<size_t>(count);
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    // A refusal of another version may be shorter; what it begins with is judged below.
    if (judge({call.answer.data(), call.received}) == Opening::incomplete)
      return retry(call, count == 0 ? "it closed the connection without an answer" : errno_text("recv"));
    break;
  }
  const auto mismatch = [&](const std::string& text) {
    ErrorDetails details;
    details.rank = self_;
    details.peer = call.peer;
    details.phase = kPhase;
    throw Error(ErrorKind::mismatched_arguments, std::string(kPhase) + ": " + text, details);
  };
  const std::span<const std::byte> received(call.answer.data(), call.received);
  switch (judge(received)) {
    case Opening::incomplete:
      return;
    case Opening::not_moecomm:
      mismatch("what answers for " + name(call.peer) +
               " is not moecomm; another program has that port, or a proxy stands between the nodes");
      return;
    case Opening::other_version:
      mismatch("refused by " + name(call.peer) + ": " + refusal_text(Answer::other_version, 0, 0) +
               " (its links have version " + std::to_string(opening_version(received)) + ", those here " +
               std::to_string(kLinkVersion) + ")");
      return;
    case Opening::whole:
      break;
  }
  const Hello answer = decode_hello(call.answer);
  // A call to a port that nobody listens on can meet itself, where the kernel chooses that port for it.
  if (answer.answer == Answer::hello) return retry(call, "the call came back to itself");
  if (answer.answer != Answer::accepted)
    mismatch("refused by " + name(call.peer) + ": " + refusal_text(answer.answer, self_, call.peer));
  if (answer.job != job_) mismatch(name(call.peer) + " is of another job");
  if (answer.from != call.peer || answer.to != self_ || answer.peers != peers_)
    mismatch("as " + name(call.peer) + " answers peer " + std::to_string(answer.from) + " of " +
             std::to_string(answer.peers) + "; ranks do not agree on nodes and rank order");
  linked_[call.peer] = std::move(call.fd);
}

// -- called by the peers above ---------------------------------------------------------------------------

void Handshake::take_callers() {
  for (;;) {
    Descriptor fd =
        Descriptor::open([&] { return accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (!fd) {
      if (errno == EINTR) continue;
      if (errno != EMFILE && errno != ENFILE) return;  // nobody is left, or that one has gone already
      const std::string text = errno_text("accept of a link");
      if (callers_.empty())
        throw Error(ErrorKind::out_of_memory, text + "; raise the limit of open files (ulimit -n)");
      ++refused_;
      callers_.erase(callers_.begin());
      return;
    }
    if (callers_.size() >= kStrangers + static_cast<size_t>(peers_)) {
      if (!callers_.front().refused) ++refused_;
      callers_.erase(callers_.begin());
    }
    Caller& caller = callers_.emplace_back();
    caller.fd = std::move(fd);
    caller.until = Clock::now() + kHelloTime;
  }
}

void Handshake::advance(Caller& caller) {
  while (
      caller.refused) {  // reads on until the caller closes: a refusal that meets unread bytes can get lost
    std::array<std::byte, 4096> ignored;
    const ssize_t count = recv(caller.fd.get(), ignored.data(), ignored.size(), 0);
    if (count > 0 || (count < 0 && errno == EINTR)) continue;
    if (count == 0 || (errno != EAGAIN && errno != EWOULDBLOCK)) caller.fd.reset();
    return;
  }
  bool ended = false;
  while (caller.received < kHelloBytes && !ended) {
    const ssize_t count =
        recv(caller.fd.get(), &caller.hello[caller.received], kHelloBytes - caller.received, 0);
    if (count > 0)
      caller.received += static_cast<size_t>(count);
    else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
      break;
    else
      ended = count == 0 || errno != EINTR;
  }
  judge_hello(caller);
  if (!ended || caller.refused) return;
  ++refused_;
  caller.fd.reset();
}

void Handshake::judge_hello(Caller& caller) {
  switch (judge({caller.hello.data(), caller.received})) {
    case Opening::incomplete:
      return;
    case Opening::not_moecomm:
      return turn_away(caller, kWordsForStrangers.data(), kWordsForStrangers.size());
    case Opening::other_version:
      return refuse(caller, Answer::other_version);
    case Opening::whole:
      break;
  }
  const Hello hello = decode_hello(caller.hello);
  if (hello.answer != Answer::hello)
    return turn_away(caller, kWordsForStrangers.data(), kWordsForStrangers.size());
  if (hello.job != job_) return refuse(caller, Answer::other_job);
  if (hello.to != self_ || hello.from <= self_ || hello.from >= peers_ || hello.peers != peers_)
    return refuse(caller, Answer::other_index);
  if (linked_[hello.from]) return refuse(caller, Answer::duplicate);
  Hello answer;
  answer.answer = Answer::accepted;
  answer.job = job_;
  answer.from = self_;
  answer.to = hello.from;
  answer.peers = peers_;
  const HelloBytes bytes = encode(answer);
  if (send(caller.fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()))
    linked_[hello.from] = std::move(caller.fd);
  else
    caller.fd.reset();  // it has gone again; a peer calls anew
}

void Handshake::refuse(Caller& caller, Answer answer) {
  Hello refusal;
  refusal.answer = answer;
  const HelloBytes bytes = encode(refusal);
  turn_away(caller, bytes.data(), bytes.size());
}

void Handshake::turn_away(Caller& caller, const void* words, size_t size) {
  ++refused_;
  caller.refused = true;
  // The caller may have gone already; then nobody misses the words.
  (void)!send(caller.fd.get(), words, size, MSG_NOSIGNAL);
  shutdown(caller.fd.get(), SHUT_WR);
}

}  // namespace moecomm::tcp
