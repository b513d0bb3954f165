// Random numbers from the system, for names and keys that nobody else can guess.
#pragma once

#include <sys/random.h>

#include <cinttypes>
#include <cstdio>
#include <string>

#include "common/error.hpp"

namespace moecomm {

/// A random number of 64 bits. Throws Error(unsupported) if the system gives none; the error's text says what
/// the number was `wanted_for` ("a memory key").
inline uint64_t random_word(const char* wanted_for) {
  uint64_t word = 0;
  if (getrandom(&word, sizeof(word), 0) != sizeof(word))
    throw Error(ErrorKind::unsupported, errno_text(text_of("getrandom for ", wanted_for).c_str()));
  return word;
}

/// random_word() in 16 hexadecimal digits.
inline std::string random_digits(const char* wanted_for) {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, random_word(wanted_for));
  return digits;
}

}  // namespace moecomm
