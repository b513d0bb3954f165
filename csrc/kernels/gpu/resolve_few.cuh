// Where the rows of very few tokens arrive, found from the routes of all sources and nothing else: neither
// the counts nor where each expert's rows begin are waited for, or worked out. Each block takes the routes
// into shared memory as they come; the place of a (token, k) among this rank's rows is the number of those
// that come before it by expert, source and token. For one kernel on one node, without rows that align.
#pragma once

#include "kernels/gpu/resolve.cuh"

namespace moecomm::gpu {

/// The routes of all sources' (token, k), as if each had as many tokens as this kernel takes, in shared
/// memory.
struct FewRoutes {
  static constexpr int32_t kElsewhere = INT32_MAX;

  int32_t* keys;    ///< the place of each in the order of this rank's rows; kElsewhere: it is none of these
  int32_t* packed;  ///< as in Route; -1: none
  float* weights;
  int32_t tokens, of_source, all;  ///< tokens of a source; entries of one, and of all

  /// True where they have room in `words` of shared memory.
  __device__ static bool serve(const Comm& comm, const SendArguments& args, int64_t words) {
    const int32_t all = kMostByRoutes * comm.top_k() * comm.ranks();
    return args.tokens <= kMostByRoutes && args.alignment == 1 && all <= kMostRoutes && 3 * all <= words;
  }
  __device__ FewRoutes(int32_t* memory, const Comm& comm)
      : tokens(static_cast<int32_t>(min(int64_t{kMostByRoutes}, comm.window.shape.max_tokens))),
        of_source(tokens * comm.top_k()),
        all(of_source * comm.ranks()) {
    keys = memory;
    packed = keys + all;
    weights = reinterpret_cast<float*>(packed + all);
  }
};

/// Takes the routes of all sources as they come, and how many tokens each has into `tokens`. Whole block;
/// false if it waits in vain, or a source does something else. Where a source has more tokens than
/// kMostByRoutes the routes are not all.
__device__ inline bool take_routes(const Comm& comm, uint64_t epoch, const FewRoutes& routes,
                                   int32_t* tokens) {
  const int32_t ranks = comm.ranks(), top_k = comm.top_k(), number_bits = comm.window.number_bits;
  const int32_t first_expert = comm.rank * comm.local_experts;
  // Warps share the sources, and where there are more warps several of them one source.
  const int32_t parts = max(comm.of_ranks.quotient(kWarps), 1);
  const int32_t part = comm.of_ranks.quotient(warp_id());
  bool here = true;
#pragma unroll 1
  for (int32_t source = warp_id() - part * ranks; here && part < parts && source < ranks; source += kWarps) {
    const device::WaitInfo info{source, WaitPhase::records, Operation::dispatch, epoch};
    const CountArrival count{comm.counts(comm.own, source, epoch) + comm.window.shape.counts(),
                             &comm.record(comm.own, source, epoch), epoch};
    const int32_t first = part * 32 + lane_id();
    ptx::Pair ahead{};  // is loaded with the number of tokens
    if (first < routes.of_source)
      ahead = ptx::load_relaxed_sys_pair(comm.routes(comm.own, source, epoch) + first);
    here = device::wait_until(comm, info, count) && count.has_come();
    const int32_t of_source = EpochNumber::number(count.number);
    if (part == 0 && lane_id() == 0) tokens[source] = of_source;
    const int32_t entries = min(of_source, routes.tokens) * top_k;
#pragma unroll 1
    for (int32_t i = first; here && i < entries; i += parts * 32) {
      const RouteArrival arrival{comm.routes(comm.own, source, epoch) + i, 0, 1, epoch};
      ptx::Pair route = i == first ? ahead : ptx::load_relaxed_sys_pair(arrival.first);
      if (!EpochNumber::is_of(route.high, epoch)) {
        here = wait_for_routes(comm, source, arrival);
        route = ptx::load_relaxed_sys_pair(arrival.first);
      }
      const auto packed = here ? static_cast<int32_t>(route.low) : -1;
      const int32_t local = packed < 0 ? -1 : (packed >> number_bits) - first_expert;
      const int32_t at = source * routes.of_source + i;
      const bool mine = local >= 0 && local < comm.local_experts;
      routes.keys[at] = mine ? (local * ranks + source) * kMostByRoutes + i / top_k : FewRoutes::kElsewhere;
      routes.packed[at] = packed;
      routes.weights[at] = __uint_as_float(static_cast<uint32_t>(route.low >> 32));
    }
  }
  return __syncthreads_and(here);
}

/// Where the row of a token of a source goes, in the lanes of its (token, k). All lanes.
struct FewPlaces {
  int32_t at;        ///< entry of this lane's k
  int32_t position;  ///< in expert-major order, before the capacity counts; kRowElsewhere
  int32_t row;       ///< rank layout: tokens of which a row comes here, before this one

