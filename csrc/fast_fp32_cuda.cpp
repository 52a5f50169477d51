// fast_fp32 on CUDA.
#include "fast_fp32.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "gemm_cuda.h"

// Weak, like the stream in binding_cuda.h.
#pragma weak aoti_torch_cuda_mm_out
#pragma weak aoti_torch_cuda_bmm_out
#pragma weak aoti_torch_cuda_addmm_out
#pragma weak aoti_torch_cuda_baddbmm_out

namespace my_ops {
namespace {

struct Cuda {
  static constexpr const char* kKey = "CUDA";
  static constexpr const char* kMm = "_ZN2at4cuda2mmERKNS_6TensorES3_";
  static constexpr const char* kMmOut = "_ZN2at4cuda6mm_outERNS_6TensorERKS1_S4_";
  static constexpr const char* kBmm = "_ZN2at4cuda3bmmERKNS_6TensorES3_";
  static constexpr const char* kBmmOut = "_ZN2at4cuda7bmm_outERNS_6TensorERKS1_S4_";

  using Handle = AtenTensorHandle;
  static AOTITorchError mm_out(Handle out, Handle a, Handle b) {
    return aoti_torch_cuda_mm_out(out, a, b);
  }
  static AOTITorchError bmm_out(Handle out, Handle a, Handle b) {
    return aoti_torch_cuda_bmm_out(out, a, b);
  }
  static AOTITorchError addmm_out(Handle out, Handle self, Handle a, Handle b) {
    return aoti_torch_cuda_addmm_out(out, self, a, b, 1, 1);
  }
  static AOTITorchError baddbmm_out(Handle out, Handle self, Handle a, Handle b) {
    return aoti_torch_cuda_baddbmm_out(out, self, a, b, 1, 1);
  }

  static bool on_device(const Tensor& t) { return t.is_cuda(); }

  template <typename Place>
  static std::optional<fast_fp32::Left> run(const char* op, const Product& p,
                                            const fast_fp32::Added& added, const Place& place) {
    const Device device(p.a);
    auto args = gemm_args<float, float>(p, std::nullopt);
    args.bias = added.bias;
    args.residual = added.residual;
    args.residual_batch = added.batch;
    args.residual_row = added.row;
    args.residual_col = added.col;
    const cuda::GemmPlan plan = planned(args, p.a, op);
    if (!plan.on_tensor_cores()) return fast_fp32::Left::kPlan;
    if (library_rounds().value_or(true)) return fast_fp32::Left::kPrecision;
    args.out = out<float>(place());
    launch_plan(args, plan, p.a, device.stream(), op);
    return std::nullopt;
  }
};

}  // namespace
}  // namespace my_ops

MY_OPS_FAST_FP32(my_ops::Cuda)
