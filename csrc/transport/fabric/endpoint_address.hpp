// Endpoint address: what a peer must know to write into a window. Its bytes travel over the rendezvous
// between ranks with the same version of moecomm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moecomm::fabric {

/// A registered region as a peer sees it.
struct RemoteRegion {
  uint64_t key = 0;
  uint64_t base = 0;  ///< address to which offsets are added
  int64_t bytes = 0;
  bool operator==(const RemoteRegion&) const = default;
};

/// The fixed-size fields of an endpoint address. Their bytes are sent as they are in memory.
struct EndpointFacts {
  uint32_t library = 0;                         ///< version of libfabric, major << 16 | minor
  uint32_t protocol = 0, protocol_version = 0;  ///< the provider's protocol on the wire
  uint32_t reserved = 0;
  RemoteRegion window;
  RemoteRegion greetings;  ///< where peers write their hellos; see FabricTransport::connect
  uint64_t hello = 0;      ///< what this rank writes to peers' greetings; random, so that nobody can guess it
  bool operator==(const EndpointFacts&) const = default;
};
static_assert(sizeof(EndpointFacts) == 72);

struct EndpointAddress : EndpointFacts {
  std::string provider;
  std::string interface;  ///< shown in messages: "eth0 192.0.2.7"
  std::string address;    ///< libfabric's address of the endpoint: bytes, in general not text
  bool operator==(const EndpointAddress&) const = default;

  std::string to_bytes() const;
  /// Error(invalid_argument) for bytes that are not a whole endpoint address.
  static EndpointAddress from_bytes(const std::string& bytes);
};

/// Throws Error(mismatched_arguments) if providers or protocols differ, or only one peer is on loopback.
void require_compatible(const EndpointAddress& own, int own_index, const EndpointAddress& other,
                        int other_index);

}  // namespace moecomm::fabric
