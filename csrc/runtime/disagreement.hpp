// Error texts for CPU and GPU communicators: where ranks disagree, and where an error follows another.
#pragma once

#include <string>

#include "common/error.hpp"
#include "layout/host_status.hpp"

namespace moecomm {

/// Text of the error that ranks disagree on an argument. Its values: `first` on rank 0, `here` on `rank`.
inline std::string disagreement_text(Disagreement about, int rank, int64_t first, int64_t here) {
  const auto text = [rank](const char* what, const auto& of_first, const auto& of_rank) {
    return text_of("ranks disagree on ", what, ": rank 0 has ", of_first, ", rank ", rank, " has ", of_rank);
  };
  const auto layout = [](int64_t value) { return value == 0 ? "expert" : "rank"; };
  const auto given_up = [](int64_t value) {
    return (value & kAfterGivenUp) != 0 ? "given it up" : "received it";
  };
  switch (about) {
    case Disagreement::operation:
      return text("the operation", operation_name(static_cast<Operation>(first)),
                  operation_name(static_cast<Operation>(here)));
    case Disagreement::caller:
      return text(kCallerText, first, here);
    case Disagreement::layout:
      return text("layout", layout(first), layout(here));
    case Disagreement::alignment:
      return text("alignment", first, here);
    case Disagreement::capacity:
      return text("capacity (-1: none)", first, here);
    case Disagreement::index_capacity:
      return text("expert_capacity (-1: none)", first, here);
    case Disagreement::plan:
      return text("the handle (the epoch of its dispatch)", first, here);
    case Disagreement::carries:
    case Disagreement::none:
      break;
  }
  if (((first ^ here) & kAfterGivenUp) != 0)
    return text(
        "whether the dispatch before was received: who gave it up may not have sent all rows, and the "
        "output of the others is not to be used",
        given_up(first), given_up(here));
  return text("what travels (1: rows, 2: weights, 4: quantised, 16: weights of tokens, or their sum)", first,
              here);
}

/// Appends `before`, the text of an earlier error that may have caused this one, to `text`. Ranks get out of
/// step if one raises an error at once, by check(), and another at its next dispatch.
inline std::string after_error(const std::string& text, const std::string& before) {
  if (before.empty()) return text;
  return text + "; the last error before, after which ranks may have gone on otherwise: " + before;
}

}  // namespace moecomm
