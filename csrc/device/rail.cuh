// How kernels exchange data with other nodes: commands to the proxy (runtime/proxy.hpp), and their data. A
// rank talks to the ranks of its rail: those with the same local number on other nodes.
#pragma once

#include "device/signal.cuh"

namespace moecomm::device {

/// Hands a command to the proxy. The network may then read what this thread wrote, or saw written, before.
/// The ring does not overflow: it has room for the commands of four operations, and when an operation begins,
/// only commands of the operation before it may be left.
__device__ inline void push_command(const Comm& comm, const Command& command) {
  const uint64_t ticket = atomicAdd(reinterpret_cast<unsigned long long*>(&comm.state().commands), 1ull);
  uint64_t* const slot = comm.rail.at<uint64_t>(comm.rail.layout.commands) + ticket % comm.rail.commands * 2;
  slot[1] = low_word(command);
  ptx::store_release_sys(slot, high_word(command, ticket, comm.rail.commands));
}

/// Pushes a command for every kPieceBytes of `bytes` bytes of ids, weights, relay indices or gradients.
/// `threads` threads call it and share the work.
__device__ inline void push_pieces(const Comm& comm, Command::Kind kind, int32_t other, int64_t bytes,
                                   uint64_t epoch, int thread, int threads) {
  for (int64_t piece = thread; piece * WindowShape::kPieceBytes < bytes; piece += threads) {
    const int64_t left = bytes - piece * WindowShape::kPieceBytes;
    push_command(
        comm, {kind, static_cast<uint8_t>(epoch), static_cast<uint16_t>(other), static_cast<uint32_t>(piece),
               static_cast<uint32_t>(min(left, int64_t{WindowShape::kPieceBytes})), 0});
  }
}

__device__ inline Announcement& outgoing_head(const Comm& comm, uint64_t epoch, int32_t other) {
  return comm.rail.at<Announcement>(comm.rail.layout.announcement[epoch & 1])[other];
}
__device__ inline const Announcement& arrived_head(const Comm& comm, uint64_t epoch, int32_t other) {
  return comm.rail.at<Announcement>(comm.rail.layout.relay_head[epoch & 1])[other];
}

__device__ inline int64_t chunks_of(const Rail& rail, int64_t rows) {
  return (rows + rail.chunk_rows - 1) / rail.chunk_rows;
}

/// Sends an Announcement to another node: the record, and how many `rows` and `parts` follow. One thread.
__device__ inline void send_head(const Comm& comm, const SignalRecord& record, int32_t other, int64_t rows,
                                 int64_t parts, bool with_text) {
  Announcement& head = outgoing_head(comm, record.epoch, other);
  head.record = record;
  head.rows = rows;
  head.parts = static_cast<uint64_t>(parts);
  push_command(comm,
               {Command::Kind::head, static_cast<uint8_t>(record.epoch), static_cast<uint16_t>(other), 0,
                static_cast<uint32_t>(with_text ? sizeof(Announcement) : offsetof(Announcement, text)), 0});
}

/// Call it after a fence, when row `number` of the `rows` for another node is staged in format `wire`. The
/// last call for a chunk hands the chunk to the proxy.
__device__ inline void row_staged(const Comm& comm, WireFormat wire, int32_t other, int32_t number,
                                  int64_t rows, uint64_t epoch) {
  const auto size = static_cast<int32_t>(comm.rail.chunk_rows);
  const int32_t chunk = number / size;
  const auto in_chunk = static_cast<uint32_t>(min(int64_t{size}, rows - int64_t{chunk} * size));
  uint32_t* const staged = comm.mine<uint32_t>(comm.window.staged_rows) + other * comm.rail.chunks + chunk;
  if (ptx::add_acq_rel_gpu(staged, 1) + 1 < in_chunk) return;
  *staged = 0;
  ptx::fence_sys();
  push_command(comm, {chunk_kind(wire), static_cast<uint8_t>(epoch), static_cast<uint16_t>(other),
                      static_cast<uint32_t>(chunk), static_cast<uint32_t>(other * comm.rail.chunks + chunk),
                      in_chunk << 16 | in_chunk});
}

/// A chunk of rows from another node. The first thread that waits polls the chunk's flag in host memory, then
/// sets word() in GPU memory, which the other threads poll: more polls would slow down the host's transfers.
struct RailChunk {
  const Comm& comm;
  uint64_t epoch;
  int32_t other;
  int64_t chunk;

  __device__ uint64_t* word() const {
    return comm.mine<uint64_t>(comm.window.chunks_here) + other * comm.rail.chunks + chunk;
  }
  __device__ OwnWord here() const { return {word(), 2 * epoch + 1}; }

  /// Waits until the chunk has arrived. False if the wait fails.
  __device__ bool wait(const WaitInfo& info) const {
    const OwnWord here = this->here();
    if (here.arrived()) return true;
    const uint64_t looked_for = here.value - 1, seen = ptx::load_relaxed_gpu(word());
    if (seen == here.value || seen == looked_for || ptx::compare_swap_gpu(word(), seen, looked_for) != seen)
      return wait_until(comm, info, here);
    if (!wait_until(comm, info, HostWord{{comm.rail.arrival(epoch, other, chunk), epoch}})) return false;
    ptx::store_release_gpu(word(), here.value);
    return true;
  }
};

/// Waits until the proxy has sent all data of earlier operations, so that the host memory that held these
/// data may be written again. Whole block; false if the wait fails.
__device__ inline bool wait_sent(const Comm& comm, Operation operation, uint64_t epoch) {
  bool sent = true;
  if (threadIdx.x == 0) {
    const RelayProgress& progress = *comm.rail.at<RelayProgress>(comm.rail.layout.progress);
    sent = wait_until(comm, {comm.rail_rank(0), WaitPhase::credit, operation, epoch, false},
                      HostWord{{&progress.put, comm.state().commands_before}});
  }
  return __syncthreads_and(sent);
}

/// Waits until all that other ranks of this rail send here in `epoch` is here, or a wait fails. Whole block.
__device__ inline void wait_all_here(const Comm& comm, Operation operation, uint64_t epoch) {
  RelayProgress& progress = *comm.rail.at<RelayProgress>(comm.rail.layout.progress);
  for (int32_t other = static_cast<int32_t>(threadIdx.x); other < comm.rail.others;
       other += static_cast<int32_t>(blockDim.x))
    if (!wait_until(comm, {comm.rail_rank(other), WaitPhase::rows, operation, epoch, false},
                    HostWord{{progress.all_here(other), epoch}}))
      return;
}

}  // namespace moecomm::device
