// Heuristics of the kernels inside a node: every choice that affects speed and not results, in one printable
// place. Owners are the ranks that own a token's experts; its home is the token's own rank.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "common/error.hpp"
#include "common/macros.hpp"
#include "layout/device_window.hpp"

namespace moecomm::gpu {

/// Warps of a block that moves rows: as many as have room in shared memory for the pieces that they move.
inline constexpr int kWarps = 12;
inline constexpr int kWarpBytes = 16384;  ///< shared memory per warp for pieces of rows
/// Words of shared memory in a block that computes routes.
inline constexpr int64_t kRouteWords = int64_t{kWarps} * kWarpBytes / 4;
/// Warps of a block that sums rows at the owners of the experts, in a combine without a pipe (kSumUnits).
inline constexpr int kReduceWarps = 16;
/// A strip, which a warp sums in one step, has kSumSteps times 512 bytes. A row has sum_strips() of them.
inline constexpr int kSumSteps = 2;
MOECOMM_HD constexpr int sum_strips(int64_t row_bytes) {
  return static_cast<int>((row_bytes + kSumSteps * 512 - 1) / (kSumSteps * 512));
}
/// The most tokens of a rank that the kernels for few tokens serve. Each token is a chunk there.
inline constexpr int kMostFusedTokens = 1024;
/// The most tokens whose routes one block of the route kernel computes alone.
inline constexpr int kFewRoutes = 512;
/// The most ranks for kernels that do a whole operation: their tables have to fit a block's shared memory.
inline constexpr int kMostFusedRanks = 64;

/// map_words: words of a bitmap of tokens. map_stride: words from one bitmap to the next, an odd number, so
/// that words of the same index lie in different banks of shared memory.
MOECOMM_HD constexpr int map_words(int64_t tokens) {
  return tokens <= 32 ? 1 : static_cast<int>((tokens + 31) / 32);
}
MOECOMM_HD constexpr int map_stride(int64_t tokens) { return map_words(tokens) | 1; }
/// Words of shared memory for `counts` bitmaps (one for each expert and each rank), and a 16-bit number for
/// each word of them. The result is even, since 64-bit ids follow.
MOECOMM_HD constexpr int64_t map_memory_words(int64_t counts, int64_t tokens) {
  return (3 * counts * map_stride(tokens) + 3) / 4 * 2;
}
/// The least number of words of shared memory for computing the routes of few tokens.
MOECOMM_HD constexpr int64_t route_few_words(int64_t counts, int64_t tokens) {
  constexpr int64_t kStaged = 512;  // (token, k), each with a 64-bit id and a weight
  return map_memory_words(counts, tokens) + 3 * kStaged;
}

/// True where one block with `words` words of shared memory computes the routes of `tokens` tokens.
MOECOMM_HD inline bool routes_few(const DeviceShape& shape, int64_t tokens, int64_t words) {
  return shape.other_nodes() == 0 && tokens <= kFewRoutes && shape.ranks <= kMostFusedRanks &&
         route_few_words(shape.counts(), tokens) <= words;
}

// Words of a block's shared memory, for few tokens. kFusedCounts: counts of all ranks in the planning block,
// bitmaps in a block that computes routes, else counts for this rank. kFusedTables: positions of rows.
inline constexpr int kFusedCounts = 30720, kFusedTables = 8192;

/// How many first blocks announce and plan, and move no rows, in a dispatch in one kernel of `blocks` blocks.
MOECOMM_HD constexpr int leading_blocks(int blocks) { return blocks > 32 ? 3 : blocks > 2 ? 2 : 1; }

/// True where one kernel does a whole operation of `tokens` tokens. `most`: the most tokens for that; 0: one
/// kernel never does, not even for an operation without tokens.
inline bool in_one_kernel(int64_t tokens, int64_t most) { return most > 0 && tokens <= most; }

/// The most tokens for which one kernel can do a whole operation, on one node of `ranks` ranks; 0: none.
inline int most_fused_tokens(int64_t ranks, int64_t num_experts) {
  const int64_t local = num_experts / ranks, counts = num_experts + ranks;
  if (ranks > kMostFusedRanks || counts * ranks > kFusedCounts ||
      (3 + ranks) * local + 3 * ranks > kFusedTables)
    return 0;
  for (int tokens = kMostFusedTokens; tokens >= 512; tokens /= 2)
    if (route_few_words(counts, tokens) <= kFusedCounts) return tokens;
  return 0;
}

/// Blocks of the two sides of a dispatch, or of the backward of a combine.
struct DispatchBlocks {
  int send, receive;
  int send_warps;     ///< a sending block's shared memory for pieces of rows, in units of kWarpBytes
  bool routes_first;  ///< a dispatch sends its rows after its routes, not at the same time

