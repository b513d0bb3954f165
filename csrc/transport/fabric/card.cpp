#include "transport/fabric/card.hpp"

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
    throw Error(ErrorKind::invalid_argument, "not a fabric address card: " + what);
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

/// By the address that ends the name of an interface: one that only its own host reaches.
static bool on_loopback(const std::string& interface) {
  const size_t space = interface.rfind(' ');
  return space != std::string::npos && is_loopback(interface.substr(space + 1));
}

uint64_t checksum(const std::byte* bytes, size_t count) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < count; ++i) hash = (hash ^ static_cast<uint64_t>(bytes[i])) * 0x100000001b3u;
  return hash;
}

std::vector<std::byte> Card::to_bytes() const {
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
  Writer card;
  card.word(kMagic);
  card.word(kFormat);
  card.text(body.bytes.data(), body.bytes.size());
  card.word(checksum(card.bytes.data(), card.bytes.size()));
  return std::move(card.bytes);
}

Card Card::from_bytes(const std::vector<std::byte>& bytes) {
  Reader outer(bytes.data(), bytes.size());
  if (outer.word<uint32_t>("its first word") != kMagic) Reader::wrong("it begins with other bytes");
  const uint32_t format = outer.word<uint32_t>("its format");
  if (format != kFormat)
    throw Error(ErrorKind::mismatched_arguments,
                "a peer's fabric address card has format " + std::to_string(format) + ", expected " +
                    std::to_string(kFormat) + ": all ranks must run the same version of moecomm");
  const std::vector<std::byte> body = outer.text("its body");
  const size_t covered = bytes.size() - outer.left();
  if (outer.word<uint64_t>("its checksum") != checksum(bytes.data(), covered))
    Reader::wrong("its checksum does not fit");
  if (outer.left() != 0) Reader::wrong(std::to_string(outer.left()) + " bytes follow it");

  Reader reader(body.data(), body.size());
  Card card;
  card.library = reader.word<uint32_t>("library version");
  card.protocol = reader.word<uint32_t>("protocol");
  card.protocol_version = reader.word<uint32_t>("protocol version");
  card.window = reader.region("window");
  card.greetings = reader.region("place for hellos");
  card.pid = static_cast<int64_t>(reader.word<uint64_t>("process"));
  card.pid_namespace = reader.word<uint64_t>("process namespace");
  card.provider = reader.string("provider");
  card.interface = reader.string("interface");
  card.address = reader.text("address");
  if (card.provider.empty()) Reader::wrong("the provider has no name");
  if (card.address.empty()) Reader::wrong("the address is empty");
  if (reader.left() != 0) Reader::wrong(std::to_string(reader.left()) + " bytes follow its last field");
  return card;
}

std::vector<std::byte> pack_cards(const std::vector<std::vector<std::byte>>& cards) {
  Writer all;
  all.word(static_cast<uint32_t>(cards.size()));
  for (const std::vector<std::byte>& card : cards) all.text(card.data(), card.size());
  return std::move(all.bytes);
}

std::vector<std::vector<std::byte>> unpack_cards(const std::vector<std::byte>& bytes) {
  Reader all(bytes.data(), bytes.size());
  const auto lanes = all.word<uint32_t>("the number of lanes");
  if (lanes == 0 || lanes > kMostLanes) Reader::wrong("it is of " + std::to_string(lanes) + " lanes");
  std::vector<std::vector<std::byte>> cards;
  for (uint32_t lane = 0; lane < lanes; ++lane) cards.push_back(all.text("the card of a lane"));
  if (all.left() != 0) Reader::wrong(std::to_string(all.left()) + " bytes follow the last lane's");
  return cards;
}

void require_compatible(const Card& own, int own_index, const Card& other, int other_index) {
  const auto side = [](const Card& card, int index) {
    return "peer " + std::to_string(index) + " uses provider " + card.provider + " (protocol " +
           std::to_string(card.protocol) + " version " + std::to_string(card.protocol_version) +
           ") of libfabric " + version_text(card.library) + " on " + card.interface;
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
