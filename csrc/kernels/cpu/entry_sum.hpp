// The sum of one token's rows on one rank. Both the reducing owners and the summing home compute it.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/cpu/combine.hpp"
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/weights.hpp"

namespace moecomm::cpu {

/// out = the sum of `count` rows, times their scales (or null), rounded once; zeros without rows.
inline void sum_rows(std::byte* out, const void* const* rows, const double* scales, int count,
                     const WindowShape& shape, bool stream) {
  const RowKernels& kernels = row_kernels();
  if (count == 0)
    std::memset(out, 0, shape.row_bytes());
  else if (count == 1 && scales == nullptr)
    kernels.copy(out, rows[0], shape.row_bytes(), stream);
  else
    kernels.verbs[static_cast<int>(shape.dtype)].sum(out, rows, scales, count, shape.hidden, stream);
}

/// Sums the rows of one entry; holds the scratch memory for that. One object per thread.
class EntrySum {
 public:
  EntrySum(const Context& context, const Plan& plan, const CombineArguments& arguments)
      : plan_(plan),
        arguments_(arguments),
        shape_(context.shape),
        sources_(shape_.top_k),
        scales_(shape_.top_k) {}

  void write(int64_t entry, std::byte* out, bool stream) {
    int count = 0;
    for (int64_t j = plan_.row_begin[entry]; j < plan_.row_begin[entry + 1]; ++j) {
      const int32_t place = plan_.row[j];
      if (place < 0) continue;
      sources_[count] = arguments_.rows + place * shape_.row_bytes();
      if (arguments_.weights != nullptr) scales_[count] = weight_at(arguments_.weights, shape_.dtype, place);
      ++count;
    }
    const double* const scales = arguments_.weights != nullptr ? scales_.data() : nullptr;
    sum_rows(out, sources_.data(), scales, count, shape_, stream);
  }

 private:
  const Plan& plan_;
  const CombineArguments& arguments_;
  const WindowShape& shape_;
  std::vector<const void*> sources_;
  std::vector<double> scales_;
};

}  // namespace moecomm::cpu
