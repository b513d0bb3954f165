#include "transport/fabric/stale_files.hpp"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "common/text_file.hpp"

namespace moecomm::fabric {
namespace {

/// Returns whether a process has ended; true for a zombie too, which runs no more.
bool ended(int64_t pid) {
  if (kill(static_cast<pid_t>(pid), 0) != 0) return errno == ESRCH;
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');  // the name before it may hold anything
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return false;
  return stat[name_end + 2] == 'Z' || stat[name_end + 2] == 'X';
}

}  // namespace

int64_t own_process() { return getpid(); }

uint64_t own_process_namespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

StaleFile remove_stale_file(const EndpointAddress& own, const EndpointAddress& peer,
                            const std::string& folder) {
  if (own.pid_namespace == 0 || own.pid_namespace != peer.pid_namespace) return StaleFile::none;
  if (peer.provider != "shm" || peer.pid <= 1 || peer.pid == own.pid) return StaleFile::none;
  std::string name(reinterpret_cast<const char*>(peer.address.data()), peer.address.size());
  name = name.substr(0, name.find('\0'));
  if (const size_t scheme = name.find("://"); scheme != std::string::npos) name = name.substr(scheme + 3);
  const bool of_process = name.starts_with(std::to_string(peer.pid) + ":");
  if (!of_process || name.find('/') != std::string::npos) return StaleFile::none;
  const std::string path = folder + "/" + name;
  if (access(path.c_str(), F_OK) != 0) return StaleFile::none;
  if (!ended(peer.pid)) return StaleFile::in_use;
  return unlink(path.c_str()) == 0 ? StaleFile::removed : StaleFile::none;
}

}  // namespace moecomm::fabric
