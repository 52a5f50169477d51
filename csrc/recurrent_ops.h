// Recurrent ops: the ops themselves, for any cell and on both backends.
//
// Op describes the ops of a cell: Cell, a cell of kernels/recurrent/cells that carries one value,
// c, or none; Weights, a kind of parameters of recurrent_weights.h; and the names of the ops in
// messages: kCell, kCellBackward, kLayer and kLayerBackward. The schemas are in bindings.cpp, with
// arguments in the order in which they are read here.
#pragma once

#include "recurrent_explain.h"
#include "recurrent_steps.h"

namespace my_ops {

// The arguments of a boxed call; each must be taken once, in order.
class Stack {
 public:
  explicit Stack(StableIValue* values) : next_(values) {}

  Tensor tensor() { return torch::stable::detail::to<Tensor>(*next_++); }
  std::optional<Tensor> optional() {
    return torch::stable::detail::to<std::optional<Tensor>>(*next_++);
  }
  int64_t integer() { return torch::stable::detail::to<int64_t>(*next_++); }
  bool flag() { return torch::stable::detail::to<bool>(*next_++); }
  Name name() { return torch::stable::detail::to<Name>(*next_++); }
  std::vector<Tensor> list() { return torch::stable::detail::to<std::vector<Tensor>>(*next_++); }
  template <size_t Count>
  std::array<Tensor, Count> tensors() {
    std::array<Tensor, Count> taken;
    for (Tensor& t : taken) t = tensor();
    return taken;
  }
  template <size_t Count>
  std::array<std::optional<Tensor>, Count> optionals() {
    std::array<std::optional<Tensor>, Count> taken;
    for (auto& t : taken) t = optional();
    return taken;
  }
  // First the required arguments, then those that may be None.
  template <typename Op>
  Parameters<Op> parameters() {
    Parameters<Op> taken;
    for (size_t i = 0; i < taken.size(); ++i) {
      taken[i] = i < Op::Weights::kRequired ? tensor() : optional();
    }
    return taken;
  }
  std::optional<Tensor> tensor_if(bool given) {
    return given ? std::optional(tensor()) : std::nullopt;
  }
  Masks masks() {
    auto lengths = optional(), reset = optional();
    return {std::move(lengths), std::move(reset), optional()};
  }

 private:
  StableIValue* next_;
};

// The results: tensors and, if an op has them, optional ones.
template <typename... Results>
void give(StableIValue* stack, const Results&... results) {
  const auto put = [&](const std::optional<Tensor>& t) {
    if (t) *stack++ = torch::stable::detail::from(*t);
  };
  (put(results), ...);
}

template <size_t Count>
std::array<std::optional<Tensor>, Count> cast(const std::array<std::optional<Tensor>, Count>& given,
                                              ScalarType dtype) {
  std::array<std::optional<Tensor>, Count> result;
  for (size_t i = 0; i < Count; ++i) result[i] = cast(given[i], dtype);
  return result;
}

// The ops of a cell on a backend.
template <typename Op, template <typename> typename BackendOf>
struct RecurrentOps {
  using Cell = typename Op::Cell;
  using Backend = BackendOf<Op>;
  static_assert(Cell::kCarried <= 1, "the schemas have no more than c");

  static void implement(torch::stable::detail::StableLibrary& m) {
    const std::string step = Op::kCell, layer = Op::kLayer;
    cells_of_ops().emplace(layer, kCellFacts<Cell>);
    m.impl(step.c_str(), &any_step<false>);
    m.impl((step + "_forward").c_str(), &any_step<true>);
    m.impl((step + "_backward").c_str(), &step_backward);
    m.impl(layer.c_str(), &any_layer<false>);
    m.impl((layer + "_forward").c_str(), &any_layer<true>);
    m.impl((layer + "_backward").c_str(), &any_layer_backward);
  }

  // One layer and direction, in the type of the input.
  static Forward layer(const Backend& backend, const LayerArguments<Op>& a, bool save,
                       const Ends& ends = {}) {
    const auto parameters = cast(a.parameters, Backend::storage_of_weights(a.input.scalar_type()));
    return forward_layer(backend, a.input, a.states[0], carried_of(a.states),
                         Op::Weights::of(parameters, a.states[0].size(1)), a.masks, save, ends);
  }

