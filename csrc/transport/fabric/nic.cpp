#include "transport/fabric/nic.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <memory>

namespace moecomm::fabric {
namespace {

namespace fs = std::filesystem;

constexpr int kOtherHostBridge = 1000;
constexpr int kOtherNumaNode = 2000;
constexpr int kUnknown = 4000;
constexpr int kMostCores = 1 << 16;
// PCI vendor and classes of a GPU in sysfs.
constexpr const char *kNvidia = "0x10de", *kController3d = "0x0302", *kControllerVga = "0x0300";

/// Returns the contents of a file of sysfs; "" if there is no such file.
std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), std::fclose);
  std::string text(4096, 0);  // sysfs gives a page at most
  text.resize(file == nullptr ? 0 : std::fread(text.data(), 1, text.size(), file.get()));
  return text;
}

std::string canonical_bus_id(std::string id) {
  for (char& letter : id) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  const auto colons = std::count(id.begin(), id.end(), ':');
  if (colons == 1) return "0000:" + id;
  // CUDA and nvidia-smi may write the domain with eight digits, sysfs with four.
  const size_t domain = id.find(':');
  if (colons == 2 && domain == 8 && id.starts_with("0000")) return id.substr(4);
  return id;
}

}  // namespace

PciDevice pci_device(const std::string& bus_id, const std::string& sysfs) {
  PciDevice device;
  std::error_code error;
  const fs::path resolved =
      fs::canonical(fs::path(sysfs) / "bus/pci/devices" / canonical_bus_id(bus_id), error);
  if (bus_id.empty() || error) return device;
  device.path = resolved.string();
  const std::string numa = read_file((resolved / "numa_node").string());
  if (std::from_chars(numa.data(), numa.data() + numa.size(), device.numa).ec != std::errc())
    device.numa = -1;
  return device;
}

std::vector<int> core_list(const std::string& text) {
  std::vector<int> cores;
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](int& value) {
    const auto [next, error] = std::from_chars(at, end, value);
    at = next;
    return error == std::errc() && value >= 0;
  };
  while (at < end && *at != '\n') {
    int first = 0, last = 0;
    if (!number(first)) return {};
    last = first;
    if (at < end && *at == '-' && (++at, !number(last) || last < first || last > kMostCores)) return {};
    for (int core = first; core <= last; ++core) cores.push_back(core);
    if (at < end && *at == ',')
      ++at;
    else if (at < end && *at != '\n')
      return {};
  }
  return cores;
}

std::vector<int> cores_near(const PciDevice& device) {
  return device.path.empty() ? std::vector<int>{} : core_list(read_file(device.path + "/local_cpulist"));
}

int pci_distance(const PciDevice& a, const PciDevice& b) {
  if (a.path.empty() || b.path.empty()) return kUnknown;
  const fs::path left(a.path), right(b.path);
  const auto [from, to] = std::mismatch(left.begin(), left.end(), right.begin(), right.end());
  const bool same_bridge =
      std::any_of(left.begin(), from, [](const fs::path& part) { return part.native().starts_with("pci"); });
  auto distance = static_cast<int>(std::distance(from, left.end()) + std::distance(to, right.end()));
  if (!same_bridge) distance += kOtherHostBridge;
  if (!same_bridge && a.numa != b.numa) distance += kOtherNumaNode - kOtherHostBridge;
  return distance;
}

std::vector<int> nearest_nics(const std::string& gpu, const std::vector<std::string>& nics,
                              const std::string& sysfs) {
  std::vector<int> distance(nics.size(), 0);
  if (!gpu.empty()) {
    const PciDevice from = pci_device(gpu, sysfs);
    for (size_t i = 0; i < nics.size(); ++i) distance[i] = pci_distance(from, pci_device(nics[i], sysfs));
  }
  const int best = *std::min_element(distance.begin(), distance.end());
  std::vector<int> equal;
  for (size_t i = 0; i < nics.size(); ++i)
    if (distance[i] == best) equal.push_back(static_cast<int>(i));
  // Sorted by bus id, because providers list NICs in different orders.
  std::sort(equal.begin(), equal.end(), [&](int a, int b) { return nics[a] < nics[b]; });
  return equal;
}

int gpus_sharing(const std::string& gpu, const std::vector<std::string>& nics, const std::string& sysfs) {
  const std::vector<int> near = nearest_nics(gpu, nics, sysfs);
  const std::string own = pci_device(gpu, sysfs).path;
  int sharing = 1;
  std::error_code error;
  for (const fs::directory_entry& entry :
       fs::directory_iterator(fs::path(sysfs) / "bus/pci/devices", error)) {
    const std::string folder = entry.path().string();
    if (!read_file(folder + "/vendor").starts_with(kNvidia)) continue;
    const std::string kind = read_file(folder + "/class");
    if (!kind.starts_with(kController3d) && !kind.starts_with(kControllerVga)) continue;
    const std::string id = entry.path().filename().string();
    if (pci_device(id, sysfs).path != own && nearest_nics(id, nics, sysfs) == near) ++sharing;
  }
  return sharing;
}

std::vector<int> share_of_nics(int near, int sharers, int local_rank) {
  const int each = std::max(1, near / std::max(1, sharers));
  std::vector<int> share;
  for (int i = 0; i < each; ++i) share.push_back(static_cast<int>((int64_t{local_rank} * each + i) % near));
  return share;
}

}  // namespace moecomm::fabric
