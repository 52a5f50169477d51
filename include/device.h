// What a plan needs to know about a device. These are plain numbers, so a plan can be made for any
// device on any machine.
#pragma once

#include <cstdint>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace my_ops::cuda {

// A number for a GPU of this name and peak clock, never 0: FNV-1a.
constexpr int64_t model_of(const char* name, int clock_khz) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](unsigned byte) { hash = (hash ^ (byte & 0xff)) * 0x100000001b3; };
  for (; *name; ++name) add(static_cast<unsigned char>(*name));
  for (int shift = 0; shift < 32; shift += 8) add(static_cast<unsigned>(clock_khz) >> shift);
  return static_cast<int64_t>(hash | 1);
}

// What a launch needs that not every device has. __launch_bounds__ limits threads and registers,
// and the compiler limits static shared memory.
struct Needs {
  int code = 0;          // the least compute capability with the kernel's body, 80 or 90
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
  int64_t model = 0;         // of model_of(); 0: not known
  int code = 0;              // compute capability of this build's code for it, 90 for 9.0; 0: none
  bool hopper_code = false;  // the code is for 9.0a, with Hopper's own instructions, and the driver
                             // supports tensor maps

  constexpr bool is(int wanted_major, int wanted_minor) const {
    return major == wanted_major && minor == wanted_minor;
  }
  int max_cluster() const { return major < 9 ? 1 : 8; }  // more are not portable
  bool runs(const Needs& needs) const {
    return needs.code <= code && needs.shared_bytes <= shared_bytes &&
           needs.cluster <= max_cluster() && needs.resident <= sm_count;
  }
};

#ifdef MY_OPS_WITH_CUDA
cudaError_t current_device(DeviceFacts* facts);

// The name and the peak clock of the current device, which make its model.
cudaError_t current_name(char (&name)[256], int* clock_khz);
#endif

}  // namespace my_ops::cuda