  int all() const { return send + receive; }
};

/// A pipe is a group of warps that makes sums (sum_pipe.cuh). kSumUnits: pipes in a block. kListTokens: the
/// most tokens that a pipe takes at a time, as a list.
inline constexpr int kSumUnits = 2, kListTokens = 8;

/// True where pipes make a combine's sums of many tokens in `blocks` blocks; else a warp makes each sum. A
/// pipe takes about as long for a short row as for one of 8 KB (measured on two ranks, docs/history.md). Sums
/// that travel quantised are made without pipes too.
constexpr bool sums_by_pipe(int64_t row_bytes, int blocks) {
  constexpr int64_t kShort = 4096, kShortOfMany = 6144;
  constexpr int kMany = 64;
  return row_bytes > (blocks >= kMany ? kShortOfMany : kShort);
}

/// Blocks of the two sides of a combine: `reduce` at the experts' owners, `sum` at the tokens' own rank.
struct CombineBlocks {
  int reduce, sum;
  int reduce_list, sum_list;  ///< tokens in a pipe's list on each side, where tokens are many; 0: no pipes

  int all() const { return reduce + sum; }
};

/// What is done to rows on their way. quantised: the sender quantises them. factors: the receiver multiplies
/// each by the factor of its output row. products: like factors, and it makes dot products with other rows.
enum class RowWork { none, quantised, factors, products };
inline constexpr int kRowWorks = 4;

/// Blocks, one per SM, for the two sides of each operation.
struct Heuristics {
  DispatchBlocks by_expert[kRowWorks], by_rank[kRowWorks];  ///< for each layout of the output, by RowWork
  CombineBlocks combine_by_expert[2], combine_by_rank[2];   ///< [0]: sums in their dtype; [1]: quantised sums
  int relay_blocks;  ///< further blocks that relay for other nodes; 0 with one node
  bool paired;       ///< blocks come in clusters of two, which leaves pairs of SMs to an overlapping product
  int fused_tokens;  ///< most tokens of a rank for which one kernel does a whole operation
  int fused_sums;    ///< most tokens of a rank for which one kernel does a combine

  /// The most blocks that an operation launches.
  int all_blocks() const { return std::max(by_expert[0].all(), combine_by_expert[0].all()) + relay_blocks; }

  const DispatchBlocks& dispatch(bool rank_layout, RowWork work) const {
    return (rank_layout ? by_rank : by_expert)[static_cast<int>(work)];
  }
  const CombineBlocks& combine(bool rank_layout, bool quantised) const {
    return (rank_layout ? combine_by_rank : combine_by_expert)[quantised];
  }

  /// How many blocks, at most `most`, compute the routes of `tokens` tokens.
  static int route_blocks(int64_t tokens, int most) {
    constexpr int64_t kTokens = 128;  // tokens for a block
    return static_cast<int>(std::clamp<int64_t>((tokens + kTokens - 1) / kTokens, 1, most));
  }

  /// Blocks of a kernel that does a whole operation; the first `leads` move no rows. There are kShareRow
  /// blocks for each of the `rows` rows that are received or summed, since an SM takes a microsecond to store
  /// a row four times. Each of `sent` rows adds a block, since blocks receive only after they have sent. At
  /// least kLeast, since other ranks may bring more tokens.
  int fused_blocks(int64_t rows, int64_t sent, int leads) const {
    constexpr int64_t kLeast = 31, kShareRow = 4;
    const int64_t most = all_blocks() - leads;
    return leads + static_cast<int>(std::min(most, std::max(kLeast, kShareRow * rows + sent)));
  }

