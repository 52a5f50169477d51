// All layers and directions of a recurrent layer in one call: recurrent_layers, and their gradients
// in another: recurrent_layers_backward. Both are for any cell, which they know by its name, and
// take no masks. What a call saves for its gradients is a list of tensors, in this order:
//   for each layer, its joined input if it has two directions and is not the first,
//   for each cell of the layer, the output in the order of its steps, the saved values and, if it
//   carries values, those of every step.
#pragma once

#include <algorithm>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>

#include "recurrent_weights_backward.h"

namespace my_ops {

using Tensors = std::vector<Tensor>;

struct LayersArguments {
  static constexpr const char* kName = "recurrent_layers";

  Name cell{"", 0};
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

inline void layers_arguments(Stack& given, LayersArguments* a) {
  a->input = given.tensor();
  a->states = given.list();
  a->parameters = given.list();
  a->layers = given.integer();
  a->bidirectional = given.flag();
}

// The functions of a cell on a backend.
struct LayersOps {
  Tensors (*forward)(const LayersArguments&);
  Tensors (*backward)(const LayersBackwardArguments&);
  Tensors (*step_backward)(const StepGradientsArguments&);  // null: the cell has none
};

// By the name of the cell. Each cell's file enters its own when the module is loaded, and programs
// those of the cells that they define.
class LayersByCell {
 public:
  void add(const std::string& cell, const LayersOps& ops) {
    const std::lock_guard lock(mutex_);
    map_.insert_or_assign(cell, ops);
  }
  std::optional<LayersOps> find(const std::string& cell) const {
    const std::lock_guard lock(mutex_);
    const auto found = map_.find(cell);
    return found == map_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<std::string, LayersOps> map_;
};
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
  static LayersOps of(const Name& cell, const char* op) {
    const auto found = kLayers().find(cell);
    check(found.has_value(), op, ": cell must be the name of a recurrent op, got '", cell, "'");
    return *found;
  }

  static void forward(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    LayersArguments a;
    a.cell = given.name();
    layers_arguments(given, &a);
    a.save = given.flag();
    *stack = torch::stable::detail::from(of(a.cell, a.kName).forward(a));
  }

