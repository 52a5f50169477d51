// Launches that give their own status. cudaGetLastError() behind <<<>>> would give, and clear, what
// an earlier call has left, be it ours or another's.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <type_traits>

namespace my_ops::cuda {

// Blocks of a launch. What exceeds a grid of one dimension becomes none, which a launch refuses.
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

// Lets a kernel have more than the 48 KiB of dynamic shared memory that need no asking for.
template <typename... P>
cudaError_t allow_shared_bytes(void (*kernel)(P...), size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace my_ops::cuda
