// LLTM on the CPU. The 16-bit types are computed in float from end to end.
#include "binding_cpu.h"
#include "lltm_ops.h"

namespace my_ops {
namespace {

constexpr int64_t kGrain = 2048;             // units a thread: each costs four exps
constexpr int64_t kGrainProducts = 1 << 20;  // multiplications a thread: 10 us or more
constexpr int64_t kCache = 1 << 20;          // bytes: of the second level, today's least

struct Cpu {
  explicit Cpu(const Tensor&) {}

  static ScalarType storage(ScalarType dtype) { return compute_dtype(dtype); }

  void matmul(const Tensor& a, const Tensor& b, const Tensor& out) const {
    aten("aten::mm", "out", a, b, out);
  }
  void cell(const CellTensors& step) const {
    rows(step.new_h, [&]<typename T>(int64_t begin, int64_t end) {
      cpu::lltm_cell(step.args<T, T>(), begin, end);
    });
  }
  void cell_backward(const CellBackwardTensors& step) const {
    rows(step.old_cell, [&]<typename T>(int64_t begin, int64_t end) {
      cpu::lltm_cell_backward(step.args<T, T>(), begin, end);
    });
  }
  template <typename F>
  static void dispatch(ScalarType dtype, const F& f) {
    if (dtype == ScalarType::Double) {
      f.template operator()<double>();
    } else {
      f.template operator()<float>();
    }
  }
  template <typename Ragged>
  void ragged(const Ragged& args) const {
    cpu::lltm_ragged(args);
  }

  bool sequence(const SequenceTensors& s) const {
    const int64_t steps = s.output.size(0), batch = s.output.size(1), hidden = s.output.size(2);
    if (!stays_in_cache(s.weights)) return false;
    dispatch(s.output.scalar_type(), [&]<typename T>() {
      const Tensor input = as_contiguous(s.input);
      const auto [weights_h, weights_x] = split_weights(s.weights, hidden);
      const Tensor packed_x = pack<T>(weights_x), packed_h = pack<T>(weights_h);
      const Tensor workspace = empty(s.output, {batch, 6 * hidden});
      const cpu::LltmSteps<T> args{.input = in<T>(input),
                                   .bias = in<T>(s.bias),
                                   .weights_x = in<T>(packed_x),
                                   .weights_h = in<T>(packed_h),
                                   .h0 = in<T>(s.h0),
                                   .c0 = in<T>(s.c0),
                                   .lengths = in<int64_t>(s.lengths),
                                   .output = out<T>(s.output),
                                   .c_n = out<T>(s.c_n),
                                   .gates = s.gates ? out<T>(*s.gates) : nullptr,
                                   .cells = s.cells ? out<T>(*s.cells) : nullptr,
                                   .workspace = out<T>(workspace),
                                   .steps = steps,
                                   .batch = batch,
                                   .inputs = input.size(2),
                                   .hidden = hidden};
      parallel(batch, rows_a_thread(steps, s.weights),
               [&](int64_t begin, int64_t end) { cpu::lltm_steps(args, begin, end); });
    });
    return true;
  }

  bool sequence_backward(const SequenceBackwardTensors& s) const {
    const int64_t steps = s.cells.size(0), batch = s.cells.size(1), hidden = s.cells.size(2);
    if (!stays_in_cache(s.weights)) return false;
    dispatch(s.gates.scalar_type(), [&]<typename T>() {
      const Tensor c0 = as_contiguous(s.c0);
      const auto grad_h_n = as_contiguous(s.grad_h_n), grad_c_n = as_contiguous(s.grad_c_n);
      const Tensor packed_h = pack<T>(recurrent_weights(s.weights, hidden));
      const cpu::LltmStepsBackward<T> args{.grad_output = in<T>(s.grad_output),
                                           .grad_h_n = in<T>(grad_h_n),
                                           .grad_c_n = in<T>(grad_c_n),
                                           .gates = in<T>(s.gates),
                                           .cells = in<T>(s.cells),
                                           .c0 = in<T>(c0),
                                           .weights_h = in<T>(packed_h),
                                           .grad_gates = out<T>(s.grad_gates),
                                           .grad_h0 = out<T>(s.grad_h0),
                                           .grad_c0 = out<T>(s.grad_c0),
                                           .steps = steps,
                                           .batch = batch,
                                           .hidden = hidden};
      parallel(batch, rows_a_thread(steps, s.weights),
               [&](int64_t begin, int64_t end) { cpu::lltm_steps_backward(args, begin, end); });
    });
    return true;
  }

 private:
  // Whether every thread may read all weights at every step.
  static bool stays_in_cache(const Tensor& weights) {
    return weights.numel() * static_cast<int64_t>(weights.element_size()) <= kCache;
  }
  static int64_t rows_a_thread(int64_t steps, const Tensor& weights) {
    return kGrainProducts / (steps * weights.numel() + 1) + 1;
  }
  template <typename T>
  static Tensor pack(const Tensor& b) {
    const int64_t k = b.size(0), n = b.size(1);
    const Tensor packed = empty(b, {cpu::lltm_packed_size<T>(k, n)});
    cpu::lltm_pack(in<T>(b), b.stride(0), b.stride(1), k, n, out<T>(packed));
    return packed;
  }
  template <typename F>
  static void rows(const Tensor& like, const F& f) {
    parallel(like.size(0), kGrain / (like.size(1) + 1) + 1, [&](int64_t begin, int64_t end) {
      dispatch(like.scalar_type(), [&]<typename T>() { f.template operator()<T>(begin, end); });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("lltm_cell", TORCH_BOX(&lltm_cell<Cpu>));
  m.impl("lltm_cell_forward", TORCH_BOX(&lltm_cell_forward<Cpu>));
  m.impl("lltm_cell_backward", TORCH_BOX(&lltm_cell_backward<Cpu>));
  m.impl("lltm", TORCH_BOX(&lltm<Cpu>));
  m.impl("lltm_forward", TORCH_BOX(&lltm_forward<Cpu>));
  m.impl("lltm_backward", TORCH_BOX(&lltm_backward<Cpu>));
}

}  // namespace my_ops
