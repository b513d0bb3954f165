// Choice of the libfabric provider and the NIC. A provider must offer one-sided writes with an immediate of
// at least 32 bits between unconnected endpoints (FI_EP_RDM, FI_RMA). Providers of hardware are preferred.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct fi_info;

namespace moecomm::fabric {

/// A caller's wishes. If all are empty: the best provider, on its first interface that other hosts can reach.
struct ProviderOptions {
  /// "verbs", "efa", "cxi", "tcp", "shm", or a full name like "tcp;ofi_rxm". "tcp" and "net" mean the same
  /// provider, called "net" before libfabric 1.18; if that provider is missing, both mean tcp;ofi_rxm.
  std::string provider;
  /// A network interface ("eth0"), a device ("mlx5_0"), or an address of this host ("192.0.2.7").
  std::string interface;
  std::string gpu_bus_id;  ///< PCI bus id of the rank's GPU, to whose nearest NICs the choice is limited
  int local_rank = 0;      ///< local index of this rank; spreads ranks over equally near NICs
  int local_ranks = 1;     ///< ranks of this node
  int lanes = 0;           ///< endpoints of a rank, see choose_lanes(); 0: chosen automatically
};

/// A provider on one interface, as libfabric lists it.
struct Offer {
  std::string provider;
  std::string domain;   ///< for example "eth0", "mlx5_0", "shm"
  std::string address;  ///< as text, "192.0.2.7"; empty where addresses are not IP
  std::string bus_id;   ///< bus id of the NIC; empty if unknown
  int64_t max_message = 0;
  bool operator==(const Offer&) const = default;
};

struct FreeInfo {
  void operator()(fi_info* info) const;
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

/// Chooses the provider and NIC for each lane (endpoint) of a rank. Lanes use the rank's NICs (share_of_nics)
/// in turn. If no number is requested, there are as many lanes as NICs; over TCP, where a core copies each
/// connection's bytes, up to eight if the ranks of the node leave enough cores. All lanes have the same
/// provider. Throws Error(unsupported), which lists what is available, if nothing fits.
std::vector<Info> choose_lanes(const ProviderOptions& options);

/// Describes an entry of libfabric's list, for example one that choose_lanes() has chosen.
Offer describe(const fi_info& info);

/// Names that a provider requested as `name` may have in this version of libfabric (major << 16 | minor), in
/// the order to try them. ("tcp", 1.17) -> net, tcp;ofi_rxm
std::vector<std::string> provider_names(const std::string& name, uint32_t version);

/// Why this version of libfabric cannot use a provider that it lists; empty if it can.
std::string why_not(const std::string& provider, uint32_t version);

}  // namespace moecomm::fabric
