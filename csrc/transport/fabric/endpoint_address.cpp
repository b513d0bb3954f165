#include "transport/fabric/endpoint_address.hpp"

#include <concepts>
#include <limits>

#include "common/error.hpp"
#include "transport/fabric/library.hpp"

namespace moecomm::fabric {
namespace {

constexpr uint32_t kMagic = 0x6362616d;  // "mabc" in memory
constexpr uint32_t kFormat = 1;
constexpr uint32_t kLongest = 4096;  // of one text; addresses and names are far below

class Writer {
 public:
  template <std::unsigned_integral Word>
  void word(Word value) {
    for (size_t i = 0; i < sizeof(Word); ++i) bytes.push_back(static_cast<std::byte>(value >> (8 * i)));
  }
  void text(const std::byte* data, size_t count) {
    word(static_cast<uint32_t>(count));
    bytes.insert(bytes.end(), data, data + count);
  }
  void region(const RemoteRegion& region) {
    word(region.key);
    word(region.base);
    word(static_cast<uint64_t>(region.bytes));
  }
  std::vector<std::byte> bytes;
};

class Reader {
 public:
  Reader(const std::byte* data, size_t count) : data_(data), left_(count) {}
  template <std::unsigned_integral Word>
  Word word(const char* field) {
    need(sizeof(Word), field);
    Word value = 0;
    for (size_t i = 0; i < sizeof(Word); ++i)
      value |= static_cast<Word>(static_cast<Word>(data_[i]) << (8 * i));
    skip(sizeof(Word));
    return value;
  }
  std::vector<std::byte> text(const char* field) {
    const uint32_t count = word<uint32_t>(field);
    if (count > kLongest) wrong(std::string(field) + " of " + std::to_string(count) + " bytes");
    need(count, field);
    std::vector<std::byte> bytes(data_, data_ + count);
    skip(count);
    return bytes;
  }
  std::string string(const char* field) {
    const std::vector<std::byte> bytes = text(field);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  RemoteRegion region(const char* field) {
    RemoteRegion region;
    region.key = word<uint64_t>(field);
    region.base = word<uint64_t>(field);
    const uint64_t bytes = word<uint64_t>(field);
    if (bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ||
        region.base + bytes < region.base)
      wrong(std::string(field) + " of " + std::to_string(bytes) + " bytes at " + std::to_string(region.base));
    region.bytes = static_cast<int64_t>(bytes);
    return region;
  }
  size_t left() const { return left_; }
  [[noreturn]] static void wrong(const std::string& what) {
    throw Error(ErrorKind::invalid_argument, "not a fabric endpoint address: " + what);
  }

 private:
  void need(size_t count, const char* field) const {
    if (left_ < count) wrong(std::string("it ends within ") + field);
  }
  void skip(size_t count) {
    data_ += count;
    left_ -= count;
  }
  const std::byte* data_;
  size_t left_;
};

}  // namespace

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

/// Returns whether the address that ends an interface's name is one that only its own host reaches.
static bool on_loopback(const std::string& interface) {
  const size_t space = interface.rfind(' ');
  return space != std::string::npos && is_loopback(interface.substr(space + 1));
}

uint64_t checksum(const std::byte* bytes, size_t count) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < count; ++i) hash = (hash ^ static_cast<uint64_t>(bytes[i])) * 0x100000001b3u;
  return hash;
}

std::vector<std::byte> EndpointAddress::to_bytes() const {
  Writer body;
  body.word(library);
  body.word(protocol);
  body.word(protocol_version);
  body.region(window);
  body.region(greetings);
  body.word(static_cast<uint64_t>(pid));
  body.word(pid_namespace);
  body.text(reinterpret_cast<const std::byte*>(provider.data()), provider.size());
  body.text(reinterpret_cast<const std::byte*>(interface.data()), interface.size());
  body.text(address.data(), address.size());
  Writer endpoint_address;
  endpoint_address.word(kMagic);
  endpoint_address.word(kFormat);
  endpoint_address.text(body.bytes.data(), body.bytes.size());
  endpoint_address.word(checksum(endpoint_address.bytes.data(), endpoint_address.bytes.size()));
  return std::move(endpoint_address.bytes);
}

