// Recoverable errors. A broken invariant is an assert; everything a caller or a peer can cause is an Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace moecomm {

// The numbers cross process borders in signal records; moecomm/errors.py maps them to Python types.
enum class ErrorKind : uint32_t {
  none = 0,
  invalid_argument = 1,
  invalid_routing = 2,
  mismatched_arguments = 3,
  capacity_exceeded = 4,
  closed = 5,
  out_of_memory = 6,
  peer_timeout = 7,
  peer_lost = 8,
  unsupported = 9,
};

/// Details of an error besides its text; a detail that is absent is -1 or 0.
struct ErrorDetails {
  int rank = -1;
  int peer = -1;
  std::string phase = {};
  uint64_t expected = 0;
  uint64_t seen = 0;
  int64_t needed = 0;     ///< rows (capacity_exceeded) or bytes (out_of_memory)
  int64_t available = 0;  ///< the bound that `needed` exceeded, in the same unit
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text, ErrorDetails details = {})
      : std::runtime_error(text), kind_(kind), details_(std::move(details)) {}
  ErrorKind kind() const { return kind_; }
  const ErrorDetails& details() const { return details_; }

 private:
  ErrorKind kind_;
  ErrorDetails details_;
};

/// Returns the concatenation of texts and numbers.
template <class... Parts>
std::string text_of(const Parts&... parts) {
  std::string text;
  const auto add = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::remove_cvref_t<decltype(part)>>)
      text += std::to_string(part);
    else
      text += part;
  };
  (add(parts), ...);
  return text;
}

/// Copies `text` (UTF-8) and a terminating zero to `target`, which has `room` bytes. A text that is too long
/// is cut after a whole character.
void store_text(const std::string& text, char* target, size_t room);

/// A text such as "shm_open: No space left on device" for the current errno.
std::string errno_text(const char* call);

/// The error for the current errno after `call`. Its kind is out_of_memory if memory, descriptors, room
/// for files or their allowed size have run out. For any other errno the kind is `otherwise`, and `advice`
/// ends the text.
Error system_error(const char* call, const std::string& advice = {},
                   ErrorKind otherwise = ErrorKind::unsupported);

}  // namespace moecomm
