// The engine on the CPU for cells that programs define. my_ops/recurrent/_own_cpu.py has their
// kernels compiled, adds them here, and calls these ops. What a unit carries is side by side:
// (batch, carried * hidden).
#include <deque>
#include <map>
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
std::map<std::string, std::array<int64_t, 2>> numbers;  // by name, for float and for double

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

// The cell of a name, for a tensor of the call.
OwnEngine engine_of(const std::string& name, const Tensor& t, const char* op) {
  const auto number = [&] {
    const std::lock_guard lock(mutex);
    return numbers.at(name)[compute_dtype(t.scalar_type()) == ScalarType::Double];
  };
  return engine_of(number(), t, op);
}

Tensors given(std::initializer_list<std::optional<Tensor>> all) {
  Tensors result;
  for (const auto& t : all) {
    if (t) result.push_back(*t);
  }
  return result;
}

struct Argument {
  const std::optional<Tensor>& t;
  const char* name;
  Sizes want;
  bool needed = true;
};

void check_arguments(std::initializer_list<Argument> arguments, const Tensor& like,
                     const char* like_name, const char* op) {
  for (const auto& [t, name, want, needed] : arguments) {
    check(t || !needed, op, ": ", name, " must be a tensor, got None");
    if (!t) continue;
    check_kind(*t, name, like, like_name, op);
    check_shape(*t, name, want, "of the cell's sizes", op);
  }
}

// The four of TwoMatrices, and those with a value for each unit, side by side.
struct Parameters {
  std::array<std::optional<Tensor>, 4> of_products;
  std::optional<Tensor> vectors;
};

Parameters parameters_of(Stack& stack) {
  Parameters p;
  for (size_t i = 0; i < 2; ++i) p.of_products[i] = stack.tensor();
  p.vectors = stack.optional();
  for (size_t i = 2; i < 4; ++i) p.of_products[i] = stack.optional();
  return p;
}

// Of a layer or a step, whose input has so many dimensions. Returns the hidden size.
int64_t check_inputs(const CellSizes& cell, const Tensor& input, int64_t dims,
                     const std::optional<Tensor>& h, const std::optional<Tensor>& carried,
                     const Parameters& parameters, const char* op) {
  const auto& p = parameters.of_products;
  check_floating(input, op, "input");
  check(input.dim() == dims, op, ": input must have ", dims, " dimensions, got ", show(input));
  check(p[1]->dim() == 2, op, ": weight_hh must be a matrix, got ", show(*p[1]));
  const int64_t batch = input.size(dims - 2), hidden = p[1]->size(1), rows = cell.gates * hidden;
  check_arguments({{p[0], "weight_ih", {rows, input.size(dims - 1)}},
                   {p[1], "weight_hh", {rows, hidden}},
                   {p[2], "bias_ih", {rows}, false},
                   {p[3], "bias_hh", {rows}, false},
                   {parameters.vectors, "vectors", {cell.vectors * hidden}, cell.vectors > 0},
                   {h, "h", {batch, hidden}},
                   {carried, "carried", {batch, cell.carried * hidden}, cell.carried > 0}},
                  input, "input", op);
  return hidden;
}

// What backward gets, whose first dimensions are those of `saved`. Returns the hidden size.
int64_t check_saved(const CellSizes& cell, const Tensor& saved, int64_t dims, const char* op) {
  check_floating(saved, op, "saved");
  check(saved.dim() == dims && saved.size(dims - 1) % cell.saved == 0, op, ": saved must have ",
        dims, " dimensions, the last of ", cell.saved, " * hidden_size, got ", show(saved));
  return saved.size(dims - 1) / cell.saved;
}

Weights weights_of(Parameters p, ScalarType dtype) {
  const ScalarType storage = OwnEngine::storage_of_weights(dtype);
  for (auto& parameter : p.of_products) parameter = cast(parameter, storage);
  Weights weights = TwoMatrices::of(p.of_products, 0);
  weights.vectors = as_contiguous(cast(p.vectors, storage));
  return weights;
}

// All layers and directions of such a cell, of one head: see recurrent_layers.h. Between its
// weights and its biases a cell has its parameters of each unit, a tensor each.
struct OwnUnit {
  OwnEngine engine;
  CellSizes sizes;
  size_t least_parameters, most_parameters;

  OwnUnit(const LayersArguments& a, const char* op)
      : engine(engine_of(a.cell, a.input, op)),
        sizes(engine.cell),
        least_parameters(2 + static_cast<size_t>(sizes.vectors)),
        most_parameters(least_parameters + 2) {}

