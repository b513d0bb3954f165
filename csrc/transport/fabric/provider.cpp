#include "transport/fabric/provider.hpp"

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>

#include "common/error.hpp"
#include "transport/fabric/endpoint_address.hpp"
#include "transport/fabric/library.hpp"
#include "transport/fabric/network.hpp"
#include "transport/fabric/nic.hpp"
#include "transport/network_interface.hpp"

namespace moecomm::fabric {
namespace {

// Preferences of providers, smaller is better. A provider with kOnlyByName or more is used only on request:
// it does not leave the host, or is meant for development.
constexpr int kOnlyByName = 100;
// kCopyingLanes: most lanes (endpoints) if cores copy the bytes, as with TCP. kCoresALane: cores for a lane.
constexpr int kCopyingLanes = 8, kCoresALane = 4;

int preference(const std::string& provider) {
  static constexpr struct {
    const char* name;
    int value;
  } kKnown[] = {
      {"cxi", 0},
      {"efa", 1},
      {"verbs", 2},
      {"verbs;ofi_rxm", 3},
      {"opx", 4},
      {"psm2", 5},
      {"psm3", 20},  // also runs over plain Ethernet
      {"tcp", 30},
      {"net", 31},
      {"tcp;ofi_rxm", 32},
      {"net;ofi_rxm", kOnlyByName},
      {"shm", kOnlyByName},
      {"sm2", kOnlyByName},
      {"sockets", kOnlyByName},
  };
  for (const auto& known : kKnown)
    if (provider == known.name) return known.value;
  if (provider.find("ofi_rxd") != std::string::npos || provider.find("udp") != std::string::npos)
    return kOnlyByName;
  return 10;  // hardware that is not in this list
}

bool on_one_host(const std::string& provider) { return provider == "shm" || provider == "sm2"; }

/// Sort key of an address if no interface is requested: loopback comes after others, then IPv6 after IPv4.
/// candidates() puts the address that control links use before all others.
int address_preference(const std::string& address) {
  if (address.starts_with("fe80:")) return 9;  // needs a scope, which address tables can't hold
  const bool v6 = address.find(':') != std::string::npos;
  return (is_loopback(address) ? 2 : 0) + (v6 ? 1 : 0);
}

/// Asks libfabric for every provider with the needed features; null if there is none.
Info query() {
  const Library& lib = library();
  // The library allocates hints: its structs may be longer than those of our headers.
  const Info hints(lib.dupinfo(nullptr));
  if (hints == nullptr) throw Error(ErrorKind::out_of_memory, "libfabric: no memory for hints");
  hints->caps = FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = 4;
  // Each bit is something that a provider may demand. endpoint.cpp fulfils all these demands.
  hints->domain_attr->mr_mode =
      FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
  fi_info* found = nullptr;
  const KeepSignalHandlers keep;
  const int status = lib.getinfo(lib.api, nullptr, nullptr, 0, hints.get(), &found);
  if (status != 0 && status != -FI_ENODATA)
    throw Error(ErrorKind::unsupported,
                std::string("libfabric cannot list its providers: ") + lib.strerror(-status));
  return Info(found);
}

struct Candidate {
  const fi_info* info;
  Offer offer;
};

/// Usable entries, best first, each once: libfabric repeats entries that differ only in irrelevant fields.
std::vector<Candidate> candidates(const fi_info* list) {
  std::vector<Candidate> found;
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    if (info->domain_attr->cq_data_size < sizeof(uint32_t)) continue;
    if (!why_not(info->fabric_attr->prov_name, library().version).empty()) continue;
    Candidate candidate{info, describe(*info)};
    if (std::none_of(found.begin(), found.end(),
                     [&](const Candidate& c) { return c.offer == candidate.offer; }))
      found.push_back(std::move(candidate));
  }
  // Of the addresses of a provider, the address that control links use comes first.
  std::string usual;
  try {
    usual = interface_address("");
  } catch (const Error&) {
    // No address of this host is up; providers may not need one.
  }
  std::stable_sort(found.begin(), found.end(), [&](const Candidate& a, const Candidate& b) {
    const int first = preference(a.offer.provider), second = preference(b.offer.provider);
    if (first != second) return first < second;
    if (a.offer.provider != b.offer.provider) return a.offer.provider < b.offer.provider;
    if ((a.offer.address == usual) != (b.offer.address == usual)) return a.offer.address == usual;
    return address_preference(a.offer.address) < address_preference(b.offer.address);
  });
  return found;
}

/// The text of offers_text().
std::string list_text(const std::vector<Candidate>& list) {
  std::vector<std::pair<std::string, std::vector<std::string>>> providers;
  for (const Candidate& c : list) {
    if (providers.empty() || providers.back().first != c.offer.provider)
      providers.push_back({c.offer.provider, {}});
    auto& domains = providers.back().second;
    if (std::find(domains.begin(), domains.end(), c.offer.domain) == domains.end())
      domains.push_back(c.offer.domain);
  }
  std::string text;
  for (const auto& [provider, domains] : providers) {
    text += (text.empty() ? "" : ", ") + provider;
    if (on_one_host(provider)) continue;
    for (size_t i = 0; i < domains.size(); ++i) text += (i == 0 ? " (" : ", ") + domains[i];
    text += ")";
  }
  return text.empty() ? "nothing" : text;
}

[[noreturn]] void nothing_fits(const ProviderOptions& options, const std::vector<Candidate>& there,
                               bool provider_there) {
  const std::string version = version_text(library().version);
  const std::string has = "libfabric " + version + " offers " + list_text(there);
  if (options.provider.empty() && options.interface.empty())
    throw Error(ErrorKind::unsupported,
                "no fabric provider has one-sided writes with an immediate and reaches other hosts: " + has +
                    "; `fi_info -t FI_EP_RDM -c FI_RMA` shows the system's view");
  std::string text;
  if (!provider_there) {
    text = "fabric provider '" + options.provider + "' cannot be used here: ";
    const std::string reason = why_not(options.provider, library().version);
    text += (reason.empty() ? "" : reason + "; ") + has +
            "; set MOECOMM_FABRIC_PROVIDER to one of them, or unset it";
  } else {
    text = "no fabric provider" + (options.provider.empty() ? "" : " '" + options.provider + "'") +
           " is on interface '" + options.interface + "': " + has +
           "; name one of these interfaces, or an address of this host";
  }
  throw Error(ErrorKind::unsupported, text);
}

/// Returns the candidates that match the caller's wishes. Throws if there are none.
std::vector<Candidate> fitting(const ProviderOptions& options, const std::vector<Candidate>& there) {
  std::vector<Candidate> fit;
  if (options.provider.empty()) {
    std::copy_if(there.begin(), there.end(), std::back_inserter(fit),
                 [](const Candidate& c) { return preference(c.offer.provider) < kOnlyByName; });
  } else {
    for (const std::string& name : provider_names(options.provider, library().version)) {
      std::copy_if(there.begin(), there.end(), std::back_inserter(fit),
                   [&](const Candidate& c) { return c.offer.provider == name; });
      if (!fit.empty()) break;
    }
  }
  const bool provider_there = !fit.empty();
  if (!options.interface.empty()) {
    std::set<std::string> addresses;
    for (const InterfaceAddress& each : host_addresses())
      if (each.interface == options.interface) addresses.insert(each.address);
    std::erase_if(fit, [&](const Candidate& c) {
      return !on_one_host(c.offer.provider) && c.offer.domain != options.interface &&
             c.offer.address != options.interface && !addresses.contains(c.offer.address);
    });
  }
  if (fit.empty()) nothing_fits(options, there, provider_there);
  return fit;
}

/// Number of lanes (endpoints) for which there are cores, if the system copies the data (TCP); else 1.
int copying_lanes(const Offer& offer, const ProviderOptions& options) {
  const std::vector<std::string> copying = provider_names("tcp", library().version);
  if (std::find(copying.begin(), copying.end(), offer.provider) == copying.end()) return 1;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  return std::clamp(CPU_COUNT(&allowed) / (kCoresALane * std::max(1, options.local_ranks)), 1, kCopyingLanes);
}

}  // namespace

