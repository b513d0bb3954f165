// What host and device share gives the same answers on both. Compiling it is half of the test: the shared
// headers have to stay free of anything that device code can't have. Without a GPU the program says so and is
// counted as skipped.
#include <cstdio>
#include <vector>

#include "layout/control.hpp"
#include "layout/routing.hpp"
#include "layout/window.hpp"

using namespace moecomm;

namespace {

constexpr int kTopK = 8, kLocal = 3, kRanks = 11, kTokens = 1000;

struct Answer {
  int32_t owner, first, below;
  int64_t row_bytes, aligned;
};

MOECOMM_HD Answer answer(const int32_t* ids, int32_t k, const WindowShape& shape) {
  const int32_t owner = expert_owner(ids[k], kLocal);
  return {owner, first_of_owner(ids, k, kLocal) ? 1 : 0, owners_between(ids, kTopK, kLocal, 0, owner),
          shape.row_bytes(), align_up(ids[k] + 1, 8)};
}

__global__ void answers(const int32_t* ids, WindowShape shape, Answer* out) {
  const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (t >= kTokens) return;
  for (int32_t k = 0; k < kTopK; ++k) out[t * kTopK + k] = answer(ids + t * kTopK, k, shape);
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device\n");
    return 77;
  }
  std::vector<int32_t> ids(kTokens * kTopK);
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(i * 2654435761u % (kRanks * kLocal + 1)) - 1;
  const WindowShape shape{kRanks, kTopK, 2880, kTokens, DType::bfloat16};
  int32_t* device_ids = nullptr;
  Answer* device_out = nullptr;
  std::vector<Answer> out(ids.size());
  bool works =
      cudaMalloc(&device_ids, ids.size() * sizeof(int32_t)) == cudaSuccess &&
      cudaMalloc(&device_out, out.size() * sizeof(Answer)) == cudaSuccess &&
      cudaMemcpy(device_ids, ids.data(), ids.size() * sizeof(int32_t), cudaMemcpyHostToDevice) == cudaSuccess;
  if (works) {
    answers<<<(kTokens + 127) / 128, 128>>>(device_ids, shape, device_out);
    works = cudaMemcpy(out.data(), device_out, out.size() * sizeof(Answer), cudaMemcpyDeviceToHost) ==
            cudaSuccess;
  }
  cudaFree(device_ids);
  cudaFree(device_out);
  if (!works) {
    std::printf("CUDA error: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }
  int wrong = 0;
  for (int t = 0; t < kTokens; ++t)
    for (int32_t k = 0; k < kTopK; ++k) {
      const Answer host = answer(&ids[t * kTopK], k, shape), device = out[t * kTopK + k];
      wrong += host.owner != device.owner || host.first != device.first || host.below != device.below ||
               host.row_bytes != device.row_bytes || host.aligned != device.aligned;
    }
  std::printf("%d answers, %d differ between host and device\n", kTokens * kTopK, wrong);
  return wrong == 0 ? 0 : 1;
}
