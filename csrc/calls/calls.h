// Plain calls of ops: from Python to the op's kernel without torch's boxed call, and with gradients
// in C++. A plain call has dense tensors of class Tensor or Parameter on the CPU or CUDA, and no
// mode, transform, tracing or forward-mode tangent acts on it. For any other call, and for one that
// fails, a function returns None: Python then takes the op's general path, which raises what there
// is to raise.
//
// Like ../overrides this module, my_ops/_calls.so, is compiled against torch's C++ headers; it also
// relies on the layout of autograd nodes and of Python's tensors. my_ops/_plain.py loads it with
// the releases of torch that it was tested with. It has no Python header: torch's own users build
// without them, and what it needs of Python is in the stable ABI.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "costs.h"

extern "C" {
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject* const*, std::ptrdiff_t);
  int flags;
  const char* doc;
};
struct _ts;
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
PyObject* PyObject_Type(PyObject*);
long long PyLong_AsLongLong(PyObject*);
const char* PyUnicode_AsUTF8AndSize(PyObject*, std::ptrdiff_t*);
PyObject* PyErr_Occurred();
void PyErr_Clear();
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
_ts* PyEval_SaveThread();
void PyEval_RestoreThread(_ts*);
extern char _Py_NoneStruct;               // a PyObject
extern char PyLong_Type, PyUnicode_Type;  // PyTypeObjects, like the two below
}

// Of torch/csrc, in headers that need Python's.
extern PyObject *THPVariableClass, *ParameterClass;
extern char THPDtypeType, THPDeviceType;
PyObject* THPVariable_Wrap(const at::TensorBase&);
namespace torch::tensors {
at::Device get_default_device();
}

