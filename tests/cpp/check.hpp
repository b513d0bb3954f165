// The least that a C++ test needs: CHECK that says where and what, a seed that is printed, and an exit
// status.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "common/error.hpp"

namespace moecomm::test {

inline std::atomic<int> checks{0}, failures{0};

inline bool check(bool holds, const char* text, const char* file, int line) {
  ++checks;
  if (!holds && ++failures <= 20) std::printf("%s:%d: does not hold: %s\n", file, line, text);
  return holds;
}

/// True if `body` throws an Error of `kind` whose text contains `part`.
template <class Body>
bool throws(ErrorKind kind, const std::string& part, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.kind() == kind && std::string(error.what()).find(part) != std::string::npos) return true;
    std::printf("other error: kind %u, %s\n", static_cast<unsigned>(error.kind()), error.what());
  }
  return false;
}

/// From MOECOMM_TEST_SEED, or a new one; printed so that a failure can be repeated.
inline uint64_t seed() {
  static const uint64_t value = [] {
    const char* given = std::getenv("MOECOMM_TEST_SEED");
    const uint64_t chosen = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("MOECOMM_TEST_SEED=%llu\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return value;
}

inline int finish() {
  std::printf("%d checks, %d failures\n", checks.load(), failures.load());
  return failures == 0 && checks > 0 ? 0 : 1;
}

}  // namespace moecomm::test

#define CHECK(condition) ::moecomm::test::check((condition), #condition, __FILE__, __LINE__)
