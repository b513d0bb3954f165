// libfabric, opened at run time: nothing of moecomm is linked against it, so that one build works on machines
// with and without it, and with every version since 1.13 (soname libfabric.so.1). Its headers are needed only
// to build moecomm; in a build without the headers without_libfabric.cpp replaces this folder.
#pragma once

#include <csignal>
#include <cstdint>
#include <string>

#include "common/error.hpp"

struct fi_info;
struct fi_fabric_attr;
struct fid_fabric;

namespace moecomm::fabric {

constexpr const char* kLibraryName = "libfabric.so.1";

/// The functions that are symbols of libfabric. All others are called through the objects that these create.
struct Library {
  int (*getinfo)(uint32_t, const char*, const char*, uint64_t, const fi_info*, fi_info**) = nullptr;
  void (*freeinfo)(fi_info*) = nullptr;
  fi_info* (*dupinfo)(const fi_info*) = nullptr;
  int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
  const char* (*strerror)(int) = nullptr;
  uint32_t version = 0;  ///< of the library, major << 16 | minor
  uint32_t api = 0;      ///< the version that moecomm requests: the smaller of the library's and the headers'
};

/// Opens a library by name or path. If that fails, throws Error(unsupported), which says what to install. The
/// library is never closed: providers may have threads.
Library load_library(const std::string& path);

/// The library of this process, opened by the first call that succeeds. Any thread may call it.
const Library& library();

/// A version as text, such as "1.17".
inline std::string version_text(uint32_t version) { return text_of(version >> 16, ".", version & 0xffff); }

/// Saves the handlers of SIGINT, SIGTERM, SIGSEGV and SIGBUS, and restores them when destroyed. When
/// providers are listed, the shm provider of some versions installs its own handlers, even if it is not used.
class KeepSignalHandlers {
 public:
  KeepSignalHandlers();
  ~KeepSignalHandlers();
  KeepSignalHandlers(const KeepSignalHandlers&) = delete;
  KeepSignalHandlers& operator=(const KeepSignalHandlers&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGSEGV, SIGBUS};
  struct sigaction saved_[4];
};

}  // namespace moecomm::fabric