void FreeInfo::operator()(fi_info* info) const { library().freeinfo(info); }

Offer describe(const fi_info& info) {
  Offer offer;
  offer.provider = info.fabric_attr->prov_name;
  offer.domain = info.domain_attr->name != nullptr ? info.domain_attr->name : "";
  const bool ip = info.addr_format == FI_SOCKADDR || info.addr_format == FI_SOCKADDR_IN ||
                  info.addr_format == FI_SOCKADDR_IN6;
  if (ip) offer.address = ip_text(static_cast<const sockaddr*>(info.src_addr));
  if (info.nic != nullptr && info.nic->bus_attr != nullptr && info.nic->bus_attr->bus_type == FI_BUS_PCI) {
    const fi_pci_attr& pci = info.nic->bus_attr->attr.pci;
    char text[32];
    std::snprintf(text, sizeof(text), "%04x:%02x:%02x.%x", unsigned{pci.domain_id}, unsigned{pci.bus_id},
                  unsigned{pci.device_id}, unsigned{pci.function_id});
    offer.bus_id = text;
  }
  offer.max_message = static_cast<int64_t>(
      std::min<uint64_t>(info.ep_attr->max_msg_size, std::numeric_limits<int64_t>::max()));
  return offer;
}

std::vector<std::string> provider_names(const std::string& name, uint32_t version) {
  if (name == "tcp" || name == "net") {
    // Until 1.17 "tcp" meant a provider of connected endpoints, whose RDM variant was called "net".
    const bool renamed = version >= FI_VERSION(1, 18);
    return {renamed ? "tcp" : "net", "tcp;ofi_rxm"};
  }
  if (name.find(';') != std::string::npos) return {name};
  return {name, name + ";ofi_rxm", name + ";ofi_rxd"};
}

