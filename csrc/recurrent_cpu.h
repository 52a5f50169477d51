// Recurrent ops on the CPU, for any cell. The 16-bit types are computed in float from end to end:
// what goes through all steps or products is converted before and after them, and the rest where a
// step reads and writes it.
#pragma once

#include <algorithm>
#include <type_traits>

#include "binding_cpu.h"
#include "recurrent/cpu/costs.h"
#include "recurrent_units.h"

namespace my_ops {

// The kernels of a cell that the module is compiled with.
template <typename Cell>
struct CompiledCell {
  static constexpr CellSizes sizes = kCellSizes<Cell>;

  template <typename... Arguments>
  static void step(const Arguments&... arguments) {
    cpu::recurrent_step<Cell>(arguments...);
  }
  template <typename... Arguments>
  static void units(const Arguments&... arguments) {
    cpu::recurrent_units<Cell>(arguments...);
  }
  template <typename... Arguments>
  static void step_backward(const Arguments&... arguments) {
    cpu::recurrent_step_backward<Cell>(arguments...);
  }
  template <typename... Arguments>
  static void sequence(const Arguments&... arguments) {
    cpu::recurrent_sequence<Cell>(arguments...);
  }
  template <typename... Arguments>
  static void sequence_backward(const Arguments&... arguments) {
    cpu::recurrent_sequence_backward<Cell>(arguments...);
  }
};

// The backend. Kernels: CompiledCell, or OwnCell of own_cells_cpu.cpp.
template <typename Kernels>
struct CpuEngine {
  static constexpr cpu::RecurrentCosts kCosts{};

  Kernels kernels;
  CellSizes cell = kernels.sizes;

  static ScalarType storage(ScalarType dtype) { return compute_dtype(dtype); }
  static ScalarType storage_of_weights(ScalarType dtype) { return compute_dtype(dtype); }
  static ScalarType storage_of_backward(ScalarType dtype) { return dtype; }
  // by_rows() and sequence_backward() convert what they read and write, step by step.
  static ScalarType storage_of_layer(ScalarType dtype, int64_t weights, int64_t steps,
                                     int64_t batch, const Masks& masks) {
    const bool by_rows = runs_by_rows(weights, steps, batch, compute_dtype(dtype));
    const bool converts = by_rows && !masks.lengths;
    return converts ? dtype : compute_dtype(dtype);
  }

