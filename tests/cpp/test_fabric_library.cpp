// libfabric as a library, the choice of a provider, and what is said where memory is not registered. Returns
// 77 (skipped) where libfabric is missing.
#include <rdma/fi_errno.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.hpp"
#include "transport/fabric/library.hpp"
#include "transport/fabric/transport.hpp"
#include "transport/network_interface.hpp"

// The tcp provider of libfabric 1.17 keeps some descriptions of itself at its end; blame only our own code.
extern "C" __attribute__((visibility("default"))) const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so\n"; }

using namespace moecomm;
using namespace moecomm::fabric;
using moecomm::test::throws;

namespace {

TEST(provider) {
  const std::string offers = ", " + offers_text();
  const auto has = [&](const std::string& name) { return test::has(offers, ", " + name); };
  constexpr uint32_t k117 = 1 << 16 | 17, k118 = 1 << 16 | 18, k25 = 2 << 16 | 5;
  using Names = std::vector<std::string>;
  CHECK((provider_names("tcp", k117) == Names{"net", "tcp;ofi_rxm"}));
  CHECK((provider_names("net", k117) == Names{"net", "tcp;ofi_rxm"}));
  CHECK((provider_names("tcp", k118) == Names{"tcp", "tcp;ofi_rxm"}));
  CHECK((provider_names("net", k25) == Names{"tcp", "tcp;ofi_rxm"}));
  CHECK((provider_names("tcp;ofi_rxm", k117) == Names{"tcp;ofi_rxm"}));
  CHECK((provider_names("verbs", k25) == Names{"verbs", "verbs;ofi_rxm", "verbs;ofi_rxd"}));
  CHECK(why_not("verbs", k117).empty());
  CHECK(test::has(why_not("cxi", k117), "2.5"));
  unsetenv("FI_CXI_ENABLE_WRITEDATA");
  CHECK(test::has(why_not("cxi", k25), "FI_CXI_ENABLE_WRITEDATA=1"));
  setenv("FI_CXI_ENABLE_WRITEDATA", "1", 1);
  CHECK(why_not("cxi", k25).empty());
  unsetenv("FI_CXI_ENABLE_WRITEDATA");

  const std::string native = provider_names("tcp", library().version).front();
  CHECK(has(native) && has("shm"));
  const auto chosen = [](const std::string& provider, const std::string& interface) {
    ProviderOptions options;
    options.provider = provider;
    options.interface = interface;
    options.lanes = 1;
    return describe(*choose_lanes(options).front());
  };
  CHECK(chosen("tcp", "").provider == native);
  CHECK(chosen("net", "lo").provider == native && chosen("net", "lo").domain == "lo");
  CHECK(chosen("tcp", "127.0.0.1").address == "127.0.0.1");
  CHECK(chosen("", "lo").domain == "lo");
  CHECK(chosen("shm", "").provider == "shm");
  CHECK(chosen("shm", "lo").provider == "shm");  // it has no interface to choose
  // By itself nothing is chosen that stays on one host, nor loopback if there is anything else.
  CHECK(chosen("", "").provider != "shm");
  const std::vector<InterfaceAddress> have = host_addresses();
  const bool elsewhere =
      std::any_of(have.begin(), have.end(), [](const InterfaceAddress& a) { return a.up && !a.loopback; });
  CHECK((chosen("tcp", "").domain != "lo") == elsewhere);

  CHECK(throws(ErrorKind::unsupported, "'carrier-pigeon'", [&] { chosen("carrier-pigeon", ""); }));
  CHECK(throws(ErrorKind::unsupported, native + " (", [&] { chosen("carrier-pigeon", ""); }));
  CHECK(throws(ErrorKind::unsupported, "interface 'eth77'", [&] { chosen("tcp", "eth77"); }));
  CHECK(throws(ErrorKind::unsupported, "interface '198.51.100.1'", [&] { chosen("", "198.51.100.1"); }));
  if (!has("cxi")) CHECK(throws(ErrorKind::unsupported, "cxi", [&] { chosen("cxi", ""); }));
}

TEST(refused_memory) {
  rlimit before{};
  getrlimit(RLIMIT_MEMLOCK, &before);
  const rlimit small{std::min<rlim_t>(before.rlim_cur, 64 << 10), before.rlim_max};
  setrlimit(RLIMIT_MEMLOCK, &small);
  for (const int status : {FI_ENOMEM, FI_EPERM, FI_EAGAIN})
    for (const char* const word : {"verbs", "12345678 bytes of memory", "may lock 64 KiB", "ulimit -l"})
      CHECK(throws(ErrorKind::out_of_memory, word, [&] { registration_refused(status, "verbs", 12345678); }));
  CHECK(throws(ErrorKind::unsupported, "efa", [&] { registration_refused(FI_ENOSYS, "efa", 1); }));
  setrlimit(RLIMIT_MEMLOCK, &before);
}

TEST(library) {
  for (const char* const part : {"libfabric1", "libmoecomm-nowhere.so.9"})
    CHECK(throws(ErrorKind::unsupported, part, [] { load_library("libmoecomm-nowhere.so.9"); }));
  CHECK(throws(ErrorKind::unsupported, "has no function fi_", [] { load_library("libm.so.6"); }));
  CHECK(&library() == &library());
  CHECK(library().version >= library().api);
  CHECK(version_text(1 << 16 | 17) == "1.17");
  std::printf("libfabric %s\n", version_text(library().version).c_str());
}

}  // namespace

int main() {
  const Error missing = test::error_of([] { library(); });
  if (missing.kind() == ErrorKind::none) return test::run();
  std::printf("skipped: %s\n", missing.what());
  return 77;
}
