#include "transport/fabric/shuffled_transport.hpp"

#include <algorithm>
#include <utility>

namespace moecomm::fabric {
namespace {

constexpr size_t kPuts = 64;  // held at most; then the caller is told to wait, as with a network that is full

}  // namespace

ShuffledTransport::ShuffledTransport(std::unique_ptr<Transport> inner, uint64_t seed,
                                     std::chrono::microseconds longest)
    : inner_(std::move(inner)), random_(seed), longest_(longest) {}

Clock::time_point ShuffledTransport::later() {
  // A random fourth goes through at once: overtaking and being overtaken are both common.
  if (random_() % 4 == 0) return Clock::now();
  std::uniform_int_distribution<int64_t> span(0, longest_.count());
  return Clock::now() + std::chrono::microseconds(span(random_));
}

bool ShuffledTransport::put(int32_t peer, int64_t dst_offset, int64_t src_offset, int64_t bytes,
                            uint32_t immediate, uint64_t context) {
  if (puts_.size() >= kPuts) return false;
  puts_.push_back({later(), peer, dst_offset, src_offset, bytes, immediate, context});
  return true;
}

void ShuffledTransport::poll(std::vector<TransportEvent>& events) {
  const Clock::time_point now = Clock::now();
  std::shuffle(puts_.begin(), puts_.end(), random_);
  std::erase_if(puts_, [&](const Put& p) {
    return p.due <= now && inner_->put(p.peer, p.dst_offset, p.src_offset, p.bytes, p.immediate, p.context);
  });

  fresh_.clear();
  inner_->poll(fresh_);
  for (TransportEvent& event : fresh_) held_.push_back({later(), std::move(event)});
  std::shuffle(held_.begin(), held_.end(), random_);
  const auto ripe =
      std::partition(held_.begin(), held_.end(), [&](const Held& held) { return held.due > now; });
  for (auto held = ripe; held != held_.end(); ++held) events.push_back(std::move(held->event));
  held_.erase(ripe, held_.end());
}

}  // namespace moecomm::fabric