  /// How many blocks only send, in a dispatch in one kernel of `blocks` blocks; 0: all that move rows send
  /// and receive. Beyond few tokens, sending blocks wait for the links, so other blocks receive meanwhile.
  /// Quantised rows keep blocks busy longer, and links less long. With more than two ranks a row may be sent
  /// several times, so the links are full at fewer tokens and with fewer blocks.
  static int fused_senders(int64_t tokens, int blocks, bool quantised, int32_t ranks) {
    // Measured. kBoth: most tokens for which blocks do both. kPercent: blocks that only send. [1]: ranks > 2.
    constexpr int64_t kBoth[] = {96, 48}, kBothQuantised[] = {256, 128};
    constexpr int kPercent[] = {35, 27}, kPercentQuantised = 30;
    const bool several = ranks > 2;
    if (tokens <= (quantised ? kBothQuantised : kBoth)[several]) return 0;
    return (blocks - leading_blocks(blocks)) * (quantised ? kPercentQuantised : kPercent[several]) / 100;
  }

  static constexpr int kTeamWarps = 4;  ///< least warps of a team, but for the measured exceptions below

  /// Warps of a team (they share a row) in a kernel for few tokens: all `warps` of a block or half of them,
  /// if each of `items` rows then has a team of its own in `blocks` blocks; else kTeamWarps.
  static int team_warps(int64_t items, int blocks, int warps) {
    for (const int team : {warps, warps / 2})
      if (items <= int64_t{blocks} * (warps / team)) return team;
    return kTeamWarps;
  }

  /// Warps of a team in a dispatch with `senders` blocks that only send. On two ranks with such blocks teams
  /// are smaller, so that more rows are in flight (measured; no better on four ranks). Else team_warps().
  static int dispatch_team_warps(int64_t items, int blocks, int warps, int senders, bool quantised,
                                 int32_t ranks) {
    if (ranks == 2 && senders > 0) return quantised ? 2 : 1;
    return team_warps(items, blocks, warps);
  }

  /// Warps of a team that makes sums for other ranks, in a combine of `tokens` tokens: two warps, if all sums
  /// then take one round, and would take several with teams of four warps (measured). Else team_warps().
  static int sum_team_warps(int64_t tokens, int blocks, int warps, int32_t ranks) {
    constexpr int kPair = 2;
    const int64_t sums = tokens * (ranks - 1);
    const auto at_once = [&](int team) { return sums <= int64_t{blocks} * (warps / team); };
    return !at_once(kTeamWarps) && at_once(kPair) ? kPair : team_warps(sums, blocks, warps);
  }

  /// True if blocks of a combine in one kernel begin sums of own tokens before they set the flags of the last
  /// sums that they sent, and so do not wait for the links first. Better from 128 tokens on (measured).
  static bool flags_late(int64_t tokens, int32_t ranks) { return ranks > 1 && tokens >= 128; }

  /// Parts into which a combine in one kernel divides the sum of each of this rank's own `tokens` tokens, so
  /// that its `warps` warps end together. A sum has `strips` strips.
  static int sum_parts(int64_t tokens, int64_t warps, int strips) {
    constexpr int kList = 2;  // finding a part's sources takes as long as summing this many strips
    int best = 1;
    int64_t least = 0;
    for (int parts = 1; parts <= strips; ++parts) {
      const int64_t rounds = (tokens * parts + warps - 1) / warps, each = (strips + parts - 1) / parts;
      const int64_t time = rounds * (each + kList);
      if (parts > 1 && time >= least) continue;
      best = parts;
      least = time;
    }
    return best;
  }

