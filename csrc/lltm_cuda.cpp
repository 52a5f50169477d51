// LLTM on CUDA. Pre-activations and cell state are float for the 16-bit types.
#include "../include/lltm_persistent.h"
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
      const auto args = gemm_args<T, acc_t<T>>(p, std::nullopt);
      const cuda::GemmPlan plan = launch_gemm(args, a, device_.stream(), "lltm");
      if (plan.kernel != cuda::GemmKernel::kLibrary) return;
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

  template <typename F>
  static void dispatch(ScalarType dtype, const F& f) {
    dispatch_floating<CudaTypes>(dtype, f);
  }
  template <typename Ragged>
  void ragged(const Ragged& args) const {
    check_launch(cuda::lltm_ragged(args, device_.stream()), "lltm");
  }

  bool sequence(const SequenceTensors& s) const {
    const int64_t steps = s.output.size(0), batch = s.output.size(1), hidden = s.output.size(2);
    const auto supported = [&]<typename T>() {
      return cuda::lltm_persistent_supported<T>(batch, hidden);
    };
    return persistent(s.output, supported, [&]<typename T>() {
      const Tensor gates_x = gates_of_input(*this, s.input, s.weights, s.lengths, hidden);
      const Tensor h0 = aligned(s.h0), c0 = aligned(s.c0), weights = unit_columns(s.weights);
      const Tensor workspace =
          scratch(s.output, cuda::lltm_persistent_workspace<T>(steps, batch, hidden));
      check_launch(cuda::lltm_persistent(
                       cuda::LltmSequence<T>{.gx = in<float>(gates_x),
                                             .bias = in<T>(s.bias),
                                             .w_h = in<T>(weights),
                                             .w_row = weights.stride(0),
                                             .h0 = in<T>(h0),
                                             .c0 = in<T>(c0),
                                             .output = out<T>(s.output),
                                             .c_n = out<T>(s.c_n),
                                             .gates = s.gates ? out<T>(*s.gates) : nullptr,
                                             .cells = s.cells ? out<float>(*s.cells) : nullptr,
                                             .steps = steps,
                                             .batch = batch,
                                             .hidden = hidden},
                       workspace.mutable_data_ptr(), device_.stream()),
                   "lltm");
    });
  }

  bool sequence_backward(const SequenceBackwardTensors& s) const {
    const int64_t steps = s.cells.size(0), batch = s.cells.size(1), hidden = s.cells.size(2);
    const auto supported = [&]<typename T>() {
      return cuda::lltm_persistent_backward_supported<T>(batch, hidden);
    };
    return persistent(s.gates, supported, [&]<typename T>() {
      const auto dense = [](const std::optional<Tensor>& t) {
        return t ? std::optional(aligned(as_contiguous(*t))) : std::nullopt;
      };
      const auto grad_output = dense(s.grad_output), grad_h_n = dense(s.grad_h_n),
                 grad_c_n = dense(s.grad_c_n);
      const Tensor gates = aligned(s.gates), cells = aligned(s.cells),
                   weights = unit_columns(s.weights);
      const Tensor workspace =
          scratch(s.gates, cuda::lltm_persistent_backward_workspace<T>(steps, batch, hidden));
      check_launch(cuda::lltm_persistent_backward(
                       cuda::LltmSequenceBackward<T>{.grad_output = in<T>(grad_output),
                                                     .grad_h_n = in<T>(grad_h_n),
                                                     .grad_c_n = in<T>(grad_c_n),
                                                     .gates = in<T>(gates),
                                                     .cells = in<float>(cells),
                                                     .w_h = in<T>(weights),
                                                     .w_row = weights.stride(0),
                                                     .grad_gates = out<T>(s.grad_gates),
                                                     .grad_h0 = out<T>(s.grad_h0),
                                                     .grad_c0 = out<T>(s.grad_c0),
                                                     .steps = steps,
                                                     .batch = batch,
                                                     .hidden = hidden},
                       workspace.mutable_data_ptr(), device_.stream()),
                   "lltm_backward");
    });
  }

 private:
  // Calls f where the persistent kernels take the problem. like: of its type, empty if it is.
  template <typename Supported, typename F>
  static bool persistent(const Tensor& like, const Supported& supported, const F& f) {
    bool taken = false;
    dispatch_floating<CudaTypes>(like.scalar_type(), [&]<typename T>() {
      if constexpr (!std::is_same_v<T, double>) {
        taken = like.numel() > 0 && supported.template operator()<T>();
        if (taken) f.template operator()<T>();
      }
    });
    return taken;
  }
  static Tensor aligned(const Tensor& t) {
    const bool fits = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
    return fits ? t : copy(t, t.scalar_type());
  }
  static Tensor unit_columns(const Tensor& weights) {
    return weights.stride(1) == 1 ? weights : as_contiguous(weights);
  }
  static Tensor scratch(const Tensor& like, size_t bytes) {
    return empty(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  }

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