namespace my_ops::calls {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::autograd::variable_list;

// ------------------------------------------------------------------------------ Python's objects

inline PyObject* none() {
  auto* const object = reinterpret_cast<PyObject*>(&_Py_NoneStruct);
  Py_IncRef(object);
  return object;
}
inline bool is_none(const PyObject* object) {
  return object == reinterpret_cast<PyObject*>(&_Py_NoneStruct);
}

// Where Python's tensors have their at::Tensor, and its dtypes and devices their value of C++:
// my_ops_calls_start finds them.
inline std::ptrdiff_t tensor_offset = 0, value_offset = 0;

template <typename T>
const T* within(PyObject* object, std::ptrdiff_t offset) {
  return reinterpret_cast<const T*>(reinterpret_cast<char*>(object) + offset);
}

inline PyObject* type_of(PyObject* object) {
  PyObject* const type = PyObject_Type(object);
  Py_DecRef(type);  // the object holds it
  return type;
}
inline bool is_of(PyObject* object, const char* type) {
  return type_of(object) == reinterpret_cast<const PyObject*>(type);
}

// The tensor of an object that is no subclass of it.
inline const Tensor* tensor(PyObject* object) {
  PyObject* const type = type_of(object);
  if (type != THPVariableClass && type != ParameterClass) return nullptr;
  return within<Tensor>(object, tensor_offset);
}

// The value of an int, or none for other objects and too large ones.
inline std::optional<int64_t> integer(PyObject* object) {
  if (!is_of(object, &PyLong_Type)) return std::nullopt;
  const int64_t value = PyLong_AsLongLong(object);
  if (value != -1 || !PyErr_Occurred()) return value;
  PyErr_Clear();
  return std::nullopt;
}
inline std::optional<at::ScalarType> dtype(PyObject* object) {
  if (!is_of(object, &THPDtypeType)) return std::nullopt;
  return *within<at::ScalarType>(object, value_offset);
}
// Of a device, its name, or None: the default one.
inline std::optional<at::Device> device(PyObject* object) {
  if (is_none(object)) return torch::tensors::get_default_device();
  if (is_of(object, &THPDeviceType)) return *within<at::Device>(object, value_offset);
  const char* const name =
      is_of(object, &PyUnicode_Type) ? PyUnicode_AsUTF8AndSize(object, nullptr) : nullptr;
  try {
    if (name) return at::Device(std::string(name));
  } catch (...) {
  }
  PyErr_Clear();
  return std::nullopt;
}

class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(thread_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  _ts* thread_;
};

// The result of compute() for Python, or None if it has none or throws; what a hook in Python
// raises is raised again. Other threads of Python run meanwhile, unless it is brief.
template <typename Compute>
PyObject* result_of(bool brief, const Compute& compute) {
  Tensor result;
  try {
    std::optional<WithoutGil> without;
    if (!brief) without.emplace();
    result = compute();
  } catch (...) {
    return PyErr_Occurred() ? nullptr : none();
  }
  return result.defined() ? THPVariable_Wrap(result) : none();
}

// ------------------------------------------------------------------------------------ plain calls

inline const DispatchKeySet kAutocast({DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
inline const DispatchKeySet kDense =
    kAutocast | DispatchKeySet(DispatchKey::CPU) | DispatchKeySet(DispatchKey::CUDA) |
    DispatchKeySet(DispatchKey::AutogradCPU) | DispatchKeySet(DispatchKey::AutogradCUDA) |
    DispatchKeySet(DispatchKey::ADInplaceOrView);

inline bool is_dense(const Tensor& t) {
  return t.defined() && (t.key_set().raw_repr() & ~kDense.raw_repr()) == 0;
}

// Whether a call of these may be brief. Autograd locks a mutex of each leaf and view, and a thread
// that has locked it may wait for the GIL.
template <typename... Tensors>
bool may_keep_gil(const Tensors&... tensors) {
  return (... && !(tensors.requires_grad() && (tensors.is_leaf() || tensors.is_view())));
}

// Whether nothing acts on the ops of this thread: neither a mode, a transform, tracing or forward
// mode nor, unless the caller allows it, autocast. It does not ask tensors for their tangents,
// which would lock their mutex, too.
inline bool is_plain_thread(bool autocast_acts) {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const auto ignored = c10::autograd_dispatch_keyset |
                       DispatchKeySet(DispatchKey::ADInplaceOrView) |
                       (autocast_acts ? DispatchKeySet() : kAutocast);
  return (keys.included_ | ignored) == (c10::default_included_set | ignored) &&
         (keys.excluded_ | ignored) == (c10::default_excluded_set | ignored) &&
         !at::impl::torch_function_mode_enabled() &&
         !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

// Whether autograd records a call of these tensors.
template <typename... Tensors>
bool recorded(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         (... || tensors.requires_grad());
}

// ----------------------------------------------------------------------------------------- ops

template <typename Signature>
c10::TypedOperatorHandle<Signature> op(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<Signature>();
}

// Calls the kernel of an op, below autograd.
template <typename Op, typename... Arguments>
Tensor kernel(const Op& op, const Arguments&... arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(arguments...);
}

// Calls an op for a gradient: the kernel itself, unless that gradient will be differentiated or its
// tensors are not dense, as when a transform or a compiler runs the backward.
template <typename Op, typename... Tensors>
Tensor call_for_gradient(const Op& op, const Tensors&... tensors) {
  const bool plain =
      !at::GradMode::is_enabled() && is_plain_thread(false) && (... && is_dense(tensors));
  return plain ? kernel(op, tensors...) : op.call(tensors...);
}

// ---------------------------------------------------------------------------------------- nodes

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

struct NodeOfACall : Node {
  // A release of torch may have flags in the gaps between the fields of these headers' nodes.
  static void* operator new(size_t size) {
    void* const memory = ::operator new(size);
    std::memset(memory, 0, size);
    return memory;
  }
};

// A node of the graph that keeps tensors and computes the gradients of its inputs by
// Derived::gradients(grad, saved, &gradients).
template <typename Derived, size_t kSaved>
struct Gradient : NodeOfACall {
  std::array<SavedVariable, kSaved> saved;

  std::string name() const override { return Derived::kName; }

  variable_list apply(variable_list&& grads) override {
    variable_list result(num_outputs());
    if (!grads[0].defined()) return result;
    std::array<Tensor, kSaved> tensors;
    if constexpr (kSaved > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (size_t i = 0; i < kSaved; ++i) tensors[i] = saved[i].unpack(getptr());
    }
    static_cast<Derived*>(this)->gradients(grads[0], tensors, &result);
    return result;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& one : saved) one.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    for (const auto& one : saved) args.collect(one, false);
  }
  variable_list apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) override {
    for (auto& one : saved) swap.before(one);
    variable_list result = apply(variable_list(grads));
    for (auto& one : saved) swap.after(one);
    return result;
  }
};

template <typename N>
auto make_node() {
  using Pointer = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {  // torch 2.10
    return std::shared_ptr<N>(new N, [](N* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<N>();
  }
}

// Tells torch.autograd.graph's hooks of a new node, which torch has since 2.14.
template <typename Pointer>
void announce(const Pointer& node) {
  using Fire = void (*)(const Pointer&);
  static const auto fire = reinterpret_cast<Fire>(
      dlsym(RTLD_DEFAULT,
            "_ZN5torch8autograd24fire_node_creation_hooksERKN3c1013intrusive_ptrINS0_"
            "4NodeENS1_6detail34intrusive_target_default_null_typeIS3_EEEE"));
  if (fire) fire(node);
}

// Makes a node, which has all that it saves, the gradient function of a result.
template <typename Pointer, typename... Inputs>
void attach(const Tensor& result, const Pointer& node, const Inputs&... inputs) {
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  torch::autograd::set_history(result, node);
  announce(decltype(torch::autograd::Edge::function)(node));
}

// ---------------------------------------------------------------------------------- the module

struct Function {
  const char* name;
  PyObject* (*function)(PyObject*, PyObject* const*, std::ptrdiff_t);
};

// What Python may call, one list for each file.
std::vector<Function> elementwise();
std::vector<Function> products();
std::vector<Function> recurrent();

}  // namespace my_ops::calls