  // In the types of the arithmetic.
  static StepBackwardTensors step_gradients(const Backend& backend,
                                            const StepBackwardArguments<Op>& a) {
    const ScalarType storage = Backend::storage_of_backward(a.gates.scalar_type());
    return one_step_backward(backend, cast(a.grads[0], storage), carried_of(a.grads),
                             cast(a.gates, storage), cast(a.old_h, storage),
                             cast(a.old_cell, storage));
  }

  static Backward layer_backward(const Backend& backend, const LayerBackwardArguments<Op>& a) {
    const int64_t hidden = a.gates.size(2) / Cell::kSaved;
    const Tensor recurrent = cast(a.recurrent, Backend::storage_of_weights(a.gates.scalar_type()));
    return backward_layer(backend, a.grad_output, a.grads[0], carried_of(a.grads),
                          {.saved = a.gates,
                           .carried = a.cells,
                           .output = a.output,
                           .h0 = a.h0,
                           .c0 = a.c0,
                           .weights_h = Op::Weights::of_h(recurrent, hidden),
                           .steps = a.gates.size(0),
                           .batch = a.gates.size(1),
                           .hidden = hidden,
                           .of_states = a.of_states},
                          a.masks);
  }

 private:
  static constexpr size_t kCount = kStates<Cell>;

  static std::optional<Tensor> carried_of(const States<Cell>& states) {
    return Cell::kCarried > 0 ? std::optional(states[kCount - 1]) : std::nullopt;
  }
  static std::optional<Tensor> carried_of(const GivenStates<Cell>& states) {
    return Cell::kCarried > 0 ? states[kCount - 1] : std::nullopt;
  }

  template <bool Save>
  static void any_step(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    StepArguments<Op> a;
    a.input = given.tensor();
    a.parameters = given.template parameters<Op>();
    a.states = given.template tensors<kCount>();
    check_step<Op>(a);
    const Backend backend(a.input);
    const ScalarType dtype = a.input.scalar_type(), storage = Backend::storage(dtype);
    const auto parameters = cast(a.parameters, Backend::storage_of_weights(dtype));
    const StepTensors r =
        one_step(backend, cast(a.input, storage), Op::Weights::of(parameters, a.states[0].size(1)),
                 cast(a.states[0], storage), carried_of(a.states), Save);
    give(stack, cast(r.new_h, dtype), cast(r.new_carried, dtype), cast(r.saved, dtype));
  }

  static void step_backward(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    StepBackwardArguments<Op> a;
    a.grads = given.template optionals<kCount>();
    a.gates = given.tensor();
    a.old_h = given.tensor_if(Cell::kReadsH);
    a.old_cell = given.tensor_if(Cell::kCarried > 0);
    check_step_backward<Op>(a);
    const StepBackwardTensors r = step_gradients(Backend(a.gates), a);
    const ScalarType dtype = a.gates.scalar_type();
    give(stack, cast(r.grad_terms, dtype), cast(r.grad_h_direct, dtype),
         cast(r.grad_carried_before, dtype));
  }

  template <bool Save>
  static void any_layer(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    LayerArguments<Op> a;
    a.input = given.tensor();
    a.states = given.template tensors<kCount>();
    a.parameters = given.template parameters<Op>();
    a.masks = given.masks();
    check_layer<Op>(a);
    const Forward r = layer(Backend(a.input), a, Save);
    give(stack, r.output, r.h_n, r.c_n, r.saved, r.carried);
  }

  static void any_layer_backward(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    LayerBackwardArguments<Op> a;
    a.grad_output = given.optional();
    a.grads = given.template optionals<kCount>();
    a.gates = given.tensor();
    a.output = given.tensor_if(Cell::kReadsH);
    a.cells = given.tensor_if(Cell::kCarried > 0);
    a.h0 = given.tensor_if(Cell::kReadsH);
    a.c0 = given.tensor_if(Cell::kCarried > 0);
    a.recurrent = given.tensor();
    a.masks = given.masks();
    check_layer_backward<Op>(a);
    const Backward r = layer_backward(Backend(a.gates), a);
    give(stack, r.grad_terms, r.grad_h0, r.grad_c0);
  }
};

}  // namespace my_ops
