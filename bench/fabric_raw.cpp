// What a libfabric provider gives by itself between two processes of this host: a window of writes with
// immediate, sent straight by the library, no runtime around them. The ceiling that dispatch and combine
// between nodes are held against, in the same run. One line of JSON a message size on standard output.
//
//   fabric_raw [--provider tcp] [--interface 127.0.0.1] [--sizes 64,65536,1048576] [--area 16777216]
//              [--seconds 0.3]
//
// Messages leave from --area bytes of memory in turn, and arrive in as many: with few bytes all of them stay
// in the caches, with many none does.
//
// The two processes send to each other at once; rates are those of one direction. A run posts as many writes
// as fit into `seconds`, and ends when both have counted all immediates; afterwards every byte is compared.
#include <getopt.h>
#include <rdma/fi_errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/deadline.hpp"
#include "common/error.hpp"
#include "transport/fabric/endpoint.hpp"
#include "transport/fabric/endpoint_address.hpp"
#include "transport/fabric/library.hpp"

using namespace moecomm;
using namespace moecomm::fabric;

namespace {

constexpr double kHang = 60;   // seconds that one run may take
constexpr int kInFlight = 32;  // writes posted and not yet done
constexpr int kRepeats = 5;
constexpr int64_t kIdlePolls = 64;  // in a row, before others get the core

struct Options {
  ProviderOptions provider;
  std::vector<int64_t> sizes{64, 65536, 1 << 20};
  int64_t area = 16 << 20;
  double seconds = 0.3;
};

/// What the two processes tell each other, beside the fabric.
struct Shared {
  std::atomic<int64_t> arrived_at[2];  // barriers passed
  std::atomic<int64_t> finished[2];    // runs received
  std::atomic<int64_t> size, count;    // of the next run's messages; none: that was all
  std::atomic<int> address_bytes[2];
  std::atomic<bool> failed;  // one of them has said why
  char endpoint_address[2][4096];
};

Shared* shared_by_both = nullptr;

/// Says why, unless the other process has said it already, and ends.
[[noreturn]] void fail(const std::string& text) {
  if (shared_by_both == nullptr || !shared_by_both->failed.exchange(true))
    std::fprintf(stderr, "fabric_raw: %s\n", text.c_str());
  std::exit(1);
}

class Bench {
 public:
  Bench(const Options& options, Shared& shared, int index)
      : options_(options),
        shared_(shared),
        index_(index),
        endpoint_(std::move(choose_lanes(options.provider).front())) {
    const int64_t largest = *std::max_element(options.sizes.begin(), options.sizes.end());
    area_ = (std::max(options.area, 2 * largest) + 7) / 8 * 8;
    void* mapped = mmap(nullptr, static_cast<size_t>(2 * area_), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) fail(errno_text("mapping memory"));
    source_ = static_cast<uint8_t*>(mapped);
    target_ = source_ + area_;
    fill(index, source_);
    expected_.resize(static_cast<size_t>(area_));
    fill(1 - index, expected_.data());
    const Registration& registration = endpoint_.register_memory(mapped, 2 * area_);
    descriptor_ = registration.descriptor();

    EndpointAddress own;
    own.provider = endpoint_.provider();
    own.window = {registration.key(), registration.remote_base(), 2 * area_};
    own.address = endpoint_.address();
    const std::string bytes = own.to_bytes();
    if (bytes.size() > sizeof(shared_.endpoint_address[0])) fail("the address is too long");
    std::memcpy(shared_.endpoint_address[index], bytes.data(), bytes.size());
    shared_.address_bytes[index] = static_cast<int>(bytes.size());
    const int other = 1 - index;
    wait([&] { return shared_.address_bytes[other] > 0; }, "the other process");
    peer_ = EndpointAddress::from_bytes(
        {shared_.endpoint_address[other], static_cast<size_t>(shared_.address_bytes[other])});
    peer_address_ = endpoint_.insert(peer_.address);
    contexts_.resize(kInFlight);
    for (fi_context2& context : contexts_) free_.push_back(&context);
  }

