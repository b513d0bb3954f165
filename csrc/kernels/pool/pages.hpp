// Rows kept in pages: a pool of pages of one size, some in the memory of the GPU and some in pinned host
// memory, and the kernels that put rows there and bring them back. How many rows there are is read on the
// device, so that a captured graph takes the pages that each replay needs. Launches are put on a stream and
// can be captured; they allocate nothing and wait for nothing. Launches of one pool run one after another:
// that is the caller's to see to.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace moecomm::pool {

inline constexpr int kMostTensors = 4;  ///< of one ticket
inline constexpr int kLeastPageBits = 12, kMostPageBits = 30;
inline constexpr int64_t kMostPages = 1 << 30;
inline constexpr int64_t kMostRows = 1 << 30, kMostRowBytes = 1 << 30;

/// State of the pool in device memory; all zero before the first `launch_reset`. moecomm/nn/pages.py reads it
/// by position.
struct State {
  int64_t free_device;  ///< pages in the lower part of the list that are free
  int64_t free_host;    ///< in the upper part
  int64_t held;         ///< pages of all tickets, also of those that did not get theirs
  int64_t peak;         ///< the most that `held` has been
  int64_t failed;       ///< 1: a ticket did not get its pages
  int64_t lost;         ///< 1: rows were asked for that were not in the pool any more
  int64_t serial;       ///< of the last ticket
  int64_t reset;        ///< serial of the last ticket before the last reset
};
static_assert(sizeof(State) == 64);

enum class TicketStatus : int32_t { none = 0, taken = 1, failed = 2, given_back = 3 };

/// Record of what a push has taken. The pages' numbers (int32) follow; those in device memory come first.
/// Each tensor begins with a page of its own.
struct Ticket {
  int64_t serial;
  TicketStatus status;
  int32_t rows;
  int32_t pages;  ///< that it needs
  int32_t device_pages;
  int32_t unused[2];
};
static_assert(sizeof(Ticket) == 32);

/// A pool, as its kernels see it.
struct Pages {
  State* state;
  int32_t* free;   ///< (device_pages + host_pages): stacks of free pages' numbers, one for each kind
  int64_t* owner;  ///< (device_pages + host_pages): serial of the ticket that has the page; 0: free
  std::byte* device;
  std::byte* host;  ///< as the device addresses it; page number device_pages is its first
  int32_t device_pages;
  int32_t host_pages;
  int32_t page_bits;  ///< a page has 2^page_bits bytes
};

/// Tensors of equally many rows, which lie behind each other without gaps, at multiples of 16 bytes.
struct Rows {
  std::byte* data[kMostTensors];
  int64_t row_bytes[kMostTensors];
  const int32_t* real_rows;  ///< if present, rows from *real_rows on are neither read nor written
  int32_t count;             ///< of tensors
  int32_t rows;
};

/// Takes the pages that the real rows need, and writes the ticket, which has room for all rows, and the rows.
/// Copies rows into pages. If too few pages are free, none is taken, and the state says so.
cudaError_t launch_push(const Pages& pages, const Rows& rows, Ticket* ticket, cudaStream_t stream);

/// Brings the rows of a ticket back and gives its pages back. Rows of a ticket that did not get its pages are
/// left as they are. `rows.real_rows` is not looked at.
cudaError_t launch_pop(const Pages& pages, const Rows& rows, Ticket* ticket, cudaStream_t stream);

/// Gives the pages of a ticket back.
cudaError_t launch_drop(const Pages& pages, Ticket* ticket, cudaStream_t stream);

/// Frees all pages; sets `held`, `peak`, `failed` and `lost` to zero. Tickets from before have no pages.
cudaError_t launch_reset(const Pages& pages, cudaStream_t stream);

/// Loads the kernels onto the current device. Before their first launch: loading at the launch may wait for
/// kernels under way.
cudaError_t prepare();

}  // namespace moecomm::pool
