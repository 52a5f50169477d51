// Recurrent ops on CUDA, for any cell. Pre-activations and c are float for the 16-bit types. Float
// products have torch's precision, but those of the persistent kernels float's; while torch allows
// TF32, many rows go step by step where that is faster.
#pragma once

#include "gemm_cuda.h"
#include "recurrent_units.h"

namespace my_ops {

template <typename T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename Op>
class Cuda {
 public:
  using Cell = typename Op::Cell;
  static constexpr CellSizes cell = kCellSizes<Cell>;

  explicit Cuda(const Tensor& t) : device_(t) {}

  static ScalarType storage(ScalarType dtype) { return dtype; }
  static ScalarType storage_of_weights(ScalarType dtype) { return dtype; }
  static ScalarType storage_of_backward(ScalarType dtype) { return dtype; }
  static ScalarType storage_of_layer(ScalarType dtype, int64_t, int64_t, int64_t, const Masks&) {
    return dtype;
  }

  template <typename Acc>
  static Acc shut(int gate) {
    return Cell::template shut<Acc>(gate);
  }

  struct Prepared {
    Tensor b;
    std::optional<Tensor> packed = std::nullopt;
  };
  Prepared prepared(const Tensor& b, int64_t rows) const {
    if (b.scalar_type() != ScalarType::Float) return {b};
    cuda::GemmProblem p{};
    p.batch = 1, p.m = rows, p.n = b.size(1), p.k = b.size(0);
    p.a_row = p.k, p.a_col = 1;
    p.b_row = b.stride(0), p.b_col = b.stride(1), p.b_aligned = is_aligned(b);
    p.out_row = p.n, p.out_col = 1;
    p.packed = true;
    if (!planned_as_torchs(&p, b, Op::kLayer).reads_packed()) return {b};
    return {b, packed(b, device_.stream(), Op::kLayer)};
  }
  void matmul(const Tensor& a, const Tensor& b, const Tensor& out) const {
    matmul(a, Prepared{b}, out);
  }
  void matmul(const Tensor& a, const Prepared& factor, const Tensor& out) const {
    const Tensor& b = factor.b;
    const Product p = product(a, b, out);
    dispatch_floating<CudaTypes>(a.scalar_type(), [&]<typename T>() {
      auto args = gemm_args<T, acc_t<T>>(p, std::nullopt);
      args.packed = factor.packed.has_value();
      if (args.packed) args.packed_b = factor.packed->const_data_ptr();
      cuda::GemmPlan plan;
      if constexpr (std::is_same_v<T, float>) {
        plan = planned_as_torchs(&args, a, Op::kLayer);
      } else {
        plan = planned<T, acc_t<T>>(args, a, Op::kLayer);
      }
      if (plan.kernel != cuda::GemmKernel::kLibrary) {
        launch_plan(args, plan, a, device_.stream(), Op::kLayer);
      } else if (a.scalar_type() == out.scalar_type()) {
        aten_gemm(p);
      } else {
        aten("aten::mm", "dtype_out", a, b, out.scalar_type(), out);
      }
    });
  }
  void step(const StepTensors& step) const {
    dispatch_floating<CudaTypes>(step.new_h.scalar_type(), [&]<typename T>() {
      check_launch(cuda::recurrent_step<Cell>(step.args<T, acc_t<T>>(), device_.stream()),
                   Op::kCell);
    });
  }
  void step_backward(const StepBackwardTensors& step) const {
    dispatch_floating<CudaTypes>(step.saved.scalar_type(), [&]<typename T>() {
      check_launch(cuda::recurrent_step_backward<Cell>(step.args<T, acc_t<T>>(), device_.stream()),
                   Op::kCellBackward);
    });
  }

  template <typename F>
  static void dispatch(ScalarType dtype, const F& f) {
    dispatch_floating<CudaTypes>(dtype, f);
  }
  template <typename Ragged>
  void ragged(const Ragged& args) const {
    check_launch(cuda::ragged(args, device_.stream()), Op::kLayer);
  }

  static LayersByCell& layers() { return cuda::layers(); }
  static WeightsGradients weights_backward(const WeightsBackward& a) {
    return cuda::weights_backward(a);
  }

  bool sequence(const SequenceTensors& s) const {
    const int64_t steps = s.output.size(0), batch = s.output.size(1), hidden = s.output.size(2);
    const auto run = [&]<typename T>(const cuda::RecurrentPlan& plan) {
      const Tensor gates_x = gates_of_input(*this, s);
      const Tensor h0 = aligned(s.h0), weights = row_major(s.weights.h);
      const auto c0 = aligned(s.c0), zoneout = aligned(s.masks.zoneout);
      const Tensor workspace = empty(s.output, {plan.workspace}, ScalarType::Byte);
      check_launch(cuda::recurrent_sequence<Cell>(
                       cuda::RecurrentSequence<T>{.gates_x = in<float>(gates_x),
                                                  .bias_x = in<T>(s.weights.bias_x),
                                                  .bias_h = in<T>(s.weights.bias_h),
                                                  .w_h = in<T>(weights),
                                                  .w_row = weights.stride(0),
                                                  .h0 = in<T>(h0),
                                                  .carried0 = in<T>(c0),
                                                  .reset = in<bool>(s.masks.reset),
                                                  .zoneout = in<T>(zoneout),
                                                  .output = out<T>(s.output),
                                                  .h_n = out<T>(s.h_n),
                                                  .carried_n = out<T>(s.c_n),
                                                  .saved = out<T>(s.saved),
                                                  .carried = out<T>(s.carried),
                                                  .steps = steps,
                                                  .batch = batch,
                                                  .hidden = hidden},
                       plan, workspace.mutable_data_ptr(), device_.stream()),
                   Op::kLayer);
    };
    return in_one_launch(s.output, Pass::kForward, steps, batch, hidden, run);
  }

