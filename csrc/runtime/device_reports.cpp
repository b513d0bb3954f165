// DeviceCommunicator: what the device has reported, as typed errors and counters.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime/cuda_calls.hpp"
#include "runtime/device_communicator.hpp"
#include "runtime/disagreement.hpp"
#include "runtime/pinned_status.hpp"

namespace moecomm {
void DeviceCommunicator::require_open() const {
  if (closed_) throw Error(ErrorKind::closed, "the communicator is closed");
}

void DeviceCommunicator::require_usable() {
  if (getpid() != owner_)
    throw Error(ErrorKind::closed, text_of("the communicator belongs to process ", owner_,
                                           "; a forked child has to build its own"));
  require_open();
  note_broken();
  if (broken_) throw *broken_;
  if (!signals_ || (nodes_.nodes() > 1 && !proxy_))
    throw Error(ErrorKind::closed, "the communicator is not connected");
}

void DeviceCommunicator::note_broken() {
  const HostStatus::Broken& broken = pinned_->status->broken;
  if (broken_ || load_acquire(broken.set) == 0) return;
  // [WaitPhase]
  static constexpr const char* kPhaseTexts[] = {"", " (its rows)", " (room for rows)",
                                                " (blocks of this GPU)"};
  const std::string phase =
      std::string(operation_name(broken.operation)) + kPhaseTexts[static_cast<int>(broken.phase)];
  const double longest = broken.seen < broken.expected ? config_.absence_seconds : 0;
  const Error lost = shm::loss_error({broken.peer, broken.cause, broken.first}, config_.rank, phase,
                                     std::max(config_.timeout_seconds, longest), broken.expected, broken.seen,
                                     proxy_ ? proxy_->reason(broken.peer) : "");
  // The peer may have left because its check() raised an overflow, which is still pending here.
  const auto overflow = take_overflow();
  broken_ = Error(lost.kind(), after_error(lost.what(), overflow ? overflow->what() : ""), lost.details());
}

std::optional<Error> DeviceCommunicator::take_overflow() {
  HostStatus::Overflow& overflow = pinned_->status->overflow;
  if (load_acquire(overflow.set) == 0) return std::nullopt;
  const Error error(ErrorKind::capacity_exceeded,
                    text_of("a dispatch with ", (overflow.of_positions != 0 ? "expert_" : ""), "capacity ",
                            overflow.capacity, " needed ", overflow.needed, " rows on rank ", overflow.rank,
                            "; rows past the capacity were left out"),
                    {.rank = overflow.rank, .needed = overflow.needed, .available = overflow.capacity});
  raised_ = error.what();
  store_release(overflow.set, uint32_t{0});
  return error;
}

std::string DeviceCommunicator::describe(const HostStatus::Verdict& v) const {
  const std::string rank = text_of("rank ", v.rank);
  if (v.has_text != 0)
    return rank + ": " + std::string(pinned_->status->text, strnlen(pinned_->status->text, kErrorText));
  if (v.about == Disagreement::none) {
    const int64_t index = v.index & ((int64_t{1} << 48) - 1), other = v.index >> 48;
    const std::string text = text_of(rank, ": topk_idx[", index / config_.shape.top_k, ", ",
                                     index % config_.shape.top_k, "] is ", v.value);
    if (other == 0) return text_of(text, ", expected -1 (no expert) to ", config_.shape.num_experts - 1);
    return text_of(text, ", which the token already has at k = ", other - 1,
                   "; a token may name an expert once");
  }
  return disagreement_text(v.about, v.rank, v.index, v.value);
}

void DeviceCommunicator::throw_verdict() {
  HostStatus::Verdict& verdict = pinned_->status->verdict;
  const auto kind = static_cast<ErrorKind>(verdict.kind);
  std::string text = describe(verdict);
  if (kind == ErrorKind::mismatched_arguments) {
    take_overflow();
    text = after_error(text, raised_);
  } else {
    raised_ = text;
  }
  store_release(verdict.set, uint32_t{0});
  throw Error(kind, text, {.rank = verdict.rank});
}

void DeviceCommunicator::check() {
  require_usable();
  if (load_acquire(pinned_->status->verdict.set) != 0) throw_verdict();
  if (const auto error = take_overflow()) throw *error;
}

DeviceCounters DeviceCommunicator::counters() {
  DeviceCounters out;
  std::vector<uint64_t> late_ns(window_.shape.ranks);
  out.late_seconds.resize(late_ns.size());
  if (closed_ || state_ == nullptr) return out;
  const DeviceGuard guard(config_.device);
  const BesideCaptures beside;
  DeviceState state;
  check_cuda(cudaMemcpyAsync(&state, state_, sizeof(state), cudaMemcpyDeviceToHost, watch_stream_),
             "cudaMemcpyAsync");
  check_cuda(cudaMemcpyAsync(late_ns.data(), late_ns_, late_ns.size() * sizeof(uint64_t),
                             cudaMemcpyDeviceToHost, watch_stream_),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(watch_stream_), "cudaStreamSynchronize");
  for (size_t rank = 0; rank < late_ns.size(); ++rank)
    out.late_seconds[rank] = static_cast<double>(late_ns[rank]) * 1e-9;
  out.rows_out = state.rows_out;
  out.bytes_wire = state.bytes_wire;
  double seconds[kClocks];
  for (int kind = 0; kind < kClocks; ++kind)
    seconds[kind] = static_cast<double>(state.clocked_ns[kind] + state.clocks[kind].nanoseconds()) * 1e-9;
  out.dispatch_seconds = seconds[clock_of(Operation::dispatch)];
  out.combine_seconds = seconds[clock_of(Operation::combine)];
  out.wait_seconds = static_cast<double>(state.wait_ns) * 1e-9;
  for (int kind = 0; kind < kClocks; ++kind)
    for (int phase = 0; phase < kPhases; ++phase) {
      const uint64_t started = state.clocks[kind].started, passed = state.clocks[kind].passed[phase];
      if (started > 0 && passed >= started)
        out.phases[kind][phase] = static_cast<double>(passed - started) * 1e-9;
    }
  return out;
}

}  // namespace moecomm
