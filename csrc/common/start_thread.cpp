#include "common/start_thread.hpp"

#include <system_error>

#include "common/error.hpp"

namespace moecomm {

std::thread start_thread(std::function<void()> body, const std::string& wanted_for,
                         const std::string& fewer) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::out_of_memory, "no thread to be had for " + wanted_for + ": " + error.what() +
                                              "; " + (fewer.empty() ? "" : "fewer " + fewer + ", or ") +
                                              "more processes and threads (ulimit -u) or memory (ulimit -v)");
  }
}

}  // namespace moecomm
