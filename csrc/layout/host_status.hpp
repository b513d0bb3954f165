// Pinned host memory through which a communicator's kernels and its host exchange messages without
// synchronising. One side writes each message, its `set` (or `ticket`) last, with release. The memory after
// HostStatus holds the row counts of the local experts (host_counts), then one PeerLoss per rank.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/control.hpp"

namespace moecomm {

/// What a kernel was waiting for when its wait failed.
enum class WaitPhase : uint32_t { records = 0, rows = 1, credit = 2, blocks = 3 };

/// The argument on which ranks disagree.
enum class Disagreement : uint32_t {
  none = 0,
  operation = 1,
  layout = 2,
  alignment = 3,
  capacity = 4,
  plan = 5,
  carries = 6,
  index_capacity = 7,
  caller = 8,
};

struct HostStatus {
  struct alignas(kLine) Rows {  // the row count of a dropless dispatch
    uint64_t ticket;            ///< number that the host gave the dispatch
    int64_t rows;               ///< -1: the dispatch failed, see `verdict`
    int64_t positions;          ///< rank layout: number of entries of the expert-major index
  } rows;
  struct alignas(kLine) Broken {  // a wait ended without its signal
    uint32_t set;
    int32_t peer;  ///< the rank to blame
    Cause cause;
    WaitPhase phase;
    Operation operation;
    int32_t first;      ///< the rank that first noticed the failure
    uint64_t expected;  ///< the operation's epoch
    uint64_t seen;      ///< the last epoch that `peer` has begun
  } broken;
  struct alignas(kLine) Verdict {  // an operation fails on all ranks: a record has an error or disagrees
    uint32_t set;
    uint32_t kind;  ///< ErrorKind
    int32_t rank;   ///< the rank whose record is bad
    Disagreement about;
    int64_t index;  ///< bad id's index, from bit 48 on k + 1 of its duplicate; disagreement: rank 0's value
    int64_t value;  ///< the bad id; disagreement: the value of `rank`
    uint32_t has_text;
  } verdict;
  struct alignas(kLine) Overflow {  // a dispatch left out rows past its capacity
    uint32_t set;
    int32_t rank;  ///< the rank that needs most
    int64_t needed, capacity;
    uint32_t of_positions;  ///< 1: the expert-major index of the rank layout overflowed; 0: rows did
  } overflow;
  char text[kErrorText];  ///< the error text of verdict.rank, if has_text
};
static_assert(sizeof(HostStatus) % kLine == 0);  // so that the data after it is aligned
static_assert(offsetof(HostStatus, text) == 4 * kLine);

/// The row counts of the local experts in a dropless dispatch, without padding. The host may read them once
/// `rows.ticket` holds the dispatch's number.
MOECOMM_HD inline int32_t* host_counts(HostStatus* status) { return reinterpret_cast<int32_t*>(status + 1); }

}  // namespace moecomm