  static Tensor prepared(const Tensor& b, int64_t) { return b; }
  // Each thread packs transposed weights where it reads them, for some columns. For few rows that
  // takes too long, and weights that are not transposed ATen reads as fast.
  void matmul(const Tensor& a, const Tensor& b, const Tensor& out) const {
    const int64_t m = a.size(0), n = b.size(1), k = a.size(1);
    const bool few =
        m < (torch::stable::get_num_threads() > 1 ? kCosts.few_rows : kCosts.few_rows_of_a_thread);
    if (few || a.stride(1) != 1 || b.stride(0) != 1) {
      aten("aten::mm", "out", a, b, out);
      return;
    }
    dispatch(out.scalar_type(), [&]<typename T>() {
      for (int64_t first = 0; first < m; first += kCosts.rows_together) {
        const cpu::Product<T> some{.a = in<T>(a) + first * a.stride(0),
                                   .b = in<T>(b),
                                   .c = my_ops::out<T>(out) + first * out.stride(0),
                                   .a_row = a.stride(0),
                                   .b_row = b.stride(0),
                                   .b_col = b.stride(1),
                                   .c_row = out.stride(0),
                                   .m = std::min(m - first, kCosts.rows_together),
                                   .k = k};
        const int64_t products = (some.m + kCosts.rows_of_a_read) * k * cpu::kColumnsTogether;
        parallel((n - 1) / cpu::kColumnsTogether + 1, kCosts.grain_products / (products + 1) + 1,
                 [&](int64_t begin, int64_t end) {
                   const Tensor packed =
                       empty(out, {cpu::packed_size<T>(k, cpu::kColumnsTogether)});
                   cpu::product_columns(some, begin * cpu::kColumnsTogether,
                                        std::min(end * cpu::kColumnsTogether, n),
                                        my_ops::out<T>(packed));
                 });
      }
    });
  }
  void step(const StepTensors& step) const {
    rows(step.gates_h, [&]<typename T>(int64_t begin, int64_t end) {
      auto args = step.args<T, T>();
      args.gates_h += begin * step.gates_h.size(1);
      kernels.step(args, cpu::Range{begin, end}, cpu::Range{0, args.hidden});
    });
  }
  void step_backward(const StepBackwardTensors& step) const {
    const int64_t grain = kCosts.grain / (step.hidden + 1) + 1;
    dispatch_floating<CpuTypes>(step.saved.scalar_type(), [&]<typename T>() {
      using Acc = typename cpu::Compute<T>::type;
      const auto args = step.args<T, Acc>();
      parallel(step.batch, grain, [&](int64_t begin, int64_t end) {
        if constexpr (std::is_same_v<T, Acc>) {
          kernels.step_backward(args, begin, end);
        } else {
          const Tensor workspace = empty(step.saved, {cpu::workspace_size(cell, args)},
                                         compute_dtype(step.saved.scalar_type()));
          kernels.step_backward(args, begin, end, out<Acc>(workspace));
        }
      });
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
    const int64_t weights = s.weights.x.numel() + s.weights.h.numel();
    const int64_t steps = s.output.size(0), batch = s.output.size(1);
    const ScalarType acc = s.weights.h.scalar_type();
    if (runs_by_rows(weights, steps, batch, acc)) {
      by_rows(s, weights);
    } else if (stays_in_cache(weights, acc)) {
      return false;
    } else {
      // ATen reads all weights for each of a few rows, in one thread; by_units once, in all
      // threads.
      const int64_t threads = torch::stable::get_num_threads();
      const bool pays = steps * (batch * threads - 1) > kCosts.few_passes * threads;
      if (steps <= kCosts.few_steps || !pays) return false;
      by_units(s);
    }
    Tensor h_n = s.h_n;
    torch::stable::copy_(h_n, step_of(s.output, steps - 1));
    return true;
  }

  bool sequence_backward(const SequenceBackwardTensors& s) const {
    const int64_t weights = s.weights_h.numel();
    if (!runs_by_rows(weights, s.steps, s.batch, s.weights_h.scalar_type())) return false;
    const bool reads_weights = s.steps > 1 || s.of_states;
    dispatch_floating<CpuTypes>(s.saved.scalar_type(), [&]<typename T>() {
      using Acc = typename cpu::Compute<T>::type;
      const auto c0 = as_contiguous(s.c0), grad_h_n = as_contiguous(s.grad_h_n),
                 grad_c_n = as_contiguous(s.grad_c_n);
      std::optional<Tensor> packed_h;
      if (reads_weights) packed_h = pack<Acc>(s.weights_h);
      const cpu::RecurrentSequenceBackward<T, Acc> args{.grad_output = in<T>(s.grad_output),
                                                        .grad_h_n = in<T>(grad_h_n),
                                                        .grad_carried_n = in<T>(grad_c_n),
                                                        .saved = in<T>(s.saved),
                                                        .carried = in<T>(s.carried),
                                                        .output = in<T>(s.output),
                                                        .h0 = in<T>(s.h0),
                                                        .carried0 = in<T>(c0),
                                                        .weights_h = in<Acc>(packed_h),
                                                        .lengths = in<int64_t>(s.lengths),
                                                        .reset = in<bool>(s.reset),
                                                        .zoneout = in<T>(s.zoneout),
                                                        .grad_terms = out<T>(s.grad_terms),
                                                        .grad_h0 = out<T>(s.grad_h0),
                                                        .grad_carried0 = out<T>(s.grad_c0),
                                                        .steps = s.steps,
                                                        .batch = s.batch,
                                                        .hidden = s.hidden,
                                                        .of_states = s.of_states};
      parallel(s.batch, rows_a_thread(s.steps, weights), [&](int64_t begin, int64_t end) {
        const Tensor workspace = empty(s.weights_h, {cpu::workspace_size(cell, args)});
        kernels.sequence_backward(args, begin, end, out<Acc>(workspace));
      });
    });
    return true;
  }

 private:
  // Each thread takes some rows through all steps.
  void by_rows(const SequenceTensors& s, int64_t weights) const {
    const int64_t steps = s.output.size(0), batch = s.output.size(1), hidden = s.output.size(2);
    dispatch_floating<CpuTypes>(s.output.scalar_type(), [&]<typename T>() {
      using Acc = typename cpu::Compute<T>::type;
      const Tensor input = as_contiguous(s.input);
      const Tensor packed_x = pack<Acc>(transposed(s.weights.x));
      const Tensor packed_h = pack<Acc>(transposed(s.weights.h));
      const cpu::RecurrentSequence<T, Acc> args{.input = in<T>(input),
                                                .bias_x = in<Acc>(s.weights.bias_x),
                                                .bias_h = in<Acc>(s.weights.bias_h),
                                                .vectors = in<Acc>(s.weights.vectors),
                                                .weights_x = in<Acc>(packed_x),
                                                .weights_h = in<Acc>(packed_h),
                                                .h0 = in<T>(s.h0),
                                                .carried0 = in<T>(s.c0),
                                                .lengths = in<int64_t>(s.masks.lengths),
                                                .reset = in<bool>(s.masks.reset),
                                                .zoneout = in<T>(s.masks.zoneout),
                                                .output = out<T>(s.output),
                                                .carried_n = out<T>(s.c_n),
                                                .saved = out<T>(s.saved),
                                                .carried = out<T>(s.carried),
                                                .steps = steps,
                                                .batch = batch,
                                                .inputs = input.size(2),
                                                .hidden = hidden};
      parallel(batch, rows_a_thread(steps, weights), [&](int64_t begin, int64_t end) {
        const Tensor workspace = empty(packed_h, {cpu::workspace_size(cell, args)});
        kernels.sequence(args, begin, end, out<Acc>(workspace));
      });
    });
  }

  // At each step every thread takes some units of all rows and finds their weights in its cache.
  void by_units(const SequenceTensors& s) const {
    const int64_t steps = s.output.size(0), batch = s.output.size(1), hidden = s.output.size(2);
    const int64_t all = batch * hidden, blocks = (hidden - 1) / cpu::kUnitsTogether + 1;
    const int64_t products =  // per block
        (batch + kCosts.rows_of_a_read) * hidden * cell.gates * cpu::kUnitsTogether;
    const Tensor gates_x = gates_of_input(*this, s);
    dispatch(s.output.scalar_type(), [&]<typename T>() {
      const Tensor packed_h = pack_gates<T>(s.weights.h);
      RecurrentStep<T, T> step{.gates_x = in<T>(gates_x),
                               .gates_h = nullptr,
                               .bias_x = in<T>(s.weights.bias_x),
                               .bias_h = in<T>(s.weights.bias_h),
                               .vectors = in<T>(s.weights.vectors),
                               .h = in<T>(s.h0),
                               .carried = in<T>(s.c0),
                               .lengths = in<int64_t>(s.masks.lengths),
                               .reset = in<bool>(s.masks.reset),
                               .zoneout = in<T>(s.masks.zoneout),
                               .new_h = out<T>(s.output),
                               .new_carried = out<T>(s.carried ? s.carried : s.c_n),
                               .saved = out<T>(s.saved),
                               .t = 0,
                               .batch = batch,
                               .hidden = hidden};
      for (; step.t < steps; ++step.t) {
        parallel(blocks, kCosts.grain_products / products + 1, [&](int64_t begin, int64_t end) {
          kernels.units(
              step, in<T>(packed_h),
              cpu::Range{begin * cpu::kUnitsTogether, std::min(end * cpu::kUnitsTogether, hidden)});
        });
        step.gates_x += cell.gates * all;
        step.h = step.new_h;
        step.new_h += all;
        step.carried = step.new_carried;
        if (s.carried) step.new_carried += cell.carried * all;
        if (step.reset) step.reset += batch;
        if (step.zoneout) step.zoneout += all;
        if (step.saved) step.saved += cell.saved * all;
      }
      if (step.carried != out<T>(s.c_n)) {
        std::copy_n(step.carried, cell.carried * all, out<T>(s.c_n));
      }
    });
  }

  // Whether every thread may read all weights at every step.
  static bool stays_in_cache(int64_t weights, ScalarType dtype) {
    return weights * (dtype == ScalarType::Double ? 8 : 4) <= kCosts.cache;
  }
  // Weights are packed once and then read for all rows at every step.
  static bool runs_by_rows(int64_t weights, int64_t steps, int64_t batch, ScalarType dtype) {
    const bool pays =
        steps > 0 && (weights <= steps * kCosts.weights_a_step || batch >= kCosts.many_rows);
    return stays_in_cache(weights, dtype) && pays;
  }
  static int64_t rows_a_thread(int64_t steps, int64_t weights) {
    return kCosts.grain_products / (steps * weights + 1) + 1;
  }
  template <typename T>
  static Tensor pack(const Tensor& b) {
    const int64_t k = b.size(0), n = b.size(1);
    const Tensor packed = empty(b, {cpu::packed_size<T>(k, n)});
    const int64_t row = b.stride(0), col = b.stride(1);
    parallel(
        (n - 1) / cpu::kColumnsTogether + 1,
        kCosts.grain_pack / (k * cpu::kColumnsTogether + 1) + 1, [&](int64_t begin, int64_t end) {
          const int64_t first = begin * cpu::kColumnsTogether,
                        last = std::min(end * cpu::kColumnsTogether, n);
          cpu::pack(in<T>(b) + first * col, row, col, k, last - first, out<T>(packed) + first * k);
        });
    return packed;
  }
  // The weights of h, gate by gate.
  template <typename T>
  Tensor pack_gates(const Tensor& weights_h) const {
    const int64_t hidden = weights_h.size(1), size = cpu::packed_size<T>(hidden, hidden);
    const Tensor packed = empty(weights_h, {cell.gates * size});
    const int64_t row = weights_h.stride(0), col = weights_h.stride(1);
    parallel(cell.gates, 1, [&](int64_t begin, int64_t end) {
      for (int64_t gate = begin; gate < end; ++gate) {
        cpu::pack(in<T>(weights_h) + gate * hidden * row, col, row, hidden, hidden,
                  out<T>(packed) + gate * size);
      }
    });
    return packed;
  }
  template <typename F>
  void rows(const Tensor& like, const F& f) const {
    const int64_t hidden = like.size(1) / cell.gates;
    parallel(like.size(0), kCosts.grain / (hidden + 1) + 1, [&](int64_t begin, int64_t end) {
      dispatch(like.scalar_type(), [&]<typename T>() { f.template operator()<T>(begin, end); });
    });
  }
};

template <typename Op>
struct Cpu : CpuEngine<CompiledCell<typename Op::Cell>> {
  using Cell = typename Op::Cell;

  explicit Cpu(const Tensor&) {}

  static LayersByCell& layers() { return cpu::layers(); }
  static WeightsGradients weights_backward(const WeightsBackward& a) {
    return cpu::weights_backward(a, std::is_same_v<typename Op::Weights, OneMatrix>);
  }
};

}  // namespace my_ops
