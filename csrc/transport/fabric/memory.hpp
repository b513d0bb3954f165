// Memory to which peers may write, and from which puts are read.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

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

/// Throws the error for a provider's refusal to register memory (an FI_E number, positive): out_of_memory,
/// with what to do about locked memory, or unsupported.
[[noreturn]] void registration_refused(int status, const std::string& provider, int64_t bytes);

/// Registered memory, which must stay mapped during this object's lifetime.
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

}  // namespace moecomm::fabric
