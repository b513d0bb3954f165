// The SM-issued exchange that other transfers are measured against: rows pushed to peers by bulk copies.
//
// Each block has some lanes, one thread each, and each lane a ring of slots in shared memory. A lane takes
// every (blocks x lanes)-th row of the list. A row is bulk-copied from this GPU's memory into a slot, and
// when it is there from the slot to its address in a peer's memory. Loads run ahead as far as the ring
// allows; a slot is loaded again once the store from it, KEEP stores earlier, has been read out of shared
// memory.
//
// push_rows does this and ends. exchange_rows then tells every peer by a flag that all of its rows are there,
// and waits for the flags of all peers: the least that an operation on received rows can take.
//
// Waits are bounded: a load or a flag that does not arrive ends the lane or the kernel, and sets *late. Needs
// sm_90. Row sizes are multiples of 16 bytes, addresses are aligned to 16 bytes.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int KEEP = 2;  // stores that may still be reading their slots
constexpr int TRIES = 1 << 20;

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init(u32 barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void load(u32 slot, u64 from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(slot),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ bool arrived(u32 barrier, u32 parity) {
  for (int i = 0; i < TRIES; ++i) {
    u32 done;
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (done) return true;
  }
  return false;
}

__device__ __forceinline__ void store(u64 to, u32 slot, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(slot), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// row_bytes: of a row; slots: of a lane, more than KEEP; blockDim.x: 32 x lanes.
// Shared memory: lanes x slots slots of row_bytes rounded up to 128, then as many barriers of 8 bytes.
__device__ __forceinline__ void push(const u64* from_N, const u64* to_N, int rows, int row_bytes, int slots,
                                     u32* late) {
  extern __shared__ __align__(128) unsigned char shared[];
  if (threadIdx.x % 32 != 0) return;
  const int lanes = blockDim.x / 32, lane = threadIdx.x / 32;
  const u32 pitch = (row_bytes + 127) / 128 * 128;
  const u32 ring = shared_address(shared) + lane * slots * pitch;
  const u32 full = shared_address(shared) + lanes * slots * pitch + lane * slots * 8;
  for (int slot = 0; slot < slots; ++slot) init(full + slot * 8);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

  const int first = blockIdx.x * lanes + lane, step = gridDim.x * lanes;
  const int count = first < rows ? (rows - 1 - first) / step + 1 : 0;
  for (int n = 0; n < count && n < slots; ++n)
    load(ring + n * pitch, from_N[first + n * step], row_bytes, full + n * 8);
  // Addresses are read one row ahead, so that their latency is not part of the loop.
  const int ahead =
      slots - KEEP;  // when row n has left, the slot of row n - KEEP is free: row n + ahead comes there
  u64 next_to = count > 0 ? to_N[first] : 0;
  u64 next_from = 0;
  for (int n = 0; n < count; ++n) {
    const u64 to = next_to, from = next_from;
    if (n + 1 < count) next_to = to_N[first + (n + 1) * step];
    if (n + 1 >= KEEP && n + 1 + ahead < count) next_from = from_N[first + (n + 1 + ahead) * step];
    const int slot = n % slots;
    if (!arrived(full + slot * 8, n / slots & 1)) {
      atomicExch(late, 1);
      break;
    }
    store(to, ring + slot * pitch, row_bytes);
    if (n >= KEEP && n + ahead < count) {
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(KEEP) : "memory");
      const int free_slot = (n + ahead) % slots;
      load(ring + free_slot * pitch, from, row_bytes, full + free_slot * 8);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void push_rows(const u64* from_N, const u64* to_N, int rows, int row_bytes, int slots,
                                     u32* late) {
  push(from_N, to_N, rows, row_bytes, slots, late);
}

// flags_P: the addresses, in the memory of each peer, of this rank's flag there; own_P: of the peers' flags
// here. A flag is the number of the last exchange, which counters[0] has; counters[1] is 0 between kernels.
extern "C" __global__ void exchange_rows(const u64* from_N, const u64* to_N, int rows, int row_bytes,
                                         int slots, u32* late, const u64* flags_P, const u64* own_P,
                                         int peers, u64* counters) {
  push(from_N, to_N, rows, row_bytes, slots, late);
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();
  if (atomicAdd(counters + 1, 1ull) != gridDim.x - 1) return;  // the last block goes on
  __threadfence();
  const u64 number = counters[0] + 1;
  counters[0] = number;
  counters[1] = 0;
  for (int peer = 0; peer < peers; ++peer)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flags_P[peer]), "l"(number) : "memory");
  for (int peer = 0; peer < peers; ++peer) {
    u64 seen = 0;
    for (int i = 0; i < TRIES && seen < number; ++i)
      asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(own_P[peer]) : "memory");
    if (seen < number) atomicExch(late, 1);
  }
}
