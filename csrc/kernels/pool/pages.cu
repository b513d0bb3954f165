// A pool of pages on the device.
//   - take and give back are one block each: one thread decides, all move page numbers between the stack of
//     free pages and the ticket. Pages of the GPU are taken first
//   - a copy moves chunks of 16 KB, which lie within a page; blocks stride over the chunks of all tensors,
//   and
//     a thread has four pieces of 16 bytes under way
//   - a ticket is counted also if it does not get its pages: so `peak` is what the whole step would need
//   - pages know their owner: rows that are asked for a second time, or after a reset, are not read
#include <algorithm>

#include "kernels/pool/pages.hpp"

namespace moecomm::pool {
namespace {

constexpr int kTakers = 1024, kThreads = 256;
constexpr int kPieces = 4;  // of 16 bytes that a thread has under way
constexpr int kChunkBytes = kThreads * kPieces * 16;
constexpr int kBlocks = 8;  // of an SM
static_assert(kThreads >= 16, "the bytes after the last piece are a thread each");

__device__ inline int32_t* pages_of(Ticket* ticket) { return reinterpret_cast<int32_t*>(ticket + 1); }
__device__ inline const int32_t* pages_of(const Ticket* ticket) {
  return reinterpret_cast<const int32_t*>(ticket + 1);
}

__device__ inline std::byte* address(const Pages& pages, int32_t page) {
  std::byte* const base = page < pages.device_pages ? pages.device : pages.host;
  const int32_t index = page < pages.device_pages ? page : page - pages.device_pages;
  return base + (int64_t{index} << pages.page_bits);
}

/// Pages of `bytes`.
__device__ inline int64_t count_pages(const Pages& pages, int64_t bytes) {
  return (bytes + (int64_t{1} << pages.page_bits) - 1) >> pages.page_bits;
}

__device__ inline int count_rows(const Rows& rows) {
  return rows.real_rows == nullptr ? rows.rows : max(0, min(rows.rows, *rows.real_rows));
}

__global__ void __launch_bounds__(kTakers)
    take_kernel(const __grid_constant__ Pages pages, const __grid_constant__ Rows rows, Ticket* ticket) {
  // Numbers of free pages of each kind, and of pages taken, shared by all threads.
  __shared__ int64_t free_device, free_host, taken_device, taken, serial;
  if (threadIdx.x == 0) {
    State& state = *pages.state;
    const int count = count_rows(rows);
    int64_t needed = 0;
    for (int i = 0; i < rows.count; ++i) needed += count_pages(pages, count * rows.row_bytes[i]);
    free_device = state.free_device;
    free_host = state.free_host;
    const bool fits = needed <= free_device + free_host;
    taken = fits ? needed : 0;
    taken_device = min(taken, free_device);
    serial = state.serial + 1;
    state.serial = serial;
    state.free_device = free_device - taken_device;
    state.free_host = free_host - (taken - taken_device);
    state.held += needed;
    state.peak = max(state.peak, state.held);
    if (!fits) state.failed = 1;
    ticket->serial = serial;
    ticket->status = fits ? TicketStatus::taken : TicketStatus::failed;
    ticket->rows = count;
    ticket->pages = static_cast<int32_t>(needed);
    ticket->device_pages = static_cast<int32_t>(taken_device);
  }
  __syncthreads();
  const int32_t* const of_host = pages.free + pages.device_pages;
  int32_t* const table = pages_of(ticket);
  for (int64_t i = threadIdx.x; i < taken; i += kTakers) {
    const int32_t page =
        i < taken_device ? pages.free[free_device - 1 - i] : of_host[free_host - 1 - (i - taken_device)];
    table[i] = page;
    pages.owner[page] = serial;
  }
}

__global__ void __launch_bounds__(kTakers)
    give_back_kernel(const __grid_constant__ Pages pages, Ticket* ticket) {
  __shared__ int64_t free_device, free_host;
  __shared__ int32_t given_device, given;
  int32_t* const table = pages_of(ticket);
  if (threadIdx.x == 0) {
    State& state = *pages.state;
    free_device = state.free_device;
    free_host = state.free_host;
    given = given_device = 0;
    const bool known = ticket->status == TicketStatus::taken || ticket->status == TicketStatus::failed;
    const bool is_taken = ticket->status == TicketStatus::taken;
    if (known && ticket->serial > state.reset) {
      // The pages may have gone back already by a copy of the ticket.
      if (is_taken && ticket->pages > 0 && pages.owner[table[0]] != ticket->serial) {
        state.lost = 1;
      } else {
        state.held -= ticket->pages;
        given = is_taken ? ticket->pages : 0;
        given_device = is_taken ? ticket->device_pages : 0;
        state.free_device = free_device + given_device;
        state.free_host = free_host + (given - given_device);
      }
    }
    ticket->status = TicketStatus::given_back;
  }
  __syncthreads();
  int32_t* const of_host = pages.free + pages.device_pages;
  // Backwards, so that the next to take finds them in the order that they had.
  for (int32_t i = threadIdx.x; i < given; i += kTakers) {
    const int32_t page = table[i];
    if (i < given_device)
      pages.free[free_device + (given_device - 1 - i)] = page;
    else
      of_host[free_host + (given - 1 - i)] = page;
    pages.owner[page] = 0;
  }
}

/// `bytes`, at most kChunkBytes of them, by all threads of the block.
__device__ inline void copy_chunk(const std::byte* from, std::byte* to, int bytes) {
  const int pieces = bytes / 16;
  uint4 raw[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
    // The row is not read again soon: it leaves room in the cache for what is written.
    if (piece < pieces) raw[i] = __ldcs(reinterpret_cast<const uint4*>(from) + piece);
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
    if (piece < pieces) reinterpret_cast<uint4*>(to)[piece] = raw[i];
  }
  const int rest = pieces * 16 + static_cast<int>(threadIdx.x);
  if (rest < bytes) to[rest] = from[rest];
}

/// The rows of a ticket, into its pages or out of them.
template <bool into>
__global__ void __launch_bounds__(kThreads, kBlocks)
    copy_kernel(const __grid_constant__ Pages pages, const __grid_constant__ Rows rows,
                const Ticket* ticket) {
  if (ticket->status != TicketStatus::taken) {
    // A ticket without pages either failed, which is known, or was read once too often.
    if (!into && ticket->status != TicketStatus::failed && blockIdx.x == 0 && threadIdx.x == 0)
      pages.state->lost = 1;
    return;
  }
  const int64_t serial = ticket->serial, count = ticket->rows;
  if (!into && serial <= pages.state->reset) {
    if (blockIdx.x == 0 && threadIdx.x == 0) pages.state->lost = 1;
    return;
  }
  const int32_t* const table = pages_of(ticket);
  const int chunk_bytes = min(kChunkBytes, 1 << pages.page_bits);
  const int64_t within = (int64_t{1} << pages.page_bits) - 1;
  int64_t first_page = 0, first_block = blockIdx.x;
  for (int i = 0; i < rows.count; ++i) {
    const int64_t total = count * rows.row_bytes[i];
    const int64_t chunks = (total + chunk_bytes - 1) / chunk_bytes;
    int64_t chunk = first_block;
    for (; chunk < chunks; chunk += gridDim.x) {
      const int64_t offset = chunk * chunk_bytes;
      const int32_t page = table[first_page + (offset >> pages.page_bits)];
      if (!into && pages.owner[page] != serial) {
        if (threadIdx.x == 0) pages.state->lost = 1;
        return;
      }
      std::byte* const stored = address(pages, page) + (offset & within);
      std::byte* const row = rows.data[i] + offset;
      const int bytes = static_cast<int>(min(int64_t{chunk_bytes}, total - offset));
      if constexpr (into)
        copy_chunk(row, stored, bytes);
      else
        copy_chunk(stored, row, bytes);
    }
    // The next tensor begins at the block after the last tensor's, so that all blocks have as much to do.
    first_block = chunk - chunks;
    first_page += count_pages(pages, total);
  }
}

__global__ void __launch_bounds__(kTakers) reset_kernel(const __grid_constant__ Pages pages) {
  const int32_t all = pages.device_pages + pages.host_pages;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    State& state = *pages.state;
    state.free_device = pages.device_pages;
    state.free_host = pages.host_pages;
    state.held = state.peak = state.failed = state.lost = 0;
    state.reset = state.serial;
  }
  const int32_t stride = static_cast<int32_t>(gridDim.x * kTakers);
  // The lowest number of each kind lies on top.
  for (int32_t i = static_cast<int32_t>(blockIdx.x * kTakers + threadIdx.x); i < all; i += stride) {
    pages.free[i] = i < pages.device_pages ? pages.device_pages - 1 - i : all - 1 - (i - pages.device_pages);
    pages.owner[i] = 0;
  }
}

cudaError_t count_sms(int* sms) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(sms, cudaDevAttrMultiProcessorCount, device);
}