  Parameters parameters_of(std::span<const Tensor> given) const {
    Parameters p;
    p.of_products[0] = given[0];
    p.of_products[1] = given[1];
    const auto vectors = given.subspan(2, least_parameters - 2);
    if (vectors.size() == 1) p.vectors = vectors[0];
    if (vectors.size() > 1) p.vectors = joined({vectors.begin(), vectors.end()});
    for (size_t i = least_parameters; i < given.size(); ++i) {
      p.of_products[2 + i - least_parameters] = given[i];
    }
    return p;
  }

  std::optional<int64_t> hidden(std::span<const Tensor> given) const {
    const Tensor& w_h = given[1];
    return w_h.dim() == 2 ? std::optional(w_h.size(1)) : std::nullopt;
  }

  void check(const CellCall& call) const {
    check_inputs(sizes, call.input, 3, call.h0, call.c0, parameters_of(call.parameters),
                 LayersArguments::kName);
  }

  Forward forward(const CellCall& call, bool save, const Ends& ends) const {
    const Weights weights = weights_of(parameters_of(call.parameters), call.input.scalar_type());
    return forward_layer(engine, call.input, call.h0, call.c0, weights, {}, save, ends);
  }

  Backward backward(const CellGradients& grads, const CellCall& call, const Tensor* saved) const {
    const Tensor& output = saved[0];
    SavedTensors of{
        .saved = saved[1],
        .carried = std::nullopt,
        .output = std::nullopt,
        .h0 = std::nullopt,
        .c0 = call.c0,
        .weights_h = cast(call.parameters[1], OwnEngine::storage_of_weights(output.scalar_type())),
        .steps = output.size(0),
        .batch = output.size(1),
        .hidden = output.size(2),
        .of_states = grads.of_states};
    if (sizes.carried > 0) of.carried = saved[2];
    if (sizes.reads_h) of.output = output, of.h0 = call.h0;
    return backward_layer(engine, grads.output, grads.h_n, grads.c_n, of, {});
  }

  UnitGradients weights_backward(const Tensor& grad_terms, const CellGradients& grads,
                                 const CellCall& call, const Tensor& output) const {
    const auto p = call.parameters;
    WeightsGradients g =
        cpu::weights_backward({.grad_gates = grad_terms,
                               .input = call.input,
                               .h0 = call.h0,
                               .output = output,
                               .weight_x = grads.of_input ? std::optional(p[0]) : std::nullopt,
                               .reset = std::nullopt,
                               .gates = sizes.gates,
                               .parameters = grads.of_parameters,
                               .vectors = sizes.vectors});
    Tensors all{g.w_x, g.w_h};
    all.insert(all.end(), g.vectors.begin(), g.vectors.end());
    all.insert(all.end(), {g.bias_x, g.bias_h});
    return {g.input, std::move(all)};
  }
};

void layer(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const int64_t cell = stack.integer();
  const Tensor input = stack.tensor(), h0 = stack.tensor();
  const auto carried0 = stack.optional();
  const Parameters parameters = parameters_of(stack);
  const Masks masks = stack.masks();
  const bool save = stack.flag();
  const char* const op = "own_cell";
  const OwnEngine engine = engine_of(cell, input, op);
  const int64_t hidden = check_inputs(engine.cell, input, 3, h0, carried0, parameters, op);
  check_masks(masks, input, "input", input.size(0), input.size(1), hidden, op);
  const Forward r = forward_layer(engine, input, h0, carried0,
                                  weights_of(parameters, input.scalar_type()), masks, save);
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
  const std::optional<Tensor> recurrent = stack.tensor();
  const Masks masks = stack.masks();
  const char* const op = "own_cell_backward";
  const OwnEngine engine = engine_of(cell, saved, op);
  const CellSizes& sizes = engine.cell;
  const int64_t hidden = check_saved(sizes, saved, 3, op), steps = saved.size(0),
                batch = saved.size(1), side_by_side = sizes.carried * hidden;
  const bool carries = sizes.carried > 0;
  check_arguments({{grads[0], "grad_output", {steps, batch, hidden}, false},
                   {grads[1], "grad_h_n", {batch, hidden}, false},
                   {grads[2], "grad_carried_n", {batch, side_by_side}, false},
                   {carried, "carried", {steps, batch, side_by_side}, carries},
                   {output, "output", {steps, batch, hidden}, sizes.reads_h},
                   {h0, "h0", {batch, hidden}, sizes.reads_h},
                   {carried0, "carried0", {batch, side_by_side}, carries},
                   {recurrent, "weight_hh", {sizes.gates * hidden, hidden}}},
                  saved, "saved", op);
  check_masks(masks, saved, "saved", steps, batch, hidden, op);
  const Tensor w_h = cast(*recurrent, OwnEngine::storage_of_weights(saved.scalar_type()));
  const Backward r = backward_layer(engine, grads[0], grads[1], grads[2],
                                    {.saved = saved,
                                     .carried = carried,
                                     .output = output,
                                     .h0 = h0,
                                     .c0 = carried0,
                                     .weights_h = w_h,
                                     .steps = steps,
                                     .batch = batch,
                                     .hidden = hidden},
                                    masks);
  *values = torch::stable::detail::from(given({r.grad_terms, r.grad_h0, r.grad_c0}));
}

