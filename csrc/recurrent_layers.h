// All layers and directions of a recurrent layer in one call: recurrent_layers, and their gradients
// in another: recurrent_layers_backward. Both are for any cell, which they know by its name, and
// take no masks. What a call saves for its gradients is a list of tensors, in this order:
//   for each layer, its joined input if it has two directions and is not the first,
//   for each cell of the layer, the output in the order of its steps, the saved values and, if it
//   carries values, those of every step.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "recurrent_weights_backward.h"

namespace my_ops {

using Tensors = std::vector<Tensor>;

struct LayersArguments {
  static constexpr const char* kName = "recurrent_layers";

  Tensor input;        // (steps, batch, input_size)
  Tensors states;      // each (cells, batch, hidden_size), or none: zeros
  Tensors parameters;  // of all cells
  int64_t layers;
  bool bidirectional, save;

  size_t directions() const { return bidirectional ? 2 : 1; }
  size_t cells() const { return static_cast<size_t>(layers) * directions(); }
  size_t of_a_cell() const { return parameters.size() / cells(); }
};

struct LayersBackwardArguments {
  static constexpr const char* kName = "recurrent_layers_backward";

  std::optional<Tensor> grad_output, grad_h_n, grad_c_n;
  LayersArguments of;
  Tensors saved;
  bool needs_input, needs_states, needs_parameters;
};

// The gradients of a cell of one step.
struct StepGradientsArguments {
  static constexpr const char* kName = "recurrent_step_backward";

  std::optional<Tensor> grad_h, grad_cell;
  Tensor gates, input;
  Tensors states, parameters;
  bool needs_input, needs_states, needs_parameters;
};

inline LayersArguments layers_arguments(Stack& given) {
  LayersArguments a;
  a.input = given.tensor();
  a.states = given.list();
  a.parameters = given.list();
  a.layers = given.integer();
  a.bidirectional = given.flag();
  return a;
}

// The functions of a cell on a backend.
struct LayersOps {
  Tensors (*forward)(const LayersArguments&);
  Tensors (*backward)(const LayersBackwardArguments&);
  Tensors (*step_backward)(const StepGradientsArguments&);
};

// By the name of the cell; each cell's file enters its own when the module is loaded.
using LayersByCell = std::map<std::string, LayersOps, std::less<>>;
namespace cpu {
inline LayersByCell& layers() {
  static LayersByCell map;
  return map;
}
}  // namespace cpu
namespace cuda {
inline LayersByCell& layers() {
  static LayersByCell map;
  return map;
}
}  // namespace cuda

// The ops on a backend.
template <LayersByCell& (*kLayers)()>
struct LayersBinding {
  static void implement(torch::stable::detail::StableLibrary& m) {
    m.impl(LayersArguments::kName, &forward);
    m.impl(LayersBackwardArguments::kName, &backward);
    m.impl(StepGradientsArguments::kName, &step_backward);
  }

 private:
  static const LayersOps& of(const Name& cell, const char* op) {
    const auto found = kLayers().find(std::string_view(cell));
    check(found != kLayers().end(), op, ": cell must be the name of a recurrent op, got '", cell,
          "'");
    return found->second;
  }

  static void forward(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    const Name cell = given.name();
    LayersArguments a = layers_arguments(given);
    a.save = given.flag();
    *stack = torch::stable::detail::from(of(cell, a.kName).forward(a));
  }

  static void backward(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    const Name cell = given.name();
    LayersBackwardArguments a;
    for (auto* grad : {&a.grad_output, &a.grad_h_n, &a.grad_c_n}) *grad = given.optional();
    a.of = layers_arguments(given);
    a.saved = given.list();
    for (bool* needs : {&a.needs_input, &a.needs_states, &a.needs_parameters}) {
      *needs = given.flag();
    }
    *stack = torch::stable::detail::from(of(cell, a.kName).backward(a));
  }