  /// What process 0 does: it decides on every run.
  void lead() {
    timed(4096, 64);  // connects
    for (int64_t size : options_.sizes) {
      // Doubled until a run is long enough to tell the rate by; never fewer then: one slow run says little.
      int64_t count = 2 * kInFlight;
      double trial = timed(size, count);
      while (trial < options_.seconds / 4) trial = timed(size, count *= 2);
      const double longer = std::max(1.0, options_.seconds / trial);
      count = static_cast<int64_t>(static_cast<double>(count) * longer);
      std::vector<double> seconds;
      for (int repeat = 0; repeat < kRepeats; ++repeat) seconds.push_back(timed(size, count));
      print(size, count, seconds);
    }
    shared_.count = 0;
    barrier();
  }

  /// What process 1 does.
  void follow() {
    while (true) {
      barrier();
      if (shared_.count == 0) return;
      run(shared_.size, shared_.count);
    }
  }

 private:
  double timed(int64_t size, int64_t count) {
    shared_.size = size;  // read by the other one between this barrier and the next, which is in run()
    shared_.count = count;
    barrier();
    return run(size, count);
  }

  static void fill(int index, uint8_t* at) {
    // Filled once with what this run's seed says; both processes know both patterns.
    std::mt19937_64 random(kSeed + static_cast<uint64_t>(index));
    for (int64_t i = 0; i < area_; i += 8) {
      const uint64_t word = random();
      std::memcpy(at + i, &word, 8);
    }
  }

  template <class Condition>
  void wait(const Condition& condition, const char* what) {
    const Deadline deadline{std::chrono::duration<double>(kHang)};
    while (!condition()) {
      poll();
      if (shared_.failed) std::exit(1);
      if (deadline.passed()) fail(std::string("waited too long for ") + what);
    }
  }

  void barrier() {
    ++barriers_;
    shared_.arrived_at[index_] = barriers_;
    wait([&] { return shared_.arrived_at[1 - index_] >= barriers_; }, "the other process");
  }

  void poll() {
    std::array<fi_cq_data_entry, 64> entries;
    const ssize_t count = endpoint_.read(entries.data(), entries.size());
    if (count == -FI_EAGAIN) {
      // Where there are fewer cores than processes that want them, who has nothing to do steps aside.
      if (++idle_ % kIdlePolls == 0) sched_yield();
      return;
    }
    idle_ = 0;
    if (count == -FI_EAVAIL) {
      Endpoint::Failure failure;
      endpoint_.read_error(failure);
      fail(endpoint_.provider() + ": " + failure.text);
    }
    if (count < 0) fail(library().strerror(static_cast<int>(-count)));
    for (ssize_t i = 0; i < count; ++i) {
      const fi_cq_data_entry& entry = entries[static_cast<size_t>(i)];
      if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
        if (static_cast<int64_t>(entry.data) != runs_) fail("an immediate of another run arrived");
        ++arrived_;
      } else {
        free_.push_back(static_cast<fi_context2*>(entry.op_context));
        ++completed_;
      }
    }
  }

  /// One run of `count` messages each way. Returns seconds until the last of them was counted by its
  /// receiver.
  double run(int64_t size, int64_t count) {
    const int64_t places = area_ / size;
    completed_ = arrived_ = 0;
    ++runs_;
    std::memset(target_, 0x5a, static_cast<size_t>(area_));
    barrier();
    const Deadline deadline{std::chrono::duration<double>(kHang + 20 * options_.seconds)};
    const auto start = Clock::now();
    int64_t posted = 0;
    int64_t turns = 0;
    while (completed_ < count || arrived_ < count) {
      while (posted < count && !free_.empty()) {
        const int64_t offset = posted % places * size;
        const ssize_t status = endpoint_.write(source_ + offset, static_cast<size_t>(size), descriptor_,
                                               static_cast<uint32_t>(runs_), peer_address_,
                                               peer_.window.base + static_cast<uint64_t>(area_ + offset),
                                               peer_.window.key, free_.back());
        if (status == -FI_EAGAIN) break;
        if (status != 0) fail(library().strerror(static_cast<int>(-status)));
        free_.pop_back();
        ++posted;
      }
      poll();
      if ((++turns & 1023) != 0) continue;
      if (shared_.failed) std::exit(1);
      if (deadline.passed())
        fail("a run stopped: of " + std::to_string(count) + " messages " + std::to_string(completed_) +
             " were sent, " + std::to_string(arrived_) + " arrived");
    }
    shared_.finished[index_] = runs_;
    wait([&] { return shared_.finished[1 - index_] >= runs_; }, "the end of a run");
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    barrier();
    if (arrived_ != count) fail("more immediates arrived than were sent");
    const int64_t written = std::min(count, places) * size;
    if (std::memcmp(target_, expected_.data(), static_cast<size_t>(written)) != 0)
      fail("other bytes arrived than were sent");
    return seconds;
  }

