// Choice of the libfabric provider and the NIC. A provider must offer one-sided writes with an immediate
// of 32 bits at least between unconnected endpoints (FI_EP_RDM, FI_RMA); of those that do, hardware comes
// first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

struct fi_info;

namespace moecomm::fabric {

/// Wishes of a caller. If all are empty: the best provider, its first interface that other hosts can reach.
struct ProviderOptions {
  /// "verbs", "efa", "cxi", "tcp", "shm", or in full: "tcp;ofi_rxm". "tcp" and "net" mean the same provider,
  /// which had the second name before libfabric 1.18, and stand for tcp;ofi_rxm where that one is missing.
  std::string provider;
  /// A network interface ("eth0"), a device ("mlx5_0"), or an address of this host ("192.0.2.7").
  std::string interface;
  std::string gpu_bus_id;  ///< PCI bus id of the rank's GPU: the NICs nearest to it are taken
  int local_rank = 0;      ///< several NICs equally near: ranks spread over them
  int local_ranks = 1;     ///< ranks of this node
  int lanes = 0;           ///< endpoints of a rank, see choose_lanes(); 0: as many as seem good
};

/// A provider on one interface, as libfabric lists it.
struct Offer {
  std::string provider;
  std::string domain;   ///< "eth0", "mlx5_0", "shm"
  std::string address;  ///< in print, "192.0.2.7"; empty where addresses are not IP
  std::string bus_id;   ///< of the NIC; empty where it is not known
  int64_t max_message = 0;
  bool operator==(const Offer&) const = default;
};

struct FreeInfo {
  void operator()(fi_info* info) const;
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

constexpr int kMostLanes = 64;

/// Chooses what the endpoint of each lane of a rank is opened with. Lanes use the NICs that are a rank's
/// share in turn. Without a number there are as many as those; and over TCP, where a core copies each
/// connection's bytes, up to eight if the ranks of the node leave cores for them. All lanes have the same
/// provider. Error(unsupported), with a list of what is there, if nothing fits.
std::vector<Info> choose_lanes(const ProviderOptions& options);

/// The description of such a choice.
Offer describe(const fi_info& info);

/// Names that a provider asked for by `name` may have in this version of libfabric (major << 16 | minor), in
/// the order to try them. ("tcp", 1.17) -> net, tcp;ofi_rxm
std::vector<std::string> provider_names(const std::string& name, uint32_t version);

/// Why a provider that is listed cannot be used with this version, or nothing.
std::string why_not(const std::string& provider, uint32_t version);

}  // namespace moecomm::fabric
