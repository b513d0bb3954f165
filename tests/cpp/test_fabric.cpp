// The libfabric transport over tcp and shm on this machine. Each case runs in a process of its own, forked
// before anything of libfabric was touched; some of those fork a peer. Returns 77 (skipped) where libfabric
// is missing.
#include <dlfcn.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fabric_peers.hpp"

// The tcp provider of libfabric 1.17 keeps some descriptions of itself at its end; blame only our own code.
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }

using namespace moecomm;
using namespace moecomm::fabric;
using namespace moecomm::fabric::test_peers;
using moecomm::test::throws;

namespace {

namespace fs = std::filesystem;

void three_peers_case(const std::string& provider) {
  Group group(3, 4096, options_for(provider));
  for (int from = 0; from < 3; ++from) {
    std::memset(group.memory[from]->base, 'a' + from, 64);
    for (int to = 0; to < 3; ++to) {
      if (to == from) continue;
      until("room", [&] {
        return group.remote[from]->put(to, 1024 * (1 + from), 0, 64, static_cast<uint32_t>(10 * from + to),
                                       0);
      });
    }
  }
  std::vector<uint32_t> seen[3];
  size_t sent = 0;
  until("three peers", [&] {
    for (size_t at = 0; at < 3; ++at) {
      std::vector<TransportEvent> events;
      group.remote[at]->poll(events);
      for (const TransportEvent& event : events) {
        CHECK(event.kind != Kind::failed);
        if (event.kind == Kind::sent) ++sent;
        if (event.kind != Kind::arrived) continue;
        const uint32_t from = event.immediate / 10;
        CHECK(event.immediate % 10 == at && from < 3 && from != at);
        const std::vector<uint8_t> expected(64, static_cast<uint8_t>('a' + from));
        CHECK(std::memcmp(group.memory[at]->base + 1024 * (1 + from), expected.data(), 64) == 0);
        seen[at].push_back(from);
      }
    }
    return sent == 6 && seen[0].size() + seen[1].size() + seen[2].size() == 6;
  });
}

void limits_case(const std::string& provider) {
  FabricOptions options = options_for(provider);
  options.max_in_flight_operations = 2;
  options.max_in_flight_bytes = 3000;  // small: a provider may take one large put at a time
  Group group(2, 4 << 20, options);
  FabricTransport& a = *group.remote[0];
  std::vector<TransportEvent> events;
  const auto drain = [&] {
    until("completions", [&] {
      a.poll(events);
      group.remote[1]->poll(events);
      return a.in_flight() == 0;
    });
  };
  const auto accepted = [&](int64_t bytes) { return a.put(1, 0, 2 << 20, bytes, 5, 0); };
  // Nothing completes between polls, so what is under way is known; a provider may have no room of its own.
  const auto under_way = [&](const std::vector<int64_t>& sizes) {
    until("room", [&] {
      drain();
      return std::all_of(sizes.begin(), sizes.end(), accepted);
    });
    CHECK(a.in_flight() == static_cast<int>(sizes.size()));
  };
  under_way({64, 64});
  CHECK(!accepted(64));
  under_way({64});
  // One that is larger than all that may be under way goes alone.
  under_way({1 << 20});
  CHECK(!accepted(1));
  under_way({2000});
  CHECK(!accepted(2000));
  under_way({2000, 1000});
  drain();
}

void bounds_case(const std::string& provider) {
  const int64_t bytes = 8192;
  Group group(2, bytes, options_for(provider));
  FabricTransport& a = *group.remote[0];
  const auto refused = [&](int32_t peer, int64_t dst, int64_t src, int64_t count, uint32_t immediate) {
    return throws(ErrorKind::invalid_argument, "fabric: put",
                  [&] { a.put(peer, dst, src, count, immediate, 0); });
  };
  CHECK(refused(1, bytes, 0, 1, 0));
  CHECK(refused(1, bytes - 63, 0, 64, 0));
  CHECK(refused(1, 0, bytes - 63, 64, 0));
  CHECK(refused(1, -1, 0, 64, 0));
  CHECK(refused(1, 0, -1, 64, 0));
  CHECK(refused(1, 0, 0, -1, 0));
  CHECK(refused(1, INT64_MAX, 0, 64, 0));
  CHECK(refused(1, 64, 0, INT64_MAX, 0));
  CHECK(refused(1, 0, 0, 64, kHelloImmediate));
  CHECK(refused(0, 0, 0, 64, 0));
  CHECK(refused(2, 0, 0, 64, 0));
  CHECK(refused(-1, 0, 0, 64, 0));
  CHECK(a.in_flight() == 0);
  // The last byte of both windows, and nothing at their ends, are inside.
  CHECK(a.put(1, bytes - 64, bytes - 64, 64, 1, 0));
  CHECK(a.put(1, bytes, bytes, 0, 2, 0));
  size_t arrived = 0;
  until("puts at the border", [&] {
    std::vector<TransportEvent> events;
    a.poll(events);
    group.remote[1]->poll(events);
    for (const TransportEvent& event : events) arrived += event.kind == Kind::arrived;
    return arrived == 2 && a.in_flight() == 0;
  });
}

// ---- two processes

/// Sends and receives whole byte strings over a socket pair.
void tell(int fd, const std::string& bytes) {
  const uint64_t count = bytes.size();
  const std::string message = std::string(reinterpret_cast<const char*>(&count), sizeof(count)) + bytes;
  if (send(fd, message.data(), message.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(message.size()))
    std::perror("write to the other process"), std::_Exit(1);
}

std::string hear(int fd) {
  uint64_t count = 0;
  if (recv(fd, &count, sizeof(count), MSG_WAITALL) != sizeof(count) || count > 1 << 20)
    std::printf("the other process ended\n"), std::_Exit(1);
  std::string bytes(count, 0);
  if (count > 0 && recv(fd, bytes.data(), count, MSG_WAITALL) != static_cast<ssize_t>(count)) std::_Exit(1);
  return bytes;
}

/// Runs `body(index, socket to the other)` in this process as peer 0 and in a child as peer 1. Returns how
/// the child ended.
int with_peer(const std::function<void(int, int)>& body) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::perror("socketpair"), std::exit(1);
  const pid_t child = test::fork_off(2 * kHang, [&] {
    close(ends[0]);
    body(1, ends[1]);
  });
  close(ends[1]);
  body(0, ends[0]);
  const int status = test::status_of(child);
  close(ends[0]);
  return status;
}

std::vector<AddressBytes> exchange_addresses(const FabricTransport& remote, int index, int fd) {
  tell(fd, remote.endpoint_address());
  std::vector<AddressBytes> endpoint_addresses{remote.endpoint_address(), hear(fd)};
  if (index == 1) std::swap(endpoint_addresses[0], endpoint_addresses[1]);
  return endpoint_addresses;
}

void two_processes_case(const std::string& provider) {
  const uint64_t seed = test::seed();
  const int status = with_peer([&](int index, int fd) {
    Memory memory(2 * kHalf);
    const FabricLane remote = open_lane(provider, memory);
    connect_lane(*remote, exchange_addresses(*remote, index, fd), index, kHang);
    const uint64_t mine = seed + 10000 * static_cast<uint64_t>(index);
    const uint64_t theirs = seed + 10000 * static_cast<uint64_t>(1 - index);
    Exchange exchange(*remote, memory, 1 - index, mine, theirs);
    until("an exchange of two processes", [&] { return exchange.step(); });
    CHECK(remote->in_flight() == 0);
    const TransportCaps& caps = remote->caps();
    CHECK(caps.max_message >= int64_t{1} << 30);
    CHECK(caps.version == version_text(library().version));
    if (index == 0)
      std::printf("%s: provider %s of libfabric %s on %s\n", provider.c_str(), caps.provider.c_str(),
                  caps.version.c_str(), caps.interface.c_str());
    // Nobody leaves before the other has all: what is under way then would be lost.
    tell(fd, {});
    std::vector<TransportEvent> events;
    char byte;
    until("the other process", [&] {
      remote->poll(events);
      return recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == 1;
    });
    hear(fd);
  });
  CHECK(status == 0);
}

/// As with one endpoint, over several with a thread each, on one of which a peer may be late.
void lanes_case(const std::string& provider) {
  const uint64_t seed = test::seed();
  const int status = with_peer([&](int index, int fd) {
    Memory memory(2 * kHalf);
    FabricOptions options = options_for(provider);
    options.provider.lanes = 3;
    const std::unique_ptr<Network> network = open_network(options, memory.base, memory.bytes);
    Network& remote = *network;
    std::vector<std::vector<AddressBytes>> peers(2, remote.endpoint_addresses());
    CHECK(peers[0].size() == 3);
    for (size_t lane = 0; lane < 3; ++lane) {
      tell(fd, peers[index][lane]);
      peers[1 - index][lane] = hear(fd);
    }
    CHECK(remote.caps().lanes == 3 && test::has(remote.caps().text(), "3 lanes"));
    int asked = 0;
    remote.insert_peers(peers, index);
    remote.connect(kHang, [&] { ++asked; });
    std::printf("connected: looked %d times\n", asked);
    remote.stay_awake(index == 0);
    const uint64_t mine = seed + 10000 * static_cast<uint64_t>(index);
    const uint64_t theirs = seed + 10000 * static_cast<uint64_t>(1 - index);
    Exchange exchange(remote, memory, 1 - index, mine, theirs);
    until("an exchange over lanes", [&] { return exchange.step(); });

    // What no window holds is a failure of its peer, not of the process.
    std::vector<TransportEvent> events;
    CHECK(remote.put(1 - index, memory.bytes, 0, 64, 1, 0));
    until("the failure", [&] {
      remote.poll(events);
      return !events.empty();
    });
    CHECK(events.front().kind == Kind::failed && events.front().peer == 1 - index);
    CHECK(test::has(events.front().text, "out of bounds"));

    remote.forget(1 - index);
    // From here on puts are dropped, by every lane: none is reported, and none stands in another's way.
    until("puts that are dropped", [&] { return remote.put(1 - index, 0, kHalf, 7 << 20, 9, 9); });
    tell(fd, {});
    hear(fd);
  });
  CHECK(status == 0);
}

/// A peer that never comes, and a caller that gives up: all lanes end, with the reason.
void lanes_connect_case(const std::string& provider) {
  FabricOptions options = options_for(provider);
  options.provider.lanes = 2;
  Memory memory(4096), other(4096);
  const auto peer = open_network(options, other.base, other.bytes);  // nobody drives them
  const auto lonely = [&](double timeout_seconds, const std::function<void()>& interrupt) {
    const auto lanes = open_network(options, memory.base, memory.bytes);
    lanes->insert_peers({lanes->endpoint_addresses(), peer->endpoint_addresses()}, 0);
    lanes->connect(timeout_seconds, interrupt);
  };
  CHECK(throws(ErrorKind::peer_timeout, "peer 1", [&] { lonely(0.3, {}); }));
  const auto start = Clock::now();
  CHECK(throws(ErrorKind::invalid_argument, "enough",
               [&] { lonely(kHang, [] { throw Error(ErrorKind::invalid_argument, "enough"); }); }));
  CHECK(Clock::now() - start < std::chrono::seconds(static_cast<int>(kHang) / 2));
}

/// The peer is killed while it is written to.
void killed_peer_case(const std::string& provider) {
  const int status = with_peer([&](int index, int fd) {
    Memory memory(8 << 20);
    FabricLane remote = open_lane(provider, memory);
    const auto endpoint_addresses = exchange_addresses(*remote, index, fd);
    connect_lane(*remote, endpoint_addresses, index, kHang);
    std::vector<TransportEvent> events;
    if (index == 1) {
      hear(fd);  // without polling: what is sent meanwhile stays under way
      kill(getpid(), SIGKILL);
    }
    // More than sockets hold, so that the end comes in the middle of writes: only then does tcp report it.
    for (int i = 0; i < 1000 && remote->put(1, 0, 4 << 20, 65536, 3, 0); ++i) remote->poll(events);
    CHECK(remote->in_flight() > 0);
    tell(fd, {});
    int failures = 0;
    bool dead = false;
    until("the peer's end to be noticed", [&] {
      events.clear();
      remote->poll(events);
      for (const TransportEvent& event : events) {
        if (event.kind != Kind::failed) continue;
        ++failures;
        CHECK(event.peer == 1);
        CHECK(test::has(event.text, remote->caps().provider));
        CHECK(test::has(event.text, "peer 1"));
        if (failures == 1) std::printf("%s\n", event.text.c_str());
      }
      char byte;
      dead = dead || recv(fd, &byte, 1, MSG_DONTWAIT) == 0;  // the kernel says it, whatever the provider does
      return provider == "shm" ? dead : failures > 0;
    });
    if (provider == "shm") {
      // This provider says nothing; its user knows from elsewhere. No name of its memory is left.
      const EndpointAddress endpoint_address = EndpointAddress::from_bytes(endpoint_addresses[1]);
      const std::string name(reinterpret_cast<const char*>(endpoint_address.address.data()));
      CHECK(!fs::exists("/dev/shm/" + name.substr(name.find("://") + 3)));
      remote->forget(1);
    }
    // Dropped without a word from now on, with no room used.
    CHECK(remote->in_flight() == 0);
    for (int i = 0; i < 1000; ++i) {
      CHECK(remote->put(1, 0, 4 << 20, 65536, 3, 0));
      events.clear();
      remote->poll(events);
      CHECK(events.empty());
    }
    CHECK(remote->in_flight() == 0);
    remote.reset();  // returns
  });
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/// A peer that exists and never connects, with a callback that is heard meanwhile.
void connect_case(const std::string& provider) {
  Memory memory(4096), other(4096);
  const FabricLane silent = open_lane(provider, other);
  const auto wait = [&](FabricTransport& remote, double seconds, const std::function<void()>& interrupt) {
    connect_lane(remote, {remote.endpoint_address(), silent->endpoint_address()}, 0, seconds, interrupt);
  };
  {
    int calls = 0;
    const FabricLane remote = open_lane(provider, memory);
    CHECK(throws(ErrorKind::peer_timeout, "peer 1 (", [&] { wait(*remote, 1.0, [&] { ++calls; }); }));
    CHECK(calls > 0);
    CHECK(throws(ErrorKind::invalid_argument, "once", [&] { wait(*remote, 0.3, {}); }));
  }
  {
    bool passed = false;
    try {
      wait(*open_lane(provider, memory), kHang, [] { throw std::string("enough"); });
    } catch (const std::string& text) {
      passed = text == "enough";
    }
    CHECK(passed);
  }
  const FabricLane remote = open_lane(provider, memory);
  CHECK(throws(ErrorKind::invalid_argument, "index",
               [&] { connect_lane(*remote, {remote->endpoint_address()}, 1, 1); }));
  CHECK(throws(ErrorKind::invalid_argument, "comes after insert_peers()", [&] { remote->connect(1); }));
  connect_lane(*remote, {remote->endpoint_address()}, 0, 1);  // alone: nothing to wait for
  std::vector<TransportEvent> events;
  remote->poll(events);
  CHECK(events.empty());
}

// ---- names, signals

/// Peers that chose differently are told so, and a window of nothing is refused.
void mismatch_case() {
  CHECK(throws(ErrorKind::invalid_argument, "window", [] { open_lane(FabricOptions{}, nullptr, 0); }));
  Memory one(4096), two(4096);
  const FabricLane tcp = open_lane("tcp", one), shm = open_lane("shm", two);
  CHECK(throws(ErrorKind::mismatched_arguments, "peer 1 uses provider shm",
               [&] { connect_lane(*tcp, {tcp->endpoint_address(), shm->endpoint_address()}, 0, 1); }));
}

/// Files of processes of the same number: of one that was killed, or in another container.
struct TakenNames {
  TakenNames() {
    for (int number = 0; number < 4; ++number) {
      paths.push_back("/dev/shm/" + std::to_string(getpid()) + ":0:" + std::to_string(number));
      std::ofstream(paths.back()) << "x";
    }
  }
  ~TakenNames() {
    for (const fs::path& path : paths) fs::remove(path);
  }
  std::vector<fs::path> paths;
};

void taken_names_case() {
  const TakenNames taken;
  {
    Group group(2, 4096, options_for("shm"));
    CHECK(group.remote[0]->endpoint_address() != group.remote[1]->endpoint_address());
  }
  for (const fs::path& path : taken.paths) CHECK(fs::exists(path));
}

void signals_case() {
  const auto handlers = [] {
    std::vector<void (*)(int)> list;
    for (int number : {SIGINT, SIGTERM, SIGSEGV, SIGBUS}) {
      struct sigaction action;
      sigaction(number, nullptr, &action);
      list.push_back(action.sa_handler);
    }
    return list;
  };
  const auto before = handlers();
  {
    Group group(2, 4096, options_for("shm"));
    CHECK(handlers() == before);
  }
  CHECK(handlers() == before);
}

/// Runs one case in a process of its own; its checks count as one here.
void run(const std::string& name, const std::function<void()>& body) {
  const int status = test::status_of(test::fork_off(4 * kHang, body));
  if (!CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0))
    std::printf("case %s: exit status %d, signal %d\n", name.c_str(), WEXITSTATUS(status),
                WIFSIGNALED(status) ? WTERMSIG(status) : 0);
  else
    std::printf("case %s: passed\n", name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  test::seed();
  const std::string only = argc > 1 ? argv[1] : "";
  const auto test_case = [&](const std::string& name, const std::function<void()>& body) {
    if (only.empty() || name == only) run(name, body);
  };
  // Once for all cases: a library that it needs calibrates a clock at its start, for 0.4 s.
  dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  const int status = test::status_of(test::fork_off(kHang, [] {
    const Error missing = test::error_of([] { library(); });
    if (CHECK(missing.kind() == ErrorKind::none)) return;
    std::printf("skipped: %s\n", missing.what());
    std::fflush(stdout);
    std::_Exit(77);
  }));
  if (WIFEXITED(status) && WEXITSTATUS(status) == 77) return 77;
  CHECK(status == 0);

  test_case("signals", signals_case);
  test_case("mismatch", mismatch_case);
  test_case("taken-names", taken_names_case);
  // The layered provider is what tcp means where the native one is missing.
  for (const char* provider : {"tcp", "shm", "tcp;ofi_rxm"}) {
    const std::string name = provider;
    test_case("three-peers-" + name, [&] { three_peers_case(name); });
    test_case("limits-" + name, [&] { limits_case(name); });
    test_case("bounds-" + name, [&] { bounds_case(name); });
    test_case("connect-" + name, [&] { connect_case(name); });
    test_case("two-processes-" + name, [&] { two_processes_case(name); });
    test_case("killed-peer-" + name, [&] { killed_peer_case(name); });
    test_case("lanes-" + name, [&] { lanes_case(name); });
    test_case("lanes-connect-" + name, [&] { lanes_connect_case(name); });
  }
  return test::finish();
}
