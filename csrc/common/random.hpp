// Random numbers from the system, for names and keys that nobody else can guess.
#pragma once

#include <cstdint>
#include <string>

namespace moecomm {

/// A random number of 64 bits. Throws Error(unsupported) if the system gives none; the error's text says what
/// the number was `wanted_for` ("a memory key").
uint64_t random_word(const char* wanted_for);
/// random_word() in 16 hexadecimal digits.
std::string random_digits(const char* wanted_for);

}  // namespace moecomm
