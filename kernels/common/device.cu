// Reads the properties of a device that plans depend on.
#include "device.h"

#include <cstring>
#include <optional>

#include "common/probe.h"
#include "common/tensor_map.h"

namespace my_ops::cuda {
namespace {

__global__ void probe_kernel() {}

// The attributes of a kernel on the current device; zeros if the build has no code of it for the
// device.
cudaError_t ask_kernel(const void* kernel, cudaFuncAttributes* attributes) {
  const cudaError_t status = cudaFuncGetAttributes(attributes, kernel);
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    static_cast<void>(cudaGetLastError());  // the refusal is the answer; clear the error
    *attributes = {};
    return cudaSuccess;
  }
  return status;
}

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
  char name[256];
  int clock_khz = 0;
  if (auto err = my_ops::cuda::current_name(name, &clock_khz); err != cudaSuccess) return err;
  facts->model = model_of(name, clock_khz);
  cudaFuncAttributes attributes{};
  if (auto err = ask_kernel(probe_sm90(), &attributes); err != cudaSuccess) return err;
  if (attributes.ptxVersion == 0) {
    if (auto err = ask_kernel(probe(), &attributes); err != cudaSuccess) return err;
  }
  facts->code = attributes.ptxVersion;
  sm90::TensorMapEncoder encoder;
  facts->hopper_code = attributes.maxThreadsPerBlock == kHopperThreads &&
                       sm90::tensor_map_encoder(&encoder) == cudaSuccess;
  return cudaSuccess;
}

}  // namespace
}  // namespace my_ops::cuda

const void* my_ops::cuda::probe() { return reinterpret_cast<const void*>(&probe_kernel); }

cudaError_t my_ops::cuda::current_name(char (&name)[256], int* clock_khz) {
  int id = 0;
  if (auto err = cudaGetDevice(&id); err != cudaSuccess) return err;
  cudaDeviceProp properties;
  if (auto err = cudaGetDeviceProperties(&properties, id); err != cudaSuccess) return err;
  static_assert(sizeof(name) == sizeof(properties.name));
  std::memcpy(name, properties.name, sizeof(name));
  return cudaDeviceGetAttribute(clock_khz, cudaDevAttrClockRate, id);
}

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
