// Control links between rail peers: what travels, who is let in, and how the end of a peer is noticed. Peers
// are objects of one process, threads, or forked processes.
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "rail.hpp"
#include "transport/network_interface.hpp"

using namespace moecomm;
using namespace moecomm::tcp;
using namespace moecomm::tcp::test_rail;
using test::throws;

std::atomic<int> endless = 0;  // above 0: so many times every socket has more to read
extern "C" ssize_t recv(int fd, void* to, size_t bytes, int flags) {
  return endless > 0 && --endless > 0 ? bytes : recvfrom(fd, to, bytes, flags, nullptr, nullptr);
}

namespace {

int open_descriptors() {
  DIR* directory = opendir("/proc/self/fd");
  int count = -1;  // its own
  while (const dirent* entry = readdir(directory)) count += entry->d_name[0] != '.';
  closedir(directory);
  return count;
}

const int descriptors_before = open_descriptors();

// -- processes, first, while there are no other threads -------------------------------------------------

void say_byte(int fd) { CHECK(write(fd, "x", 1) == 1); }
void wait_byte(int fd) {
  pollfd polled{fd, POLLIN, 0};
  char byte;
  CHECK(::poll(&polled, 1, static_cast<int>(kLong * 1000)) == 1 && read(fd, &byte, 1) == 1);
}

// Peer 2 is a process of its own that has forked a worker in its turn; it is killed, the worker lives on.
TEST(killed_process) {
  const JobId job = random_job();
  std::array<int, 2> up, down;  // from and to the process
  CHECK(pipe2(up.data(), O_CLOEXEC) == 0 && pipe2(down.data(), O_CLOEXEC) == 0);
  Links first({job, 0, 3, kHere}), second({job, 1, 3, kHere});
  std::array<char, 64> name{};
  const pid_t child = test::fork_off(kLong, [&] {
    Links own({job, 2, 3, kHere});
    std::snprintf(name.data(), name.size(), "%s", own.endpoint().c_str());
    CHECK(write(up[1], name.data(), name.size()) == static_cast<ssize_t>(name.size()));
    own.connect({first.endpoint(), second.endpoint(), own.endpoint()}, kLong);
    own.send(0, {1, 0, 0, 0});
    const pid_t worker = fork();
    if (worker == 0) {  // holds what it inherited until the test ends
      own.send(0, {99, 0, 0, 0});
      std::vector<LinkEvent> events;
      own.poll(events);
      say_byte(up[1]);
      wait_byte(down[0]);
      _exit(0);
    }
    for (;;) pause();
  });
  CHECK(read(up[0], name.data(), name.size()) == static_cast<ssize_t>(name.size()));
  const std::vector<std::string> endpoints{first.endpoint(), second.endpoint(), name.data()};
  // Threads would be in the way of the sanitizer when it sees a fork; the second peer connects from another.
  std::thread connecting([&] { second.connect(endpoints, kLong); });
  first.connect(endpoints, kLong);
  connecting.join();
  std::vector<LinkEvent> events = take(first, 1);
  CHECK(events.size() == 1 && events[0].message.kind == 1);
  wait_byte(up[0]);  // the worker is there, and has not sent what it tried to
  first.poll(events);
  CHECK(events.size() == 1);
  kill(child, SIGKILL);
  CHECK(is_lost(take(first, 1)[0], 2, name.data()));
  CHECK(is_lost(take(second, 1)[0], 2, "peer 2"));
  events.clear();
  first.send(2, {2, 0, 0, 0});
  first.poll(events);
  CHECK(events.empty());  // told once
  first.send(1, {3, 0, 1, 0});
  CHECK(take(second, 1)[0].message.kind == 3);
  say_byte(down[1]);
  CHECK(waitpid(child, nullptr, 0) == child);
  for (const int fd : {up[0], up[1], down[0], down[1]}) close(fd);
}

// A forked child may destroy what it inherited, and make links of its own; the parent's stay as they are.
TEST(forked_child) {
  auto rail = std::make_unique<Rail>(2);
  rail->connect();
  rail->links[0]->send(1, {1, 0, 0, 0});
  const pid_t child = test::fork_off(kLong, [&] {
    std::vector<LinkEvent> events;
    rail->links[1]->poll(events);
    CHECK(events.empty());
    CHECK(
        throws(ErrorKind::closed, "forked child", [&] { rail->links[0]->connect(rail->endpoints, kLong); }));
    rail->links[0]->close(kLong);
    // Numbers that the child uses anew do not belong to the inherited objects.
    std::array<int, 2> ends;
    CHECK(pipe(ends.data()) == 0);
    rail.reset();
    CHECK(fcntl(ends[0], F_GETFD) >= 0 && fcntl(ends[1], F_GETFD) >= 0);
    Links own({random_job(), 0, 1, kHere});
    own.connect({own.endpoint()}, kLong);
  });
  CHECK(test::status_of(child) == 0);
  rail->links[0]->send(1, {2, 0, 0, 0});
  const std::vector<LinkEvent> events = take(*rail->links[1], 2);
  CHECK(events.size() == 2 && events[0].message.kind == 1 && events[1].message.kind == 2);
  std::vector<LinkEvent> none;
  rail->links[0]->poll(none);
  CHECK(none.empty());
}

// -- messages --------------------------------------------------------------------------------------------

// All send to all, from two threads each, while all poll.
void exchange_messages(int32_t peers, const std::string& interface) {
  constexpr int kSenders = 2;
  constexpr uint64_t kMessages = 200;
  Rail rail(peers, interface);
  rail.connect();
  std::atomic<int> wrong{0};
  test::at_once(peers * (kSenders + 1), [&](int number) {
    const int32_t self = number % peers, sender = number / peers;
    if (sender < kSenders) {
      for (uint64_t i = 0; i < kMessages; ++i)
        for (int32_t peer = 0; peer < peers; ++peer)
          if (peer != self)
            rail.links[self]->send(peer, {static_cast<uint32_t>(sender), self, peer, i << 32 | i});
      return;
    }
    std::vector<std::array<uint64_t, kSenders>> next(peers);
    size_t received = 0;
    std::vector<LinkEvent> events;
    wrong += !eventually([&] {
      events.clear();
      rail.links[self]->poll(events);
      for (const LinkEvent& event : events) {
        const LinkMessage& message = event.message;
        if (event.kind != LinkEvent::Kind::message || message.kind >= kSenders) {
          ++wrong;
          continue;
        }
        const uint64_t expected = next[event.peer][message.kind]++;
        wrong += message.a != event.peer || message.b != self || message.value != (expected << 32 | expected);
      }
      received += events.size();
      return received >= (peers - 1) * kSenders * kMessages;
    });
  });
  CHECK(wrong == 0);
  std::vector<LinkEvent> more;
  for (const auto& each : rail.links) each->poll(more);
  CHECK(more.empty());
}

TEST(messages) {
  for (const int32_t peers : {2, 3, 5}) exchange_messages(peers, kHere);
  const std::vector<InterfaceAddress> host = host_addresses();
  if (std::any_of(host.begin(), host.end(), [](const auto& each) { return each.address == "::1"; }))
    exchange_messages(2, "::1");
  else
    std::printf("no IPv6 on this host: links over it are not tested\n");
}

// One thread does all: a send() that blocked would never come back. Who reads nothing at all is lost in the
// end.
TEST(slow_reader) {
  Rail rail(2);
  rail.connect();
  constexpr uint64_t kMessages = 100;
  for (uint64_t i = 0; i < kMessages; ++i) rail.links[0]->send(1, {7, 0, 1, i});
  uint64_t next = 0;
  for (const LinkEvent& event : take(*rail.links[1], kMessages))
    CHECK(event.kind == LinkEvent::Kind::message && event.message == LinkMessage(7, 0, 1, next++));
  for (uint64_t i = 0; i < 1'000'000; ++i)
    rail.links[0]->send(1, {8, 0, 1, i});  // more bytes than sockets take
  CHECK(is_lost(take(*rail.links[0], 1)[0], 1, "the link broke"));
}

// What was sent before the end arrives, also where the one that ends has not read what was sent to it.
TEST(close_loses_nothing) {
  for (const uint64_t messages : {0, 1, 100}) {
    Rail rail(3);
    rail.connect();
    for (uint64_t i = 0; i < messages; ++i) {
      rail.links[0]->send(2, {1, 0, 2, i});
      if (i < 100) rail.links[2]->send(0, {2, 2, 0, i});
    }
    std::thread closing([&] { rail.links[0]->close(kLong); });
    uint64_t next = 0;
    bool right = true, ended = false;
    std::vector<LinkEvent> events;
    CHECK(eventually([&] {
      events.clear();
      rail.links[2]->poll(events);
      for (const LinkEvent& event : events) {
        right &= !ended;
        if (event.kind == LinkEvent::Kind::lost)
          ended = is_lost(event, 0, rail.endpoints[0]);
        else
          right &= event.message == LinkMessage{1, 0, 2, next++};
      }
      return ended;
    }));
    closing.join();
    CHECK(right && next == messages);
    rail.links[0]->send(2, {3, 0, 2, 0});  // dropped
    rail.links[2]->send(0, {3, 2, 0, 0});
    rail.links[0]->poll(events);
    CHECK(is_lost(take(*rail.links[1], 1)[0], 0, "closed its communicator"));
    rail.links[1]->send(2, {4, 1, 2, 5});  // the others go on
    const std::vector<LinkEvent> after = take(*rail.links[2], 1);
    CHECK(after.size() == 1 && after[0].peer == 1 && after[0].message == (LinkMessage{4, 1, 2, 5}));
  }
}

// Bytes that never end do not hold it up past its deadline.
TEST(close_while_a_peer_sends) {
  Rail rail(2);
  rail.connect();
  endless = 100'000'000;
  rail.links[0]->close(0.2);
  CHECK(endless.exchange(0) > 0);
}

// Also where the reader still sends to the one that has ended, and so breaks the link, before it reads.
TEST(reading_after_a_break) {
  constexpr uint64_t kMessages = 100;
  Rail rail(2);
  rail.connect();
  for (uint64_t i = 0; i < kMessages; ++i) rail.links[0]->send(1, {1, 0, 1, i});
  rail.links[0]->close(kLong);
  for (int i = 0; i < 10; ++i) rail.links[1]->send(0, {2, 1, 0, 0});
  std::vector<LinkEvent> events = take(*rail.links[1], kMessages);
  while (events.back().kind != LinkEvent::Kind::lost) events.push_back(take(*rail.links[1], 1)[0]);
  CHECK(events.size() == kMessages + 1 && is_lost(events.back(), 0, "peer 0"));
  for (uint64_t i = 0; i < kMessages; ++i) CHECK(events[i].message == (LinkMessage{1, 0, 1, i}));
}

// -- who is let in ---------------------------------------------------------------------------------------

TEST(strays) {
  const JobId job = random_job(), other = random_job();
  Rail rail(4, kHere, job);
  rail.links.pop_back();  // the test is peer 3
  Links& first = *rail.links[0];
  std::thread connecting([&] { first.connect(rail.endpoints, kLong); });

  Raw peer3(rail.endpoints[0]);
  const HelloBytes good = hello_of(job, 3, 0);
  peer3.say(good);
  const Hello answer = peer3.hello();
  CHECK(answer.job == job && answer.from == 0 && answer.to == 3);

  Raw silent(rail.endpoints[0]), half(rail.endpoints[0]);
  half.say(good, 20);
  const auto refused = [&](const auto& words, size_t size) {
    Raw raw(rail.endpoints[0]);
    raw.say(words, size);
    return raw.refused();
  };
  std::mt19937_64 random(test::seed());
  std::array<unsigned char, 3000> garbage;
  for (unsigned char& each : garbage) each = static_cast<unsigned char>(random() | 0x80);
  CHECK(refused(garbage, garbage.size()));
  CHECK(refused(garbage, 1));
  const std::string http = "GET / HTTP/1.1\r\nHost: " + rail.endpoints[0] + "\r\n\r\n";
  CHECK(refused(http, http.size()));
  CHECK(refused(hello_of(other, 1, 0), sizeof(Hello)));
  CHECK(refused(hello_of(JobId{}, 1, 0), sizeof(Hello)));
  for (const int32_t from : {0, -1, 4, 1 << 30, -1 << 30})
    CHECK(refused(hello_of(job, from, 0), sizeof(Hello)));
  CHECK(refused(hello_of(job, 1, 2), sizeof(Hello)));
  CHECK(refused(good, sizeof(Hello)));  // of a peer that is there already
  {
    Raw(rail.endpoints[0]).say(good, 30);
  }  // and gone again
  CHECK(silent.refused());  // in the end
  CHECK(half.refused());
  Raw late(rail.endpoints[0]);  // silent until all are there

  std::vector<std::jthread> others;
  for (const int peer : {1, 2})
    others.emplace_back([&, peer] { rail.links[peer]->connect(rail.endpoints, kLong); });
  Raw to1(rail.endpoints[1]), to2(rail.endpoints[2]);
  to1.say(hello_of(job, 3, 1));
  to2.say(hello_of(job, 3, 2));
  connecting.join();
  others.clear();
  CHECK(late.refused());

  // Nobody listens any more, and the links work.
  const Address gone = parse_endpoint("endpoint", rail.endpoints[0]);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(connect(fd, gone.get(), gone.length) != 0 && errno == ECONNREFUSED);
  close(fd);
  rail.links[1]->send(0, {5, 1, 0, 6});
  const MessageBytes message = bytes_of(LinkMessage{6, 3, 0, 7});
  std::vector<LinkEvent> events = take(first, 1);
  CHECK(events.size() == 1 && events[0].peer == 1 && events[0].message == (LinkMessage{5, 1, 0, 6}));
  for (const std::byte each : message) peer3.say(std::array{each});  // in pieces
  events = take(first, 1);
  CHECK(events.size() == 1 && events[0].peer == 3 && events[0].message == (LinkMessage{6, 3, 0, 7}));

  // What is no message ends the link; so does an end within one.
  MessageBytes two = message;
  two[offsetof(LinkMessage, mark)] = std::byte{0};
  peer3.say(message);
  peer3.say(two);
  events = take(first, 2);
  CHECK(events.size() == 2 && events[0].message == (LinkMessage{6, 3, 0, 7}) &&
        is_lost(events[1], 3, "no message"));
  CHECK(to1.hello().job == job);
  to1.say(message, 11);
  {
    const Raw ended = std::move(to1);
  }
  CHECK(is_lost(take(*rail.links[1], 1)[0], 3, "process has ended"));
}

TEST(many_silent_strays) {
  Rail rail(2);
  std::vector<Raw> silent;
  std::thread connecting([&] { rail.links[0]->connect(rail.endpoints, kLong); });
  for (int i = 0; i < 200; ++i) silent.emplace_back(rail.endpoints[0]);
  CHECK(silent.front().refused());
  rail.links[1]->connect(rail.endpoints, kLong);
  connecting.join();
  rail.links[1]->send(0, {1, 2, 3, 4});
  CHECK(take(*rail.links[0], 1)[0].message == (LinkMessage{1, 2, 3, 4}));
}

/// Peer 1 of two, and peer 0, which answers as the test says.
struct Answered {
  template <class Answer>
  explicit Answered(const Answer& answer) : answering([this, answer] { answer(listener, job); }) {}
  void connect() { links.connect({listener.endpoint, links.endpoint()}, kLong); }

