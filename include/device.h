// What a plan asks of a device: plain numbers, so that it can be made for any device on any
// machine.
#pragma once

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace my_ops::cuda {

// What a launch needs, where not every device has it. Threads and registers are bounded by
// __launch_bounds__, static shared memory by the compiler.
struct Needs {
  int code = 0;          // the compute capability that the kernel's body is compiled from, 80 or 90
  int shared_bytes = 0;  // of a block, static and dynamic
  int cluster = 1;       // blocks
  int resident = 1;      // blocks that must run at once
};

struct DeviceFacts {
  int major = 0;  // compute capability
  int minor = 0;
  int sm_count = 0;
  int shared_bytes = 0;      // of a block, at most
  int l2_bytes = 0;          // of the L2 cache
  int code = 0;              // compute capability of this build's code for it, 90 for 9.0; 0: none
  bool hopper_code = false;  // that code is of 9.0a, with Hopper's own instructions, which the
                             // driver supports with tensor maps

  constexpr bool is(int wanted_major, int wanted_minor) const {
    return major == wanted_major && minor == wanted_minor;
  }
  int max_cluster() const { return major < 9 ? 1 : major == 9 ? 16 : 8; }  // 16 is not portable
  bool runs(const Needs& needs) const {
    return needs.code <= code && needs.shared_bytes <= shared_bytes &&
           needs.cluster <= max_cluster() && needs.resident <= sm_count;
  }
};

#ifdef MY_OPS_WITH_CUDA
cudaError_t current_device(DeviceFacts* facts);
#endif

}  // namespace my_ops::cuda
