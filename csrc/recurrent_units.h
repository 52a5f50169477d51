// The cells that the module is compiled with, as units of recurrent_layers, and the gradients of
// one step of theirs: recurrent_step_backward.
#pragma once

#include "recurrent_layers.h"

namespace my_ops {

// The gradients of a cell's parameters, in their order.
template <typename Weights, typename Parameters>
Tensors joined_gradients(const WeightsGradients& g, const Parameters& parameters) {
  if constexpr (std::is_same_v<Weights, OneMatrix>) {
    const Sizes bias = sizes_of(*parameters[1]);
    return {g.one ? *g.one : joined({g.w_h, g.w_x}, 1),
            as_strided(g.bias_x, bias, contiguous_strides(bias))};
  } else {
    return {g.w_x, g.w_h, g.bias_x, g.bias_h};
  }
}

// A cell that the module is compiled with.
template <typename Op, template <typename> typename BackendOf>
struct CompiledUnit {
  using Cell = typename Op::Cell;
  using Weights = typename Op::Weights;
  using Backend = BackendOf<Op>;
  using Ops = RecurrentOps<Op, BackendOf>;
  static constexpr CellSizes sizes = kCellSizes<Cell>;
  static constexpr size_t least_parameters = Weights::kRequired;
  static constexpr size_t most_parameters = Weights::kNames.size();
  static constexpr size_t kCount = kStates<Cell>;

  CompiledUnit(const LayersArguments&, const char*) {}

  static Parameters<Op> parameters_of(std::span<const Tensor> given) {
    Parameters<Op> result;
    std::copy(given.begin(), given.end(), result.begin());
    return result;
  }

  static std::optional<int64_t> hidden(std::span<const Tensor> parameters) {
    const auto agreed = Weights::sizes(parameters_of(parameters), Cell::kGates);
    return agreed ? std::optional(agreed->hidden) : std::nullopt;
  }

  static LayerArguments<Op> arguments_of(const CellCall& call) {
    LayerArguments<Op> result{.input = call.input,
                              .states = {},
                              .parameters = parameters_of(call.parameters),
                              .masks = {}};
    result.states[0] = call.h0;
    if (Cell::kCarried > 0) result.states[kCount - 1] = *call.c0;
    return result;
  }

  static void check(const CellCall& call) { check_layer<Op>(arguments_of(call)); }

  static Forward forward(const CellCall& call, bool save, const Ends& ends) {
    return Ops::layer(Backend(call.input), arguments_of(call), save, ends);
  }

  static Backward backward(const CellGradients& grads, const CellCall& call, const Tensor* saved) {
    LayerBackwardArguments<Op> of{.grad_output = grads.output,
                                  .grads = {},
                                  .gates = saved[1],
                                  .output = std::nullopt,
                                  .cells = std::nullopt,
                                  .h0 = std::nullopt,
                                  .c0 = std::nullopt,
                                  .recurrent = call.parameters[Weights::kRecurrentAt],
                                  .masks = {},
                                  .of_states = grads.of_states};
    of.grads[0] = grads.h_n;
    if (Cell::kCarried > 0) of.grads[kCount - 1] = grads.c_n;
    if (Cell::kReadsH) of.output = saved[0], of.h0 = call.h0;
    if (Cell::kCarried > 0) of.cells = saved[2], of.c0 = call.c0;
    check_layer_backward<Op>(of);
    return Ops::layer_backward(Backend(call.input), of);
  }

  static UnitGradients weights_backward(const Tensor& grad_terms, const CellGradients& grads,
                                        const CellCall& call, const Tensor& output) {
    std::optional<Tensor> weight_x;
    const Parameters<Op> p = parameters_of(call.parameters);
    if (grads.of_input) weight_x = Weights::of(p, call.h0.size(1)).x;
    const WeightsGradients g = Backend::weights_backward({.grad_gates = grad_terms,
                                                          .input = call.input,
                                                          .h0 = call.h0,
                                                          .output = output,
                                                          .weight_x = weight_x,
                                                          .reset = std::nullopt,
                                                          .gates = Cell::kGates,
                                                          .parameters = grads.of_parameters});
    return {g.input, grads.of_parameters ? joined_gradients<Weights>(g, p) : Tensors{}};
  }
};

// The gradients of a step of such a cell.
template <typename Op, template <typename> typename BackendOf>
struct StepGradientsOf {
  using Cell = typename Op::Cell;
  using Backend = BackendOf<Op>;
  using Ops = RecurrentOps<Op, BackendOf>;
  static constexpr size_t kCount = kStates<Cell>;

