// The host's side of a communicator on GPUs, over a CUDA runtime that only notes what is asked of it: on
// which stream each half of an operation is launched, whether a capture records it, and what streams wait
// for.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "kernels/gpu/common/arguments.hpp"
#include "layout/host_status.hpp"
#include "runtime/device_communicator.hpp"

using namespace moecomm;

namespace {

using Calls = std::vector<std::string>;

constexpr intptr_t kOwn = 100;      ///< streams from here on, and events, are the communicator's
std::map<std::string, int> blocks;  ///< of each kernel's last launch
Calls calls;                        ///< on other streams, "sum 1" on stream 1 for example
std::map<cudaStream_t, uint64_t> captures;
std::map<cudaEvent_t, cudaStream_t> recorded;  ///< where an event was recorded last
HostStatus* status = nullptr;
bool reports = true;  ///< kernels that route tell the host how many rows come
intptr_t handles = kOwn;

constexpr int64_t kRows = 7;

bool of_caller(cudaStream_t stream) { return reinterpret_cast<intptr_t>(stream) < kOwn; }

std::string named(cudaStream_t stream) { return std::to_string(reinterpret_cast<intptr_t>(stream)); }

/// Notes a launch: "recorded" by a capture, "beside" the kernel before it; `after` what was given up.
cudaError_t note(const std::string& kernel, const gpu::Launch& launch, uint32_t after = 0) {
  const bool is_recorded = captures.count(launch.stream) > 0;
  blocks[kernel] = launch.blocks;
  calls.push_back(kernel + " " + named(launch.stream) + (is_recorded ? " recorded" : "") +
                  (launch.overlapped ? " beside" : "") + (after == kAfterGivenUp ? " after" : ""));
  return cudaSuccess;
}

template <class Handle>
cudaError_t give(Handle* handle) {
  *handle = reinterpret_cast<Handle>(++handles);
  return cudaSuccess;
}

}  // namespace

// -- the runtime