  static void step_backward(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    const Name cell = given.name();
    StepGradientsArguments a;
    a.grad_h = given.optional();
    a.grad_cell = given.optional();
    a.gates = given.tensor();
    a.input = given.tensor();
    a.states = given.list();
    a.parameters = given.list();
    for (bool* needs : {&a.needs_input, &a.needs_states, &a.needs_parameters}) {
      *needs = given.flag();
    }
    *stack = torch::stable::detail::from(of(cell, a.kName).step_backward(a));
  }
};

// (steps, batch, columns) with its steps in the opposite order.
inline Tensor reversed(const Tensor& t) { return aten("aten::flip", "", t, Sizes{0}); }

// t[k] of (cells, batch, hidden).
inline Tensor of_cell(const Tensor& t, int64_t k) {
  return as_strided(t, {t.size(1), t.size(2)}, {t.stride(1), t.stride(2)}, k * t.stride(0));
}
inline std::optional<Tensor> of_cell(const std::optional<Tensor>& t, int64_t k) {
  return t ? std::optional(of_cell(*t, k)) : std::nullopt;
}

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

template <typename Op, template <typename> typename BackendOf>
struct LayersOf {
  using Cell = typename Op::Cell;
  using Backend = BackendOf<Op>;
  using Ops = RecurrentOps<Op, BackendOf>;
  static constexpr size_t kCount = kStates<Cell>;
  static constexpr size_t kSavedTensors = 2 + Cell::kCarried;

  static void check_call(const LayersArguments& a, const char* op) {
    check_given(a.input, op, "input");
    check(a.input.dim() == 3, op, ": input must be (steps, batch, input_size), got ",
          show(a.input));
    check(a.layers >= 1, op, ": layers must be positive, got ", a.layers);
    const size_t each = a.of_a_cell();
    check(each * a.cells() == a.parameters.size() && each >= Op::Weights::kRequired &&
              each <= Op::Weights::kNames.size(),
          op, ": parameters must be those of ", a.cells(), " cells, got ", a.parameters.size());
    check(a.states.empty() || a.states.size() == kCount, op, ": states must be ", kCount,
          " tensors or none, got ", a.states.size());
    for (const Tensor& s : a.states) {
      check_given(s, op, "states");
      check(s.dim() == 3 && s.size(0) == static_cast<int64_t>(a.cells()), op,
            ": states must be (layers * directions, batch, hidden_size) with layers * directions "
            "= ",
            a.cells(), ", got ", show(s));
    }
  }

  static Parameters<Op> parameters_of(const LayersArguments& a, size_t k) {
    Parameters<Op> result;
    const size_t each = a.of_a_cell();
    for (size_t i = 0; i < each; ++i) result[i] = a.parameters[k * each + i];
    return result;
  }

  static LayerArguments<Op> arguments_of(const LayersArguments& a, const Tensor& input, size_t k,
                                         const Tensor& zero) {
    LayerArguments<Op> result{
        .input = input, .states = {}, .parameters = parameters_of(a, k), .masks = {}};
    for (size_t i = 0; i < kCount; ++i) {
      result.states[i] = a.states.empty() ? zero : of_cell(a.states[i], static_cast<int64_t>(k));
    }
    return result;
  }

  // The state before the first step where none is given.
  static Tensor zero_state(const LayersArguments& a) {
    if (!a.states.empty()) return {};
    const auto sizes = Op::Weights::sizes(parameters_of(a, 0), Cell::kGates);
    // Parameters that do not agree have no size; the check of the first cell says which is wrong.
    const int64_t hidden = sizes ? sizes->hidden : 0;
    return zeros(a.input, {a.input.size(1), hidden}, a.input.scalar_type());
  }

  // Where the states at the end go: all of a kind in one tensor.
  static std::array<Tensor, kCount> ends(const LayersArguments& a, const Tensor& h0) {
    std::array<Tensor, kCount> result;
    for (Tensor& t : result) {
      t = empty(a.input, {static_cast<int64_t>(a.cells()), h0.size(0), h0.size(1)});
    }
    return result;
  }

  // The results, and what is saved: the output, the states at the end, and the list above.
  static Tensors forward(const LayersArguments& a) {
    check_call(a, LayersArguments::kName);
    const Tensor zero = zero_state(a);
    const size_t directions = a.directions();
    std::array<Tensor, kCount> last;
    Tensors results(1 + kCount);
    Tensor x = a.input;
    for (size_t first = 0; first < a.cells(); first += directions) {
      if (a.save && first > 0 && directions > 1) results.push_back(x);
      Tensors outputs;
      for (size_t d = 0; d < directions; ++d) {
        const size_t k = first + d;
        const LayerArguments<Op> of_cell_k = arguments_of(a, d > 0 ? reversed(x) : x, k, zero);
        check_layer<Op>(of_cell_k);
        if (k == 0) last = ends(a, of_cell_k.states[0]);
        const Forward r = Ops::layer(Backend(a.input), of_cell_k, a.save, places(last, k));
        for (size_t i = 0; i < kCount; ++i) put(last[i], k, i == 0 ? r.h_n : *r.c_n);
        if (a.save) {
          results.push_back(r.output);
          results.push_back(*r.saved);
          if (r.carried) results.push_back(*r.carried);
        }
        outputs.push_back(d > 0 ? reversed(r.output) : r.output);
      }
      x = directions > 1 ? joined(outputs, 2) : outputs[0];
    }
    results[0] = x;
    std::copy(last.begin(), last.end(), results.begin() + 1);
    return results;
  }

