#include "transport/fabric/endpoint.hpp"

#include <rdma/fi_errno.h>
#include <sys/resource.h>

#include <cerrno>
#include <string>
#include <utility>

#include "common/error.hpp"
#include "common/random.hpp"
#include "transport/fabric/library.hpp"

namespace moecomm::fabric {
namespace {

constexpr size_t kQueueEntries = 4096;  // most unread completions; the provider may allow fewer

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
  // The provider refuses a key that another region has. Short random keys may collide.
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

Endpoint::Endpoint(Info info) : info_(std::move(info)) {
  const KeepSignalHandlers keep;
  const auto require = [this](int status, const char* what) {
    if (status == 0) return;
    const Offer offer = describe(*info_);
    const std::string call =
        "fabric " + offer.provider + " on " + offer.domain + " " + offer.address + ": " + what;
    errno = -status;  // below FI_ERRNO_OFFSET codes are those of the system
    if (errno < FI_ERRNO_OFFSET) throw system_error(call.c_str());
    throw Error(ErrorKind::unsupported, call + ": " + library().strerror(-status));
  };
  // Calls open(&object) and keeps the object in `handle`. If `open` fails, throws an error about `what`.
  const auto make = [&](auto& handle, const char* what, const auto& open) {
    auto object = handle.get();
    require(open(&object), what);
    handle.reset(object);
  };
  make(fabric_, "opening the fabric",
       [&](auto object) { return library().fabric(info_->fabric_attr, object, nullptr); });
  make(domain_, "opening the domain",
       [&](auto object) { return fi_domain(fabric_.get(), info_.get(), object, nullptr); });
  fi_cq_attr queue{};
  queue.format = FI_CQ_FORMAT_DATA;
  queue.size = kQueueEntries;
  queue.wait_obj = FI_WAIT_NONE;
  make(queue_, "opening the completion queue",
       [&](auto object) { return fi_cq_open(domain_.get(), &queue, object, nullptr); });
  fi_av_attr table{};
  table.type = FI_AV_TABLE;
  make(addresses_, "opening the address table",
       [&](auto object) { return fi_av_open(domain_.get(), &table, object, nullptr); });
  make(endpoint_, "opening the endpoint",
       [&](auto object) { return fi_endpoint(domain_.get(), info_.get(), object, nullptr); });
  if (provider() == "shm") {
    // The shm provider names its file in /dev/shm by the process id. That name may be taken: a killed process
    // has left its file, or a process in another container that shares the folder has the same id. Versions
    // after 1.17 then try another name; for older versions random digits are added here.
    std::string name = address().c_str();
    name += ':';
    name += random_digits("the name of an endpoint");
    require(fi_setname(&endpoint_->fid, name.data(), name.size() + 1), "naming the endpoint");
  }
  require(fi_ep_bind(endpoint_.get(), &queue_->fid, FI_TRANSMIT | FI_RECV), "binding the completion queue");
  require(fi_ep_bind(endpoint_.get(), &addresses_->fid, 0), "binding the address table");
  require(fi_enable(endpoint_.get()), "enabling the endpoint");
}

Endpoint::~Endpoint() {
  // Registrations that are bound to an endpoint have to be closed before the endpoint, others after it (see
  // the order of members).
  if ((static_cast<uint64_t>(info_->domain_attr->mr_mode) & FI_MR_ENDPOINT) != 0) registrations_.clear();
}

const Registration& Endpoint::register_memory(void* base, int64_t bytes) {
  return registrations_.emplace_back(domain_.get(), endpoint_.get(), *info_, base, bytes);
}

std::string Endpoint::address() const {
  size_t bytes = 0;
  fi_getname(&endpoint_->fid, nullptr, &bytes);  // fails, and returns the length
  std::string name(bytes, 0);
  const int status = fi_getname(&endpoint_->fid, name.data(), &bytes);
  if (status != 0 || bytes == 0)
    throw Error(ErrorKind::unsupported,
                "fabric " + provider() + ": the endpoint has no address: " + library().strerror(-status));
  name.resize(bytes);
  return name;
}

fi_addr_t Endpoint::insert(const std::string& address) {
  const size_t own = this->address().size();
  if (info_->addr_format != FI_ADDR_STR && address.size() != own)
    throw Error(ErrorKind::mismatched_arguments, text_of("fabric ", provider(), ": a peer's address has ",
                                                         address.size(), " bytes, this rank's ", own,
                                                         ": all ranks must use the same kind of address "
                                                         "(IPv4 or IPv6); MOECOMM_FABRIC_INTERFACE chooses"));
  fi_addr_t peer = FI_ADDR_NOTAVAIL;
  const int inserted = fi_av_insert(addresses_.get(), address.c_str(), 1, &peer, 0, nullptr);
  if (inserted != 1)
    throw Error(ErrorKind::invalid_argument,
                "fabric " + provider() + ": address " + print(address) + " is not taken" +
                    (inserted < 0 ? std::string(": ") + library().strerror(-inserted) : ""));
  return peer;
}

std::string Endpoint::print(const std::string& address) const {
  char text[256] = "";
  size_t bytes = sizeof(text);
  fi_av_straddr(addresses_.get(), address.c_str(), text, &bytes);
  text[sizeof(text) - 1] = 0;
  return text;
}

bool Endpoint::read_error(Failure& failure) {
  fi_cq_err_entry entry{};  // all zero, so that err_data stays in the provider's memory
  if (fi_cq_readerr(queue_.get(), &entry, 0) != 1) return false;
  char buffer[256] = "";
  const char* detail = fi_cq_strerror(queue_.get(), entry.prov_errno, entry.err_data, buffer, sizeof(buffer));
  failure.context = entry.op_context;
  failure.text = std::string(library().strerror(entry.err)) + " (" + std::to_string(entry.err) +
                 "), provider: " + (detail != nullptr ? detail : "nothing more") + " (" +
                 std::to_string(entry.prov_errno) + ")";
  return true;
}

}  // namespace moecomm::fabric
