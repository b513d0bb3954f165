// Notices that a peer process has ended, with one pidfd per peer. It is readable from the moment the process
// exits, also before its parent has reaped it, and is never confused by a reused process number.
#pragma once

#include <cstdint>
#include <vector>

namespace moecomm::shm {

class PeerWatch {
 public:
  /// pids[r] is rank r's process; `self` is not watched. A process that has already ended counts as lost.
  PeerWatch(const std::vector<int64_t>& pids, int self);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  /// True once the process of `rank` has ended. Takes about a microsecond.
  bool lost(int rank) const;

 private:
  std::vector<int> fds_;  // -1: not watched; -2: ended before it could be watched
};

}  // namespace moecomm::shm
