// Replacement of this folder in a build without libfabric's headers: the same functions, which say so.
#include "common/error.hpp"
#include "transport/fabric/library.hpp"
#include "transport/fabric/provider.hpp"
#include "transport/fabric/transport.hpp"

namespace moecomm::fabric {
namespace {

[[noreturn]] void unavailable() {
  throw Error(ErrorKind::unsupported,
              "moecomm was built without libfabric: install its headers (Debian and Ubuntu: apt-get install "
              "libfabric-dev; Fedora: dnf install libfabric-devel) and build again");
}

}  // namespace

bool built() { return false; }
std::string header_version() { return ""; }
std::string version_text(uint32_t version) {
  return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff);
}

std::string Library::version_text() const { return fabric::version_text(version); }
Library load_library(const std::string&) { unavailable(); }
const Library& library() { unavailable(); }

void FreeInfo::operator()(fi_info*) const {}
std::vector<Offer> list_offers(bool) { unavailable(); }
Info choose_provider(const ProviderOptions&) { unavailable(); }
std::vector<Info> choose_lanes(const ProviderOptions&) { unavailable(); }
Offer describe(const fi_info&) { unavailable(); }
std::vector<std::string> provider_names(const std::string&, uint32_t) { unavailable(); }
std::string why_not(const std::string&, uint32_t) { unavailable(); }

struct FabricTransport::State {};
FabricTransport::FabricTransport(const FabricOptions&, void*, int64_t) { unavailable(); }
FabricTransport::FabricTransport(const FabricOptions&, Info, void*, int64_t) { unavailable(); }
FabricTransport::~FabricTransport() = default;
std::vector<std::byte> FabricTransport::endpoint_address() const { unavailable(); }
void FabricTransport::insert_peers(const std::vector<std::vector<std::byte>>&, int) { unavailable(); }
void FabricTransport::connect(double, const std::function<void()>&) { unavailable(); }
const TransportCaps& FabricTransport::caps() const { unavailable(); }
bool FabricTransport::put(int32_t, int64_t, int64_t, int64_t, uint32_t, uint64_t) { unavailable(); }
void FabricTransport::poll(std::vector<TransportEvent>&) { unavailable(); }
void FabricTransport::forget(int32_t) { unavailable(); }
int FabricTransport::in_flight() const { unavailable(); }
int64_t FabricTransport::bytes_in_flight() const { unavailable(); }

}  // namespace moecomm::fabric
