// The items that a block of a depthwise kernel has.
#pragma once

#include <cstdint>

namespace my_ops::cuda {

struct Range {
  int begin, end;
};

// The part of n items that a slice has.
__device__ __forceinline__ Range slice_of(int items, int slice, int slices) {
  const auto at = [&](int i) { return static_cast<int>(static_cast<int64_t>(items) * i / slices); };
  return {at(slice), at(slice + 1)};
}

}  // namespace my_ops::cuda
