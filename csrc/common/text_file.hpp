// Small text files of /proc and /sys.
#pragma once

#include <string>

namespace moecomm {

/// Returns a file's contents; "" if there is no such file.
std::string read_file(const std::string& path);

}  // namespace moecomm
