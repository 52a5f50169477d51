// Reads the properties of a device that plans depend on.
#include "device.h"

#include <optional>

#include "common/tensor_map.h"

namespace my_ops::cuda {
namespace {

constexpr int kHopperThreads = 64;

// Never launched. The number of threads it allows tells which of the build's code the device runs,
// if it is compiled like the kernels for Hopper and newer.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__global__ void __launch_bounds__(kHopperThreads) probe_kernel() {}
#else
__global__ void __launch_bounds__(kHopperThreads / 2) probe_kernel() {}
#endif

// The facts of the current device, `id`.
cudaError_t ask(int id, DeviceFacts* facts) {
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, id);
  };
  if (auto err = get(&facts->major, cudaDevAttrComputeCapabilityMajor); err != cudaSuccess) {
    return err;
  }
  if (auto err = get(&facts->minor, cudaDevAttrComputeCapabilityMinor); err != cudaSuccess) {
    return err;
  }
  if (auto err = get(&facts->sm_count, cudaDevAttrMultiProcessorCount); err != cudaSuccess) {
    return err;
  }
  if (auto err = get(&facts->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
      err != cudaSuccess) {
    return err;
  }
  if (auto err = get(&facts->l2_bytes, cudaDevAttrL2CacheSize); err != cudaSuccess) return err;
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    static_cast<void>(cudaGetLastError());  // the refusal is the answer; clear the error
    return cudaSuccess;
  }
  facts->code = attributes.ptxVersion;
  sm90::TensorMapEncoder encoder;
  facts->hopper_code = attributes.maxThreadsPerBlock == kHopperThreads &&
                       sm90::tensor_map_encoder(&encoder) == cudaSuccess;
  return status;
}

}  // namespace
}  // namespace my_ops::cuda

cudaError_t my_ops::cuda::current_device(DeviceFacts* facts) {
  constexpr int kRemembered = 64;
  thread_local std::optional<DeviceFacts> known[kRemembered];
  int id = 0;
  cudaError_t status = cudaGetDevice(&id);
  if (status == cudaSuccess && id < kRemembered && known[id]) {
    *facts = *known[id];
    return cudaSuccess;
  }
  if (status == cudaSuccess) status = ask(id, facts);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the error is returned; clear it
    return status;
  }
  if (id < kRemembered) known[id] = *facts;
  return cudaSuccess;
}
