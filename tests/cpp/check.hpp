// The least that a C++ test needs: TEST and CHECK, which says where and what, a seed that is printed, errors
// and waits, and an exit status.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "common/deadline.hpp"
#include "common/error.hpp"

namespace moecomm::test {

inline std::atomic<int> checks{0}, failures{0};

inline bool check(bool holds, const char* text, const char* file, int line) {
  ++checks;
  if (!holds && ++failures <= 20) std::printf("%s:%d: does not hold: %s\n", file, line, text);
  return holds;
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The Error that `body` throws; one of the kind `none` if it throws none.
template <class Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorKind::none, "nothing is thrown"};
}

/// True if `body` throws an Error of `kind` whose text contains `part`.
template <class Body>
bool throws(ErrorKind kind, const std::string& part, const Body& body) {
  const Error error = error_of(body);
  if (error.kind() == kind && has(error.what(), part)) return true;
  std::printf("other error: kind %u, %s\n", static_cast<unsigned>(error.kind()), error.what());
  return false;
}

/// Seconds after which a wait has failed; only reached when something is wrong.
inline constexpr double kLong = 120;

/// Calls `holds` until it returns true. False if that takes too long.
template <class Holds>
bool eventually(const Holds& holds) {
  const Deadline deadline{std::chrono::duration<double>(kLong)};
  while (!holds()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

/// Runs body(0), body(1) to body(count - 1) in a thread each, and returns when all have ended.
template <class Body>
void at_once(int count, const Body& body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
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

/// Runs `body` in a child, which whatever hangs ends after `seconds`.
template <class Body>
pid_t fork_off(double seconds, const Body& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child != 0) return child;
  alarm(static_cast<unsigned>(seconds));
  checks = failures = 0;
  try {
    body();
  } catch (const std::exception& error) {
    std::printf("not expected: %s\n", error.what());
    ++failures;
  }
  std::exit(finish());  // what sanitizers say at exit counts
}

/// How a child ended, as waitpid says it.
inline int status_of(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

/// The tests of a program, in the order of its file.
inline std::vector<void (*)()> tests;

inline int run() {
  for (const auto test : tests) test();
  return finish();
}

}  // namespace moecomm::test

#define CHECK(condition) ::moecomm::test::check((condition), #condition, __FILE__, __LINE__)
#define TEST(name)                                                                                 \
  void test_##name();                                                                              \
  [[maybe_unused]] const bool listed_##name = (moecomm::test::tests.push_back(test_##name), true); \
  void test_##name()
