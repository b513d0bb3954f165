#include "transport/fabric/library.hpp"

#include <dlfcn.h>
#include <rdma/fabric.h>

#include <algorithm>

#include "common/error.hpp"

namespace moecomm::fabric {
namespace {

constexpr uint32_t kHeaders = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);

template <class Function>
void find(void* handle, const char* name, const std::string& path, Function& function) {
  // dlsym gives default versions. Functions that share a struct have the same version, so layouts agree.
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr)
    throw Error(ErrorKind::unsupported,
                path + " has no function " + name +
                    "; it is not libfabric, or one too old: install libfabric 1.13 or newer");
}

}  // namespace

Library load_library(const std::string& path) {
  const KeepSignalHandlers keep;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw Error(
        ErrorKind::unsupported,
        std::string("libfabric cannot be opened: ") + (reason != nullptr ? reason : path.c_str()) +
            "; install it (Debian and Ubuntu: apt-get install libfabric1; Fedora: dnf install libfabric) or "
            "put its folder on LD_LIBRARY_PATH");
  }
  Library library;
  uint32_t (*version)() = nullptr;
  find(handle, "fi_version", path, version);
  find(handle, "fi_getinfo", path, library.getinfo);
  find(handle, "fi_freeinfo", path, library.freeinfo);
  find(handle, "fi_dupinfo", path, library.dupinfo);
  find(handle, "fi_fabric", path, library.fabric);
  find(handle, "fi_strerror", path, library.strerror);
  library.version = version();
  library.api = std::min(library.version, kHeaders);
  return library;
}

const Library& library() {
  static const Library loaded = load_library(kLibraryName);
  return loaded;
}

KeepSignalHandlers::KeepSignalHandlers() {
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], nullptr, &saved_[i]);
}

KeepSignalHandlers::~KeepSignalHandlers() {
  for (int i = 0; i < 4; ++i) sigaction(kSignals[i], &saved_[i], nullptr);
}

}  // namespace moecomm::fabric
