#include "common/error.hpp"

#include <cerrno>
#include <system_error>

namespace moecomm {

std::string errno_text(const char* call) {
  return std::string(call) + ": " + std::generic_category().message(errno);
}

}  // namespace moecomm
