// fast_fp32 on CUDA.
#include "fast_fp32_convolution.h"

#include "fast_fp32_attention_cuda.h"
#include "fast_fp32_windows_cuda.h"
#include "gemm/complex_matrix/plan.h"
#include "gemm_cuda.h"

namespace my_ops {
namespace {

struct Cuda {
  static constexpr const char* kKey = "CUDA";
  static bool on_device(const Tensor& t) { return t.is_cuda(); }
  using Attention = fast_fp32::Attention<Cuda>;
  using Windows = fast_fp32::Windows<Cuda>;

  template <typename Place>
  static std::optional<fast_fp32::Left> run(const char* op, const Product& p,
                                            const fast_fp32::Added& added,
                                            const fast_fp32::ComplexMatrix* matrix,
                                            const Place& place) {
    const Device device(p.a);
    auto args = gemm_args<float, float>(p, std::nullopt);
    args.bias = added.bias;
    args.has_bias = added.bias != nullptr;
    args.residual = added.residual;
    args.has_residual = added.residual != nullptr;
    args.residual_batch = added.batch;
    args.residual_row = added.row;
    args.residual_col = added.col;
    if (matrix) {
      args.preparation =
          cuda::complex_matrix::preparation(*matrix, matrix->copied, cuda::kComplexCosts);
    }
    const cuda::GemmPlan plan = planned<float, float>(args, p.a, op);
    if (!plan.on_tensor_cores()) return fast_fp32::Left::kPlan;
    if (library_uses_tf32().value_or(true)) return fast_fp32::Left::kPrecision;
    args.out = out<float>(place());
    args.a = in<float>(p.a), args.b = in<float>(p.b);
    launch_plan(args, plan, p.a, device.stream(), op);
    return std::nullopt;
  }

  template <typename Place>
  static std::optional<fast_fp32::Left> depthwise(const cuda::DepthwiseArgs& args,
                                                  const Tensor& like, const Place& place) {
    const char* const op = "convolution";
    const Device device(like);
    cuda::DepthwisePlan plan;
    check_launch(cuda::plan_depthwise(args, &plan), op);
    if (plan.choice != cuda::ConvolutionChoice::kOurs) return fast_fp32::Left::kPlan;
    place();
    const Tensor workspace = empty(like, {plan.workspace}, ScalarType::Byte);
    check_launch(cuda::depthwise(args, plan, workspace.mutable_data_ptr(), device.stream()), op);
    return std::nullopt;
  }

  static void write(const fast_fp32::ComplexMatrix& matrix, const Tensor& to) {
    const Device device(to);
    check_launch(cuda::write_complex_matrix(matrix, out<float>(to), device.stream()), "fast_fp32");
  }
};

}  // namespace
}  // namespace my_ops

MY_OPS_FAST_FP32(my_ops::Cuda)
