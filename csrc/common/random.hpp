// Random numbers from the system, for names and keys that nobody else can guess.
#pragma once

#include <cstdint>
#include <string>

namespace moecomm {

/// Throws Error(unsupported) where the system has no random numbers; the text says what it was `wanted_for`
/// ("a memory key").
uint64_t random_word(const char* wanted_for);
/// A random word in 16 hexadecimal digits.
std::string random_digits(const char* wanted_for);

}  // namespace moecomm
