// What launchers ask of a device.
#pragma once

#include <cuda_runtime_api.h>

namespace my_ops::cuda {

struct DeviceFacts {
  int major = 0, minor = 0;  // compute capability
  int sm_count = 0;

  bool is(int wanted_major, int wanted_minor) const {
    return major == wanted_major && minor == wanted_minor;
  }
};

inline cudaError_t query_device(int id, DeviceFacts* facts) {
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, id);
  };
  if (auto err = get(&facts->major, cudaDevAttrComputeCapabilityMajor); err != cudaSuccess) {
    return err;
  }
  if (auto err = get(&facts->minor, cudaDevAttrComputeCapabilityMinor); err != cudaSuccess) {
    return err;
  }
  return get(&facts->sm_count, cudaDevAttrMultiProcessorCount);
}

inline cudaError_t current_device(DeviceFacts* facts) {
  int id = 0;
  if (auto err = cudaGetDevice(&id); err != cudaSuccess) return err;
  return query_device(id, facts);
}

// Whether this build holds the kernel's body: on an architecture below the one that it needs (80,
// or 90 for clusters) it is compiled empty.
inline bool compiled_for(const void* kernel, int architecture) {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the refusal is the answer; leave no error behind
    return false;
  }
  return attributes.ptxVersion >= architecture;
}

}  // namespace my_ops::cuda
