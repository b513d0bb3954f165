#include "transport/tcp/address.hpp"

#include <netdb.h>

#include <array>
#include <cstring>

#include "common/error.hpp"

namespace moecomm::tcp {

Address make_address(const std::string& numeric, const std::string& port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(numeric.c_str(), port.c_str(), &hints, &found) != 0)
    throw Error(ErrorKind::invalid_argument, "'" + numeric + "' is no numeric address");
  Address address;
  address.length = found->ai_addrlen;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return address;
}

Address parse_endpoint(const std::string& what, const std::string& endpoint) {
  const size_t colon = endpoint.rfind(':');
  std::string host = endpoint.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  try {
    if (colon != std::string::npos && !host.empty()) return make_address(host, endpoint.substr(colon + 1));
  } catch (const Error&) {
    // reported below, with the whole text
  }
  throw Error(ErrorKind::invalid_argument,
              what + " is '" + endpoint + "', expected a numeric address and a port, as 10.0.0.3:4567");
}

std::string endpoint_text(const Address& address) {
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  getnameinfo(address.get(), address.length, host.data(), host.size(), port.data(), port.size(),
              NI_NUMERICHOST | NI_NUMERICSERV);
  const std::string name = host.data();
  return (address.family() == AF_INET6 ? '[' + name + ']' : name) + ':' + port.data();
}

std::string peer_text(int32_t peer, const Address& address) {
  return text_of("peer ", peer, " (", endpoint_text(address), ")");
}

}  // namespace moecomm::tcp
