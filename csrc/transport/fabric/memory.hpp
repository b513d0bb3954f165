// Memory that peers may write to and that puts are read from.
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

/// Memory to register. `cuda_device` >= 0: GPU memory, by its dmabuf where there is one.
struct Memory {
  void* base = nullptr;
  int64_t bytes = 0;
  int cuda_device = -1;
  int dmabuf_fd = -1;
  int64_t dmabuf_offset = 0;  ///< of base within the dmabuf
};

/// Throws what a provider's refusal (an FI_E number, positive) to register memory means: out_of_memory, with
/// what to do about locked memory, or unsupported.
[[noreturn]] void registration_refused(int status, const std::string& provider, const Memory& memory);

/// Registered memory; it must stay mapped while this lives.
class Registration {
 public:
  Registration(fid_domain* domain, fid_ep* endpoint, const fi_info& info, const Memory& memory);

  void* descriptor() const { return fi_mr_desc(region_.get()); }
  uint64_t key() const { return fi_mr_key(region_.get()); }
  /// Address to which a peer adds offsets: the address here, or 0 with providers that count from the start of
  /// the region.
  uint64_t remote_base() const { return remote_base_; }

 private:
  Handle<fid_mr> region_;
  uint64_t remote_base_ = 0;
};

}  // namespace moecomm::fabric
