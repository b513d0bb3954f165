#include "transport/fabric/endpoint.hpp"

#include <rdma/fi_errno.h>

#include <string>
#include <utility>

#include "common/error.hpp"
#include "common/random.hpp"
#include "transport/fabric/library.hpp"

namespace moecomm::fabric {
namespace {

constexpr size_t kQueueEntries = 4096;  // most unread completions; the provider may allow fewer

}  // namespace

Endpoint::Endpoint(Info info) : info_(std::move(info)) {
  const KeepSignalHandlers keep;
  const auto require = [this](int status, const char* what) {
    if (status == 0) return;
    const Offer offer = describe(*info_);
    throw Error(status == -FI_ENOMEM ? ErrorKind::out_of_memory : ErrorKind::unsupported,
                "fabric " + offer.provider + " on " + offer.domain + " " + offer.address + ": " + what +
                    ": " + library().strerror(-status));
  };
  fid_fabric* fabric = nullptr;
  require(library().fabric(info_->fabric_attr, &fabric, nullptr), "opening the fabric");
  fabric_.reset(fabric);

  fid_domain* domain = nullptr;
  require(fi_domain(fabric, info_.get(), &domain, nullptr), "opening the domain");
  domain_.reset(domain);

  fi_cq_attr queue_attributes{};
  queue_attributes.format = FI_CQ_FORMAT_DATA;
  queue_attributes.size = kQueueEntries;
  queue_attributes.wait_obj = FI_WAIT_NONE;
  fid_cq* queue = nullptr;
  require(fi_cq_open(domain, &queue_attributes, &queue, nullptr), "opening the completion queue");
  queue_.reset(queue);

  fi_av_attr address_attributes{};
  address_attributes.type = FI_AV_TABLE;
  fid_av* addresses = nullptr;
  require(fi_av_open(domain, &address_attributes, &addresses, nullptr), "opening the address table");
  addresses_.reset(addresses);

  fid_ep* endpoint = nullptr;
  require(fi_endpoint(domain, info_.get(), &endpoint, nullptr), "opening the endpoint");
  endpoint_.reset(endpoint);
  if (provider() == "shm") {
    // The shm provider names its file in /dev/shm by the process id, which may recur: a killed process has
    // left its file, or another container shares the folder. In that case versions after 1.17 try another
    // name.
    std::string name = reinterpret_cast<const char*>(address().data());
    name += ':';
    name += random_digits("the name of an endpoint");
    require(fi_setname(&endpoint->fid, name.data(), name.size() + 1), "naming the endpoint");
  }
  require(fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV), "binding the completion queue");
  require(fi_ep_bind(endpoint, &addresses->fid, 0), "binding the address table");
  require(fi_enable(endpoint), "enabling the endpoint");
}

Endpoint::~Endpoint() {
  // Memory that is bound to the endpoint prevents its closing; otherwise the endpoint is destroyed first (see
  // members).
  if ((static_cast<uint64_t>(info_->domain_attr->mr_mode) & FI_MR_ENDPOINT) != 0) registrations_.clear();
}

const Registration& Endpoint::register_memory(void* base, int64_t bytes) {
  return registrations_.emplace_back(domain_.get(), endpoint_.get(), *info_, base, bytes);
}

std::vector<std::byte> Endpoint::address() const {
  size_t bytes = 0;
  fi_getname(&endpoint_->fid, nullptr, &bytes);  // fails, and returns the length
  std::vector<std::byte> name(bytes);
  const int status = fi_getname(&endpoint_->fid, name.data(), &bytes);
  if (status != 0 || bytes == 0)
    throw Error(ErrorKind::unsupported,
                "fabric " + provider() + ": the endpoint has no address: " + library().strerror(-status));
  name.resize(bytes);
  return name;
}

fi_addr_t Endpoint::insert(const std::vector<std::byte>& address) {
  const size_t own = this->address().size();
  if (info_->addr_format != FI_ADDR_STR && address.size() != own)
    throw Error(ErrorKind::mismatched_arguments, text_of("fabric ", provider(), ": a peer's address has ",
                                                         address.size(), " bytes, this rank's ", own,
                                                         ": all ranks must use the same kind of address "
                                                         "(IPv4 or IPv6); MOECOMM_FABRIC_INTERFACE chooses"));
  std::vector<std::byte> padded(address);
  padded.resize(address.size() + 64);  // terminates a text with a zero, whatever the peer sent
  fi_addr_t peer = FI_ADDR_NOTAVAIL;
  const int inserted = fi_av_insert(addresses_.get(), padded.data(), 1, &peer, 0, nullptr);
  if (inserted != 1)
    throw Error(ErrorKind::invalid_argument,
                "fabric " + provider() + ": address " + print(address) + " is not taken" +
                    (inserted < 0 ? std::string(": ") + library().strerror(-inserted) : ""));
  return peer;
}

std::string Endpoint::print(const std::vector<std::byte>& address) const {
  std::vector<std::byte> padded(address);
  padded.resize(address.size() + 64);
  char text[256] = "";
  size_t bytes = sizeof(text);
  fi_av_straddr(addresses_.get(), padded.data(), text, &bytes);
  text[sizeof(text) - 1] = 0;
  return text;
}

bool Endpoint::read_error(Failure& failure) {
  fi_cq_err_entry entry{};  // all zero, so that the provider keeps error data to itself
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