  // grad_input, grad_states and the gradients of the parameters: those that are needed.
  static Tensors backward(const LayersBackwardArguments& a) {
    check_backward(a);
    const LayersArguments& of = a.of;
    const Tensor zero = zero_state(of);
    const size_t directions = of.directions(), each = of.of_a_cell();
    std::array<Tensor, kCount> of_states;
    Tensors of_parameters(a.needs_parameters ? of.parameters.size() : 0);
    std::optional<Tensor> grad = a.grad_output, grad_x;
    size_t at = a.saved.size();
    for (size_t first = of.cells(); first > 0;) {
      first -= directions;
      at -= kSavedTensors * directions;
      const Tensor* const of_layer = &a.saved[at];
      const bool inner = first > 0;
      if (inner && directions > 1) --at;
      const Tensor& x = !inner ? of.input : directions > 1 ? a.saved[at] : of_layer[-kBefore];
      grad_x.reset();
      for (size_t d = 0; d < directions; ++d) {
        const size_t k = first + d;
        const LayerArguments<Op> call = arguments_of(of, d > 0 ? reversed(x) : x, k, zero);
        check_layer<Op>(call);
        const Tensor* const own = of_layer + d * kSavedTensors;
        const Backward r = gradients(a, direction_of(grad, d, directions), call, own, k);
        const bool needs_x = inner || a.needs_input;
        const Parameters<Op>& p = call.parameters;
        const int64_t hidden = call.states[0].size(1);
        std::optional<Tensor> weight_x;
        if (needs_x) weight_x = Op::Weights::of(p, hidden).x;
        if (needs_x || a.needs_parameters) {
          const WeightsGradients g = Backend::weights_backward({.grad_gates = r.grad_terms,
                                                                .input = call.input,
                                                                .h0 = call.states[0],
                                                                .output = own[0],
                                                                .weight_x = weight_x,
                                                                .reset = std::nullopt,
                                                                .gates = Cell::kGates,
                                                                .parameters = a.needs_parameters});
          if (a.needs_parameters) {
            const auto all = joined_gradients<typename Op::Weights>(g, p);
            for (size_t i = 0; i < each; ++i) of_parameters[k * each + i] = all[i];
          }
          if (needs_x) {
            const Tensor own_x = d > 0 ? reversed(g.input) : g.input;
            grad_x = grad_x ? torch::stable::subtract(*grad_x, own_x, -1.0) : own_x;
          }
        }
        if (!a.needs_states) continue;
        if (!of_states[0].defined()) of_states = ends(of, call.states[0]);
        for (size_t i = 0; i < kCount; ++i) put(of_states[i], k, i == 0 ? r.grad_h0 : *r.grad_c0);
      }
      grad = grad_x;
    }
    Tensors results;
    if (a.needs_input) results.push_back(*grad_x);
    if (a.needs_states) results.insert(results.end(), of_states.begin(), of_states.end());
    results.insert(results.end(), of_parameters.begin(), of_parameters.end());
    return results;
  }

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

 private:
  // From the saved tensors of a layer of one direction back to the output of the one before.
  static constexpr ptrdiff_t kBefore = kSavedTensors;