  std::string text() const {
    const auto sides = [](const DispatchBlocks(&blocks)[kRowWorks]) {
      const auto of = [&](RowWork work) {
        const DispatchBlocks& some = blocks[static_cast<int>(work)];
        return text_of(some.send, " + ", some.receive);
      };
      return text_of(of(RowWork::none), " (quantised ", of(RowWork::quantised), ", times factors ",
                     of(RowWork::factors), ", with products ", of(RowWork::products), ")");
    };
    const auto reducing = [](const CombineBlocks(&blocks)[2]) {
      return text_of(blocks[0].reduce, " + ", blocks[0].sum, " (quantised ", blocks[1].reduce, " + ",
                     blocks[1].sum, ")");
    };
    return text_of(all_blocks(), " SMs: dispatch sending + receiving by expert ", sides(by_expert),
                   ", by rank ", sides(by_rank), ", combine reducing + summing by expert ",
                   reducing(combine_by_expert), ", by rank ", reducing(combine_by_rank),
                   relay_blocks > 0 ? text_of(", ", relay_blocks, " relaying for other nodes") : "",
                   fused_tokens > 0 ? text_of("; one kernel up to ", fused_tokens, " tokens") : "",
                   fused_sums < fused_tokens ? text_of(", a combine up to ", fused_sums) : "");
  }
};

/// Expected number of ranks that own experts of a token, with uniform routing.
inline double owners_of_token(int32_t ranks, int32_t top_k) {
  return ranks * (1 - std::pow(1 - 1.0 / ranks, top_k));
}

/// Counts of output rows and of (row, expert) pairs.
struct RowCounts {
  int64_t rows, positions;
};

/// The size of an output that is allocated before its number of rows is known, so that the host waits for
/// this number while the kernel runs. For a dropless dispatch of `tokens` tokens in one kernel. There is room
/// for all rows that can come if no rank has more tokens, but at most for 1.5 times the rows of uniform
/// routing. A size above kMostBytes becomes 0, since an output takes memory for as long as its rows are kept.
inline RowCounts offered_rows(int64_t tokens, RowLayout layout, int64_t alignment, const DeviceShape& shape) {
  constexpr int64_t kLeastTokens = 32;  // other ranks may bring more
  constexpr int64_t kMostBytes = 64 << 20;
  constexpr double kSlack = 1.5;
  const int64_t each = std::max(tokens, kLeastTokens), local = shape.local_experts();
  const auto most = [&](int64_t of_token, double expected) {
    return std::min(shape.ranks * each * of_token, static_cast<int64_t>(kSlack * expected * each));
  };
  RowCounts offered{0, most(std::min<int64_t>(shape.top_k, local), shape.top_k) + local * (alignment - 1)};
  offered.rows =
      layout == RowLayout::expert ? offered.positions : most(1, owners_of_token(shape.ranks, shape.top_k));
  return offered.rows * shape.row_bytes() <= kMostBytes ? offered : RowCounts{};
}

/// The row counts of the last dropless dispatches of many tokens in a layout, from which the size of the next
/// output is estimated.
class RecentRows {
 public:
  void note(int64_t tokens, const RowCounts& counts) {
    if (tokens < kLeastTokens) return;
    const auto of_token = [tokens](int64_t rows) { return static_cast<double>(rows) / tokens; };
    last_[noted_++ % kKept] = {of_token(counts.rows), of_token(counts.positions)};
  }
  /// Returns `tokens` times the most rows per token of these dispatches, and 3% more. Returns 0 before the
  /// first dispatch, for few tokens, and if the result would exceed 1.25 times the rows of uniform routing.
  RowCounts offer(int64_t tokens, int64_t alignment, const DeviceShape& shape) const {
    constexpr double kMore = 1.03, kMost = 1.25;
    if (tokens < kLeastTokens) return {};
    Each most{};
    for (const Each& each : last_) {
      most.rows = std::max(most.rows, each.rows);
      most.positions = std::max(most.positions, each.positions);
    }
    const auto offered = [tokens](double of_token) {
      return static_cast<int64_t>(kMore * of_token * tokens);
    };
    const double uniform = 1.0 * shape.top_k * tokens + 1.0 * shape.local_experts() * (alignment - 1);
    const RowCounts counts{offered(most.rows), offered(most.positions)};
    return counts.positions <= kMost * uniform ? counts : RowCounts{};
  }

