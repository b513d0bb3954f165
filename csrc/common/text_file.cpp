#include "common/text_file.hpp"

#include <array>
#include <cstdio>
#include <memory>

namespace moecomm {

std::string read_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), std::fclose);
  std::string text;
  std::array<char, 4096> piece;
  while (file != nullptr) {
    const size_t count = std::fread(piece.data(), 1, piece.size(), file.get());
    if (count == 0) break;
    text.append(piece.data(), count);
  }
  return text;
}

}  // namespace moecomm
