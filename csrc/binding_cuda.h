// What the CUDA bindings share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>

#include "binding.h"

#ifndef MY_OPS_ARCHITECTURES  // setup.py defines it; other builds are for this machine
#define MY_OPS_ARCHITECTURES "the GPU of the machine that built it"
#endif

// Defined in libtorch_cuda.so, which CPU builds of torch lack. It is weak, so that one module loads
// with both.
#pragma weak aoti_torch_get_current_cuda_stream

namespace my_ops {

struct CudaTypes {
  using Half = __half;
  using BFloat16 = __nv_bfloat16;
};

// Makes the tensor's device current for the scope; launches go to torch's current stream on it.
class Device {
 public:
  explicit Device(const Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    check_torch(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream),
                "current stream");
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// Throws a launcher's error. If this build cannot run on this machine, the message says what each
// of them has.
inline void check_launch(cudaError_t status, const char* op) {
  if (status == cudaSuccess) return;
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  // Clears the error, which is reported here. Otherwise another call would report it again.
  static_cast<void>(cudaGetLastError());
  const bool no_code =
      status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction;
  check(!no_code, op, ": this GPU has compute capability ", major, ".", minor,
        ", and this build of my_ops has code for ", MY_OPS_ARCHITECTURES,
        "; `python -m my_ops` says which build to install");
  check(status != cudaErrorInsufficientDriver, op, ": the NVIDIA driver is too old for CUDA ",
        CUDART_VERSION / 1000, ", which this build of my_ops holds; `python -m my_ops` says which ",
        "build to install");
  check(false, op, ": CUDA launch failed: ", cudaGetErrorString(status), " (",
        cudaGetErrorName(status), ")");
}

}  // namespace my_ops