extern "C" {
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? 132 : 9;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  status = static_cast<HostStatus*>(*memory);
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return give(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return give(stream); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return give(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  recorded[event] = stream;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  if (of_caller(stream) && of_caller(recorded[event]))
    calls.push_back(named(stream) + " waits for " + named(recorded[event]));
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void** of_device, void* of_host, unsigned) {
  *of_device = of_host;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int, int) {
  std::strcpy(text, "0000:00:00.0");
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* capturing) {
  *capturing = captures.count(stream) > 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* capturing,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *id = captures.count(stream) > 0 ? captures[stream] : 0;
  return cudaStreamIsCapturing(stream, capturing);
}
}

// -- the kernels

namespace moecomm::gpu {
cudaError_t prepare_dispatch_route(const DeviceShape&) { return cudaSuccess; }
cudaError_t prepare_dispatch_receive(const DeviceShape&) { return cudaSuccess; }
cudaError_t prepare_combine_reduce(const DeviceShape&, WireFormat) { return cudaSuccess; }
cudaError_t prepare_combine_sum(const DeviceShape&, WireFormat) { return cudaSuccess; }
cudaError_t prepare_combine_fused(const DeviceShape&, WireFormat) { return cudaSuccess; }
cudaError_t prepare_announce() { return cudaSuccess; }
#define MOECOMM_OF(wire)                                                                                    \
  template <>                                                                                               \
  cudaError_t prepare_dispatch_send<wire>(const DeviceShape&) {                                             \
    return cudaSuccess;                                                                                     \
  }                                                                                                         \
  template <>                                                                                               \
  cudaError_t prepare_dispatch_fused<wire>(const DeviceShape&) {                                            \
    return cudaSuccess;                                                                                     \
  }                                                                                                         \
  template <>                                                                                               \
  cudaError_t launch_dispatch_send<wire>(const Launch& launch, const device::Comm&, const SendArguments&) { \
    return note("send", launch);                                                                            \
  }                                                                                                         \
  template <>                                                                                               \
  cudaError_t launch_dispatch_fused<wire>(const Launch& launch, const device::Comm&,                        \
                                          const FusedArguments&) {                                          \
    return note("fused", launch);                                                                           \
  }
MOECOMM_OF(WireFormat::same)
MOECOMM_OF(WireFormat::fp8)
MOECOMM_OF(WireFormat::mxfp8)
cudaError_t launch_dispatch_route(const Launch& launch, const device::Comm&, const SendArguments& arguments) {
  if (reports && arguments.capacity < 0) {
    status->rows.rows = status->rows.positions = kRows;
    status->rows.ticket = arguments.ticket;
  }
  return note("route", launch, arguments.after);
}
cudaError_t launch_dispatch_receive(const Launch& launch, const device::Comm&, const ReceiveArguments&) {
  return note("receive", launch);
}
cudaError_t launch_combine_reduce(const Launch& launch, const device::Comm&, const CombineArguments&) {
  return note("reduce", launch);
}
cudaError_t launch_combine_sum(const Launch& launch, const device::Comm&, const CombineArguments&) {
  return note("sum", launch);
}
cudaError_t launch_combine_fused(const Launch& launch, const device::Comm&,
                                 const CombineArguments& arguments) {
  return note("combine", launch, arguments.after);
}
cudaError_t launch_abandon(const Launch& launch, const device::Comm&, Operation, int64_t, bool) {
  return note("abandon", launch);
}
cudaError_t launch_announce(const Launch& launch, const device::Comm&, uint32_t, const char*) {
  return note("announce", launch);
}
}  // namespace moecomm::gpu

// -- the tests

namespace {

cudaStream_t stream(intptr_t number) { return reinterpret_cast<cudaStream_t>(number); }
const cudaStream_t one = stream(1), two = stream(2);

/// A communicator of one rank, and arguments for its operations.
struct Rank {
  explicit Rank(int32_t ranks = 1)
      : shape{ranks, 1, 8 * ranks, 64, 4096, DType::bfloat16, WireFormat::same, 0, 0},
        comm(DeviceConfig{shape, 0, 5.0, 0, 0, 1}) {
    const std::string name = comm.link();
    comm.connect(std::vector(ranks, reinterpret_cast<uintptr_t>(memory.data())), std::vector(ranks, name),
                 std::vector<int64_t>(ranks, getpid()));
    comm.unlink();
    start();
  }
  ~Rank() {
    captures.clear();
    reports = true;
  }
  /// Forgets what was noted.
  void start() { calls.clear(); }

  gpu::SendArguments sent(int64_t capacity, int64_t tokens) const {
    return {.operation = Operation::dispatch,
            .x = bytes,
            .ids = bytes,
            .plan = plan,
            .tokens = tokens,
            .alignment = 1,
            .capacity = capacity,
            .positions = -1};
  }
  void begin(cudaStream_t on, int64_t capacity = -1, int64_t tokens = 100) {
    comm.begin_dispatch(sent(capacity, tokens), on);
  }
  void receive(cudaStream_t on, int64_t rows = kRows, bool directly = true) {
    comm.finish_dispatch(directly, {rows, rows, bytes}, on);
  }
  void combine(cudaStream_t on, bool held = false) {
    comm.combine({bytes, nullptr, nullptr, bytes, nullptr, plan, 100, RowLayout::expert}, false, held, on);
  }

  const DeviceShape shape;
  std::vector<std::byte> memory = std::vector<std::byte>(DeviceWindow::make(shape).total_bytes);
  std::byte* const bytes = memory.data();
  int32_t* const plan = reinterpret_cast<int32_t*>(bytes);
  DeviceCommunicator comm;
};

const Calls kCombined = {"combine 1"};

TEST(halves) {
  Rank rank;
  rank.begin(one);
  CHECK((rank.comm.wait_rows(one) == std::pair{kRows, kRows}));
  rank.receive(one);
  CHECK((calls == Calls{"route 1", "send 1 beside", "receive 1 beside"}));
  rank.start();
  rank.begin(one);
  rank.comm.wait_rows(one);
  rank.receive(one, kRows, false);  // other work is between
  CHECK(calls.back() == "receive 1");
  rank.begin(one);
  rank.comm.wait_rows(two);
  rank.receive(two);
  CHECK(calls.back() == "receive 2");
  rank.start();
  rank.combine(one, true);
  CHECK(rank.comm.complete(two) && rank.comm.complete(two));
  rank.begin(one);
  rank.combine(one);  // which ends the dispatch
  CHECK((calls ==
         Calls{"reduce 1", "sum 2 beside", "route 1", "send 1 beside", "abandon 1 beside", "combine 1"}));
}

/// What is launched is what was planned, for operations that take several kernels and one.
TEST(plans) {
  for (const int32_t ranks : {1, 3}) {
    Rank rank(ranks);
    rank.comm.log_launches();
    const gpu::Heuristics heuristics = gpu::choose_heuristics(
        132, 0, gpu::most_fused_tokens(ranks, rank.shape.num_experts), rank.shape, WireFormat::same);
    const gpu::LaunchContext context{heuristics, rank.shape, heuristics.fused_tokens,
                                     DeviceWindow::make(rank.shape).stage_tokens};
    for (const int64_t tokens : {100, 4096}) {
      const gpu::DispatchPlan plan =
          gpu::plan_dispatch(context, {true, tokens, RowLayout::expert, gpu::RowWork::none, true});
      rank.begin(one, -1, tokens);
      rank.comm.wait_rows(one);
      rank.receive(one);
      CHECK(blocks["route"] == plan.route_blocks() && blocks["send"] == plan.send_blocks());
      CHECK(blocks["receive"] == plan.receive);
    }
    rank.start();
    rank.comm.dispatch(rank.sent(kRows, 100), {kRows, kRows, rank.bytes}, one);
    const gpu::DispatchPlan in_one =
        gpu::plan_dispatch(context, {true, 100, RowLayout::expert, gpu::RowWork::none, false});
    CHECK(in_one.in_one && calls == Calls{"fused 1"} && blocks["fused"] == in_one.fused.blocks);
    rank.combine(one);
    rank.combine(one, true);
    rank.comm.complete(one);
    const auto planned = [&](bool held) {
      return gpu::plan_combine(context, {100, RowLayout::expert, false, false, held});
    };
    CHECK(blocks["combine"] == planned(false).blocks && blocks["reduce"] == planned(true).reduce_blocks());
    CHECK(blocks["sum"] == planned(true).sum);
  }
}

/// Where an output is received at once, and where it only has to be there before the host waits.
TEST(offers) {
  for (const int32_t ranks : {1, 3}) {
    Rank rank(ranks);
    CHECK(rank.comm.offered_rows(4096, RowLayout::expert, 1).first.rows == 0);
    rank.begin(one, -1, 4096);
    rank.comm.wait_rows(one);
    rank.receive(one);
    const auto [offered, at_once] = rank.comm.offered_rows(4096, RowLayout::expert, 1);
    CHECK(offered.rows >= kRows && at_once == (ranks == 1));  // of three ranks so many tokens take turns
  }
}

/// Where tokens take turns, the next operation says what was not received, unless it was called off.
TEST(what_is_given_up) {
  for (const int32_t ranks : {1, 3}) {
    Rank rank(ranks);
    const std::string after = ranks == 1 ? "" : " after";
    rank.begin(one);
    rank.start();
    rank.combine(one);
    CHECK((calls == Calls{"abandon 1 beside", "combine 1" + after}));
    rank.start();
    rank.combine(one);
    CHECK(calls == Calls{"combine 1"});

    rank.begin(one);
    rank.comm.set_interrupt([] { throw std::runtime_error("interrupted"); });
    status->rows.ticket = 0;
    rank.start();
    try {
      rank.comm.wait_rows(one);
      CHECK(false);
    } catch (const std::runtime_error&) {
    }
    rank.begin(one);
    CHECK((calls == Calls{"abandon 1 beside", "route 1" + after, "send 1 beside"}));
    status->rows.rows = -1;
    status->verdict.kind = static_cast<uint32_t>(ErrorKind::mismatched_arguments);
    status->verdict.about = Disagreement::caller;
    status->verdict.set = 1;
    CHECK(test::throws(ErrorKind::mismatched_arguments, "disagree", [&] { rank.comm.wait_rows(one); }));
    rank.start();
    rank.combine(one);
    CHECK(calls == Calls{"combine 1"});
  }
}

/// What ends a dispatch comes before what follows on the stream that waited for it.
TEST(order_after_an_error) {
  Rank rank;
  rank.begin(one);
  status->verdict.kind = static_cast<uint32_t>(ErrorKind::invalid_argument);
  status->verdict.has_text = 1;
  std::strcpy(status->text, "a bad id");
  status->verdict.set = 1;
  status->rows.rows = -1;
  rank.start();
  CHECK(test::throws(ErrorKind::invalid_argument, "a bad id", [&] { rank.comm.wait_rows(two); }));
  CHECK((calls == Calls{"abandon 1 beside", "2 waits for 1"}));
}

TEST(closed_between_the_halves) {
  Rank rank;
  rank.begin(one);
  rank.comm.close();
  rank.start();
  CHECK(test::throws(ErrorKind::closed, "is closed", [&] { rank.comm.wait_rows(one); }));
  CHECK(test::throws(ErrorKind::closed, "is closed", [&] { rank.receive(one); }));
  CHECK(calls.empty());
}

TEST(closed_by_a_signal) {
  Rank rank;
  reports = false;
  rank.comm.set_interrupt([&] { rank.comm.close(); });
  rank.begin(one);
  rank.start();
  CHECK(test::throws(ErrorKind::closed, "is closed", [&] { rank.comm.wait_rows(one); }));
  CHECK(calls.empty());
}

/// A capture fails between the halves: the second one neither runs nor is waited for.
TEST(a_capture_that_fails) {
  Rank rank;
  captures[one] = captures[two] = 5;
  rank.begin(two, 64);
  CHECK(calls.back() == "send 2 recorded beside");
  captures.clear();
  rank.start();
  rank.combine(one);
  CHECK(calls == kCombined);

  captures[one] = captures[two] = 6;
  rank.begin(two, 64);
  captures.clear();
  rank.start();
  CHECK(test::throws(ErrorKind::invalid_argument, "has ended without its second half",
                     [&] { rank.receive(two, 64); }));
  CHECK(test::throws(ErrorKind::invalid_argument, "no dispatch was begun", [&] { rank.receive(two, 64); }));
  CHECK(calls.empty());

  captures[one] = captures[two] = 7;
  rank.combine(two, true);
  captures.clear();
  rank.start();
  CHECK(!rank.comm.complete(two) && rank.comm.complete(two));
  rank.combine(one);
  CHECK(calls == kCombined);

  captures[two] = 8;
  rank.combine(two, true);
  captures[two] = 9;  // the next attempt
  rank.start();
  rank.combine(two);
  CHECK((calls == Calls{"combine 2 recorded"}));
}

TEST(both_halves_in_a_capture) {
  Rank rank;
  captures[one] = captures[two] = 5;
  rank.begin(two, 64);
  rank.receive(two, 64);
  rank.combine(two, true);
  CHECK(rank.comm.complete(one));
  CHECK((calls == Calls{"route 2 recorded", "send 2 recorded beside", "receive 2 recorded beside",
                        "reduce 2 recorded", "sum 1 recorded beside"}));
}

/// What was begun before a capture does not end within it.
TEST(a_capture_between_the_halves) {
  Rank rank;
  rank.begin(one);
  rank.comm.wait_rows(one);
  captures[two] = 5;
  CHECK(test::throws(ErrorKind::invalid_argument, "outside of the capture", [&] { rank.receive(two); }));
  captures.clear();
  rank.receive(one);
  CHECK(calls.back() == "receive 1 beside");

  rank.begin(one);
  captures[one] = 6;
  rank.start();
  CHECK(test::throws(ErrorKind::invalid_argument, "before its capture", [&] { rank.combine(one); }));
  CHECK(calls.empty());
  captures.clear();
  rank.receive(one);

  rank.combine(one, true);
  captures[two] = 7;
  rank.start();
  rank.combine(two);
  CHECK((calls == Calls{"sum 1 beside", "combine 2 recorded"}));
  captures.clear();
  rank.combine(one, true);
  captures[one] = 8;
  CHECK(test::throws(ErrorKind::invalid_argument, "before its capture", [&] { rank.comm.complete(one); }));
  captures.clear();
  CHECK(rank.comm.complete(one) && calls.back() == "sum 1 beside");
}

}  // namespace

int main() { return moecomm::test::run(); }
