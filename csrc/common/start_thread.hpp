// Starts threads, with a typed error where the system has none left.
#pragma once

#include <string>
#include <system_error>
#include <thread>

#include "common/error.hpp"

namespace moecomm {

/// Starts a thread that runs `body`. Throws Error(out_of_memory) if there is none; its text has `wanted_for`
/// ("a lane") and what to use `fewer` of ("lanes (MOECOMM_FABRIC_LANES)"; empty: nothing).
template <class Body>
std::thread start_thread(const Body& body, const std::string& wanted_for, const std::string& fewer = {}) {
  try {
    return std::thread(body);
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::out_of_memory, "no thread to be had for " + wanted_for + ": " + error.what() +
                                              "; " + (fewer.empty() ? "" : "fewer " + fewer + ", or ") +
                                              "more processes and threads (ulimit -u) or memory (ulimit -v)");
  }
}

}  // namespace moecomm
