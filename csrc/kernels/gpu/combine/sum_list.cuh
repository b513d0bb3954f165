// Data of the listing warp in a pipe of sums (sum_pipe.cuh): rows and factors of a few tokens, spread over
// its lanes while they are loaded, and the list of sums that it hands to the loading warp. At a token's own
// rank (home), where the sums of several ranks meet, each sum has a slot.
#pragma once

#include "kernels/gpu/common/kernel.cuh"

namespace moecomm::gpu {

/// kListRounds: rounds in which a warp loads a list's (token, k). kListWords: the most (token, k) of a list.
inline constexpr int kListRounds = 4, kListWords = kListRounds * 32;

/// A piece of a sum of `rows` rows times their factors. At the token's home the result adds up `slots` sums:
/// number `own_slot` is the sum of these rows, and the others have arrived in slots.
struct alignas(16) SumItem {
  std::byte* to;
  uint64_t* flag;  ///< set when the sum has arrived, or null
  int32_t bytes;
  int32_t rows;
  uint16_t slots, own_slot;  ///< 0 and 0 at an owner
  uint16_t stage;            ///< stage with the last source's piece, which the sum replaces
  uint16_t ends;             ///< 1: no sum, but the end of all items

  __device__ int sources() const { return rows + slots - (own_slot < slots); }
};
static_assert(sizeof(SumItem) == 32);

/// What the listing warp hands to the loading warp: what the sums of a few tokens are made of.
struct SumList {
  const std::byte* sources[kListWords];  ///< token by token: its rows, then its slots except `own_slot`
  float factors[kListWords];
  SumItem items[kListTokens];                       ///< items for whole rows, without `stage`
  int32_t first[kListTokens], counts[kListTokens];  ///< the range of a token's sources; empty: it has no sum
  int32_t total;                                    ///< number of sources
  int32_t row_bytes;                                ///< bytes of a row; 0: nothing is moved
};

/// Spreads the entries of a few tokens, `each` per token, over lanes: in round j lane l has entry j * 32 + l.
class ListMap {
 public:
  __device__ explicit ListMap(int each) : each_(each) {
#pragma unroll
    for (int j = 0; j < kListRounds; ++j)
      tokens_ |= static_cast<uint32_t>((j * 32 + lane_id()) / each & 0xff) << 8 * j;
  }
  __device__ int each() const { return each_; }
  /// The token of this lane in a round.
  __device__ int token(int j) const { return static_cast<int>(tokens_ >> 8 * j & 0xff); }
  __device__ bool first_of_token(int j) const { return token(j) * each_ == j * 32 + lane_id(); }
  /// For each entry of `tokens` tokens that this lane has: calls visit(j, index), where j is the round.
  template <class Visit>
  __device__ void each_word(int tokens, const Visit& visit) const {
#pragma unroll
    for (int j = 0; j < kListRounds; ++j)
      if (j * 32 + lane_id() < tokens * each_) visit(j, j * 32 + lane_id());
  }

 private:
  const int each_;
  uint32_t tokens_ = 0;
};

/// Returns how many of a rank's `tokens` tokens a list takes: at most `most`, each with `each` entries.
__device__ inline int list_tokens(int each, int64_t tokens, int most) {
  most = tokens >= 1024 ? most : tokens >= 256 ? 2 : 1;
  while (most * each > kListWords) most /= 2;
  return most;
}

/// Row numbers of a list's tokens, and their factors. Both are loaded while earlier lists are handed over.
struct ListedRows {
  int32_t row[kListRounds];  ///< negative: none
  float factor[kListRounds];

  __device__ void fetch(const ListMap& map, const int32_t* rows, int tokens) {
#pragma unroll
    for (int j = 0; j < kListRounds; ++j) row[j] = kRowElsewhere;
    map.each_word(tokens, [&](int j, int index) { row[j] = rows[index]; });
  }
  __device__ void weigh(const std::byte* weights) {
#pragma unroll
    for (int j = 0; j < kListRounds; ++j)
      factor[j] = weights != nullptr && row[j] >= 0 ? reinterpret_cast<const float*>(weights)[row[j]] : 1.0f;
  }
};

/// A lane's token in a list. SumLister::list sets the last three fields.
struct ListedToken {
  bool wanted;    ///< the token has a sum
  int others;     ///< number of its sources that are sums in slots
  int rows = 0;   ///< number of its rows
  int first = 0;  ///< position of its first source in the list
  int count = 0;  ///< number of its sources, at least one; 0: it has no sum
};

}  // namespace moecomm::gpu