 private:
  static constexpr int kKept = 8;
  // With fewer tokens row counts vary by more than kMore between calls.
  static constexpr int64_t kLeastTokens = 256;
  struct Each {
    double rows = 0, positions = 0;  ///< per token
  };
  Each last_[kKept];
  uint64_t noted_ = 0;
};

/// The experts' owners' share of the additions in a combine; the tokens' own ranks (homes) make the other
/// additions. For expert-major rows with uniform routing.
inline double owners_share(int32_t ranks, int32_t top_k) {
  const double owners = owners_of_token(ranks, top_k);
  const double owner = top_k * (ranks - 1.0) / ranks, home = 1.0 * top_k / ranks + owners;
  return owner / (owner + home);
}

/// The owners' share of SM time in a combine of rank-major rows: owners copy them, homes add them.
inline double owners_share_by_rank(int32_t ranks, int32_t top_k) {
  // Bytes per nanosecond that an SM loads and stores, while it copies or adds (docs/performance.md).
  constexpr double kCopied = 75, kAdded = 56;
  const double owners = owners_of_token(ranks, top_k), sent = owners * (ranks - 1) / ranks;
  const double owner = 2 * sent / kCopied, home = (owners + 1) / kAdded;
  return owner / (owner + home);
}

/// Bytes per nanosecond over a GPU's links (docs/performance.md).
inline constexpr double kLinkRate = 332;

/// The data that a combine moves per token of a rank, with uniform routing.
struct SumMoves {
  double read;     ///< rows that owners read for travelling sums
  double sent;     ///< sums that travel
  double added;    ///< rows and sums that the home reads
  double rate;     ///< bytes of rows per nanosecond that an owner's block reads and sends
  double fill;     ///< most blocks at the owners, as a multiple of the number that fills the links
  double listing;  ///< nanoseconds that an owner's pipe takes to list its next tokens
  int64_t bytes;   ///< bytes of a row
};

/// The most blocks that reduce in a combine: as many as fill the links, and some more. Further blocks slow
/// each other down, and are of more use at the tokens' home (docs/performance.md, "Few SMs on four GPUs").
/// Quantised sums take longer to make than to send, and without pipes more blocks are needed to fill links.
inline int most_reducing(const SumMoves& moves, bool quantised, bool piped) {
  constexpr int kMost = 34, kMostQuantised = 26;
  if (quantised) return kMostQuantised;
  if (moves.sent <= 0 || !piped) return kMost;
  const double filling = (moves.read + moves.sent) / moves.rate * kLinkRate / moves.sent;
  return static_cast<int>(std::min<double>(kMost, moves.fill * filling));
}

/// Returns how many tokens a pipe's list needs to keep the pipe busy while it makes the next list, which
/// takes `list_time` nanoseconds. `token_time`: nanoseconds that the pipe takes for a token.
inline int list_of(double token_time, double list_time) {
  int tokens = 2;
  while (tokens < kListTokens && tokens * token_time < list_time) tokens *= 2;
  return tokens;
}

/// Sets reduce_list and sum_list of a combine's `blocks`. With short lists blocks end at nearly the same
/// time, and a sum is used soon after it has arrived.
inline void choose_lists(CombineBlocks& blocks, const SumMoves& moves, int32_t ranks) {
  constexpr double kAdded = 56;      // as in owners_share_by_rank
  constexpr double kListing = 6500;  // ns that a pipe at the home takes for a list, including waits
  const auto bytes = static_cast<double>(moves.bytes);
  const double token_time = std::max({moves.sent * bytes / kLinkRate,
                                      (moves.read + moves.sent) * bytes / moves.rate / blocks.reduce,
                                      (moves.added + 1) * bytes / kAdded / blocks.sum});
  blocks.sum_list = list_of(token_time * blocks.sum * kSumUnits, kListing);
  blocks.reduce_list =
      list_of(token_time * blocks.reduce * kSumUnits / std::max(ranks - 1, 1), moves.listing);
}

/// How often a dispatch moves a token's row, with uniform routing.
struct RowMoves {
  double owners;    ///< ranks that receive it
  double sent;      ///< ranks other than this one that receive it
  double received;  ///< times that it is stored to outputs, by all owners together
  int64_t bytes;    ///< bytes of a row
  RowWork work;
  int64_t wire_bytes;  ///< bytes of a row on the wire

