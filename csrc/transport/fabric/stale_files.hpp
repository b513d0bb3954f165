// Files that the shm provider leaves in /dev/shm when a process is killed.
#pragma once

#include <cstdint>
#include <string>

#include "transport/fabric/endpoint_address.hpp"

namespace moecomm::fabric {

int64_t own_process();
/// Identity of the namespace that process numbers count in; 0 if the system does not say.
uint64_t own_process_namespace();

enum class StaleFile {
  none,    ///< nothing there that is this peer's; who closes takes its file along
  in_use,  ///< its process runs
  removed,
};

/// Removes the file of a peer that used the shm provider on this host, if that process has ended. Only where
/// it is certain: both count processes alike, and the file's name begins with the number of a process that is
/// gone.
StaleFile remove_stale_file(const EndpointAddress& own, const EndpointAddress& peer,
                            const std::string& folder = "/dev/shm");

}  // namespace moecomm::fabric
