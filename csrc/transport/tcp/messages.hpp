// Messages of a link: one hello each way, then messages. Sizes are fixed, integers little endian.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace moecomm::tcp {

using JobId = std::array<std::byte, 16>;

/// A control message; the caller gives the kinds their meaning.
struct LinkMessage {
  uint32_t kind;
  int32_t a, b;
  uint64_t value;
  bool operator==(const LinkMessage&) const = default;
};

inline constexpr size_t kMessageBytes = 24;
using MessageBytes = std::array<std::byte, kMessageBytes>;

MessageBytes encode(const LinkMessage& message);
/// Decodes a message; returns nothing if these bytes are none.
std::optional<LinkMessage> decode_message(std::span<const std::byte, kMessageBytes> bytes);

inline constexpr uint32_t kLinkVersion = 1;

enum class Answer : uint32_t {
  hello = 0,     ///< no answer: the side that connects begins with it
  accepted = 1,  ///< the link stands; messages may follow
  other_version = 2,
  other_job = 3,
  other_index = 4,  ///< an index out of range, or the hello was meant for another rank
  duplicate = 5,    ///< a rank of this index is connected already
};

/// The first bytes of each side. A refusal has no job id in it: who is refused does not learn it.
struct Hello {
  Answer answer = Answer::hello;
  JobId job{};
  int32_t from = 0, to = 0, peers = 0;
};

inline constexpr size_t kHelloBytes = 48;
/// Bytes of a hello, {magic, version, answer}, that are the same in every version.
inline constexpr size_t kHelloFixedBytes = 16;
using HelloBytes = std::array<std::byte, kHelloBytes>;

HelloBytes encode(const Hello& hello);
/// Decodes a hello that is whole and of this version.
Hello decode_hello(const HelloBytes& bytes);

/// Verdict on the first bytes of a connection, as early as it is certain.
enum class Opening { incomplete, whole, not_moecomm, other_version };
Opening judge(std::span<const std::byte> received);
/// The version of an `other_version` opening.
uint32_t opening_version(std::span<const std::byte> received);

/// Text of a refusal for people, "another job". `from` and `to` are those of the hello that was refused.
std::string refusal_text(Answer answer, int32_t from, int32_t to);

}  // namespace moecomm::tcp