EndpointAddress EndpointAddress::from_bytes(const std::vector<std::byte>& bytes) {
  Reader outer(bytes.data(), bytes.size());
  if (outer.word<uint32_t>("its first word") != kMagic) Reader::wrong("it begins with other bytes");
  const uint32_t format = outer.word<uint32_t>("its format");
  if (format != kFormat)
    throw Error(ErrorKind::mismatched_arguments,
                "a peer's fabric endpoint address has format " + std::to_string(format) + ", expected " +
                    std::to_string(kFormat) + ": all ranks must run the same version of moecomm");
  const std::vector<std::byte> body = outer.text("its body");
  const size_t covered = bytes.size() - outer.left();
  if (outer.word<uint64_t>("its checksum") != checksum(bytes.data(), covered))
    Reader::wrong("its checksum does not fit");
  if (outer.left() != 0) Reader::wrong(std::to_string(outer.left()) + " bytes follow it");

  Reader reader(body.data(), body.size());
  EndpointAddress endpoint_address;
  endpoint_address.library = reader.word<uint32_t>("library version");
  endpoint_address.protocol = reader.word<uint32_t>("protocol");
  endpoint_address.protocol_version = reader.word<uint32_t>("protocol version");
  endpoint_address.window = reader.region("window");
  endpoint_address.greetings = reader.region("place for hellos");
  endpoint_address.pid = static_cast<int64_t>(reader.word<uint64_t>("process"));
  endpoint_address.pid_namespace = reader.word<uint64_t>("process namespace");
  endpoint_address.provider = reader.string("provider");
  endpoint_address.interface = reader.string("interface");
  endpoint_address.address = reader.text("address");
  if (endpoint_address.provider.empty()) Reader::wrong("the provider has no name");
  if (endpoint_address.address.empty()) Reader::wrong("the address is empty");
  if (reader.left() != 0) Reader::wrong(std::to_string(reader.left()) + " bytes follow its last field");
  return endpoint_address;
}

std::vector<std::byte> pack_endpoint_addresses(
    const std::vector<std::vector<std::byte>>& endpoint_addresses) {
  Writer all;
  all.word(static_cast<uint32_t>(endpoint_addresses.size()));
  for (const std::vector<std::byte>& endpoint_address : endpoint_addresses)
    all.text(endpoint_address.data(), endpoint_address.size());
  return std::move(all.bytes);
}

std::vector<std::vector<std::byte>> unpack_endpoint_addresses(const std::vector<std::byte>& bytes) {
  Reader all(bytes.data(), bytes.size());
  const auto lanes = all.word<uint32_t>("the number of lanes");
  if (lanes == 0 || lanes > kMostLanes) Reader::wrong("it is of " + std::to_string(lanes) + " lanes");
  std::vector<std::vector<std::byte>> endpoint_addresses;
  for (uint32_t lane = 0; lane < lanes; ++lane)
    endpoint_addresses.push_back(all.text("the endpoint address of a lane"));
  if (all.left() != 0) Reader::wrong(std::to_string(all.left()) + " bytes follow the last lane's");
  return endpoint_addresses;
}

void require_compatible(const EndpointAddress& own, int own_index, const EndpointAddress& other,
                        int other_index) {
  const auto side = [](const EndpointAddress& endpoint_address, int index) {
    return "peer " + std::to_string(index) + " uses provider " + endpoint_address.provider + " (protocol " +
           std::to_string(endpoint_address.protocol) + " version " +
           std::to_string(endpoint_address.protocol_version) + ") of libfabric " +
           version_text(endpoint_address.library) + " on " + endpoint_address.interface;
  };
  ErrorDetails details;
  details.peer = other_index;
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
