// Launches that return their own status. cudaGetLastError() after <<<>>> would return, and clear,
// an error that any earlier call has left.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <type_traits>

#include "device.h"

#ifndef __CUDACC_RTC__

namespace my_ops::cuda {

// The blocks of a launch. A count too large for a grid of one dimension becomes 0, which is
// refused.
struct Blocks : dim3 {
  Blocks(int64_t count) : dim3(count <= INT_MAX ? static_cast<unsigned>(count) : 0) {}
  Blocks(dim3 counts) : dim3(counts) {}
};

// kernel<<<blocks, threads, shared_bytes, stream>>>(args...)
template <typename... P>
cudaError_t launch(void (*kernel)(P...), Blocks blocks, dim3 threads, size_t shared_bytes,
                   cudaStream_t stream, const std::type_identity_t<P>&... args) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, threads, pointers,
                          shared_bytes, stream);
}

// Lets a kernel use more than the default 48 KiB of dynamic shared memory. The limit belongs to the
// kernel, in all threads, so every launch of a kernel must set the same.
template <typename... P>
cudaError_t allow_shared_bytes(void (*kernel)(P...), size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// The same for a kernel without static shared memory whose launches need different amounts: lets it
// use all that a block of the current device can have.
inline cudaError_t allow_all_shared_bytes(const void* kernel) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              device.shared_bytes);
}

namespace sm90 {

// Launches a kernel in clusters. With griddepcontrol it starts before the previous one has
// finished.
template <typename... P, typename... A>
cudaError_t launch_overlapped(void (*kernel)(P...), int64_t blocks, dim3 threads, size_t smem,
                              int cluster, cudaStream_t stream, const A&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = threads;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace sm90
}  // namespace my_ops::cuda

#endif
