// What ranks tell each other before libfabric connects them, and what a rank finds out about its host:
// endpoint addresses, NICs near a GPU. Needs no libfabric.
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "check.hpp"
#include "transport/fabric/endpoint_address.hpp"
#include "transport/fabric/nic.hpp"

using namespace moecomm;
using namespace moecomm::fabric;
using moecomm::test::throws;

namespace {

namespace fs = std::filesystem;

EndpointAddress sample_address() {
  EndpointAddress endpoint_address;
  endpoint_address.library = 1 << 16 | 17;
  endpoint_address.protocol = 25;
  endpoint_address.protocol_version = 3;
  endpoint_address.window = {0x1234567890abcdefu, 0x7f0000001000u, int64_t{3} << 30};
  endpoint_address.greetings = {42, 0, 4096};
  endpoint_address.hello = 77;
  endpoint_address.provider = "net";
  endpoint_address.interface = "eth0 192.0.2.7";
  for (int i = 0; i < 16; ++i) endpoint_address.address.push_back(static_cast<char>(16 * i));
  return endpoint_address;
}

TEST(address) {
  const EndpointAddress endpoint_address = sample_address();
  const std::string bytes = endpoint_address.to_bytes();
  CHECK(EndpointAddress::from_bytes(bytes) == endpoint_address);
  for (size_t count = 0; count < bytes.size(); ++count)
    CHECK(throws(ErrorKind::invalid_argument, "not a fabric endpoint address",
                 [&] { EndpointAddress::from_bytes(bytes.substr(0, count)); }));

  EndpointAddress other = endpoint_address;
  require_compatible(endpoint_address, 0, other, 1);
  EndpointAddress lonely = other;
  lonely.interface = "lo 127.0.0.1";
  CHECK(throws(ErrorKind::mismatched_arguments, "loopback",
               [&] { require_compatible(endpoint_address, 0, lonely, 1); }));
  require_compatible(lonely, 0, lonely, 1);
  other.protocol_version = 4;
  CHECK(throws(ErrorKind::mismatched_arguments, "protocol 25 version 4",
               [&] { require_compatible(endpoint_address, 0, other, 1); }));
}

/// A folder that is gone with the test.
struct Folder {
  Folder() {
    std::string name = fs::temp_directory_path() / "moecomm-test-XXXXXX";
    if (mkdtemp(name.data()) == nullptr) std::perror("mkdtemp"), std::exit(1);
    path = name;
  }
  ~Folder() { fs::remove_all(path); }
  fs::path path;
};

TEST(nics) {
  // Two sockets. GPU 17:00.0 and NIC 18:00.0 below one switch; NIC 1a:00.0 below the next port of the same
  // host bridge; NIC 3b:00.0 below another bridge of the same socket; NICs 97:00.0 and 98:00.0 on the other
  // one.
  Folder root;
  const auto device = [&](const std::string& path, int numa) {
    const fs::path folder = root.path / "devices" / path;
    fs::create_directories(folder);
    std::ofstream(folder / "numa_node") << numa << "\n";
    fs::create_directories(root.path / "bus/pci/devices");
    fs::create_symlink(folder, root.path / "bus/pci/devices" / folder.filename());
  };
  device("pci0000:16/0000:16:01.0/0000:17:00.0", 0);
  device("pci0000:16/0000:16:01.0/0000:18:00.0", 0);
  device("pci0000:16/0000:16:02.0/0000:1a:00.0", 0);
  device("pci0000:3a/0000:3a:01.0/0000:3b:00.0", 0);
  device("pci0000:96/0000:96:01.0/0000:97:00.0", 1);
  device("pci0000:96/0000:96:01.0/0000:98:00.0", 1);
  const std::string sysfs = root.path;
  const auto at = [&](const std::string& id) { return pci_device(id, sysfs); };
  const PciDevice gpu = at("0000:17:00.0");
  CHECK(gpu.numa == 0 && gpu.path.ends_with("pci0000:16/0000:16:01.0/0000:17:00.0"));
  CHECK(at("17:00.0").path == gpu.path && at("0000:1A:00.0").path == at("1a:00.0").path);
  CHECK(at("00000000:17:00.0").path == gpu.path);
  CHECK(pci_distance(gpu, gpu) == 0);
  CHECK(pci_distance(gpu, at("18:00.0")) == 2);
  CHECK(pci_distance(gpu, at("1a:00.0")) == 4);
  const int other_bridge = pci_distance(gpu, at("3b:00.0"));
  const int other_socket = pci_distance(gpu, at("97:00.0"));
  const int unknown = pci_distance(gpu, at("55:00.0"));
  CHECK(4 < other_bridge && other_bridge < other_socket && other_socket < unknown);
  CHECK(pci_distance(at("18:00.0"), gpu) == 2);

  std::ofstream(fs::path(gpu.path) / "local_cpulist") << "0-3,8,10-11\n";
  CHECK((cores_near(gpu) == std::vector<int>{0, 1, 2, 3, 8, 10, 11}));
  CHECK(cores_near(at("18:00.0")).empty() && cores_near(at("55:00.0")).empty());
  CHECK((core_list("5") == std::vector<int>{5}) && core_list("").empty() && core_list("\n").empty());
  for (const char* const bad : {"x", "3-", "4-2", "-1", "1,,x", "0-99999999", "1 2"})
    CHECK(core_list(bad).empty());

  const std::vector<std::string> nics{"0000:98:00.0", "0000:1a:00.0", "0000:97:00.0", "0000:18:00.0"};
  CHECK((nearest_nics("0000:17:00.0", nics, sysfs) == std::vector<int>{3}));
  CHECK((nearest_nics("0000:98:00.0", nics, sysfs) == std::vector<int>{0}));
  // From the other socket's view of the first one, all NICs there are equally far.
  const std::vector<std::string> rails{"0000:98:00.0", "0000:97:00.0"};
  CHECK((nearest_nics("0000:17:00.0", rails, sysfs) == std::vector<int>{1, 0}));
  // Without a GPU all are equal.
  CHECK((nearest_nics("", nics, sysfs) == std::vector<int>{3, 1, 2, 0}));

  // GPUs among the devices: who has the same nearest NICs shares them.
  const auto is = [&](const std::string& id, const char* vendor, const char* kind) {
    std::ofstream(fs::path(at(id).path) / "vendor") << vendor << "\n";
    std::ofstream(fs::path(at(id).path) / "class") << kind << "\n";
  };
  is("17:00.0", "0x10de", "0x030200");
  is("3b:00.0", "0x10de", "0x030000");
  is("1a:00.0", "0x15b3", "0x020700");
  CHECK(gpus_sharing("0000:17:00.0", {"0000:18:00.0"}, sysfs) == 2);
  CHECK(gpus_sharing("0000:17:00.0", nics, sysfs) == 1);
  CHECK(gpus_sharing("0000:55:00.0", {"0000:18:00.0"}, sysfs) == 3);  // one that sysfs does not show, and two
  is("97:00.0", "0x10de", "0x068000");                                // a switch
  CHECK(gpus_sharing("0000:17:00.0", {"0000:18:00.0"}, sysfs) == 2);

  using List = std::vector<int>;
  CHECK((share_of_nics(1, 1, 0) == List{0} && share_of_nics(1, 8, 5) == List{0}));
  CHECK((share_of_nics(2, 1, 0) == List{0, 1} && share_of_nics(2, 1, 3) == List{0, 1}));
  CHECK((share_of_nics(8, 2, 1) == List{4, 5, 6, 7} && share_of_nics(8, 2, 2) == List{0, 1, 2, 3}));
  CHECK((share_of_nics(2, 4, 3) == List{1} && share_of_nics(4, 3, 3) == List{3}));
}

}  // namespace

int main() { return moecomm::test::run(); }
