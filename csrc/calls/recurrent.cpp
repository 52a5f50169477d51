// Plain calls of recurrent layers and of single steps of cells, and their gradients. Without this
// module my_ops/recurrent/_plain.py calls the same ops with a Function in Python in place of the
// node; its tests run both.
#include <torch/csrc/autograd/autograd.h>

#include <ATen/ATen.h>

#include <algorithm>

#include "calls.h"

extern "C" {
int PyObject_IsTrue(PyObject*);
PyObject* PyTuple_New(std::ptrdiff_t);
int PyTuple_SetItem(PyObject*, std::ptrdiff_t, PyObject*);
}

namespace my_ops::calls {
namespace {

// What a call is besides its tensors, which stand in a row: the input, the states if any are given
// (none: zeros) and the parameters.
struct Call {
  std::string cell;
  int64_t kinds;  // of states
  int64_t hidden, states;
  int64_t layers = 0;  // 0: one step of a cell
  bool bidirectional = false, batch_first = false;

  bool is_step() const { return layers == 0; }
  int64_t directions() const { return bidirectional ? 2 : 1; }
  size_t parameters() const { return static_cast<size_t>(1 + states); }  // the place of the first
  Tensor in_time(const Tensor& t) const { return batch_first ? t.transpose(0, 1) : t; }
};

c10::OperatorHandle op_of(const Call& call, const char* suffix) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("my_ops::" + call.cell + suffix).c_str(),
                                                        "");
}

// Calls an op of a cell with these arguments; it has more optional ones at `optional`.
variable_list call_op(const c10::OperatorHandle& op, const variable_list& arguments,
                      size_t optional) {
  const size_t missing = op.schema().arguments().size() - arguments.size();
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  stack.insert(stack.begin() + static_cast<std::ptrdiff_t>(optional), missing, c10::IValue());
  op.callBoxed(&stack);
  variable_list results;
  for (const c10::IValue& each : stack) results.push_back(each.toTensor());
  return results;
}

bool is_defined(const Tensor& t) { return t.defined(); }

variable_list zeros(const Call& call, const Tensor& input, at::IntArrayRef sizes) {
  return {static_cast<size_t>(call.kinds), at::zeros(sizes, input.options())};
}

// One step: the new states, and for backward the gates.
variable_list step(const Call& call, const variable_list& tensors, const char* suffix) {
  const auto states = tensors.begin() + 1, parameters = states + call.states;
  variable_list arguments{tensors[0]};
  arguments.insert(arguments.end(), parameters, tensors.end());
  const size_t optional = arguments.size();
  arguments.insert(arguments.end(), states, parameters);
  return call_op(op_of(call, suffix), arguments, optional);
}

// All steps by the op of each layer and direction: _plain.each_direction.
variable_list each_direction(const Call& call, const variable_list& tensors) {
  const int64_t directions = call.directions(), cells = call.layers * directions;
  const size_t first = call.parameters();
  const size_t each = (tensors.size() - first) / static_cast<size_t>(cells);
  Tensor x = call.in_time(tensors[0]);
  variable_list states(tensors.begin() + 1, tensors.begin() + static_cast<std::ptrdiff_t>(first));
  if (states.empty()) states = zeros(call, x, {cells, x.size(1), call.hidden});
  const auto op = op_of(call, "");
  std::vector<variable_list> ends(states.size());
  variable_list outputs;
  for (int64_t k = 0; k < cells; ++k) {
    if (k > 0 && k % directions == 0) {
      x = at::cat(outputs, 2);
      outputs.clear();
    }
    const bool back = k % directions == 1;
    variable_list arguments{back ? x.flip(0) : x};
    for (const Tensor& state : states) arguments.push_back(state.select(0, k));
    const auto own = tensors.begin() + static_cast<std::ptrdiff_t>(first + each * k);
    arguments.insert(arguments.end(), own, own + static_cast<std::ptrdiff_t>(each));
    const variable_list results = call_op(op, arguments, arguments.size());
    outputs.push_back(back ? results[0].flip(0) : results[0]);
    for (size_t i = 0; i < ends.size(); ++i) ends[i].push_back(results[1 + i]);
  }
  variable_list all{at::cat(outputs, 2)};
  for (const variable_list& end : ends) all.push_back(at::stack(end));
  return all;
}

