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

/// Throws the error for a provider that refuses to register memory: out_of_memory, with advice on the limit
/// of locked memory, or unsupported. `status`: the provider's FI_E number, positive.
[[noreturn]] void registration_refused(int status, const std::string& provider, int64_t bytes);

/// Memory that peers may write and that this rank's puts read. It must stay mapped while this object lives.
class Registration {
 public:
  Registration(fid_domain* domain, fid_ep* endpoint, const fi_info& info, void* base, int64_t bytes);

  void* descriptor() const { return fi_mr_desc(region_.get()); }
  uint64_t key() const { return fi_mr_key(region_.get()); }
  /// Address to which a peer adds offsets. It is the local address, or 0 if the provider counts from the
  /// start of the region.
  uint64_t remote_base() const { return remote_base_; }

 private:
  Handle<fid_mr> region_;
  uint64_t remote_base_ = 0;
};

/// The endpoint and its objects (head comment). Only one thread may use it at a time (FI_THREAD_DOMAIN).
class Endpoint {
 public:
  explicit Endpoint(Info info);
  ~Endpoint();

  const fi_info& info() const { return *info_; }
  std::string provider() const { return info_->fabric_attr->prov_name; }

  /// Registers memory, until deregister() or until this object is destroyed.
  const Registration& register_memory(void* base, int64_t bytes);
  /// Ends all registrations. Peers can't write to the memory any more, and it may be unmapped.
  void deregister() { registrations_.clear(); }

  /// The address that a peer passes to insert(): bytes, in general not text.
  std::string address() const;
  fi_addr_t insert(const std::string& address);
  /// Returns an address as text, for error messages.
  std::string print(const std::string& address) const;

  /// Starts a put. Returns 0, -FI_EAGAIN or another error. `context` must stay valid until the put ends.
  ssize_t write(const void* source, size_t bytes, void* descriptor, uint32_t immediate, fi_addr_t peer,
                uint64_t address, uint64_t key, fi_context2* context) {
    return fi_writedata(endpoint_.get(), source, bytes, descriptor, immediate, peer, address, key, context);
  }

  /// Makes progress, reads completions, returns their number; -FI_EAGAIN: none; -FI_EAVAIL: an error is next.
  ssize_t read(fi_cq_data_entry* entries, size_t count) { return fi_cq_read(queue_.get(), entries, count); }

  struct Failure {
    void* context = nullptr;  ///< that of the failed put; null if the error belongs to no put
    std::string text;
  };
  /// Takes the next error from the completion queue. False if there is none.
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