std::string why_not(const std::string& provider, uint32_t version) {
  if (provider != "cxi") return "";
  if (version < FI_VERSION(2, 5))
    return "the cxi provider has no write with immediate (fi_writedata) before libfabric 2.5, and this is " +
           version_text(version);
  const char* enabled = std::getenv("FI_CXI_ENABLE_WRITEDATA");
  if (enabled == nullptr || std::strcmp(enabled, "1") != 0)
    return "the cxi provider has write with immediate (fi_writedata) switched off: set "
           "FI_CXI_ENABLE_WRITEDATA=1";
  return "";
}

std::string installed_version() { return version_text(library().version); }

std::string offers_text() {
  const Info all = query();
  return list_text(candidates(all.get()));
}

std::vector<Info> choose_lanes(const ProviderOptions& options) {
  const Info all = query();
  const std::vector<Candidate> there = candidates(all.get());
  const std::vector<Candidate> fit = fitting(options, there);

  // Among NICs with the first candidate's provider and kind of address, the distance from the GPU decides.
  const Candidate& first = fit.front();
  std::vector<const Candidate*> rails;
  std::vector<std::string> nics;
  for (const Candidate& c : fit) {
    if (c.offer.bus_id.empty() || c.offer.provider != first.offer.provider) continue;
    if (address_preference(c.offer.address) != address_preference(first.offer.address)) continue;
    if (std::find(nics.begin(), nics.end(), c.offer.bus_id) != nics.end()) continue;
    rails.push_back(&c);
    nics.push_back(c.offer.bus_id);
  }
  std::vector<const Candidate*> share;
  if (nics.empty()) {
    share.push_back(&first);
  } else {
    const std::vector<int> near = nearest_nics(options.gpu_bus_id, nics);
    const int sharers =
        options.gpu_bus_id.empty() ? options.local_ranks : gpus_sharing(options.gpu_bus_id, nics);
    for (const int at : share_of_nics(static_cast<int>(near.size()), sharers, options.local_rank))
      share.push_back(rails[near[at]]);
  }

  int lanes = options.lanes;
  if (lanes == 0) lanes = std::max(static_cast<int>(share.size()), copying_lanes(first.offer, options));
  std::vector<Info> chosen;
  for (int lane = 0; lane < lanes; ++lane) {
    chosen.emplace_back(library().dupinfo(share[static_cast<size_t>(lane) % share.size()]->info));
    if (chosen.back() == nullptr)
      throw Error(ErrorKind::out_of_memory, "libfabric: no memory for a provider's description");
  }
  return chosen;
}

}  // namespace moecomm::fabric
