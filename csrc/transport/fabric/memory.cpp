#include "transport/fabric/memory.hpp"

#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <sys/resource.h>

#include <string>

#include "common/error.hpp"
#include "common/random.hpp"
#include "transport/fabric/library.hpp"

namespace moecomm::fabric {
namespace {

/// Returns a random key that nobody else can guess, in as many bytes as the provider takes.
uint64_t random_key(size_t key_bytes) {
  const uint64_t key = random_word("a memory key");
  return key_bytes >= sizeof(key) ? key : key & ((uint64_t{1} << (8 * key_bytes)) - 1);
}

std::string memlock_text() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return text_of(limit.rlim_cur / 1024, " KiB");
}

}  // namespace

void registration_refused(int status, const std::string& provider, int64_t bytes) {
  const std::string what =
      text_of("fabric ", provider, ": registering ", bytes, " bytes of memory: ", library().strerror(status));
  const ErrorDetails details{.needed = bytes};
  if (status == FI_ENOMEM || status == FI_EPERM || status == FI_EAGAIN)
    throw Error(ErrorKind::out_of_memory,
                what + "; a NIC pins what it may write, and this process may lock " + memlock_text() +
                    ": raise `ulimit -l` (memlock in /etc/security/limits.conf; LimitMEMLOCK=infinity in a "
                    "systemd unit; --ulimit memlock=-1 for a container)",
                details);
  throw Error(ErrorKind::unsupported, what, details);
}

Registration::Registration(fid_domain* domain, fid_ep* endpoint, const fi_info& info, void* base,
                           int64_t bytes) {
  const uint64_t mode = static_cast<uint64_t>(info.domain_attr->mr_mode);
  iovec range{base, static_cast<size_t>(bytes)};
  fi_mr_attr attributes{};
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = FI_WRITE | FI_REMOTE_WRITE;
  // The provider refuses two regions with the same key, which random keys meet where keys are short.
  int status = -FI_ENOKEY;
  for (int attempt = 0; attempt < 16 && status == -FI_ENOKEY; ++attempt) {
    if ((mode & FI_MR_PROV_KEY) == 0) attributes.requested_key = random_key(info.domain_attr->mr_key_size);
    fid_mr* region = nullptr;
    status = fi_mr_regattr(domain, &attributes, 0, &region);
    if (status == 0) region_.reset(region);
  }
  if (status == 0 && (mode & FI_MR_ENDPOINT) != 0) {
    status = fi_mr_bind(region_.get(), &endpoint->fid, 0);
    if (status == 0) status = fi_mr_enable(region_.get());
  }
  if (status != 0) registration_refused(-status, info.fabric_attr->prov_name, bytes);
  if ((mode & FI_MR_VIRT_ADDR) != 0) remote_base_ = reinterpret_cast<uint64_t>(base);
}

}  // namespace moecomm::fabric
