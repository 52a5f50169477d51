// Recurrent ops on the CPU, for any cell. The 16-bit types are computed in float from end to end.
#pragma once

#include "binding_cpu.h"
#include "recurrent_ops.h"

namespace my_ops {

constexpr int64_t kGrain = 2048;             // units a thread: each costs four exps
constexpr int64_t kGrainProducts = 1 << 20;  // multiplications a thread: 10 us or more
constexpr int64_t kCache = 1 << 20;          // bytes: of the second level, today's least

template <typename Op>
struct Cpu {
  using Cell = typename Op::Cell;

  explicit Cpu(const Tensor&) {}

  static ScalarType storage(ScalarType dtype) { return compute_dtype(dtype); }

  void matmul(const Tensor& a, const Tensor& b, const Tensor& out) const {
    aten("aten::mm", "out", a, b, out);
  }
  void cell(const CellTensors& step) const {
    rows(step.new_h, [&]<typename T>(int64_t begin, int64_t end) {
      cpu::recurrent_step<Cell>(step.args<T, T>(), begin, end);
    });
  }
  void cell_backward(const CellBackwardTensors& step) const {
    rows(step.old_cell, [&]<typename T>(int64_t begin, int64_t end) {
      cpu::recurrent_step_backward<Cell>(step.args<T, T>(), begin, end);
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
    cpu::ragged(args);
  }

  bool sequence(const SequenceTensors& s) const {
    const int64_t steps = s.output.size(0), batch = s.output.size(1), hidden = s.output.size(2);
    if (!stays_in_cache(s.weights)) return false;
    dispatch(s.output.scalar_type(), [&]<typename T>() {
      const Tensor input = as_contiguous(s.input);
      const auto [weights_h, weights_x] = split_weights(s.weights, hidden);
      const Tensor packed_x = pack<T>(weights_x), packed_h = pack<T>(weights_h);
      const Tensor workspace = empty(s.output, {batch, 2 * s.weights.size(0)});
      const cpu::RecurrentSequence<T> args{.input = in<T>(input),
                                           .bias = in<T>(s.bias),
                                           .weights_x = in<T>(packed_x),
                                           .weights_h = in<T>(packed_h),
                                           .h0 = in<T>(s.h0),
                                           .carried0 = in<T>(s.c0),
                                           .lengths = in<int64_t>(s.lengths),
                                           .output = out<T>(s.output),
                                           .carried_n = out<T>(s.c_n),
                                           .saved = s.gates ? out<T>(*s.gates) : nullptr,
                                           .carried = s.cells ? out<T>(*s.cells) : nullptr,
                                           .workspace = out<T>(workspace),
                                           .steps = steps,
                                           .batch = batch,
                                           .inputs = input.size(2),
                                           .hidden = hidden};
      parallel(batch, rows_a_thread(steps, s.weights), [&](int64_t begin, int64_t end) {
        cpu::recurrent_sequence<Cell>(args, begin, end);
      });
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
      const cpu::RecurrentSequenceBackward<T> args{.grad_output = in<T>(s.grad_output),
                                                   .grad_h_n = in<T>(grad_h_n),
                                                   .grad_carried_n = in<T>(grad_c_n),
                                                   .saved = in<T>(s.gates),
                                                   .carried = in<T>(s.cells),
                                                   .output = nullptr,
                                                   .h0 = nullptr,
                                                   .carried0 = in<T>(c0),
                                                   .weights_h = in<T>(packed_h),
                                                   .grad_terms = out<T>(s.grad_gates),
                                                   .grad_h0 = out<T>(s.grad_h0),
                                                   .grad_carried0 = out<T>(s.grad_c0),
                                                   .workspace = nullptr,
                                                   .steps = steps,
                                                   .batch = batch,
                                                   .hidden = hidden};
      parallel(batch, rows_a_thread(steps, s.weights), [&](int64_t begin, int64_t end) {
        cpu::recurrent_sequence_backward<Cell>(args, begin, end);
      });
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
    const Tensor packed = empty(b, {cpu::packed_size<T>(k, n)});
    cpu::pack(in<T>(b), b.stride(0), b.stride(1), k, n, out<T>(packed));
    return packed;
  }
  template <typename F>
  static void rows(const Tensor& like, const F& f) {
    parallel(like.size(0), kGrain / (like.size(1) + 1) + 1, [&](int64_t begin, int64_t end) {
      dispatch(like.scalar_type(), [&]<typename T>() { f.template operator()<T>(begin, end); });
    });
  }
};

}  // namespace my_ops