  const JobId job = random_job();
  RawListener listener;
  Links links{{job, 1, 2, kHere}};
  std::jthread answering;
};

// The side that calls does not trust what answers it.
TEST(answers) {
  const auto call = [](const auto& bytes_of_job) {
    Answered peer([&](RawListener& listener, const JobId& job) {
      Raw raw = listener.accept();
      raw.hello();
      raw.say(bytes_of_job(job));
      raw.rest();
    });
    const bool thrown =
        throws(ErrorKind::mismatched_arguments, "is not that rank of this job", [&] { peer.connect(); });
    CHECK(throws(ErrorKind::closed, "called before", [&] { peer.connect(); }));
    return thrown;
  };
  CHECK(call([](const JobId&) { return std::string("SSH-2.0-OpenSSH_9.2\r\n"); }));
  CHECK(call([](const JobId&) { return hello_of(random_job(), 0, 1); }));
  CHECK(call([](const JobId& job) { return hello_of(job, 5, 1); }));
  CHECK(call([](const JobId& job) { return hello_of(job, 0, 0); }));

  // A connection that ends without an answer, or with half of one, is tried again.
  Answered peer([](RawListener& listener, const JobId& job) {
    {
      listener.accept();
    }
    {
      Raw raw = listener.accept();
      raw.hello();
      raw.say(hello_of(job, 0, 1), 12);
    }
    Raw raw = listener.accept();
    raw.hello();
    raw.say(hello_of(job, 0, 1));
    raw.say(bytes_of(LinkMessage{1, 2, 3, 4}));
    raw.rest();
  });
  peer.connect();
  CHECK(take(peer.links, 1)[0].message == (LinkMessage{1, 2, 3, 4}));
  peer.links.close(kLong);
}

TEST(missing) {
  const auto missing = [](Links& links, const std::vector<std::string>& endpoints, int peer,
                          const std::string& part) {
    const Error error = test::error_of([&] { links.connect(endpoints, 0.3); });
    const std::string name = "peer " + std::to_string(peer) + " (" + endpoints[peer] + ")";
    std::printf("%s\n", error.what());
    return error.kind() == ErrorKind::peer_timeout && error.details().peer == peer &&
           test::has(error.what(), name) && test::has(error.what(), part);
  };
  {
    Rail rail(3);
    CHECK(missing(*rail.links[0], rail.endpoints, 1, "and 1 more within 0.3 s (it has not called)"));
  }
  {
    Rail rail(3);  // peer 1 is not there
    std::jthread first([&] { CHECK(missing(*rail.links[0], rail.endpoints, 1, "it has not called")); });
    CHECK(missing(*rail.links[2], rail.endpoints, 1, "no answer"));  // its listener is there, nobody accepts
  }
  {
    Rail rail(2);
    {
      Links gone(std::move(LinkOptions{random_job(), 0, 2, kHere}));
      rail.endpoints[0] = gone.endpoint();
    }
    CHECK(missing(*rail.links[1], rail.endpoints, 0, "Connection refused"));
  }
  // An interrupt ends the wait with its own exception.
  Rail rail(2);
  int calls = 0;
  bool thrown = false;
  try {
    rail.links[0]->connect(rail.endpoints, kLong, [&] {
      if (++calls == 3) throw std::string("enough");
    });
  } catch (const std::string& text) {
    thrown = text == "enough";
  }
  CHECK(thrown);
}

TEST(arguments) {
  const JobId job = random_job();
  for (const auto& [self, peers] : {std::pair{0, 0}, {-1, 2}, {2, 2}, {0, -3}})
    CHECK(throws(ErrorKind::invalid_argument, "does not exist",
                 [&] { Links links({job, self, peers, kHere}); }));
  for (const double silence : {0.0, -1.0, 32768.0, std::nan("")})
    CHECK(throws(ErrorKind::invalid_argument, "silence_seconds",
                 [&] { Links links({job, 0, 2, kHere, silence}); }));
  CHECK(throws(ErrorKind::invalid_argument, "no-such-interface",
               [&] { Links links({job, 0, 2, "no-such-interface"}); }));
  const auto refused = [&](const std::string& part,
                           const std::function<void(std::vector<std::string>&)>& spoil) {
    Rail rail(2);
    spoil(rail.endpoints);
    return throws(ErrorKind::invalid_argument, part, [&] { rail.links[0]->connect(rail.endpoints, kLong); });
  };
  CHECK(refused("3 endpoints, expected 2", [](auto& all) { all.push_back(all[1]); }));
  CHECK(refused("endpoint of peer 1 is 'x'", [](auto& all) { all[1] = std::string("x"); }));
  Rail rail(2);
  rail.endpoints[1] = "192.0.2.1:80";
  CHECK(throws(ErrorKind::mismatched_arguments, "loopback",
               [&] { rail.links[0]->connect(rail.endpoints, kLong); }));
  CHECK(refused("IPv4 or IPv6", [](auto& all) { all[1] = "[::1]:80"; }));
  CHECK(refused("expected this rank's own", [](auto& all) { std::swap(all[0], all[1]); }));
}

// The kernel takes what the options allow.
TEST(silence) {
  for (const double silence : {0.01, 1.0, 3.5, 32767.0}) {
    Rail rail(2, kHere, random_job(), silence);
    rail.connect();
    rail.links[0]->send(1, {1, 2, 3, 4});
    CHECK(take(*rail.links[1], 1)[0].message == (LinkMessage{1, 2, 3, 4}));
  }
}

// The listener stands on one address: on another of this host nobody answers at its port.
TEST(listens_on_one_address) {
  Links links({random_job(), 0, 2, "127.0.0.5"});
  CHECK(links.endpoint().find("127.0.0.5:") == 0);
  Address elsewhere = parse_endpoint("endpoint", kHere + links.endpoint().substr(links.endpoint().find(':')));
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(connect(fd, elsewhere.get(), elsewhere.length) != 0 && errno == ECONNREFUSED);
  close(fd);
}

TEST(no_descriptors_left) {
  Rail rail(2);
  Raw caller(rail.endpoints[0]);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = dup(0);  // the lowest free number: with it as limit no descriptor can be had
  close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  const bool thrown =
      throws(ErrorKind::out_of_memory, "ulimit -n", [&] { rail.links[0]->connect(rail.endpoints, kLong); });
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK(thrown);
}

// A peer that is gone for good breaks the sending side first: no signal, and still one `lost`.
TEST(sending_to_the_dead) {
  Answered peer([](RawListener& listener, const JobId& job) {
    Raw raw = listener.accept();
    raw.hello();
    raw.say(hello_of(job, 0, 1));
    raw.say(bytes_of(LinkMessage{1, 2, 3, 4}));
  });
  peer.connect();
  peer.answering.join();
  Links& links = peer.links;
  for (int i = 0; i < 100'000; ++i) links.send(0, {5, 0, 0, 0});  // meets a reset on the way
  std::vector<LinkEvent> events;
  CHECK(eventually([&] {
    links.poll(events);
    return !events.empty() && events.back().kind == LinkEvent::Kind::lost;
  }));
  CHECK(is_lost(events.back(), 0, "peer 0"));
  const size_t count = events.size();
  CHECK(count <= 2);
  for (int i = 0; i < 100; ++i) {
    links.send(0, {5, 0, 0, 0});
    links.poll(events);
  }
  CHECK(events.size() == count);
}

TEST(all_descriptors_are_closed) { CHECK(open_descriptors() == descriptors_before); }

}  // namespace

int main() { return moecomm::test::run(); }
