#include "transport/interface.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>

#include "common/error.hpp"

namespace moecomm {
namespace {

bool is_ipv6(const std::string& address) { return address.find(':') != std::string::npos; }

/// The one spelling of a numeric address ("::0001" is "::1"), or "" if `text` is none.
std::string canonical(const std::string& text) {
  std::array<unsigned char, sizeof(in6_addr)> bytes;
  std::array<char, INET6_ADDRSTRLEN> spelled;
  for (const int family : {AF_INET, AF_INET6})
    if (inet_pton(family, text.c_str(), bytes.data()) == 1)
      return inet_ntop(family, bytes.data(), spelled.data(), spelled.size());
  return "";
}

std::string list(const std::vector<InterfaceAddress>& have) {
  std::string text;
  for (const InterfaceAddress& each : have)
    text += (text.empty() ? "" : ", ") + each.interface + " (" + each.address + (each.up ? ")" : ", down)");
  return text.empty() ? "none at all" : text;
}

[[noreturn]] void refuse(const std::string& wanted, const std::string& why,
                         const std::vector<InterfaceAddress>& have) {
  throw Error(ErrorKind::invalid_argument,
              "interface is '" + wanted + "': " + why +
                  "; set MOECOMM_FABRIC_INTERFACE to the name or a numeric address "
                  "of an interface of this host that is up, here: " +
                  list(have));
}

/// The first address that fits, IPv4 before IPv6; "" if there is none.
template <class Fits>
std::string first(const std::vector<InterfaceAddress>& have, const Fits& fits) {
  for (const bool ipv6 : {false, true})
    for (const InterfaceAddress& each : have)
      if (each.up && is_ipv6(each.address) == ipv6 && fits(each)) return each.address;
  return "";
}

}  // namespace

std::vector<InterfaceAddress> host_addresses() {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) throw Error(ErrorKind::unsupported, errno_text("getifaddrs"));
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(found, freeifaddrs);
  std::vector<InterfaceAddress> addresses;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr) continue;
    const int family = each->ifa_addr->sa_family;
    const void* bytes;
    if (family == AF_INET) {
      bytes = &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr;
    } else if (family == AF_INET6) {
      const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr;
      // It means something else on every host, so no peer could use it.
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
      bytes = &address;
    } else {
      continue;
    }
    std::array<char, INET6_ADDRSTRLEN> spelled;
    if (inet_ntop(family, bytes, spelled.data(), spelled.size()) == nullptr) continue;
    addresses.push_back({each->ifa_name, spelled.data(), (each->ifa_flags & IFF_UP) != 0,
                         (each->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return addresses;
}

std::string default_route_interface(const std::string& table) {
  std::istringstream lines(table);
  std::string line, chosen;
  uint64_t lowest = std::numeric_limits<uint64_t>::max();
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string name, destination, gateway, mask;
    uint64_t flags, references, used, metric;
    if (!(words >> name >> destination >> gateway >> std::hex >> flags >> std::dec >> references >> used >>
          metric >> mask))
      continue;  // the heading, or a line of another format
    if (destination != "00000000" || mask != "00000000" || (flags & RTF_UP) == 0 || metric >= lowest)
      continue;
    chosen = name;
    lowest = metric;
  }
  return chosen;
}

std::string choose_address(const std::string& wanted, const std::vector<InterfaceAddress>& have,
                           const std::string& default_interface) {
  if (wanted.empty()) {
    std::string address =
        first(have, [&](const InterfaceAddress& each) { return each.interface == default_interface; });
    if (address.empty()) address = first(have, [](const InterfaceAddress& each) { return !each.loopback; });
    if (address.empty()) address = first(have, [](const InterfaceAddress&) { return true; });
    if (address.empty()) refuse(wanted, "none is up", have);
    return address;
  }
  if (const std::string numeric = canonical(wanted); !numeric.empty()) {
    if (numeric == "0.0.0.0" || numeric == "::")
      refuse(wanted, "it stands for all interfaces, and moecomm listens on one", have);
    // Interfaces list one address of the loopback network, all of which are this host.
    if (numeric.starts_with("127.")) return numeric;
    for (const InterfaceAddress& each : have) {
      if (canonical(each.address) != numeric) continue;
      if (!each.up) refuse(wanted, "interface " + each.interface + " is down", have);
      return numeric;
    }
    refuse(wanted, "this host does not have that address", have);
  }
  const std::string address =
      first(have, [&](const InterfaceAddress& each) { return each.interface == wanted; });
  if (!address.empty()) return address;
  const bool known = std::any_of(have.begin(), have.end(),
                                 [&](const InterfaceAddress& each) { return each.interface == wanted; });
  refuse(wanted, known ? "it is down" : "there is none of that name with an address that other hosts can use",
         have);
}

std::string interface_address(const std::string& name_or_address) {
  std::ifstream file("/proc/net/route");
  std::ostringstream table;
  if (file) table << file.rdbuf();
  return choose_address(name_or_address, host_addresses(), default_route_interface(table.str()));
}

}  // namespace moecomm
