#include "transport/tcp/messages.hpp"

#include <algorithm>
#include <cstring>

namespace moecomm::tcp {
namespace {

constexpr std::array<char, 8> kMagic{'m', 'o', 'e', 'c', 'o', 'm', 'm', '\x1a'};
// Stands in every message, so that a stream out of step is noticed.
constexpr uint32_t kMessageMark = 0x4b4e4c4d;

template <class Number>
void put(std::byte* at, Number number) {
  for (size_t i = 0; i < sizeof(Number); ++i) at[i] = static_cast<std::byte>(number >> (8 * i));
}

template <class Number>
Number get(const std::byte* at) {
  Number number = 0;
  for (size_t i = 0; i < sizeof(Number); ++i) number |= static_cast<Number>(at[i]) << (8 * i);
  return number;
}

void put_signed(std::byte* at, int32_t number) { put(at, static_cast<uint32_t>(number)); }
int32_t get_signed(const std::byte* at) { return static_cast<int32_t>(get<uint32_t>(at)); }

}  // namespace

MessageBytes encode(const LinkMessage& message) {
  MessageBytes bytes;
  put(&bytes[0], kMessageMark);
  put(&bytes[4], message.kind);
  put_signed(&bytes[8], message.a);
  put_signed(&bytes[12], message.b);
  put(&bytes[16], message.value);
  return bytes;
}

std::optional<LinkMessage> decode_message(std::span<const std::byte, kMessageBytes> bytes) {
  if (get<uint32_t>(&bytes[0]) != kMessageMark) return std::nullopt;
  return LinkMessage{get<uint32_t>(&bytes[4]), get_signed(&bytes[8]), get_signed(&bytes[12]),
                     get<uint64_t>(&bytes[16])};
}

HelloBytes encode(const Hello& hello) {
  HelloBytes bytes{};
  std::memcpy(&bytes[0], kMagic.data(), kMagic.size());
  put(&bytes[8], kLinkVersion);
  put(&bytes[12], static_cast<uint32_t>(hello.answer));
  std::copy(hello.job.begin(), hello.job.end(), &bytes[16]);
  put_signed(&bytes[32], hello.from);
  put_signed(&bytes[36], hello.to);
  put_signed(&bytes[40], hello.peers);
  return bytes;
}

Hello decode_hello(const HelloBytes& bytes) {
  Hello hello;
  hello.answer = static_cast<Answer>(get<uint32_t>(&bytes[12]));
  std::copy_n(&bytes[16], hello.job.size(), hello.job.begin());
  hello.from = get_signed(&bytes[32]);
  hello.to = get_signed(&bytes[36]);
  hello.peers = get_signed(&bytes[40]);
  return hello;
}

Opening judge(std::span<const std::byte> received) {
  const size_t known = std::min(received.size(), kMagic.size());
  if (known > 0 && std::memcmp(received.data(), kMagic.data(), known) != 0) return Opening::not_moecomm;
  if (received.size() < kHelloFixedBytes) return Opening::incomplete;
  if (opening_version(received) != kLinkVersion) return Opening::other_version;
  return received.size() < kHelloBytes ? Opening::incomplete : Opening::whole;
}

uint32_t opening_version(std::span<const std::byte> received) { return get<uint32_t>(&received[8]); }

std::string refusal_text(Answer answer, int32_t from, int32_t to) {
  switch (answer) {
    case Answer::other_version:
      return "another version of moecomm; install the same on all nodes";
    case Answer::other_job:
      return "another job; the ranks of one job got endpoints of another's";
    case Answer::other_index:
      return "it does not expect peer " + std::to_string(from) + " as a caller of peer " +
             std::to_string(to) + "; ranks do not agree on nodes and rank order";
    case Answer::duplicate:
      return "peer " + std::to_string(from) + " is connected already; two ranks take themselves for it";
    case Answer::hello:
    case Answer::accepted:
      break;
  }
  return "unknown reason " + std::to_string(static_cast<uint32_t>(answer));
}

}  // namespace moecomm::tcp
