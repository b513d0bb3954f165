// The control section: signal records that ranks write into each other's windows. Plain data, shared by host
// and device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/macros.hpp"

namespace moecomm {

inline constexpr int kLine = 64;  ///< bytes of a cache line

/// The operation of a rank in an epoch; compared between ranks, so that a mismatch is an error and no hang.
enum class Operation : uint16_t { none = 0, dispatch = 1, redispatch = 2, combine = 3 };

inline const char* operation_name(Operation operation) {
  switch (operation) {
    case Operation::dispatch:
      return "dispatch";
    case Operation::redispatch:
      return "backward of combine";
    case Operation::combine:
      return "combine";
    case Operation::none:
      break;
  }
  return "an operation with bad arguments";
}

enum class RowLayout : int32_t { expert = 0, rank = 1 };

/// What SignalRecord::caller is. If ranks paired dispatches of different layers, tokens would go to the wrong
/// experts.
inline constexpr char kCallerText[] =
    "the layer that calls (a number of its place among those of the communicator, of its MoEConfig, and "
    "under DistributedDataParallel of a router's weights, which differ where ranks clip or step by "
    "themselves: clip by moecomm.nn.clip_grad_norm, scale by ShardedGradScaler; 0: none)";

/// A rank's announcement to one peer for one epoch. `epoch` is stored last, with release, and loaded with
/// acquire. A reader that sees it also sees the other fields, and earlier writes to any window: on the CPU
/// all writes of the rank, on a GPU those of the signalling block.
struct alignas(kLine) SignalRecord {
  uint64_t epoch;
  Operation operation;
  uint16_t caller;      ///< dispatch: the layer's number among those of the communicator; 0: none
  uint32_t error;       ///< ErrorKind, with the text in the sender's window
  int64_t rows_offset;  ///< where the sender's rows start in its window; GPU, with an error: as
                        ///< HostStatus::Verdict::index
  int64_t capacity;     ///< -1: dropless
  uint64_t plan;        ///< epoch of the kept plan; dispatch: epoch of a plan to reuse, or 0
  int32_t tokens;
  int32_t alignment;
  RowLayout layout;
  uint32_t carries;  ///< Carries bits
  int64_t detail;    ///< dispatch: DispatchArguments::positions; GPU, with an error: the bad id
};
static_assert(sizeof(SignalRecord) == kLine && offsetof(SignalRecord, epoch) == 0);

/// A hash of the fields of a record that must be equal on all ranks (compare_records). Equal hashes mean
/// equal fields, as surely as 64 bits can; if hashes differ, the records are compared. 0: the record has an
/// error, and records are always compared.
MOECOMM_HD constexpr uint64_t arguments_hash(const SignalRecord& record) {
  if (record.error != 0) return 0;
  uint64_t hash = 0;
  for (const uint64_t field : {static_cast<uint64_t>(record.operation) | uint64_t{record.caller} << 16,
                               static_cast<uint64_t>(record.capacity), record.plan,
                               static_cast<uint64_t>(record.alignment), static_cast<uint64_t>(record.layout),
                               static_cast<uint64_t>(record.carries), static_cast<uint64_t>(record.detail)}) {
    hash = (hash ^ field) * 0x9e3779b97f4a7c15;  // odd, so that fields that differ change the hash
    hash ^= hash >> 29;
  }
  return hash | 1;
}

enum Carries : uint32_t {
  kCarriesRows = 1,
  kCarriesWeights = 2,
  kCarriesQuantised = 4,
  kCarriesTokenWeights = 16,
  kAfterGivenUp = 8  ///< GPU, where tokens reuse staging memory in turn: this rank gave up the previous
                     ///< dispatch, whose unsent rows it will not send
};

/// Why a rank gave up on a peer.
enum class Cause : uint32_t { no_signal = 0, ended = 1, closed = 2, unreachable = 3 };

/// The cache lines of a window that one peer writes. For a peer on another node they are written by the rank
/// of this node with the peer's local number. Two records alternate: a peer can be one epoch ahead but not
/// two, because epoch n+2 starts only after all ranks have announced n+1, and by then they have read n.
struct PeerLines {
  SignalRecord record[2];
  alignas(kLine) Cause gone;  ///< no_signal: the peer may still announce operations; else why it will not
  uint32_t abort;             ///< 1 once the peer has given up on a rank
  int32_t abort_peer;         ///< the rank on which it gave up
  Cause abort_cause;          ///< why it gave up
};
static_assert(sizeof(PeerLines) == 3 * kLine);

/// Two cache lines of a window: its owner sleeps on the first; the second tells others what the owner read.
struct OwnerLines {
  alignas(kLine) uint32_t doorbell;   ///< futex word, bumped by every signal to this rank
  uint32_t sleeping;                  ///< 1 while the owner may be asleep on the doorbell
  alignas(kLine) uint64_t completed;  ///< last epoch whose remote rows this rank has finished reading
  uint32_t inside;                    ///< CPU: above 0 while the rank is within a call of the communicator
};
static_assert(sizeof(OwnerLines) == 2 * kLine);

inline constexpr int kErrorText = 512;  ///< bytes of an error text in a window, with its terminating zero

}  // namespace moecomm