  bool quantised() const { return work == RowWork::quantised; }
  bool changes() const { return work == RowWork::factors || work == RowWork::products; }
};

/// Divides `total` blocks between the sending and the receiving side so that both end together. If receivers
/// have time to spare, more blocks send, up to 2.5 times the number that just fills the links: so many fill
/// them best. If receivers multiply rows, which takes longer, the limit is 1.6 times that number: rows that
/// arrive long before they are read have left the GPU's cache.
inline DispatchBlocks divide_dispatch(int total, const RowMoves& row, bool even) {
  // Bytes per nanosecond of a block (docs/performance.md). kMoved: loaded and stored; kMultiplied: loaded and
  // stored while it multiplies; kStored: stored; kQuantised: quantised.
  constexpr double kMoved = 80, kMultiplied = 62, kStored = 55, kQuantised = 24;
  // A block's extra nanoseconds: kSend per row sent, kSendTo per target, kReceive per row received.
  constexpr double kSend = 20, kSendTo = 60, kReceive = 30;
  constexpr double kLater = 1.1;  // receivers wait for the first rows, and end later than senders
  const int most_send = row.quantised() ? total / 2 : 30;  // more blocks only slow each other down
  // fill: the most sending blocks, as a multiple of those that fill the links; more slow each other down.
  // kept: receivers that need at most this share of the whole time have time to spare.
  const double fill = row.changes() ? 1.6 : 2.5, kept = row.changes() ? 0.8 : 0.7;
  const auto bytes = static_cast<double>(row.bytes), wire = static_cast<double>(row.wire_bytes);
  const auto of_block = [&](double loaded, double stored, double besides) {
    return std::max((loaded + stored) / kMoved + besides, stored / kStored);
  };
  const double besides = kSend + kSendTo * row.sent;
  const double send_time = row.quantised() ? bytes / kQuantised + besides
                           : row.sent > 0  ? of_block(bytes, row.sent * bytes, besides)
                                           : 0;
  const double with = row.work == RowWork::products ? row.received * bytes : 0;
  const double receive_time =
      kLater * (row.changes() ? (row.owners * wire + with + row.received * bytes) / kMultiplied
                              : of_block(row.owners * wire, row.received * bytes, row.owners * kReceive));
  const double links_time = row.sent * wire / kLinkRate;
  const auto time = [&](int send) {
    return std::max({kLater * send_time / send, links_time, receive_time / (total - send)});
  };
  const int step = even && total >= 4 ? 2 : 1, most = std::min(most_send, total - 1);
  double least = time(step);
  for (int send = 2 * step; send <= most; send += step) least = std::min(least, time(send));
  DispatchBlocks best{};
  for (int send = step; send <= most; send += step) {
    const bool spare = send * links_time <= fill * send_time && receive_time / (total - send) <= kept * least;
    if ((best.send == 0 || spare) && time(send) <= 1.01 * least) best.send = send;
  }
  best.receive = total - best.send;
  // With more warps, rows in flight only wait for each other, and arrive later.
  best.send_warps = std::max(4, 240 / best.send);
  // Routes that go along with rows wait behind them. If memory limits the dispatch, not links or blocks, rows
  // sent a little later still arrive early enough, and receivers begin sooner.
  constexpr double kMemory = 3000;  // bytes per nanosecond that a GPU's memory reads and writes
  constexpr double kClearly = 1.15;
  constexpr double kMakesUp = 1.6;  // senders that are so much faster than memory make up for their wait
  const double staged = row.quantised() ? row.owners : row.sent;
  const double memory_time = (bytes + (staged + row.owners) * wire + row.received * bytes) / kMemory;
  best.routes_first = memory_time > kMakesUp * send_time / best.send &&
                      memory_time > kClearly * std::max(links_time, receive_time / best.receive);
  return best;
}

/// Chooses blocks for all operations. `sms`: SMs of the device; `budget`: SMs that one operation may use (at
/// least three with several nodes), 0 for the default. `fused_tokens`: the most tokens that kernels for few
/// tokens can serve. `wire`: the format of quantised rows.
inline Heuristics choose_heuristics(int sms, int budget, int fused_tokens, const DeviceShape& shape,
                                    WireFormat wire) {
  const bool several_nodes = shape.other_nodes() > 0;
  const int32_t ranks = shape.ranks, top_k = shape.top_k;
  const int64_t row_bytes = shape.row_bytes();
  const int all = std::max(2, std::min(budget > 0 ? budget : sms * 3 / 4, sms));
  Heuristics h{};
  h.paired = budget > 0;
  const auto even = [&h](int blocks) { return h.paired ? (blocks + 1) / 2 * 2 : blocks; };
  // This many blocks copy between host memory and the links as fast as a network of 50 GB/s delivers.
  h.relay_blocks = several_nodes ? std::clamp(all / 8, 1, 12) : 0;
  const int total = std::max(2, all - h.relay_blocks);
  const double owners = owners_of_token(ranks, top_k), sent = owners * (ranks - 1) / ranks;
  for (int work = 0; work < kRowWorks; ++work) {
    const bool quantised = static_cast<RowWork>(work) == RowWork::quantised;
    const int64_t wire_bytes = quantised ? shape.with_wire(wire).wire_row_bytes() : row_bytes;
    const auto divide = [&](double received) {
      return divide_dispatch(
          total, {owners, sent, received, row_bytes, static_cast<RowWork>(work), wire_bytes}, h.paired);
    };
    h.by_expert[work] = divide(top_k);
    h.by_rank[work] = divide(owners);
  }
  const int unit = h.paired && total >= 4 ? 2 : 1;
  const auto divide_combine = [&](double share, const SumMoves& moves, bool quantised) {
    const bool piped = !quantised && sums_by_pipe(row_bytes, total);
    const int most =
        std::max(unit, std::min(most_reducing(moves, quantised, piped) / unit * unit, total - 1));
    const int reduce = std::clamp(even(static_cast<int>(total * share)), unit, most);
    CombineBlocks blocks{reduce, total - reduce, 0, 0};
    if (piped) choose_lists(blocks, moves, ranks);
    return blocks;
  };
  constexpr double kSends = 1.1;   // owners also send their sums
  const double own = 1.0 / ranks;  // the share of (token, k) whose expert is on the token's own rank
  const SumMoves added{.read = top_k * (1 - own),
                       .sent = sent,
                       .added = top_k * own + sent,
                       .rate = 65,
                       .fill = 1.3,
                       .listing = 3000,
                       .bytes = row_bytes};
  const SumMoves copied{.read = sent,
                        .sent = sent,
                        .added = owners,
                        .rate = 52,
                        .fill = 1.1,
                        .listing = 2100,
                        .bytes = row_bytes};
  for (const bool quantised : {false, true}) {
    h.combine_by_expert[quantised] = divide_combine(kSends * owners_share(ranks, top_k), added, quantised);
    h.combine_by_rank[quantised] = divide_combine(owners_share_by_rank(ranks, top_k), copied, quantised);
  }
  h.fused_tokens = several_nodes ? 0 : fused_tokens;
  // With more than two ranks more sums travel than are made of own rows. Above kMostSums tokens two kernels
  // are then faster, since some of their blocks only reduce. Measured at 512 and 1024 tokens on four ranks.
  constexpr int kMostSums = 768;
  h.fused_sums = ranks > 2 ? std::min(h.fused_tokens, kMostSums) : h.fused_tokens;
  return h;
}

}  // namespace moecomm::gpu