  static void backward(StableIValue* stack, uint64_t, uint64_t) {
    Stack given(stack);
    LayersBackwardArguments a;
    a.of.cell = given.name();
    for (auto* grad : {&a.grad_output, &a.grad_h_n, &a.grad_c_n}) *grad = given.optional();
    layers_arguments(given, &a.of);
    a.saved = given.list();
    for (bool* needs : {&a.needs_input, &a.needs_states, &a.needs_parameters}) {
      *needs = given.flag();
    }
    *stack = torch::stable::detail::from(of(a.of.cell, a.kName).backward(a));
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
    const auto step = of(cell, a.kName).step_backward;
    check(step != nullptr, a.kName, ": cell must be one that the module has, got '", cell, "'");
    *stack = torch::stable::detail::from(step(a));
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

// One cell of a call, in a direction: its own input and parameters, and its state before the first
// step, with what it carries side by side.
struct CellCall {
  Tensor input, h0;
  std::optional<Tensor> c0;
  std::span<const Tensor> parameters;
};

// The gradients of a cell's results, of which any may be missing, and which of its arguments need
// theirs.
struct CellGradients {
  std::optional<Tensor> output, h_n, c_n;
  bool of_states, of_input, of_parameters;
};

// What weights_backward of a Unit returns.
struct UnitGradients {
  Tensor input;
  Tensors parameters;
};

// A call and its gradients, for any cell. A Unit, which is made of the call's arguments, computes
// one cell:
//   sizes                          the CellSizes,
//   least_parameters, most_parameters   how many a cell has,
//   hidden(parameters)             their hidden size, if they agree,
//   check(call)                    all that the ops of a cell check,
//   forward(call, save, ends), backward(grads, call, saved)   as forward_layer and backward_layer,
//                                  with `saved` what forward saved for the cell, from the output
//                                  on,
//   weights_backward(grad_terms, grads, call, output)   the gradients of the input and parameters.
template <typename Unit>
class LayersOf {
 public:
  // The results, and what is saved: the output, the states at the end, and the list above.
  static Tensors forward(const LayersArguments& a) {
    return LayersOf(a, LayersArguments::kName).run();
  }

  // grad_input, grad_states and the gradients of the parameters: those that are needed.
  static Tensors backward(const LayersBackwardArguments& a) {
    const LayersOf layers(a.of, LayersBackwardArguments::kName);
    layers.check_backward(a);
    return layers.run_backward(a);
  }

 private:
  // The states of all cells, (cells, batch, .), what a cell carries side by side.
  struct States {
    std::optional<Tensor> h, c;
  };

  LayersOf(const LayersArguments& a, const char* op) : a_(a), unit_(a, op) {
    check_call(op);
    if (a.states.empty()) {
      const int64_t hidden = unit_.hidden(of_cell_parameters(0)).value_or(0);
      // Parameters that do not agree have no size; the check of the first cell says which is wrong.
      zero_h_ = zeros(a.input, {a.input.size(1), hidden}, a.input.scalar_type());
      if (carried() == 1) zero_c_ = zero_h_;
      if (carried() > 1) {
        zero_c_ = zeros(a.input, {a.input.size(1), carried() * hidden}, a.input.scalar_type());
      }
    } else {
      given_.h = a.states[0];
      if (carried() == 1) given_.c = a.states[1];
      if (carried() > 1) given_.c = joined({a.states.begin() + 1, a.states.end()}, 2);
    }
  }

  int64_t carried() const { return unit_.sizes.carried; }
  size_t states() const { return 1 + static_cast<size_t>(carried()); }
  size_t saved_tensors() const { return carried() > 0 ? 3 : 2; }  // of a cell

  void check_call(const char* op) const {
    check_given(a_.input, op, "input");
    check(a_.input.dim() == 3, op, ": input must be (steps, batch, input_size), got ",
          show(a_.input));
    check(a_.layers >= 1, op, ": layers must be positive, got ", a_.layers);
    const size_t each = a_.of_a_cell();
    check(each * a_.cells() == a_.parameters.size() && each >= unit_.least_parameters &&
              each <= unit_.most_parameters,
          op, ": parameters must be those of ", a_.cells(), " cells, got ", a_.parameters.size());
    check(a_.states.empty() || a_.states.size() == states(), op, ": states must be ", states(),
          " tensors or none, got ", a_.states.size());
    for (const Tensor& s : a_.states) {
      check_given(s, op, "states");
      check(s.dim() == 3 && s.size(0) == static_cast<int64_t>(a_.cells()), op,
            ": states must be (layers * directions, batch, hidden_size) with layers * directions "
            "= ",
            a_.cells(), ", got ", show(s));
      if (carried() > 1) {  // which are joined before a cell looks at them
        check_kind(s, "states", a_.input, "input", op);
        check(sizes_of(s) == sizes_of(a_.states[0]), op, ": states must have the same sizes, got ",
              show(a_.states[0]), " and ", show(s));
      }
    }
  }

  std::span<const Tensor> of_cell_parameters(size_t k) const {
    const size_t each = a_.of_a_cell();
    return std::span(a_.parameters).subspan(k * each, each);
  }

  CellCall call(const Tensor& x, size_t k) const {
    const bool back = a_.bidirectional && k % 2 == 1;
    const auto at = static_cast<int64_t>(k);
    const CellCall result{.input = back ? reversed(x) : x,
                          .h0 = given_.h ? of_cell(*given_.h, at) : zero_h_,
                          .c0 = given_.h ? of_cell(given_.c, at) : zero_c_,
                          .parameters = of_cell_parameters(k)};
    unit_.check(result);
    return result;
  }

  // Where the states at the end go: all of a kind in one tensor.
  States ends(const Tensor& h0) const {
    const auto cells = static_cast<int64_t>(a_.cells());
    States result{.h = empty(a_.input, {cells, h0.size(0), h0.size(1)}), .c = std::nullopt};
    if (carried() > 0) result.c = empty(a_.input, {cells, h0.size(0), carried() * h0.size(1)});
    return result;
  }

  // Appends the states, each kind of what is carried in a tensor of its own.
  void give(const States& all, Tensors* results) const {
    results->push_back(*all.h);
    if (carried() == 1) results->push_back(*all.c);
    const int64_t hidden = all.h->size(2);
    for (int64_t i = 0; carried() > 1 && i < carried(); ++i) {
      const Tensor one = as_strided(*all.c, sizes_of(*all.h), strides_of(*all.c), i * hidden);
      results->push_back(copy(one, one.scalar_type()));
    }
  }

  Tensors run() const {
    const size_t directions = a_.directions();
    States last;
    Tensors saved;
    Tensor x = a_.input;
    for (size_t first = 0; first < a_.cells(); first += directions) {
      if (a_.save && first > 0 && directions > 1) saved.push_back(x);
      Tensors outputs;
      for (size_t d = 0; d < directions; ++d) {
        const size_t k = first + d;
        const CellCall of_cell_k = call(x, k);
        if (k == 0) last = ends(of_cell_k.h0);
        const Forward r = unit_.forward(of_cell_k, a_.save, places(last, k));
        put(*last.h, k, r.h_n);
        if (last.c) put(*last.c, k, *r.c_n);
        if (a_.save) {
          saved.push_back(r.output);
          saved.push_back(*r.saved);
          if (r.carried) saved.push_back(*r.carried);
        }
        outputs.push_back(d > 0 ? reversed(r.output) : r.output);
      }
      x = directions > 1 ? joined(outputs, 2) : outputs[0];
    }
    Tensors results{x};
    give(last, &results);
    results.insert(results.end(), saved.begin(), saved.end());
    return results;
  }

  Tensors run_backward(const LayersBackwardArguments& a) const {
    const size_t directions = a_.directions(), each = a_.of_a_cell();
    States of_states;
    Tensors of_parameters(a.needs_parameters ? a_.parameters.size() : 0);
    std::optional<Tensor> grad = a.grad_output, grad_x;
    size_t at = a.saved.size();
    for (size_t first = a_.cells(); first > 0;) {
      first -= directions;
      at -= saved_tensors() * directions;
      const Tensor* const of_layer = &a.saved[at];
      const bool inner = first > 0;
      if (inner && directions > 1) --at;
      const Tensor& x = !inner           ? a_.input
                        : directions > 1 ? a.saved[at]
                                         : a.saved[at - saved_tensors()];
      grad_x.reset();
      for (size_t d = 0; d < directions; ++d) {
        const size_t k = first + d;
        const CellCall of_cell_k = call(x, k);
        const Tensor* const own = of_layer + d * saved_tensors();
        const auto end = static_cast<int64_t>(k);
        const CellGradients grads{.output = direction_of(grad, d, directions),
                                  .h_n = of_cell(a.grad_h_n, end),
                                  .c_n = of_cell(a.grad_c_n, end),
                                  .of_states = a.needs_states,
                                  .of_input = inner || a.needs_input,
                                  .of_parameters = a.needs_parameters};
        const Backward r = unit_.backward(grads, of_cell_k, own);
        if (grads.of_input || a.needs_parameters) {
          const auto [of_input, all] =
              unit_.weights_backward(r.grad_terms, grads, of_cell_k, own[0]);
          if (a.needs_parameters) {
            for (size_t i = 0; i < each; ++i) of_parameters[k * each + i] = all[i];
          }
          if (grads.of_input) {
            const Tensor own_x = d > 0 ? reversed(of_input) : of_input;
            grad_x = grad_x ? torch::stable::subtract(*grad_x, own_x, -1.0) : own_x;
          }
        }
        if (!a.needs_states) continue;
        if (!of_states.h) of_states = ends(of_cell_k.h0);
        put(*of_states.h, k, r.grad_h0);
        if (of_states.c) put(*of_states.c, k, *r.grad_c0);
      }
      grad = grad_x;
    }
    Tensors results;
    if (a.needs_input) results.push_back(*grad_x);
    if (a.needs_states) give(of_states, &results);
    results.insert(results.end(), of_parameters.begin(), of_parameters.end());
    return results;
  }

  void check_backward(const LayersBackwardArguments& a) const {
    constexpr const char* op = LayersBackwardArguments::kName;
    const size_t cells = a_.cells();
    const size_t inputs = a_.bidirectional ? static_cast<size_t>(a_.layers) - 1 : 0;
    check(a.saved.size() == cells * saved_tensors() + inputs, op, ": saved must be the ",
          cells * saved_tensors() + inputs, " tensors that recurrent_layers saves, got ",
          a.saved.size());
    const int64_t steps = a_.input.size(0), batch = a_.input.size(1);
    const auto shaped = [&](const std::optional<Tensor>& t, const char* name, const Sizes& want,
                            const char* rule) {
      if (!t) return;
      check_kind(*t, name, a_.input, "input", op);
      check_shape(*t, name, want, rule, op);
    };
    const auto agreed = unit_.hidden(of_cell_parameters(0));
    if (!agreed) call(a_.input, 0);  // this says which parameter is wrong
    const int64_t hidden = agreed.value_or(0);
    const Sizes of_input{steps, batch, 2 * hidden}, of_output{steps, batch, hidden},
        of_saved{steps, batch, unit_.sizes.saved * hidden},
        of_carried{steps, batch, carried() * hidden};
    const Sizes* const of_cell_k[] = {&of_output, &of_saved, &of_carried};
    auto next = a.saved.begin();
    for (size_t k = 0; k < cells; ++k) {
      if (inputs > 0 && k > 0 && k % 2 == 0)
        shaped(*next++, "saved", of_input, "(steps, batch, .)");
      for (size_t i = 0; i < saved_tensors(); ++i) {
        shaped(*next++, "saved", *of_cell_k[i], "(steps, batch, .)");
      }
    }
    shaped(a.grad_output, "grad_output",
           {steps, batch, static_cast<int64_t>(a_.directions()) * hidden},
           "(steps, batch, directions * hidden_size)");
    const auto count = static_cast<int64_t>(cells);
    constexpr const char* rule = "(layers * directions, batch, hidden_size)";
    shaped(a.grad_h_n, "grad_h_n", {count, batch, hidden}, rule);
    shaped(a.grad_c_n, "grad_c_n", {count, batch, std::max<int64_t>(carried(), 1) * hidden}, rule);
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
  static Ends places(const States& all, size_t k) {
    const auto at = static_cast<int64_t>(k);
    const Ends result{.h_n = of_cell(*all.h, at), .c_n = of_cell(all.c, at)};
    const auto aligned = [](const std::optional<Tensor>& t) {
      return !t || reinterpret_cast<uintptr_t>(t->const_data_ptr()) % 16 == 0;
    };
    return aligned(result.h_n) && aligned(result.c_n) ? result : Ends{};
  }

  static void put(const Tensor& all, size_t k, const Tensor& t) {
    Tensor place = of_cell(all, static_cast<int64_t>(k));
    if (place.const_data_ptr() != t.const_data_ptr()) torch::stable::copy_(place, t);
  }

  const LayersArguments& a_;
  const Unit unit_;
  States given_;
  Tensor zero_h_;
  std::optional<Tensor> zero_c_;
};

}  // namespace my_ops