  bool sequence_backward(const SequenceBackwardTensors& s) const {
    const auto run = [&]<typename T>(const cuda::RecurrentPlan& plan) {
      const auto dense = [](const std::optional<Tensor>& t) { return aligned(as_contiguous(t)); };
      const auto grad_output = dense(s.grad_output), grad_h_n = dense(s.grad_h_n),
                 grad_c_n = dense(s.grad_c_n), carried = aligned(s.carried),
                 output = aligned(s.output), h0 = aligned(s.h0), zoneout = aligned(s.zoneout);
      std::optional<Tensor> grad_kept;
      if (zoneout) grad_kept = empty(s.saved, {s.batch, s.hidden}, ScalarType::Float);
      const auto c0 = dense(Cell::kReadsPrevious ? s.c0 : std::nullopt);
      const Tensor saved = aligned(s.saved), weights = row_major(s.weights_h);
      const Tensor workspace = empty(s.saved, {plan.workspace}, ScalarType::Byte);
      check_launch(cuda::recurrent_sequence_backward<Cell>(
                       cuda::RecurrentSequenceBackward<T>{.grad_output = in<T>(grad_output),
                                                          .grad_h_n = in<T>(grad_h_n),
                                                          .grad_carried_n = in<T>(grad_c_n),
                                                          .saved = in<T>(saved),
                                                          .carried = in<T>(carried),
                                                          .output = in<T>(output),
                                                          .h0 = in<T>(h0),
                                                          .carried0 = in<T>(c0),
                                                          .w_h = in<T>(weights),
                                                          .w_row = weights.stride(0),
                                                          .reset = in<bool>(s.reset),
                                                          .zoneout = in<T>(zoneout),
                                                          .grad_kept = out<float>(grad_kept),
                                                          .grad_terms = out<T>(s.grad_terms),
                                                          .grad_h0 = out<T>(s.grad_h0),
                                                          .grad_carried0 = out<T>(s.grad_c0),
                                                          .steps = s.steps,
                                                          .batch = s.batch,
                                                          .hidden = s.hidden},
                       plan, workspace.mutable_data_ptr(), device_.stream()),
                   Op::kLayerBackward);
    };
    return in_one_launch(s.saved, Pass::kBackward, s.steps, s.batch, s.hidden, run);
  }

 private:
  // Plans a layer, and calls run(plan) if the plan is one launch. like has its dtype, and is empty
  // if it is.
  template <typename Run>
  static bool in_one_launch(const Tensor& like, Pass pass, int64_t steps, int64_t batch,
                            int64_t hidden, const Run& run) {
    bool taken = false;
    dispatch_floating<CudaTypes>(like.scalar_type(), [&]<typename T>() {
      if constexpr (!std::is_same_v<T, double>) {
        if (like.numel() == 0) return;
        const char* const op = pass == Pass::kForward ? Op::kLayer : Op::kLayerBackward;
        cuda::RecurrentPlan plan;
        check_launch(cuda::plan_recurrent<Cell, T>(pass, steps, batch, hidden, &plan), op);
        if (plan.steps_faster_in_tf32 && library_uses_tf32().value_or(false)) plan = {};
        log_plan(like, pass, steps, batch, hidden, plan, op);
        taken = plan.kernel != cuda::RecurrentKernel::kSteps;
        if (taken) run.template operator()<T>(plan);
      }
    });
    return taken;
  }
  static void log_plan(const Tensor& like, Pass pass, int64_t steps, int64_t batch, int64_t hidden,
                       const cuda::RecurrentPlan& plan, const char* op) {
    if (!logs_plans()) return;
    std::fprintf(stderr, "my_ops: %s of %s, steps %lld batch %lld hidden %lld: %s\n", op,
                 name_of(like.scalar_type()).c_str(), static_cast<long long>(steps),
                 static_cast<long long>(batch), static_cast<long long>(hidden),
                 show(plan, pass).c_str());
  }
  static Tensor aligned(const Tensor& t) { return is_aligned(t) ? t : copy(t, t.scalar_type()); }
  static std::optional<Tensor> aligned(const std::optional<Tensor>& t) {
    return t ? std::optional(aligned(*t)) : std::nullopt;
  }
  static Tensor row_major(const Tensor& weights) {
    return weights.stride(1) == 1 ? weights : as_contiguous(weights);
  }

  Device device_;
};

}  // namespace my_ops
