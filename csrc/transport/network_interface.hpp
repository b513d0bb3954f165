// Chooses the address on which this rank listens and at which peers reach it: one interface, never all.
#pragma once

#include <string>
#include <vector>

struct sockaddr;

namespace moecomm {

struct InterfaceAddress {
  std::string interface;  ///< "eth0"
  std::string address;    ///< numeric, "10.0.0.3" or "2001:db8::3"
  bool up = true;
  bool loopback = false;
  bool carrier = true;  ///< a network is connected, unlike with docker0 without containers
};

/// The addresses of this host, in the kernel's order, without IPv6 addresses that are valid on one link only.
std::vector<InterfaceAddress> host_addresses();

/// This host's own address on its default route of IPv4, else of IPv6; "" without a default route.
std::string default_route_address();

/// The text of a numeric address; "" for null, and for an address that is neither IPv4 nor IPv6.
std::string ip_text(const sockaddr* address);

/// Returns whether a numeric address is reachable from its own host alone.
inline bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

/// Finds in `have` the address that `wanted` means, an interface's name or a numeric address. For an
/// interface it is the first IPv4 address, else the first IPv6 one. If `wanted` is empty: `default_address`,
/// else the address of the first interface other than the loopback, those with a carrier first, else the
/// loopback's. Throws Error(invalid_argument), which lists the addresses, if none fits.
std::string choose_address(const std::string& wanted, const std::vector<InterfaceAddress>& have,
                           const std::string& default_address);

/// choose_address() on this host.
std::string interface_address(const std::string& name_or_address);

}  // namespace moecomm
