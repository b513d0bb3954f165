#include "common/random.hpp"

#include <sys/random.h>

#include <cinttypes>
#include <cstdio>

#include "common/error.hpp"

namespace moecomm {

uint64_t random_word(const char* wanted_for) {
  uint64_t word = 0;
  if (getrandom(&word, sizeof(word), 0) != sizeof(word))
    throw Error(ErrorKind::unsupported, errno_text((std::string("getrandom for ") + wanted_for).c_str()));
  return word;
}

std::string random_digits(const char* wanted_for) {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, random_word(wanted_for));
  return digits;
}

}  // namespace moecomm
