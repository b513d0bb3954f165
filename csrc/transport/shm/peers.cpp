#include "transport/shm/peers.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "common/error.hpp"

namespace moecomm::shm {

PeerWatch::PeerWatch(const std::vector<int64_t>& pids, int self) : fds_(pids.size(), -1) {
  for (size_t r = 0; r < pids.size(); ++r) {
    // Ranks that are threads of one process need no watching.
    if (static_cast<int>(r) == self || pids[r] == getpid()) continue;
    const long fd = syscall(SYS_pidfd_open, static_cast<pid_t>(pids[r]), 0);
    if (fd >= 0)
      fds_[r] = static_cast<int>(fd);
    else if (errno == ESRCH)
      fds_[r] = -2;
    else
      throw system_error("pidfd_open of a peer", errno == ENOSYS
                                                     ? "Linux 5.3 or later is needed"
                                                     : "a container's seccomp profile has to allow it");
  }
}

PeerWatch::~PeerWatch() {
  for (int fd : fds_)
    if (fd >= 0) close(fd);
}

bool PeerWatch::lost(int rank) const {
  if (fds_[rank] < 0) return fds_[rank] == -2;
  pollfd polled{fds_[rank], POLLIN, 0};
  return poll(&polled, 1, 0) > 0;
}

}  // namespace moecomm::shm
