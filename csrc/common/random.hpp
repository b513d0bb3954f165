// Random numbers from the system, for names and keys that nobody else can guess.
#pragma once

#include <cstdint>
#include <string>

namespace moecomm {

/// A random number. Throws Error(unsupported) where the system has none; the text says what the number was
/// `wanted_for` ("a memory key").
uint64_t random_word(const char* wanted_for);
/// A random word in 16 hexadecimal digits.
std::string random_digits(const char* wanted_for);

}  // namespace moecomm
