// The sum of one token's rows on one rank. Both the reducing owners and the summing home compute it.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/cpu/combine.hpp"
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/weights.hpp"

namespace moecomm::cpu {

/// Sums the rows of one entry; holds the scratch memory for that. One object per thread.
class EntrySum {
 public:
  EntrySum(const Context& context, const Plan& plan, const CombineArguments& arguments)
      : plan_(plan),
        arguments_(arguments),
        dtype_(context.shape.dtype),
        hidden_(context.shape.hidden),
        row_bytes_(context.shape.row_bytes()),
        sources_(context.shape.top_k),
        scales_(context.shape.top_k) {}

  void write(int64_t entry, std::byte* out, bool stream) {
    int count = 0;
    for (int64_t j = plan_.row_begin[entry]; j < plan_.row_begin[entry + 1]; ++j) {
      const int32_t place = plan_.row[j];
      if (place < 0) continue;
      sources_[count] = arguments_.rows + place * row_bytes_;
      if (arguments_.weights != nullptr) scales_[count] = weight_at(arguments_.weights, dtype_, place);
      ++count;
    }
    const RowKernels& kernels = row_kernels();
    if (count == 0)
      std::memset(out, 0, row_bytes_);
    else if (count == 1 && arguments_.weights == nullptr)
      kernels.copy(out, sources_[0], row_bytes_, stream);
    else
      kernels.verbs[static_cast<int>(dtype_)].sum(
          out, sources_.data(), arguments_.weights ? scales_.data() : nullptr, count, hidden_, stream);
  }

 private:
  const Plan& plan_;
  const CombineArguments& arguments_;
  const DType dtype_;
  const int64_t hidden_, row_bytes_;
  std::vector<const void*> sources_;
  std::vector<double> scales_;
};

}  // namespace moecomm::cpu