  static void check_backward(const LayersBackwardArguments& a) {
    constexpr const char* op = LayersBackwardArguments::kName;
    check_call(a.of, op);
    const size_t cells = a.of.cells();
    const size_t inputs = a.of.bidirectional ? static_cast<size_t>(a.of.layers) - 1 : 0;
    check(a.saved.size() == cells * kSavedTensors + inputs, op, ": saved must be the ",
          cells * kSavedTensors + inputs, " tensors that recurrent_layers saves, got ",
          a.saved.size());
    const int64_t steps = a.of.input.size(0), batch = a.of.input.size(1);
    const auto shaped = [&](const std::optional<Tensor>& t, const char* name, const Sizes& want,
                            const char* rule) {
      if (!t) return;
      check_kind(*t, name, a.of.input, "input", op);
      check_shape(*t, name, want, rule, op);
    };
    const auto sizes = Op::Weights::sizes(parameters_of(a.of, 0), Cell::kGates);
    // This says which parameter is wrong.
    if (!sizes) check_layer<Op>(arguments_of(a.of, a.of.input, 0, zero_state(a.of)));
    const int64_t hidden = sizes ? sizes->hidden : 0;
    const Sizes of_input{steps, batch, 2 * hidden}, of_saved{steps, batch, Cell::kSaved * hidden},
        of_state{steps, batch, hidden};
    auto next = a.saved.begin();
    for (size_t k = 0; k < cells; ++k) {
      if (inputs > 0 && k > 0 && k % 2 == 0)
        shaped(*next++, "saved", of_input, "(steps, batch, .)");
      for (size_t i = 0; i < kSavedTensors; ++i) {
        shaped(*next++, "saved", i == 1 ? of_saved : of_state, "(steps, batch, .)");
      }
    }
    shaped(a.grad_output, "grad_output",
           {steps, batch, static_cast<int64_t>(a.of.directions()) * hidden},
           "(steps, batch, directions * hidden_size)");
    const Sizes end{static_cast<int64_t>(cells), batch, hidden};
    constexpr const char* rule = "(layers * directions, batch, hidden_size)";
    shaped(a.grad_h_n, "grad_h_n", end, rule);
    shaped(a.grad_c_n, "grad_c_n", end, rule);
  }

  static Backward gradients(const LayersBackwardArguments& a, const std::optional<Tensor>& grad,
                            const LayerArguments<Op>& call, const Tensor* saved, size_t k) {
    LayerBackwardArguments<Op> of{.grad_output = grad,
                                  .grads = {},
                                  .gates = saved[1],
                                  .output = std::nullopt,
                                  .cells = std::nullopt,
                                  .h0 = std::nullopt,
                                  .c0 = std::nullopt,
                                  .recurrent = *call.parameters[Op::Weights::kRecurrentAt],
                                  .masks = {},
                                  .of_states = a.needs_states};
    const std::optional<Tensor>* ends[] = {&a.grad_h_n, &a.grad_c_n};
    for (size_t i = 0; i < kCount; ++i) of.grads[i] = of_cell(*ends[i], static_cast<int64_t>(k));
    if (Cell::kReadsH) of.output = saved[0], of.h0 = call.states[0];
    if (Cell::kCarried > 0) of.cells = saved[2], of.c0 = call.states[kCount - 1];
    check_layer_backward<Op>(of);
    return Ops::layer_backward(Backend(a.of.input), of);
  }

  // The columns of a direction, in the order of its steps.
  static std::optional<Tensor> direction_of(const std::optional<Tensor>& grad, size_t d,
                                            size_t directions) {
    if (!grad || directions == 1) return grad;
    const int64_t hidden = grad->size(2) / 2;
    const Tensor part = as_strided(*grad, {grad->size(0), grad->size(1), hidden}, strides_of(*grad),
                                   static_cast<int64_t>(d) * hidden * grad->stride(2));
    return d > 0 ? reversed(part) : part;
  }

  // Where the kernels can write the states at the end of a cell themselves.
  static Ends places(const std::array<Tensor, kCount>& all, size_t k) {
    const Tensor h_n = of_cell(all[0], static_cast<int64_t>(k));
    const bool aligned = reinterpret_cast<uintptr_t>(h_n.const_data_ptr()) % 16 == 0;
    if (!aligned) return {};
    Ends result{.h_n = h_n, .c_n = std::nullopt};
    if (Cell::kCarried > 0) result.c_n = of_cell(all[kCount - 1], static_cast<int64_t>(k));
    return result;
  }

  static void put(const Tensor& all, size_t k, const Tensor& t) {
    Tensor place = of_cell(all, static_cast<int64_t>(k));
    if (place.const_data_ptr() != t.const_data_ptr()) torch::stable::copy_(place, t);
  }
};

// All ops of a cell on a backend.
template <typename Op, template <typename> typename BackendOf>
void implement(torch::stable::detail::StableLibrary& m) {
  RecurrentOps<Op, BackendOf>::implement(m);
  using Layers = LayersOf<Op, BackendOf>;
  BackendOf<Op>::layers()[Op::kLayer] = {&Layers::forward, &Layers::backward,
                                         &Layers::step_backward};
}

}  // namespace my_ops
