// LLTM on CUDA. Pre-activations and cell state are float for the 16-bit types.
#include "gemm_cuda.h"
#include "lltm_ops.h"

namespace my_ops {
namespace {

template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

class Cuda {
 public:
  explicit Cuda(const Tensor& t) : device_(t) {}

  static ScalarType storage(ScalarType dtype) { return dtype; }

  void matmul(const Tensor& a, const Tensor& b, const Tensor& out) const {
    const Product p = product(a, b, out);
    dispatch_floating<CudaTypes>(a.scalar_type(), [&]<typename T>() {
      if (launch_gemm<T, acc_t<T>>(p, nullptr, Activation::kNone, device_.stream(), "lltm")) return;
      if (a.scalar_type() == out.scalar_type()) {
        aten_gemm(p);
      } else {
        aten("aten::mm", "dtype_out", a, b, out.scalar_type(), out);
      }
    });
  }
  void cell(const CellTensors& step) const {
    dispatch_floating<CudaTypes>(step.new_h.scalar_type(), [&]<typename T>() {
      check_launch(cuda::lltm_cell(step.args<T, acc_t<T>>(), device_.stream()), "lltm_cell");
    });
  }
  void cell_backward(const CellBackwardTensors& step) const {
    dispatch_floating<CudaTypes>(step.gates.scalar_type(), [&]<typename T>() {
      check_launch(cuda::lltm_cell_backward(step.args<T, acc_t<T>>(), device_.stream()),
                   "lltm_cell_backward");
    });
  }

 private:
  Device device_;
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("lltm_cell", TORCH_BOX(&lltm_cell<Cuda>));
  m.impl("lltm_cell_forward", TORCH_BOX(&lltm_cell_forward<Cuda>));
  m.impl("lltm_cell_backward", TORCH_BOX(&lltm_cell_backward<Cuda>));
  m.impl("lltm", TORCH_BOX(&lltm<Cuda>));
  m.impl("lltm_forward", TORCH_BOX(&lltm_forward<Cuda>));
  m.impl("lltm_backward", TORCH_BOX(&lltm_backward<Cuda>));
}

}  // namespace my_ops
