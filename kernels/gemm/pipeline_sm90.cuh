// The ring of k-blocks under Hopper's products.
#pragma once

#include <cstdint>

namespace my_ops::cuda {

// A place in a ring of stages, with the parity of its barriers.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace my_ops::cuda
