// The address of shared memory as instructions take it: 32 bits, of the block's own window.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace my_ops::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace my_ops::cuda::ptx
