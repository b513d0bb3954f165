#include "transport/network_interface.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <string_view>

#include "common/error.hpp"
#include "common/text_file.hpp"

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

std::vector<std::string_view> split(std::string_view line) {
  std::vector<std::string_view> words;
  for (size_t at = line.find_first_not_of(" \t"); at < line.size(); at = line.find_first_not_of(" \t", at)) {
    const size_t end = std::min(line.find_first_of(" \t", at), line.size());
    words.push_back(line.substr(at, end - at));
    at = end;
  }
  return words;
}

bool parse(std::string_view word, int base, uint32_t& number) {
  const char* const end = word.data() + word.size();
  const auto parsed = std::from_chars(word.data(), end, number, base);
  return parsed.ec == std::errc() && parsed.ptr == end;
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
      // A link-local address means something else on every host, so no peer could use it.
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;
      bytes = &address;
    } else {
      continue;
    }
    std::array<char, INET6_ADDRSTRLEN> spelled;
    if (inet_ntop(family, bytes, spelled.data(), spelled.size()) == nullptr) continue;
    addresses.push_back({each->ifa_name, spelled.data(), (each->ifa_flags & IFF_UP) != 0,
                         (each->ifa_flags & IFF_LOOPBACK) != 0, (each->ifa_flags & IFF_RUNNING) != 0});
  }
  return addresses;
}

namespace {

/// The word `name_at` of the line with the lowest metric of those of which usable(words, metric) is true.
template <class Usable>
std::string best_route(const std::string& table, size_t words_needed, size_t name_at, const Usable& usable) {
  std::string chosen;
  uint32_t lowest = 0;
  for (size_t begin = 0; begin < table.size();) {
    const size_t end = std::min(table.find('\n', begin), table.size());
    const std::vector<std::string_view> words = split(std::string_view(table).substr(begin, end - begin));
    begin = end + 1;
    uint32_t metric;
    if (words.size() < words_needed || !usable(words, metric)) continue;
    if (!chosen.empty() && metric >= lowest) continue;
    chosen = words[name_at];
    lowest = metric;
  }
  return chosen;
}

}  // namespace

std::string default_route_interface(const std::string& table) {
  // Iface Destination Gateway Flags RefCnt Use Metric Mask ...
  return best_route(table, 8, 0, [](const std::vector<std::string_view>& words, uint32_t& metric) {
    uint32_t flags;
    return parse(words[3], 16, flags) && parse(words[6], 10, metric) && words[1] == "00000000" &&
           words[7] == "00000000" && (flags & RTF_UP) != 0;
  });
}

std::string default_route_interface_ipv6(const std::string& table) {
  // destination length source length gateway metric references use flags interface
  return best_route(table, 10, 9, [](const std::vector<std::string_view>& words, uint32_t& metric) {
    uint32_t flags;
    return parse(words[8], 16, flags) && parse(words[5], 16, metric) &&
           words[0].find_first_not_of('0') == std::string_view::npos && words[1] == "00" &&
           (flags & RTF_UP) != 0 && (flags & RTF_REJECT) == 0;
  });
}

std::string choose_address(const std::string& wanted, const std::vector<InterfaceAddress>& have,
                           const std::string& default_interface) {
  if (wanted.empty()) {
    std::string address =
        first(have, [&](const InterfaceAddress& each) { return each.interface == default_interface; });
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
  // A host without IPv4, or without IPv6, has no such table.
  std::string interface = default_route_interface(read_file("/proc/net/route"));
  if (interface.empty()) interface = default_route_interface_ipv6(read_file("/proc/net/ipv6_route"));
  return choose_address(name_or_address, host_addresses(), interface);
}

}  // namespace moecomm