  /// `many`: lanes have a k each several times over, and share what each is compared with.
  __device__ FewPlaces(const Comm& comm, RowLayout layout, const FewRoutes& routes, const int32_t* tokens,
                       const TokenLanes& many, int32_t source, int32_t token)
      : at(source * routes.of_source + token * many.top_k + many.k), position(0), row(0) {
    const int32_t key = routes.keys[at], top_k = many.top_k;
    int32_t below = 0;
#pragma unroll 1
    for (int32_t other = 0; other < comm.ranks(); ++other) {
      const int32_t* const keys = routes.keys + other * routes.of_source;
      const int32_t end = many.within < many.tokens ? tokens[other] * top_k : 0;
#pragma unroll 4
      for (int32_t i = many.within; i < end; i += many.tokens) below += keys[i] < key;
      if (layout == RowLayout::expert) continue;
      const int32_t before = other < source ? tokens[other] : other == source ? token : 0;
      bool comes = false;  // of the token in this lane
#pragma unroll 1
      for (int32_t k = 0; k < top_k && lane_id() < before; ++k)
        comes = comes || keys[lane_id() * top_k + k] != FewRoutes::kElsewhere;
      row += __popc(__ballot_sync(0xffffffffu, comes));
    }
#pragma unroll 1
    for (int32_t share = 0; share < many.tokens; ++share)
      position += __shfl_sync(0xffffffffu, below, share * top_k + many.k);
    if (lane_id() >= top_k || key == FewRoutes::kElsewhere) position = kRowElsewhere;
  }
};

/// The routes of a token as resolve_rows wants them: where its rows are is known without their numbers.
struct FewTokenRoutes {
  int32_t expert, number_bits, row;
  float of_weight;

  __device__ int32_t packed(int) const { return expert < 0 ? -1 : expert << number_bits; }
  __device__ float weight(int) const { return of_weight; }
  __device__ int32_t place(int) const { return row; }
};

/// The rows of one token, as resolve_rows finds them. All lanes.
__device__ inline ChunkRows<1> resolve_few(const Comm& comm, const ReceiveArguments& args,
                                           const FewRoutes& routes, const FewPlaces& places,
                                           const TokenLanes& map, const Item& item) {
  const int32_t packed = map.has(0, 1) ? routes.packed[places.at] : -1;
  const int32_t position = places.position, number_bits = comm.window.number_bits;
  const FewTokenRoutes of_token{packed < 0 ? -1 : packed >> number_bits, number_bits, places.row,
                                map.has(0, 1) ? routes.weights[places.at] : 0.0f};
  return resolve_rows<1>(comm, args, map, item, of_token, 0, [position](int32_t) { return position; });
}

/// Rows, and positions in expert-major order, that come here. All lanes.
__device__ inline PlanHeader needed_by_few(const Comm& comm, const ReceiveArguments& args,
                                           const FewRoutes& routes, const int32_t* tokens) {
  int32_t rows = 0, positions = 0;
#pragma unroll 1
  for (int32_t i = lane_id(); i < comm.ranks() * routes.tokens; i += 32) {
    const int32_t source = i / routes.tokens, token = i - source * routes.tokens;
    int32_t each = 0;
#pragma unroll 1
    for (int32_t k = 0; k < comm.top_k() && token < tokens[source]; ++k)
      each += routes.keys[i * comm.top_k() + k] != FewRoutes::kElsewhere;
    positions += each;
    rows += args.layout == RowLayout::expert ? each : min(each, 1);
  }
  PlanHeader header{};
  header.needed_rows = __reduce_add_sync(0xffffffffu, rows);
  header.needed_positions = __reduce_add_sync(0xffffffffu, positions);
  return header;
}

}  // namespace moecomm::gpu