variable_list forward(const Call& call, const variable_list& tensors, bool save) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (call.is_step()) return step(call, tensors, save ? "_cell_forward" : "_cell");
  using Op = variable_list(std::string_view, const Tensor&, at::TensorList, at::TensorList, int64_t,
                           bool, bool);
  static const auto layers = op<Op>("my_ops::recurrent_layers");
  const at::TensorList all(tensors);
  const size_t first = call.parameters();
  return layers.call(call.cell, call.in_time(tensors[0]), all.slice(1, first - 1), all.slice(first),
                     call.layers, call.bidirectional, save);
}

struct Needs {
  bool input, states, parameters;
};

using MaybeTensor = std::optional<Tensor>;

MaybeTensor maybe(const Tensor& t) { return t.defined() ? MaybeTensor(t) : std::nullopt; }

// Gradients of values of a unit side by side, with zeros for those that have none; none if none
// has one.
MaybeTensor side_by_side(variable_list grads) {
  const auto known = std::find_if(grads.begin(), grads.end(), is_defined);
  if (known == grads.end()) return std::nullopt;
  const Tensor like = *known;
  if (grads.size() == 1) return like;
  for (Tensor& grad : grads) {
    if (!grad.defined()) grad = at::zeros_like(like);
  }
  return at::cat(grads, -1);
}

// The gradients of the input, of all states and of all parameters: of those that are needed.
variable_list backward(const Call& call, const variable_list& grads, const variable_list& tensors,
                       const variable_list& kept, Needs needs) {
  const at::TensorList all(tensors);
  const size_t first = call.parameters();
  const at::TensorList states = all.slice(1, first - 1), parameters = all.slice(first);
  if (call.is_step()) {
    using Op =
        variable_list(std::string_view, const MaybeTensor&, const MaybeTensor&, const Tensor&,
                      const Tensor&, at::TensorList, at::TensorList, bool, bool, bool);
    static const auto of_step = op<Op>("my_ops::recurrent_step_backward");
    const MaybeTensor of_carried = call.kinds > 1 ? maybe(grads[1]) : std::nullopt;
    return of_step.call(call.cell, maybe(grads[0]), of_carried, kept[0], tensors[0], states,
                        parameters, needs.input, needs.states, needs.parameters);
  }
  using Op = variable_list(std::string_view, const MaybeTensor&, const MaybeTensor&,
                           const MaybeTensor&, const Tensor&, at::TensorList, at::TensorList,
                           int64_t, bool, at::TensorList, bool, bool, bool);
  static const auto of_layers = op<Op>("my_ops::recurrent_layers_backward");
  const MaybeTensor of_carried = side_by_side({grads.begin() + 2, grads.end()});
  variable_list results =
      of_layers.call(call.cell, maybe(grads[0]), maybe(grads[1]), of_carried,
                     call.in_time(tensors[0]), states, parameters, call.layers, call.bidirectional,
                     kept, needs.input, needs.states, needs.parameters);
  if (needs.input) results[0] = call.in_time(results[0]);
  return results;
}

// --------------------------------------------------------------------------------------- the node

bool a_transform_acts() {
  return c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode);
}

struct Recurrent : NodeOfACall {
  Call call;
  std::vector<SavedVariable> tensors, kept;  // what the call took; what its op kept for backward
  std::vector<bool> is_result;               // of those kept

  std::string name() const override { return "RecurrentBackward"; }

