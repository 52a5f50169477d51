// The address of shared memory in the form that instructions take: 32 bits, in the block's window.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace my_ops::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace my_ops::cuda::ptx
