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
  bool carrier = true;  ///< a network is connected; false for docker0 without containers
};

/// The addresses of this host, in the kernel's order, except link-local IPv6 addresses (valid on one link).
std::vector<InterfaceAddress> host_addresses();

/// This host's address on the default route for IPv4, or else on that for IPv6; "" without a default route.
std::string default_route_address();

/// The address in a sockaddr as numeric text; "" for null, and for families other than IPv4 and IPv6.
std::string ip_text(const sockaddr* address);

/// Returns whether a numeric address is reachable from its own host alone.
inline bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1";
}

/// Finds in `have` the address for `wanted`, an interface's name or a numeric address. An interface stands
/// for its first IPv4 address, or else its first IPv6 address. If `wanted` is empty: `default_address`, else
/// an address of an interface with a carrier, else of any interface but the loopback, else the loopback's.
/// Interfaces that are down do not count. Error(invalid_argument), with the addresses, if none fits.
std::string choose_address(const std::string& wanted, const std::vector<InterfaceAddress>& have,
                           const std::string& default_address);

/// choose_address() with this host's addresses and default route.
std::string interface_address(const std::string& name_or_address);

}  // namespace moecomm