  variable_list apply(variable_list&& grads) override {
    if (std::none_of(grads.begin(), grads.end(), is_defined)) return variable_list(num_outputs());
    variable_list given, saved;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      given = unpacked(tensors);
      saved = unpacked(kept);
    }
    if (!differentiates(grads)) {
      // Under a mode Python runs, and its errors are to reach the caller.
      if (!is_plain_thread(false)) return gradients(call, grads, given, saved, needs());
      try {
        const at::AutoDispatchBelowADInplaceOrView below;
        return gradients(call, grads, given, saved, needs());
      } catch (...) {  // by_ops raises what there is to raise
      }
    }
    return by_ops(grads, given);
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* list : {&tensors, &kept}) {
      for (auto& one : *list) one.reset_data();
    }
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(call.cell);
    for (const int64_t n : {call.kinds, call.hidden, call.states, call.layers}) args.collect(n);
    args.collect(call.bidirectional);
    args.collect(call.batch_first);
    for (const auto& one : tensors) args.collect(one, false);
    for (size_t i = 0; i < kept.size(); ++i) args.collect(kept[i], is_result[i]);
  }
  // Compiled autograd calls the op when it knows the shapes of the gradients.
  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    using List = torch::dynamo::autograd::IValuePacker<variable_list>;
    using Edges = std::vector<std::optional<torch::autograd::InputMetadata>>;
    for (auto* list : {&tensors, &kept}) {
      for (auto& one : *list) swap.before(one);
    }
    const auto compute = [call = call, needs = needs()](const variable_list& grads,
                                                        const std::vector<c10::IValue>& lists) {
      return gradients(call, grads, List::unpack(lists[0]), List::unpack(lists[1]), needs);
    };
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    PyObject* const instance = swap.get_py_compiler();
    const std::string bound =
        compiler->bind_function(instance, name(), compute, {2, List::packed_type()},
                                /*is_custom_function=*/true);  // gets a name of its own
    variable_list result =
        compiler->call_function(instance, "apply_functional", bound, grads,
                                {List::pack(unpacked(tensors)), List::pack(unpacked(kept))},
                                torch::dynamo::autograd::IValuePacker<Edges>::pack(
                                    torch::dynamo::autograd::get_input_metadata(next_edges())));
    for (auto* list : {&tensors, &kept}) {
      for (auto& one : *list) swap.after(one);
    }
    return result;
  }

 private:
  variable_list unpacked(const std::vector<SavedVariable>& saved) {
    variable_list result;
    for (const auto& one : saved) result.push_back(one.unpack(getptr()));
    return result;
  }

  Needs needs() const {
    const auto any = [this](size_t begin, size_t end) {
      bool found = false;
      for (size_t i = begin; i < end; ++i) found = found || task_should_compute_output(i);
      return found;
    };
    const size_t first = call.parameters();
    return {any(0, 1), any(1, first), any(first, tensors.size())};
  }

  // Of each tensor, undefined where it is not needed.
  static variable_list gradients(const Call& call, const variable_list& grads,
                                 const variable_list& given, const variable_list& saved,
                                 Needs needs) {
    variable_list result = backward(call, grads, given, saved, needs);
    size_t at = 0;
    const auto leave_out = [&](bool need, size_t count) {
      if (!need) result.insert(result.begin() + static_cast<std::ptrdiff_t>(at), count, Tensor());
      at += count;
    };
    leave_out(needs.input, 1);
    leave_out(needs.states, static_cast<size_t>(call.states));
    leave_out(needs.parameters, given.size() - call.parameters());
    return result;
  }

  // Whether the gradients will be differentiated or mapped.
  static bool differentiates(const variable_list& grads) {
    if (at::GradMode::is_enabled() || a_transform_acts()) return true;
    if (torch::autograd::ForwardADLevel::try_get_by_idx(0)) return true;
    return std::any_of(grads.begin(), grads.end(),
                       [](const Tensor& t) { return t.defined() && !is_dense(t); });
  }

  // By ops that can be differentiated and mapped.
  variable_list by_ops(const variable_list& grads, const variable_list& given) {
    const bool again = at::GradMode::is_enabled();
    const at::AutoGradMode on(true);
    // Views, so that an input that is computed from another has a gradient of its own.
    variable_list own, wanted, results, known;
    for (const Tensor& t : given) own.push_back(t.view_as(t));
    const variable_list all = call.is_step() ? step(call, own, "_cell") : each_direction(call, own);
    for (size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) continue;
      results.push_back(all[i]);
      known.push_back(grads[i]);
    }
    for (size_t i = 0; i < own.size(); ++i) {
      if (task_should_compute_output(i)) wanted.push_back(own[i]);
    }
    variable_list found =
        torch::autograd::grad(results, wanted, known, std::nullopt, again, /*allow_unused=*/true);
    variable_list result(own.size());
    auto next = found.begin();
    for (size_t i = 0; i < own.size(); ++i) {
      if (task_should_compute_output(i)) result[i] = std::move(*next++);
    }
    return result;
  }
};

