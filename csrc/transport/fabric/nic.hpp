// Choice of the NIC near a GPU, by the PCI tree that Linux shows in sysfs. All functions are pure on path
// strings but for the two functions that take a sysfs root.
#pragma once

#include <string>
#include <vector>

namespace moecomm::fabric {

/// A PCI device in sysfs: its resolved folder, e.g.
/// "/sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0", and its NUMA node (-1: not known).
struct PciDevice {
  std::string path;
  int numa = -1;
};

/// The device with this bus id ("0000:17:00.0"; upper case and a missing domain are taken too). The path is
/// empty if sysfs does not show it.
PciDevice pci_device(const std::string& bus_id, const std::string& sysfs = "/sys");

/// PCI links between two devices by way of their nearest common bridge. Devices below different host bridges
/// are 1000 apart at least, those of different NUMA nodes 2000, one that is not known 4000: no path through
/// bridges is so long.
///   .../pci0000:16/0000:16:01.0/0000:17:00.0 and .../pci0000:16/0000:16:01.0/0000:18:00.0: 2, one switch
int pci_distance(const PciDevice& a, const PciDevice& b);

/// Cores near a device, as sysfs lists them; empty if it does not.
std::vector<int> cores_near(const PciDevice& device);

/// The numbers in a list like "0-3,8,10-11"; empty if it is none.
std::vector<int> core_list(const std::string& text);

/// Indices of the NICs nearest to a GPU, which are equally near; of all without one (`gpu` empty). In the
/// order of their bus ids, which is the same on machines of one kind. `nics` are bus ids and must not be
/// empty.
std::vector<int> nearest_nics(const std::string& gpu, const std::vector<std::string>& nics,
                              const std::string& sysfs = "/sys");

/// GPUs of this host that have the same nearest NICs as `gpu`, itself among them: they share these NICs.
int gpus_sharing(const std::string& gpu, const std::vector<std::string>& nics,
                 const std::string& sysfs = "/sys");

/// The NICs, out of `near` equal ones that `sharers` ranks share, that the lanes of a rank use in turn: its
/// part if there are enough for all, else one of them. Ranks of one node spread in the same way on every
/// node.
///   (8 near, 2 sharers, local rank 1): 4, 5, 6, 7    (2 near, 4 sharers, local rank 3): 1
std::vector<int> share_of_nics(int near, int sharers, int local_rank);

}  // namespace moecomm::fabric
