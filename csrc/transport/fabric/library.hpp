// libfabric, opened at run time: nothing of moecomm is linked against it, so that one build works on machines
// with and without it, and with every version since 1.13 (soname libfabric.so.1). Needs its headers only when
// moecomm is built; without them this folder is without_libfabric.cpp.
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

/// The functions that are symbols of the library; all others are reached through the objects that they make.
struct Library {
  int (*getinfo)(uint32_t, const char*, const char*, uint64_t, const fi_info*, fi_info**) = nullptr;
  void (*freeinfo)(fi_info*) = nullptr;
  fi_info* (*dupinfo)(const fi_info*) = nullptr;
  int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
  const char* (*strerror)(int) = nullptr;
  uint32_t version = 0;  ///< of the library, major << 16 | minor
  uint32_t api = 0;      ///< what is asked of it: the smaller one of its version and the headers'
};

/// Opens a library by name or path. Error(unsupported) with what to install if that is not possible. It is
/// never closed again: providers may have threads of their own.
Library load_library(const std::string& path);

/// The library of this process, opened by the first call that succeeds. Any thread.
const Library& library();

/// "1.17"
inline std::string version_text(uint32_t version) { return text_of(version >> 16, ".", version & 0xffff); }

/// While it lives, changes to the handlers of SIGINT, SIGTERM, SIGSEGV and SIGBUS are undone at its end: the
/// shm provider of some versions installs its own as soon as providers are listed, also when it is not used.
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