// The results of a call; with gradients if it is recorded.
variable_list run(Call call, const variable_list& tensors, bool save) {
  variable_list results = forward(call, tensors, save);
  const auto count = static_cast<size_t>(call.kinds + !call.is_step());
  const bool batch_first = call.batch_first;
  if (save) {
    const variable_list kept(results.begin() + static_cast<std::ptrdiff_t>(count), results.end());
    results.resize(count);
    const auto node = make_node<Recurrent>();
    node->call = std::move(call);
    node->set_next_edges(torch::autograd::collect_next_edges(tensors));
    torch::autograd::set_history(results, node);
    for (const Tensor& t : tensors) node->tensors.emplace_back(t, false);
    for (const Tensor& t : kept) {  // after the results have their node
      const bool is_result = std::any_of(results.begin(), results.end(),
                                         [&](const Tensor& r) { return r.is_same(t); });
      node->kept.emplace_back(t, is_result);
      node->is_result.push_back(is_result);
    }
    announce(decltype(torch::autograd::Edge::function)(node));
  }
  if (batch_first) results[0] = results[0].transpose(0, 1);
  return results;
}

// ----------------------------------------------------------------------------------- from Python

// All of Call and its tensors, or none if the objects of Python are others.
std::optional<Call> call_of(PyObject* const* arguments, size_t count, variable_list* tensors) {
  constexpr size_t kFirst = 7;  // tensor
  if (count <= kFirst) return std::nullopt;
  std::array<int64_t, 4> numbers{};
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto number = integer(arguments[1 + i]);
    if (!number) return std::nullopt;
    numbers[i] = *number;
  }
  const char* const cell = PyUnicode_AsUTF8AndSize(arguments[0], nullptr);
  if (!cell) {
    PyErr_Clear();
    return std::nullopt;
  }
  for (size_t i = kFirst; i < count; ++i) {
    const Tensor* const t = tensor(arguments[i]);
    if (!t || !is_dense(*t)) return std::nullopt;
    tensors->push_back(*t);
  }
  return Call{.cell = cell,
              .kinds = numbers[0],
              .hidden = numbers[1],
              .states = numbers[2],
              .layers = numbers[3],
              .bidirectional = PyObject_IsTrue(arguments[5]) == 1,
              .batch_first = PyObject_IsTrue(arguments[6]) == 1};
}

// Whether a call records the gradients of all its parameters; none if it is not plain.
std::optional<bool> records(const Call& call, const variable_list& tensors) {
  const Tensor& input = tensors[0];
  if (tensors.size() <= call.parameters() || !input.is_floating_point()) return std::nullopt;
  if (input.dim() != (call.is_step() ? 2 : 3) || !is_plain_thread(true)) return std::nullopt;
  const auto requires_grad = [](const Tensor& t) { return t.requires_grad(); };
  const bool any = std::any_of(tensors.begin(), tensors.end(), requires_grad);
  if (!any || !at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return false;
  const auto first = tensors.begin() + static_cast<std::ptrdiff_t>(call.parameters());
  return std::all_of(first, tensors.end(), requires_grad) ? std::optional(true) : std::nullopt;
}

// (name of the cell, kinds, hidden, states, layers, bidirectional, batch_first, input, *states,
// *parameters)
PyObject* call(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  variable_list tensors, results;
  auto call = call_of(arguments, static_cast<size_t>(count), &tensors);
  const auto save = call ? records(*call, tensors) : std::nullopt;
  if (!save) return none();
  try {
    const WithoutGil without;
    if (call->is_step() && call->states == 0) {
      const variable_list states = zeros(*call, tensors[0], {tensors[0].size(0), call->hidden});
      tensors.insert(tensors.begin() + 1, states.begin(), states.end());
      call->states = call->kinds;
    }
    results = run(std::move(*call), tensors, *save);
  } catch (...) {
    return PyErr_Occurred() ? nullptr : none();
  }
  PyObject* const tuple = PyTuple_New(static_cast<std::ptrdiff_t>(results.size()));
  for (size_t i = 0; tuple && i < results.size(); ++i) {
    PyObject* const wrapped = THPVariable_Wrap(results[i]);
    if (!wrapped) {
      Py_DecRef(tuple);
      return nullptr;
    }
    PyTuple_SetItem(tuple, static_cast<std::ptrdiff_t>(i), wrapped);
  }
  return tuple;
}

}  // namespace

std::vector<Function> recurrent() { return {{"recurrent", &call}}; }

}  // namespace my_ops::calls
