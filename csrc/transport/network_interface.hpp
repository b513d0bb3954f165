// Choice of the host's address that this rank listens on and is reached at: one interface, never all.
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
  bool carrier = true;  ///< something is connected: unlike docker0 without containers
};

/// The addresses of this host, in the kernel's order; IPv6 addresses that hold on one link only are left out.
std::vector<InterfaceAddress> host_addresses();

/// The address by which this host sends to others that it has no nearer way to: that of its default route of
/// IPv4, else of IPv6; "" without one.
std::string default_route_address();

/// The text of a numeric address; "" for none, and for what is neither IPv4 nor IPv6.
std::string ip_text(const sockaddr* address);

/// The address in `have` that `wanted`, an interface's name or a numeric address, means. An interface counts
/// with its first IPv4 address, else its first IPv6 one. Empty: `default_address`, else that of the
/// first interface that is no loopback, those with a carrier first, else of the loopback.
/// Error(invalid_argument) that lists what there is if nothing fits.
std::string choose_address(const std::string& wanted, const std::vector<InterfaceAddress>& have,
                           const std::string& default_address);

/// choose_address() on this host.
std::string interface_address(const std::string& name_or_address);

}  // namespace moecomm
