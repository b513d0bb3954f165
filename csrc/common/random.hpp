// Random numbers from the system, for names and keys that nobody else comes upon.
#pragma once

#include <cstdint>
#include <string>

namespace moecomm {

/// Throws Error(unsupported), which says what it was `wanted_for` ("a memory key"), where the system has
/// none.
uint64_t random_word(const char* wanted_for);
/// A random word in 16 hexadecimal digits.
std::string random_digits(const char* wanted_for);

}  // namespace moecomm
