// Plain data, shared by host and device: commands to a proxy (the host thread that talks to other nodes), and
// the immediates of its puts. A piece: up to WindowShape::kPieceBytes consecutive bytes of a section.
#pragma once

#include <cstdint>

#include "common/macros.hpp"
#include "layout/wire_format.hpp"

namespace moecomm {

/// A command to the proxy, 16 bytes.
struct Command {
  enum class Kind : uint8_t {
    head,     ///< the Announcement of this epoch; a: bytes
    ids,      ///< piece `index` of the ids (from GPUs: of counts and routes, see ids_bytes); a: bytes
    weights,  ///< piece `index` of the routing weights; a: bytes
    index,    ///< piece `index` of the relay indices; a: bytes
    grads,    ///< piece `index` of the outgoing gradients; a: bytes
    chunk,    ///< chunk `index` is in staging slot a; b: rows to count as staged << 16 | rows of the chunk.
              ///< chunk + n is the kind for rows in the WireFormat with number n
  };
  Kind kind;
  uint8_t epoch;   ///< low 8 bits of the epoch
  uint16_t other;  ///< the other node, numbered by NodeMap::other
  uint32_t index;
  uint32_t a, b;
};
static_assert(sizeof(Command) == 16);
static_assert(static_cast<int>(Command::Kind::chunk) + kWireFormatCount <= 128);

/// The kind of a command for rows in format `wire`.
MOECOMM_HD constexpr Command::Kind chunk_kind(WireFormat wire) {
  return static_cast<Command::Kind>(static_cast<int>(Command::Kind::chunk) + static_cast<int>(wire));
}
/// The reverse of chunk_kind(): the format of the rows of a command whose kind is `chunk` or one after it.
MOECOMM_HD constexpr WireFormat chunk_format(Command::Kind kind) {
  return static_cast<WireFormat>(static_cast<int>(kind) - static_cast<int>(Command::Kind::chunk));
}

// Command number `ticket` fills a slot of a ring of `slots`: first the low word, then the high word, whose
// top bit is 1 in the ring's first lap, 0 in the next and so on, so that a zeroed ring holds no command.
MOECOMM_HD constexpr uint64_t command_turn(uint64_t ticket, uint64_t slots) {
  return (ticket / slots + 1) & 1;
}
MOECOMM_HD constexpr uint64_t high_word(const Command& command, uint64_t ticket, uint64_t slots) {
  return command_turn(ticket, slots) << 63 | static_cast<uint64_t>(command.kind) << 56 |
         uint64_t{command.epoch} << 48 | uint64_t{command.other} << 32 | command.index;
}
MOECOMM_HD constexpr uint64_t low_word(const Command& command) {
  return uint64_t{command.a} << 32 | command.b;
}
MOECOMM_HD constexpr Command command_from(uint64_t high, uint64_t low) {
  return {static_cast<Command::Kind>(high >> 56 & 0x7f),
          static_cast<uint8_t>(high >> 48),
          static_cast<uint16_t>(high >> 32),
          static_cast<uint32_t>(high),
          static_cast<uint32_t>(low >> 32),
          static_cast<uint32_t>(low)};
}

/// The 32 bits that arrive with a put. Three low bits of the epoch are enough: the receiver expects one of
/// four consecutive epochs of a peer (docs/protocol.md).
struct Immediate {
  enum class Kind : uint32_t {
    head,  ///< an Announcement
    body,  ///< a piece of ids, weights or relay indices; the receiver counts these
    part,  ///< a chunk or a piece of gradients; sets arrival flag `index`
  };
  Kind kind;
  uint32_t epoch;  ///< low 3 bits of the epoch
  uint32_t node;   ///< the sending node
  uint32_t index;

  static constexpr uint32_t kEpochs = 8, kIndices = 1 << 15;

  MOECOMM_HD constexpr uint32_t bits() const {
    return static_cast<uint32_t>(kind) << 30 | (epoch % kEpochs) << 27 | node << 15 | index;
  }
  MOECOMM_HD static constexpr Immediate from(uint32_t bits) {
    return {static_cast<Kind>(bits >> 30), bits >> 27 & 7, bits >> 15 & 4095, bits & (kIndices - 1)};
  }
};

}  // namespace moecomm
