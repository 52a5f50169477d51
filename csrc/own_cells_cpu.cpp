// The engine on the CPU for cells that programs define. my_ops/recurrent/_own_cpu.py has their
// kernels compiled, adds them here, and calls these ops, with arguments that it has checked. What a
// unit carries is side by side: (batch, carried * hidden).
#include <deque>
#include <mutex>

#include "own_cell.h"
#include "recurrent/cpu/product_cpu.h"
#include "recurrent_cpu.h"
#include "recurrent_ops.h"

#define MY_OPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace my_ops {

// The kernels of such a cell, as CompiledCell.
struct OwnCell {
  const void* functions;  // CellFunctions of the type of arithmetic
  CellSizes sizes;
  ScalarType acc;

  template <typename Acc>
  const cpu::CellFunctions<Acc>& of() const {
    return *static_cast<const cpu::CellFunctions<Acc>*>(functions);
  }
  template <typename Acc>
  Acc shut(int gate) const {
    return of<Acc>().shut[gate];
  }
  template <typename Acc>
  void step(const RecurrentStep<Acc, Acc>& args, cpu::Range rows, cpu::Range units) const {
    of<Acc>().step(args, rows, units);
  }
  template <typename Acc>
  void units(const RecurrentStep<Acc, Acc>& args, const Acc* weights_h, cpu::Range units) const {
    of<Acc>().units(args, weights_h, units);
  }
  template <typename Acc>
  void step_backward(const RecurrentStepBackward<Acc, Acc>& args, int64_t begin,
                     int64_t end) const {
    of<Acc>().cpu::template StepFunctions<Acc>::step_backward(args, begin, end);
  }
  template <typename T>
  void step_backward(const RecurrentStepBackward<T, float>& args, int64_t begin, int64_t end,
                     float* workspace) const {
    of<float>().cpu::template EdgeFunctions<T>::step_backward(args, begin, end, workspace);
  }
  template <typename T, typename Acc>
  void sequence(const cpu::RecurrentSequence<T, Acc>& args, int64_t begin, int64_t end,
                Acc* workspace) const {
    of<Acc>().cpu::template SequenceFunctions<T, Acc>::sequence(args, begin, end, workspace);
  }
  template <typename T, typename Acc>
  void sequence_backward(const cpu::RecurrentSequenceBackward<T, Acc>& args, int64_t begin,
                         int64_t end, Acc* workspace) const {
    of<Acc>().cpu::template SequenceFunctions<T, Acc>::sequence_backward(args, begin, end,
                                                                         workspace);
  }
};

namespace {

using OwnEngine = CpuEngine<OwnCell>;

std::mutex mutex;  // of what follows, whose elements stay where they are
std::deque<OwnCell> cells;

// For a tensor of the call.
OwnEngine engine_of(int64_t cell, const Tensor& t, const char* op) {
  const std::lock_guard lock(mutex);
  check(cell >= 0 && cell < static_cast<int64_t>(cells.size()), op,
        ": cell must be one that was added, got ", cell);
  const OwnCell& kernels = cells[static_cast<size_t>(cell)];
  check(compute_dtype(t.scalar_type()) == kernels.acc, op, ": the cell is compiled for ",
        name_of(kernels.acc), ", got ", name_of(t.scalar_type()));
  return {kernels};
}

Tensors given(std::initializer_list<std::optional<Tensor>> all) {
  Tensors result;
  for (const auto& t : all) {
    if (t) result.push_back(*t);
  }
  return result;
}

Weights weights_of(Stack& stack, ScalarType dtype) {
  std::array<std::optional<Tensor>, 4> parameters;
  for (size_t i = 0; i < 4; ++i) {
    parameters[i] =
        cast(i < 2 ? stack.tensor() : stack.optional(), OwnEngine::storage_of_weights(dtype));
  }
  return TwoMatrices::of(parameters, 0);
}

void layer(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const int64_t cell = stack.integer();
  const Tensor input = stack.tensor(), h0 = stack.tensor();
  const auto carried0 = stack.optional();
  const Weights weights = weights_of(stack, input.scalar_type());
  const Masks masks = stack.masks();
  const bool save = stack.flag();
  const Forward r =
      forward_layer(engine_of(cell, input, "own_cell"), input, h0, carried0, weights, masks, save);
  *values = torch::stable::detail::from(given({r.output, r.h_n, r.c_n, r.saved, r.carried}));
}

void layer_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const int64_t cell = stack.integer();
  std::array<std::optional<Tensor>, 3> grads;
  for (auto& grad : grads) grad = stack.optional();
  const Tensor saved = stack.tensor();
  const auto carried = stack.optional(), output = stack.optional(), h0 = stack.optional(),
             carried0 = stack.optional();
  const Tensor w_h = cast(stack.tensor(), OwnEngine::storage_of_weights(saved.scalar_type()));
  const Masks masks = stack.masks();
  const OwnEngine engine = engine_of(cell, saved, "own_cell_backward");
  const Backward r = backward_layer(engine, grads[0], grads[1], grads[2],
                                    {.saved = saved,
                                     .carried = carried,
                                     .output = output,
                                     .h0 = h0,
                                     .c0 = carried0,
                                     .weights_h = w_h,
                                     .steps = saved.size(0),
                                     .batch = saved.size(1),
                                     .hidden = saved.size(2) / engine.cell.saved},
                                    masks);
  *values = torch::stable::detail::from(given({r.grad_terms, r.grad_h0, r.grad_c0}));
}