template <class... Parameters, class... Arguments>
cudaError_t start(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                  const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <bool into>
cudaError_t copy(const Pages& pages, const Rows& rows, Ticket* ticket, cudaStream_t stream) {
  int sms = 0;
  if (const cudaError_t error = count_sms(&sms); error != cudaSuccess) return error;
  const int64_t chunk_bytes = std::min<int64_t>(kChunkBytes, int64_t{1} << pages.page_bits);
  int64_t chunks = 1;
  for (int i = 0; i < rows.count; ++i)
    chunks += (rows.rows * rows.row_bytes[i] + chunk_bytes - 1) / chunk_bytes;
  return start(copy_kernel<into>, std::min(chunks, int64_t{sms} * kBlocks), kThreads, stream, pages, rows,
               const_cast<const Ticket*>(ticket));
}

}  // namespace

cudaError_t launch_push(const Pages& pages, const Rows& rows, Ticket* ticket, cudaStream_t stream) {
  if (const cudaError_t error = start(take_kernel, 1, kTakers, stream, pages, rows, ticket);
      error != cudaSuccess)
    return error;
  return copy<true>(pages, rows, ticket, stream);
}

cudaError_t launch_pop(const Pages& pages, const Rows& rows, Ticket* ticket, cudaStream_t stream) {
  if (const cudaError_t error = copy<false>(pages, rows, ticket, stream); error != cudaSuccess) return error;
  return launch_drop(pages, ticket, stream);
}

cudaError_t launch_drop(const Pages& pages, Ticket* ticket, cudaStream_t stream) {
  return start(give_back_kernel, 1, kTakers, stream, pages, ticket);
}

cudaError_t launch_reset(const Pages& pages, cudaStream_t stream) {
  int sms = 0;
  if (const cudaError_t error = count_sms(&sms); error != cudaSuccess) return error;
  const int64_t all = int64_t{pages.device_pages} + pages.host_pages;
  return start(reset_kernel, std::clamp<int64_t>(all / kTakers, 1, sms), kTakers, stream, pages);
}

cudaError_t prepare() {
  const void* const kernels[] = {
      reinterpret_cast<const void*>(take_kernel), reinterpret_cast<const void*>(give_back_kernel),
      reinterpret_cast<const void*>(copy_kernel<true>), reinterpret_cast<const void*>(copy_kernel<false>),
      reinterpret_cast<const void*>(reset_kernel)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes loaded;
    if (const cudaError_t error = cudaFuncGetAttributes(&loaded, kernel); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace moecomm::pool