  static Tensors step_backward(const StepGradientsArguments& a) {
    constexpr const char* op = StepGradientsArguments::kName;
    check(a.states.size() == kCount, op, ": states must be ", kCount, " tensors, got ",
          a.states.size());
    const size_t each = a.parameters.size();
    check(each >= Op::Weights::kRequired && each <= Op::Weights::kNames.size(), op,
          ": parameters must be those of a cell, got ", each);
    StepArguments<Op> call{.input = a.input, .parameters = {}, .states = {}};
    for (size_t i = 0; i < each; ++i) call.parameters[i] = a.parameters[i];
    for (size_t i = 0; i < kCount; ++i) call.states[i] = a.states[i];
    check_step<Op>(call);
    StepBackwardArguments<Op> of{
        .grads = {}, .gates = a.gates, .old_h = std::nullopt, .old_cell = std::nullopt};
    of.grads[0] = a.grad_h;
    if (Cell::kReadsH) of.old_h = a.states[0];
    if (Cell::kCarried > 0) of.grads[kCount - 1] = a.grad_cell, of.old_cell = a.states[kCount - 1];
    check_step_backward<Op>(of);
    const Backend backend(a.gates);
    const StepBackwardTensors r = Ops::step_gradients(backend, of);
    const Tensor& h = a.states[0];
    const ScalarType dtype = a.gates.scalar_type();
    Tensors results;
    WeightsGradients g;
    if (a.needs_input || a.needs_parameters) {
      const auto one_step = [](const Tensor& t) {  // (1, batch, .)
        return as_strided(t, {1, t.size(0), t.size(1)}, {0, t.stride(0), t.stride(1)});
      };
      std::optional<Tensor> weight_x;
      if (a.needs_input) weight_x = Op::Weights::of(call.parameters, h.size(1)).x;
      g = Backend::weights_backward({.grad_gates = one_step(cast(r.grad_terms, dtype)),
                                     .input = one_step(a.input),
                                     .h0 = h,
                                     .output = one_step(h),
                                     .weight_x = weight_x,
                                     .reset = std::nullopt,
                                     .gates = Cell::kGates,
                                     .parameters = a.needs_parameters});
    }
    if (a.needs_input)
      results.push_back(
          as_strided(g.input, sizes_of(a.input), contiguous_strides(sizes_of(a.input))));
    if (a.needs_states) {
      const ScalarType storage = Backend::storage(dtype);
      const Tensor recurrent =
          Op::Weights::of_h(cast(a.parameters[Op::Weights::kRecurrentAt], storage), h.size(1));
      const Tensor through = empty(h, sizes_of(h), compute_dtype(dtype));
      if (through.numel() > 0) {
        backend.matmul(product_terms(cast(r.grad_terms, storage), backend.cell), recurrent,
                       through);
      }
      const Tensor sum =
          r.grad_h_direct ? start_backward(backend, through, r.grad_h_direct, std::nullopt, storage)
                          : through;
      results.push_back(cast(sum, dtype));
      if (Cell::kCarried > 0) results.push_back(cast(*r.grad_carried_before, dtype));
    }
    if (a.needs_parameters) {
      const Tensors all = joined_gradients<typename Op::Weights>(g, call.parameters);
      results.insert(results.end(), all.begin(), all.begin() + static_cast<ptrdiff_t>(each));
    }
    return results;
  }
};

// All ops of a cell on a backend.
template <typename Op, template <typename> typename BackendOf>
void implement(torch::stable::detail::StableLibrary& m) {
  RecurrentOps<Op, BackendOf>::implement(m);
  using Layers = LayersOf<CompiledUnit<Op, BackendOf>>;
  BackendOf<Op>::layers().add(Op::kLayer, {&Layers::forward, &Layers::backward,
                                           &StepGradientsOf<Op, BackendOf>::step_backward});
}

}  // namespace my_ops
