// Addresses of sockets and their text, "10.0.0.3:4567" or "[2001:db8::3]:4567".
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>

namespace moecomm::tcp {

struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

/// Makes an address from numeric text, without a look-up. Throws Error(invalid_argument) for any other text.
Address make_address(const std::string& numeric, const std::string& port);

/// Parses a numeric address with a port, or throws Error(invalid_argument), whose text begins with `what`.
Address parse_endpoint(const std::string& what, const std::string& endpoint);

std::string endpoint_text(const Address& address);

/// A peer's name in messages, "peer 2 (10.0.0.3:4567)".
std::string peer_text(int32_t peer, const Address& address);

}  // namespace moecomm::tcp
