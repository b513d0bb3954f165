#include "transport/network_interface.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <memory>

#include "common/descriptor.hpp"
#include "common/error.hpp"
#include "transport/tcp/address.hpp"

namespace moecomm {
namespace {

bool is_ipv6(const std::string& address) { return address.find(':') != std::string::npos; }

/// Returns `text`, a numeric address, in its canonical spelling ("::1" for "::0001"); "" for other texts.
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

/// The first address that is up and satisfies `fits`, IPv4 before IPv6; "" if there is none.
template <class Fits>
std::string first(const std::vector<InterfaceAddress>& have, const Fits& fits) {
  for (const bool ipv6 : {false, true})
    for (const InterfaceAddress& each : have)
      if (each.up && is_ipv6(each.address) == ipv6 && fits(each)) return each.address;
  return "";
}

}  // namespace

std::string ip_text(const sockaddr* address) {
  std::array<char, NI_MAXHOST> text{};
  if (address == nullptr) return "";
  const bool ipv4 = address->sa_family == AF_INET;
  if (!ipv4 && address->sa_family != AF_INET6) return "";
  const socklen_t length = ipv4 ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return text.data();
}

std::vector<InterfaceAddress> host_addresses() {
  ifaddrs* found = nullptr;
  if (getifaddrs(&found) != 0) throw system_error("getifaddrs");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(found, freeifaddrs);
  std::vector<InterfaceAddress> addresses;
  for (const ifaddrs* each = found; each != nullptr; each = each->ifa_next) {
    const std::string address = ip_text(each->ifa_addr);
    // A link-local address has another meaning on every host, so no peer could use it.
    if (!address.empty() && !address.starts_with("fe80:"))
      addresses.push_back({each->ifa_name, address, (each->ifa_flags & IFF_UP) != 0,
                           (each->ifa_flags & IFF_LOOPBACK) != 0, (each->ifa_flags & IFF_RUNNING) != 0});
  }
  return addresses;
}

std::string default_route_address() {
  // No host has these addresses, reserved for documentation (RFC 5737, 3849). connect() of a datagram socket
  // to such an address sends nothing, but gives the socket this host's address on the default route.
  for (const char* const far : {"192.0.2.1", "2001:db8::1"}) {
    tcp::Address address = tcp::make_address(far, "9");
    const Descriptor fd =
        Descriptor::open([&] { return socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0); });
    if (fd && connect(fd.get(), address.get(), address.length) == 0 &&
        getsockname(fd.get(), address.get(), &address.length) == 0)
      return ip_text(address.get());
  }
  return "";
}

std::string choose_address(const std::string& wanted, const std::vector<InterfaceAddress>& have,
                           const std::string& default_address) {
  if (wanted.empty()) {
    std::string address =
        first(have, [&](const InterfaceAddress& each) { return each.address == default_address; });
    if (address.empty())
      address = first(have, [](const InterfaceAddress& each) { return !each.loopback && each.carrier; });
    if (address.empty()) address = first(have, [](const InterfaceAddress& each) { return !each.loopback; });
    if (address.empty()) address = first(have, [](const InterfaceAddress&) { return true; });
    if (address.empty()) refuse(wanted, "none is up", have);
    return address;
  }
  if (const std::string numeric = canonical(wanted); !numeric.empty()) {
    if (numeric == "0.0.0.0" || numeric == "::")
      refuse(wanted, "it stands for all interfaces, and moecomm listens on one", have);
    // The loopback lists one address of 127.0.0.0/8, but all addresses of that range are this host's.
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
  return choose_address(name_or_address, host_addresses(), default_route_address());
}

}  // namespace moecomm
