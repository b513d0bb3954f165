#include "transport/fabric/endpoint_address.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/error.hpp"
#include "transport/fabric/library.hpp"
#include "transport/network_interface.hpp"

namespace moecomm::fabric {

static_assert(std::is_trivially_copyable_v<EndpointFacts>);

/// Returns whether the text of an interface, such as "lo 127.0.0.1", ends with a loopback address.
static bool on_loopback(const std::string& interface) {
  const size_t space = interface.rfind(' ');
  return space != std::string::npos && is_loopback(interface.substr(space + 1));
}

std::string EndpointAddress::to_bytes() const {
  std::string bytes;
  const auto append = [&](const auto& data) {
    bytes.append(reinterpret_cast<const char*>(&data), sizeof(data));
  };
  append(static_cast<const EndpointFacts&>(*this));
  for (const std::string& text : {provider, interface, address}) {
    append(static_cast<uint32_t>(text.size()));
    bytes += text;
  }
  return bytes;
}

EndpointAddress EndpointAddress::from_bytes(const std::string& bytes) {
  size_t at = 0;
  const auto take = [&](void* to, size_t count) {
    if (bytes.size() - at < count)
      throw Error(ErrorKind::invalid_argument, "not a fabric endpoint address: it ends too early");
    std::memcpy(to, bytes.data() + at, count);
    at += count;
  };
  EndpointAddress endpoint_address;
  take(static_cast<EndpointFacts*>(&endpoint_address), sizeof(EndpointFacts));
  for (std::string* text :
       {&endpoint_address.provider, &endpoint_address.interface, &endpoint_address.address}) {
    uint32_t count = 0;
    take(&count, sizeof(count));
    text->resize(std::min<size_t>(count, bytes.size()));
    take(text->data(), count);
  }
  return endpoint_address;
}

void require_compatible(const EndpointAddress& own, int own_index, const EndpointAddress& other,
                        int other_index) {
  const auto side = [](const EndpointAddress& endpoint_address, int index) {
    return text_of("peer ", index, " uses provider ", endpoint_address.provider, " (protocol ",
                   endpoint_address.protocol, " version ", endpoint_address.protocol_version,
                   ") of libfabric ", version_text(endpoint_address.library), " on ",
                   endpoint_address.interface);
  };
  const ErrorDetails details{.peer = other_index};
  if (own.provider == other.provider && own.protocol == other.protocol &&
      own.protocol_version == other.protocol_version) {
    if (on_loopback(own.interface) == on_loopback(other.interface)) return;
    throw Error(ErrorKind::mismatched_arguments,
                "fabric: " + side(own, own_index) + ", but " + side(other, other_index) +
                    "; only its own host reaches a loopback address: set MOECOMM_FABRIC_INTERFACE to an "
                    "interface that is up and that the other nodes reach",
                details);
  }
  throw Error(ErrorKind::mismatched_arguments,
              "fabric: " + side(own, own_index) + ", but " + side(other, other_index) +
                  "; set MOECOMM_FABRIC_PROVIDER to the same provider everywhere, with the same libfabric",
              details);
}

}  // namespace moecomm::fabric
