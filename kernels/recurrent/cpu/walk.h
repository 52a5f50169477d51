// All steps of some rows, which are independent of other rows, all rows of some units, and a step
// backward of a 16-bit type.
#pragma once

#include "recurrent/cpu/edge.h"
#include "recurrent/cpu/product_cpu.h"
#include "recurrent/cpu/step.h"

namespace my_ops::cpu {

// For the rows from `row` on, at step t.
template <typename Sequence>
const bool* reset_of(const Sequence& args, int64_t t, int64_t row) {
  return args.reset && t < args.steps ? args.reset + t * args.batch + row : nullptr;
}

template <typename Cell, typename T, typename Acc>
void walk(const RecurrentSequence<T, Acc>& args, int64_t begin, int64_t end, Acc* workspace) {
  constexpr int64_t kGates = Cell::kGates, kCarried = Cell::kCarried, kSaved = Cell::kSaved;
  const int64_t inputs = args.inputs, hidden = args.hidden, all = args.batch * hidden;
  for (; begin < end; begin += kRows) {
    const int64_t first = begin * hidden, rows = std::min(end - begin, kRows);
    const int64_t units = rows * hidden;
    Acc* const gates_x = workspace;
    Acc* const gates_h = gates_x + kGates * units;
    Acc* free = gates_h + kGates * units;
    const Edge<T, Acc> x(rows * inputs, free), zoneout(units, free), saved(kSaved * units, free),
        carries(kCarried * units, free), h_even(units, free), h_odd(units, free);
    const Acc* h = h_odd.read(args.h0 + first);
    const Acc* carried = carries.read(args.carried0 + kCarried * first);
    T* const carried_n = args.carried_n + kCarried * first;
    for (int64_t t = 0; t < args.steps; ++t) {
      product(x.read(args.input + (t * args.batch + begin) * inputs), inputs, args.weights_x,
              gates_x, kGates * hidden, rows, kGates * hidden, inputs);
      product(h, hidden, args.weights_h, gates_h, kGates * hidden, rows, kGates * hidden, hidden);
      const int64_t here = t * all + first;
      T* const output = args.output + here;
      T* const kept = at(args.saved, kSaved * here);
      T* const kept_carried = at(args.carried, kCarried * here);
      const Edge<T, Acc>& h_now = t % 2 == 0 ? h_even : h_odd;
      Acc* const new_carried = carries.place(kept_carried ? kept_carried : carried_n);
      recurrent_step<Cell, Acc>({.gates_x = gates_x,
                                 .gates_h = gates_h,
                                 .bias_x = args.bias_x,
                                 .bias_h = args.bias_h,
                                 .vectors = args.vectors,
                                 .h = h,
                                 .carried = carried,
                                 .lengths = at(args.lengths, begin),
                                 .reset = reset_of(args, t, begin),
                                 .zoneout = zoneout.read(at(args.zoneout, here)),
                                 .new_h = h_now.place(output),
                                 .new_carried = new_carried,
                                 .saved = saved.place(kept),
                                 .t = t,
                                 .batch = rows,
                                 .hidden = hidden},
                                {0, rows}, {0, hidden});
      h_now.written(output);
      saved.written(kept);
      carries.written(kept_carried);
      h = h_now.place(output);
      carried = new_carried;
    }
    carries.finish(carried, carried_n);
  }
}

constexpr int64_t kRowsOfUnits = 32;  // their pre-activations stay in L1 until they are read

template <typename Cell, typename T>
void step_of_units(RecurrentStep<T, T> args, const T* weights_h, Range units) {
  constexpr int64_t kGates = Cell::kGates;
  const int64_t hidden = args.hidden, of_gate = packed_size<T>(hidden, hidden);
  T gates_h[kRowsOfUnits * kGates * kUnitsTogether];
  args.gates_h = gates_h;
  for (int64_t unit = units.begin; unit < units.end; unit += kUnitsTogether) {
    const int64_t width = std::min(kUnitsTogether, units.end - unit);
    for (int64_t row = 0; row < args.batch; row += kRowsOfUnits) {
      const int64_t rows = std::min(args.batch - row, kRowsOfUnits);
      for (int64_t i = 0; i < rows * kGates; ++i) {  // the product hides the latency
        const T* gates_x = args.gates_x + (row * kGates + i) * hidden + unit;
        for (int64_t u = 0; u < width; u += kLine / sizeof(T))
          __builtin_prefetch(gates_x + u, 0, 2);
      }
      for (int gate = 0; gate < kGates; ++gate) {
        product(args.h + row * hidden, hidden, weights_h + gate * of_gate + unit * hidden,
                gates_h + gate * width, kGates * width, rows, width, hidden);
      }
      recurrent_step<Cell, T>(args, {row, row + rows}, {unit, unit + width});
    }
  }
}

template <typename Cell, typename T, typename Acc>
void walk_backward(const RecurrentSequenceBackward<T, Acc>& args, int64_t begin, int64_t end,
                   Acc* workspace) {
  constexpr int64_t kGates = Cell::kGates, kTerms = my_ops::kTerms<Cell>;
  constexpr int64_t kCarried = Cell::kCarried, kSaved = Cell::kSaved;
  const int64_t hidden = args.hidden, all = args.batch * hidden;
  const bool has_direct = Cell::kReadsH || args.zoneout;
  for (; begin < end; begin += kRows) {
    const int64_t first = begin * hidden, rows = std::min(end - begin, kRows);
    const int64_t units = rows * hidden;
    Acc* const grad_h_direct = has_direct ? workspace : nullptr;
    Acc* free = workspace + units;
    const Edge<T, Acc> grad_output(units, free), h(Cell::kReadsH ? units : 0, free),
        zoneout(units, free), saved(kSaved * units, free), carried(kCarried * units, free),
        grad_terms(kTerms * units, free), grad_hs(units, free),
        grad_carries(kCarried * units, free);
    T* const grad_h0 = args.grad_h0 + first;
    T* const grad_carried0 = args.grad_carried0 + kCarried * first;
    // Of the current step.
    Acc* const grad_h = grad_hs.start(at(args.grad_h_n, first), grad_h0);
    Acc* const grad_carried =
        grad_carries.start(at(args.grad_carried_n, kCarried * first), grad_carried0);
    if (has_direct) std::fill_n(grad_h_direct, units, Acc(0));
    for (int64_t t = args.steps - 1; t >= 0; --t) {
      const int64_t here = t * all + first;
      T* const terms = args.grad_terms + kTerms * here;
      const T* const old_h = t > 0 ? at(args.output, here - all) : at(args.h0, first);
      const T* const old_carried =
          t > 0 ? at(args.carried, kCarried * (here - all)) : at(args.carried0, kCarried * first);
      recurrent_step_backward<Cell, Acc>({.grad_h = grad_output.read(at(args.grad_output, here)),
                                          .grad_h_next = grad_h,
                                          .grad_carried = grad_carried,
                                          .saved = saved.read(args.saved + kSaved * here),
                                          .h = Cell::kReadsH ? h.read(old_h) : nullptr,
                                          .carried = carried.read(old_carried),
                                          .grad_terms = grad_terms.place(terms),
                                          .grad_h_direct = grad_h_direct,
                                          .grad_carried_before = grad_carried,
                                          .lengths = at(args.lengths, begin),
                                          .reset = reset_of(args, t, begin),
                                          .reset_next = reset_of(args, t + 1, begin),
                                          .zoneout = zoneout.read(at(args.zoneout, here)),
                                          .t = t,
                                          .batch = rows,
                                          .hidden = hidden},
                                         0, rows);
      if (t > 0 || args.of_states) {
        product(grad_terms.place(terms) + Cell::kApart * hidden, kTerms * hidden, args.weights_h,
                grad_h, hidden, rows, hidden, kGates * hidden);
      }
      grad_terms.written(terms);
    }
    for (int64_t row = 0; args.reset && row < rows; ++row) {
      if (args.steps > 0 && args.reset[begin + row])
        std::fill_n(grad_h + row * hidden, hidden, Acc(0));
    }
    if (has_direct) {
      for (int64_t i = 0; i < units; ++i) grad_h[i] += grad_h_direct[i];
    }
    grad_hs.written(grad_h0);
    grad_carries.written(grad_carried0);
  }
}

// A step backward of a 16-bit type, of some rows.
template <typename Cell, typename T>
void step_backward_of_edges(const RecurrentStepBackward<T, float>& args, int64_t begin, int64_t end,
                            float* workspace) {
  constexpr int64_t kCarried = Cell::kCarried, kSaved = Cell::kSaved, kTerms = my_ops::kTerms<Cell>;
  for (; begin < end; begin += kRows) {
    const int64_t first = begin * args.hidden, rows = std::min(end - begin, kRows);
    const int64_t units = rows * args.hidden;
    float* free = workspace;
    const Edge<T, float> grad_h(units, free), saved(kSaved * units, free), h(units, free),
        carried(kCarried * units, free), grad_terms(kTerms * units, free), zoneout(units, free);
    T* const terms = args.grad_terms + kTerms * first;
    recurrent_step_backward<Cell, float>(
        {.grad_h = grad_h.read(at(args.grad_h, first)),
         .grad_h_next = at(args.grad_h_next, first),
         .grad_carried = at(args.grad_carried, kCarried * first),
         .saved = saved.read(args.saved + kSaved * first),
         .h = h.read(at(args.h, first)),
         .carried = carried.read(at(args.carried, kCarried * first)),
         .grad_terms = grad_terms.place(terms),
         .grad_h_direct = at(args.grad_h_direct, first),
         .grad_carried_before = at(args.grad_carried_before, kCarried * first),
         .lengths = at(args.lengths, begin),
         .reset = at(args.reset, begin),
         .reset_next = at(args.reset_next, begin),
         .zoneout = zoneout.read(at(args.zoneout, first)),
         .t = args.t,
         .batch = rows,
         .hidden = args.hidden},
        0, rows);
    grad_terms.written(terms);
  }
}

}  // namespace my_ops::cpu
