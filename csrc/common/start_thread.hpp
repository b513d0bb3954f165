// Threads, or a typed error where the system has none to give.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace moecomm {

/// A thread that runs `body`. Throws Error(out_of_memory) that says what it was `wanted_for` ("a lane") and
/// what there can be `fewer` of ("lanes (MOECOMM_FABRIC_LANES)"; empty: nothing).
std::thread start_thread(std::function<void()> body, const std::string& wanted_for,
                         const std::string& fewer = {});

}  // namespace moecomm
