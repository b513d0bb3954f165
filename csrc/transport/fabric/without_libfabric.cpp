// Replaces this folder in a build without libfabric's headers: its functions throw Error(unsupported).
#include "common/error.hpp"
#include "transport/fabric/network.hpp"

namespace moecomm::fabric {
namespace {

[[noreturn]] void unavailable() {
  throw Error(ErrorKind::unsupported,
              "moecomm was built without libfabric: install its headers (Debian and Ubuntu: apt-get install "
              "libfabric-dev; Fedora: dnf install libfabric-devel) and build again");
}

}  // namespace

std::unique_ptr<Network> open_network(const FabricOptions&, void*, int64_t) { unavailable(); }
std::string offers_text() { unavailable(); }
std::string installed_version() { unavailable(); }

}  // namespace moecomm::fabric
