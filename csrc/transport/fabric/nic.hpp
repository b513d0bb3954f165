// Chooses the NIC near a GPU by the PCI tree that Linux shows in sysfs. pci_distance, core_list and
// share_of_nics are pure functions; the others read sysfs. A rank's lane is a libfabric endpoint.
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

/// The device with this bus id ("0000:17:00.0"; upper case and a missing domain are accepted). Its path is
/// empty if sysfs does not show the device.
PciDevice pci_device(const std::string& bus_id, const std::string& sysfs = "/sys");

/// Number of PCI links between two devices through their nearest common bridge. If the devices are below
/// different host bridges, 1000 is added, or 2000 if their NUMA nodes differ too. If a device is unknown,
/// the result is 4000: more than any path through bridges has.
///   .../pci0000:16/0000:16:01.0/0000:17:00.0 and .../pci0000:16/0000:16:01.0/0000:18:00.0: 2, by a switch
int pci_distance(const PciDevice& a, const PciDevice& b);

/// Cores near a device according to sysfs; empty if it lists none.
std::vector<int> cores_near(const PciDevice& device);

/// The numbers in a list like "0-3,8,10-11"; empty if the text is not such a list.
std::vector<int> core_list(const std::string& text);

/// Indices of the NICs nearest to a GPU, several if they are equally near; all if `gpu` is empty (no GPU).
/// They are sorted by bus id, for the same order on machines of one kind. `nics`: bus ids, at least one.
std::vector<int> nearest_nics(const std::string& gpu, const std::vector<std::string>& nics,
                              const std::string& sysfs = "/sys");

/// Number of this host's GPUs that share the nearest NICs of `gpu`, including `gpu` itself.
int gpus_sharing(const std::string& gpu, const std::vector<std::string>& nics,
                 const std::string& sysfs = "/sys");

/// Divides `near` equally near NICs among `sharers` ranks: indices of the NICs that the lanes of one rank
/// use. These are near / sharers NICs, or one NIC if there are more ranks than NICs; the same on every node.
///   (8 near, 2 sharers, local rank 1): 4, 5, 6, 7    (2 near, 4 sharers, local rank 3): 1
std::vector<int> share_of_nics(int near, int sharers, int local_rank);

}  // namespace moecomm::fabric