  void print(int64_t size, int64_t count, std::vector<double> seconds) const {
    std::sort(seconds.begin(), seconds.end());
    const double total = static_cast<double>(count);
    const auto rate = [&](double time) { return total * static_cast<double>(size) / time / 1e9; };
    const size_t half = seconds.size() / 2;
    const double median = seconds.size() % 2 == 1 ? seconds[half] : (seconds[half - 1] + seconds[half]) / 2;
    const Offer offer = describe(endpoint_.info());
    std::printf(
        "{\"provider\": \"%s\", \"version\": \"%s\", \"interface\": \"%s\", \"address\": \"%s\", \"bytes\": "
        "%lld, "
        "\"in_flight\": %d, \"area\": %lld, \"both\": true, \"messages\": %lld, \"repeats\": %zu, "
        "\"gb_per_s\": %.4f, "
        "\"gb_per_s_min\": %.4f, \"gb_per_s_max\": %.4f, \"messages_per_s\": %.0f}\n",
        offer.provider.c_str(), version_text(library().version).c_str(), offer.domain.c_str(),
        offer.address.c_str(), static_cast<long long>(size), kInFlight, static_cast<long long>(area_),
        static_cast<long long>(count), seconds.size(), rate(median), rate(seconds.back()),
        rate(seconds.front()), total / median);
    std::fflush(stdout);
  }

  static constexpr uint64_t kSeed = 20240229;
  static inline int64_t area_ = 0;
  const Options& options_;
  Shared& shared_;
  int index_;
  Endpoint endpoint_;
  uint8_t* source_ = nullptr;
  uint8_t* target_ = nullptr;
  std::vector<uint8_t> expected_;
  void* descriptor_ = nullptr;
  EndpointAddress peer_;
  fi_addr_t peer_address_ = FI_ADDR_NOTAVAIL;
  std::vector<fi_context2> contexts_;
  std::vector<fi_context2*> free_;
  int64_t barriers_ = 0, runs_ = 0, completed_ = 0, arrived_ = 0, idle_ = 0;
};

double number(const char* text, double least, char stop = 0) {
  char* end = nullptr;
  const double parsed = std::strtod(text, &end);
  if (end == text || (*end != 0 && *end != stop) || !(parsed >= least))
    fail(std::string(text) + " will not do");
  return parsed;
}

Options parse(int argc, char** argv) {
  Options options;
  const option known[] = {
      {"provider", required_argument, nullptr, 'p'}, {"interface", required_argument, nullptr, 'i'},
      {"sizes", required_argument, nullptr, 's'},    {"area", required_argument, nullptr, 'a'},
      {"seconds", required_argument, nullptr, 't'},  {}};
  for (int name; (name = getopt_long(argc, argv, "", known, nullptr)) != -1;) {
    if (name == 'p') {
      options.provider.provider = optarg;
    } else if (name == 'i') {
      options.provider.interface = optarg;
    } else if (name == 's') {
      options.sizes.clear();
      for (const char* at = optarg; at != nullptr; at = std::strchr(at, ',')) {
        at += *at == ',' ? 1 : 0;
        options.sizes.push_back(static_cast<int64_t>(number(at, 1, ',')));
      }
    } else if (name == 'a') {
      options.area = static_cast<int64_t>(number(optarg, 1));
    } else if (name == 't') {
      options.seconds = number(optarg, 1e-3);
    } else {
      fail("see the head of bench/fabric_raw.cpp for its options");
    }
  }
  return options;
}

int run_process(const Options& options, Shared& shared, int index) {
  try {
    Bench bench(options, shared, index);
    index == 0 ? bench.lead() : bench.follow();
  } catch (const Error& error) {
    fail(error.what());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) fail(errno_text("mapping memory"));
  Shared& shared = *new (mapped) Shared{};
  shared_by_both = &shared;
  // Before libfabric is touched: its state does not survive a fork.
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) fail(errno_text("fork"));
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // never outlives the one that prints
    if (getppid() != parent) return 1;
    return run_process(options, shared, 1);
  }
  const int status = run_process(options, shared, 0);
  int child_status = 0;
  waitpid(child, &child_status, 0);
  return status == 0 && child_status == 0 ? 0 : 1;
}
