// Notices that a peer process has ended, by one pidfd a peer: readable from the moment the process exits,
// also while its parent has not reaped it, and never confused by a reused process number.
#pragma once

#include <cstdint>
#include <vector>

namespace moecomm::shm {

class PeerWatch {
 public:
  /// pids[r] is rank r's process; `self` is not watched. A process that is gone already counts as lost.
  PeerWatch(const std::vector<int64_t>& pids, int self);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// True once the process of `rank` has ended. Takes about a microsecond.
  bool lost(int rank) const;

 private:
  std::vector<int> fds_;  // -1: not watched, -2: gone before it could be watched
};

}  // namespace moecomm::shm