void step(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const int64_t cell = stack.integer();
  const Tensor input = stack.tensor();
  const ScalarType dtype = input.scalar_type(), storage = OwnEngine::storage(dtype);
  const Tensor h = cast(stack.tensor(), storage);
  const auto carried = stack.optional();
  const Weights weights = weights_of(stack, dtype);
  const bool save = stack.flag();
  const StepTensors r = one_step(engine_of(cell, input, "own_cell_step"), cast(input, storage),
                                 weights, h, carried, save);
  *values = torch::stable::detail::from(
      given({cast(r.new_h, dtype), cast(r.new_carried, dtype), cast(r.saved, dtype)}));
}

void step_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const int64_t cell = stack.integer();
  const auto grad_h = stack.optional(), grad_carried = stack.optional();
  const Tensor saved = stack.tensor();
  const auto h = stack.optional(), carried = stack.optional();
  const ScalarType dtype = saved.scalar_type();
  const StepBackwardTensors r = one_step_backward(engine_of(cell, saved, "own_cell_step_backward"),
                                                  grad_h, grad_carried, saved, h, carried);
  *values =
      torch::stable::detail::from(given({cast(r.grad_terms, dtype), cast(r.grad_h_direct, dtype),
                                         cast(r.grad_carried_before, dtype)}));
}

STABLE_TORCH_LIBRARY_FRAGMENT(my_ops, m) {
  m.def(
      "own_cell(int cell, Tensor input, Tensor h0, Tensor? carried0, Tensor weight_ih, Tensor "
      "weight_hh, Tensor? bias_ih, Tensor? bias_hh, Tensor? lengths, Tensor? reset, Tensor? "
      "zoneout, bool save) -> Tensor[]");
  m.def(
      "own_cell_backward(int cell, Tensor? grad_output, Tensor? grad_h_n, Tensor? "
      "grad_carried_n, Tensor saved, Tensor? carried, Tensor? output, Tensor? h0, Tensor? "
      "carried0, Tensor weight_hh, Tensor? lengths, Tensor? reset, Tensor? zoneout) -> Tensor[]");
  m.def(
      "own_cell_step(int cell, Tensor input, Tensor h, Tensor? carried, Tensor weight_ih, Tensor "
      "weight_hh, Tensor? bias_ih, Tensor? bias_hh, bool save) -> Tensor[]");
  m.def(
      "own_cell_step_backward(int cell, Tensor? grad_h, Tensor? grad_carried, Tensor saved, "
      "Tensor? h, Tensor? carried) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("own_cell", &layer);
  m.impl("own_cell_backward", &layer_backward);
  m.impl("own_cell_step", &step);
  m.impl("own_cell_step_backward", &step_backward);
}

}  // namespace
}  // namespace my_ops

// The widest instruction set that the processor and the kernels of this file's module have, as
// compilers name it, or an empty string for the compiler's default.
MY_OPS_EXPORT const char* my_ops_level_of_own_cell() {
#ifdef MY_OPS_LEVELS
  if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
  if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
#endif
  return "";
}

// Returns the number by which the ops know the cell. entry: OwnCellEntry, which stays loaded.
MY_OPS_EXPORT int64_t my_ops_add_own_cell(void* entry, int is_double) {
  using namespace my_ops;
  static const cpu::EngineFunctions engine{&cpu::product<float>, &cpu::product<double>,
                                           &cpu::convert,        &cpu::convert,
                                           &cpu::convert,        &cpu::convert};
  const void* functions = reinterpret_cast<cpu::OwnCellEntry>(entry)(&engine);
  const auto own = [&]<typename Acc>(ScalarType acc) {
    const auto& of = *static_cast<const cpu::CellFunctions<Acc>*>(functions);
    return OwnCell{functions, of.sizes, acc};
  };
  const OwnCell cell = is_double ? own.template operator()<double>(ScalarType::Double)
                                 : own.template operator()<float>(ScalarType::Float);
  const std::lock_guard lock(mutex);
  cells.push_back(cell);
  return static_cast<int64_t>(cells.size()) - 1;
}
