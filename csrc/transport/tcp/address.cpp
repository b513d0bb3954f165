#include "transport/tcp/address.hpp"

#include <arpa/inet.h>

#include <array>
#include <charconv>

#include "common/error.hpp"

namespace moecomm::tcp {

Address make_address(const std::string& numeric, uint16_t port) {
  Address address;
  auto& ipv4 = reinterpret_cast<sockaddr_in&>(address.storage);
  auto& ipv6 = reinterpret_cast<sockaddr_in6&>(address.storage);
  if (inet_pton(AF_INET, numeric.c_str(), &ipv4.sin_addr) == 1) {
    ipv4.sin_family = AF_INET;
    ipv4.sin_port = htons(port);
    address.length = sizeof(ipv4);
  } else if (inet_pton(AF_INET6, numeric.c_str(), &ipv6.sin6_addr) == 1) {
    ipv6.sin6_family = AF_INET6;
    ipv6.sin6_port = htons(port);
    address.length = sizeof(ipv6);
  } else {
    throw Error(ErrorKind::invalid_argument, "'" + numeric + "' is no numeric address");
  }
  return address;
}

Address parse_endpoint(const std::string& what, const std::string& endpoint) {
  const size_t colon = endpoint.rfind(':');
  if (colon != std::string::npos) {
    std::string host = endpoint.substr(0, colon);
    const bool bracketed = host.size() >= 2 && host.front() == '[' && host.back() == ']';
    if (bracketed) host = host.substr(1, host.size() - 2);
    uint16_t port = 0;
    const char* const end = endpoint.data() + endpoint.size();
    const auto parsed = std::from_chars(endpoint.data() + colon + 1, end, port);
    const bool ipv6 = host.find(':') != std::string::npos;
    if (parsed.ec == std::errc() && parsed.ptr == end && port != 0 && bracketed == ipv6) {
      try {
        return make_address(host, port);
      } catch (const Error&) {
        // told below, with the whole text
      }
    }
  }
  throw Error(ErrorKind::invalid_argument,
              what + " is '" + endpoint + "', expected a numeric address and a port, as 10.0.0.3:4567");
}

std::string endpoint_text(const Address& address) {
  std::array<char, INET6_ADDRSTRLEN> spelled{};
  std::string text;
  uint16_t port;
  if (address.family() == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(address.storage);
    text = inet_ntop(AF_INET, &ipv4.sin_addr, spelled.data(), spelled.size());
    port = ipv4.sin_port;
  } else {
    const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
    text += '[';
    text += inet_ntop(AF_INET6, &ipv6.sin6_addr, spelled.data(), spelled.size());
    text += ']';
    port = ipv6.sin6_port;
  }
  return text + ":" + std::to_string(ntohs(port));
}

bool is_loopback(const Address& address) {
  if (address.family() == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr.s_addr) >> 24 == 127;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr);
}

}  // namespace moecomm::tcp
