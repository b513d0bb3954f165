#include "common/error.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace moecomm {

void store_text(const std::string& text, char* target, size_t room) {
  size_t length = std::min(text.size(), room - 1);
  const auto continues = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
  if (length < text.size())
    while (length > 0 && continues(length)) --length;
  std::memcpy(target, text.data(), length);
  target[length] = 0;
}

std::string errno_text(const char* call) {
  return std::string(call) + ": " + std::generic_category().message(errno);
}

Error system_error(const char* call, const std::string& advice, ErrorKind otherwise) {
  const bool files = errno == EMFILE || errno == ENFILE;
  const std::string text = errno_text(call);
  if (files) return {ErrorKind::out_of_memory, text + "; raise the limit of open files (ulimit -n)"};
  if (errno == EFBIG) return {ErrorKind::out_of_memory, text + "; raise the limit of file sizes (ulimit -f)"};
  if (errno == ENOMEM || errno == ENOBUFS || errno == ENOSPC) return {ErrorKind::out_of_memory, text};
  return {otherwise, advice.empty() ? text : text + " (" + advice + ")"};
}

}  // namespace moecomm