void step(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const int64_t cell = stack.integer();
  const Tensor input = stack.tensor();
  const Tensor h = stack.tensor();
  const auto carried = stack.optional();
  const Parameters parameters = parameters_of(stack);
  const bool save = stack.flag();
  const char* const op = "own_cell_step";
  const OwnEngine engine = engine_of(cell, input, op);
  check_inputs(engine.cell, input, 2, h, carried, parameters, op);
  const ScalarType dtype = input.scalar_type(), storage = OwnEngine::storage(dtype);
  const StepTensors r = one_step(engine, cast(input, storage), weights_of(parameters, dtype),
                                 cast(h, storage), carried, save);
  *values = torch::stable::detail::from(
      given({cast(r.new_h, dtype), cast(r.new_carried, dtype), cast(r.saved, dtype)}));
}

void step_backward(StableIValue* values, uint64_t, uint64_t) {
  Stack stack(values);
  const int64_t cell = stack.integer();
  const auto grad_h = stack.optional(), grad_carried = stack.optional();
  const Tensor saved = stack.tensor();
  const auto h = stack.optional(), carried = stack.optional();
  const char* const op = "own_cell_step_backward";
  const OwnEngine engine = engine_of(cell, saved, op);
  const CellSizes& sizes = engine.cell;
  const int64_t hidden = check_saved(sizes, saved, 2, op), batch = saved.size(0),
                side_by_side = sizes.carried * hidden;
  check_arguments({{grad_h, "grad_h", {batch, hidden}, false},
                   {grad_carried, "grad_carried", {batch, side_by_side}, false},
                   {h, "h", {batch, hidden}, sizes.reads_h},
                   {carried, "carried", {batch, side_by_side}, sizes.carried > 0}},
                  saved, "saved", op);
  const ScalarType dtype = saved.scalar_type();
  const StepBackwardTensors r = one_step_backward(engine, grad_h, grad_carried, saved, h, carried);
  *values =
      torch::stable::detail::from(given({cast(r.grad_terms, dtype), cast(r.grad_h_direct, dtype),
                                         cast(r.grad_carried_before, dtype)}));
}

STABLE_TORCH_LIBRARY_FRAGMENT(my_ops, m) {
  m.def(
      "own_cell(int cell, Tensor input, Tensor h0, Tensor? carried0, Tensor weight_ih, Tensor "
      "weight_hh, Tensor? vectors, Tensor? bias_ih, Tensor? bias_hh, Tensor? lengths, Tensor? "
      "reset, Tensor? zoneout, bool save) -> Tensor[]");
  m.def(
      "own_cell_backward(int cell, Tensor? grad_output, Tensor? grad_h_n, Tensor? "
      "grad_carried_n, Tensor saved, Tensor? carried, Tensor? output, Tensor? h0, Tensor? "
      "carried0, Tensor weight_hh, Tensor? lengths, Tensor? reset, Tensor? zoneout) -> Tensor[]");
  m.def(
      "own_cell_step(int cell, Tensor input, Tensor h, Tensor? carried, Tensor weight_ih, Tensor "
      "weight_hh, Tensor? vectors, Tensor? bias_ih, Tensor? bias_hh, bool save) -> Tensor[]");
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
  return "x86-64";
#else
  return "";
#endif
}

// Returns the number by which the ops know the cell; recurrent_layers knows it by its name. entry:
// OwnCellEntry, which stays loaded.
MY_OPS_EXPORT int64_t my_ops_add_own_cell(const char* name, void* entry, int is_double) {
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
  const auto number = [&] {
    const std::lock_guard lock(mutex);
    cells.push_back(cell);
    const auto added = static_cast<int64_t>(cells.size()) - 1;
    const auto [of_name, is_new] = numbers.try_emplace(name, std::array<int64_t, 2>{-1, -1});
    of_name->second[is_double != 0] = added;
    return added;
  }();
  using Layers = LayersOf<OwnUnit>;
  cpu::layers().add(name, {&Layers::forward, &Layers::backward, nullptr});
  return number;
}
