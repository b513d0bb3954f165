// Endpoint address: what a peer must know to write into a window, as bytes that travel over the rendezvous.
//
//   magic u32 | format u32 | body bytes u32 | body | checksum u64 of all before it
//
// Integers are little endian. The body is the fields below in their order, texts and bytes after a u32
// length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moecomm::fabric {

/// A registered region as a peer sees it.
struct RemoteRegion {
  uint64_t key = 0;
  uint64_t base = 0;  ///< address that offsets are added to
  int64_t bytes = 0;
  bool operator==(const RemoteRegion&) const = default;
};

struct EndpointAddress {
  uint32_t library = 0;                         ///< version of libfabric, major << 16 | minor
  uint32_t protocol = 0, protocol_version = 0;  ///< what the provider speaks on the wire
  RemoteRegion window;
  RemoteRegion greetings;  ///< where hellos are written, see FabricTransport::connect
  int64_t pid = 0;         ///< for the shm provider: whose files these are
  uint64_t pid_namespace = 0;
  std::string provider;
  std::string interface;           ///< for messages: "eth0 192.0.2.7"
  std::vector<std::byte> address;  ///< of the endpoint
  bool operator==(const EndpointAddress&) const = default;

  std::vector<std::byte> to_bytes() const;
  /// Error(invalid_argument) that names what is wrong with bytes that are no whole endpoint address;
  /// Error(mismatched_arguments) for a endpoint address of another format version.
  static EndpointAddress from_bytes(const std::vector<std::byte>& bytes);
};

/// The endpoint addresses of a rank's lanes as one, and back. Error(invalid_argument) for bytes that are no
/// such thing.
///   lanes u32 | for each: bytes u32 | endpoint address
std::vector<std::byte> pack_endpoint_addresses(const std::vector<std::vector<std::byte>>& endpoint_addresses);
std::vector<std::vector<std::byte>> unpack_endpoint_addresses(const std::vector<std::byte>& bytes);
constexpr int kMostLanes = 64;

/// Error(mismatched_arguments) if two peers cannot talk to each other.
void require_compatible(const EndpointAddress& own, int own_index, const EndpointAddress& other,
                        int other_index);

/// Returns whether a numeric address is one that only its own host reaches.
bool is_loopback(const std::string& address);

/// Checksum of bytes that endpoint addresses end with (FNV-1a, 64 bits).
uint64_t checksum(const std::byte* bytes, size_t count);

}  // namespace moecomm::fabric
