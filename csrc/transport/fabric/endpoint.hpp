// A libfabric endpoint with the objects it needs: fabric, domain, completion queue, address table, registered
// memory. transport.cpp handles peers, limits and failures.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_rma.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "transport/fabric/provider.hpp"

namespace moecomm::fabric {

/// Closes a libfabric object.
struct CloseFid {
  template <class Object>
  void operator()(Object* object) const {
    fi_close(&object->fid);
  }
};
template <class Object>
using Handle = std::unique_ptr<Object, CloseFid>;

/// Throws the error for a provider that refuses to register memory. `status`: its FI_E number, positive.
/// Either out_of_memory, with what to do about locked memory, or unsupported.
[[noreturn]] void registration_refused(int status, const std::string& provider, int64_t bytes);

/// Memory to which peers may write and from which puts are read. It must stay mapped while this object lives.
class Registration {
 public:
  Registration(fid_domain* domain, fid_ep* endpoint, const fi_info& info, void* base, int64_t bytes);

  void* descriptor() const { return fi_mr_desc(region_.get()); }
  uint64_t key() const { return fi_mr_key(region_.get()); }
  /// Address to which a peer adds offsets: the local address, or 0 with providers that count from the start
  /// of the region.
  uint64_t remote_base() const { return remote_base_; }

 private:
  Handle<fid_mr> region_;
  uint64_t remote_base_ = 0;
};

/// Used by one thread at a time (FI_THREAD_DOMAIN).
class Endpoint {
 public:
  explicit Endpoint(Info info);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  const fi_info& info() const { return *info_; }
  std::string provider() const { return info_->fabric_attr->prov_name; }

  /// The registration lives until deregister(), or as long as the endpoint.
  const Registration& register_memory(void* base, int64_t bytes);
  /// Ends all registrations, after which the memory may be unmapped. Peers can't write to it any more.
  void deregister() { registrations_.clear(); }

  /// The address that a peer passes to insert(): bytes, in general not text.
  std::vector<std::byte> address() const;
  fi_addr_t insert(const std::vector<std::byte>& address);
  /// An address as text, for messages.
  std::string print(const std::vector<std::byte>& address) const;

  /// Returns 0, -FI_EAGAIN or another error. `context` must stay valid until the completion.
  ssize_t write(const void* source, size_t bytes, void* descriptor, uint32_t immediate, fi_addr_t peer,
                uint64_t address, uint64_t key, fi_context2* context) {
    return fi_writedata(endpoint_.get(), source, bytes, descriptor, immediate, peer, address, key, context);
  }

  /// Makes progress. Returns the number of completions; -FI_EAGAIN if none, -FI_EAVAIL if one is an error.
  ssize_t read(fi_cq_data_entry* entries, size_t count) { return fi_cq_read(queue_.get(), entries, count); }

  struct Failure {
    void* context = nullptr;  ///< of the failed operation; null if the entry belongs to none
    std::string text;
  };
  /// Gets the next error of the queue. False if there is none.
  bool read_error(Failure& failure);

 private:
  // Members are destroyed from last to first: the endpoint before the memory that it may access.
  Info info_;
  Handle<fid_fabric> fabric_;
  Handle<fid_domain> domain_;
  Handle<fid_cq> queue_;
  Handle<fid_av> addresses_;
  std::deque<Registration> registrations_;
  Handle<fid_ep> endpoint_;
};

}  // namespace moecomm::fabric
