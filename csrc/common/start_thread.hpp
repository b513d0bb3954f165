// Starts threads, with a typed error where the system has none left.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace moecomm {

/// Starts a thread that runs `body`. Throws Error(out_of_memory) if there is none; its text has `wanted_for`
/// ("a lane") and what to use `fewer` of ("lanes (MOECOMM_FABRIC_LANES)"; empty: nothing).
std::thread start_thread(std::function<void()> body, const std::string& wanted_for,
                         const std::string& fewer = {});

}  // namespace moecomm
