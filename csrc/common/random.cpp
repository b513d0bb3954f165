#include "common/random.hpp"

#include <sys/random.h>

#include "common/error.hpp"

namespace moecomm {

uint64_t random_word(const char* wanted_for) {
  uint64_t word = 0;
  if (getrandom(&word, sizeof(word), 0) != sizeof(word))
    throw Error(ErrorKind::unsupported, errno_text((std::string("getrandom for ") + wanted_for).c_str()));
  return word;
}

std::string random_digits(const char* wanted_for) {
  static constexpr char kDigits[] = "0123456789abcdef";
  const uint64_t word = random_word(wanted_for);
  std::string digits;
  for (int digit = 0; digit < 16; ++digit) digits += kDigits[(word >> (4 * digit)) & 15];
  return digits;
}

}  // namespace moecomm
