// Plain calls of the elementwise ops, and their gradients. A few elements on the CPU take less time
// than the dispatcher needs to reach the op's kernel, so here the kernels' loops are called as they
// are.
#include <ATen/EmptyTensor.h>
#include <ATen/record_function.h>

#include "../../include/elementwise.h"
#include "calls.h"
#include "common/numeric_cpu.h"

namespace my_ops::calls {
namespace {

// ---------------------------------------------------------------------------------- few elements

// Calls f.operator()<T>() with the kernels' type. Returns false if this is no floating-point type.
template <typename F>
bool with_floating(at::ScalarType dtype, const F& f) {
  switch (dtype) {
    case at::kFloat:
      f.template operator()<float>();
      return true;
    case at::kDouble:
      f.template operator()<double>();
      return true;
    case at::kHalf:
      f.template operator()<cpu::Half>();
      return true;
    case at::kBFloat16:
      f.template operator()<cpu::BFloat16>();
      return true;
    default:
      return false;
  }
}

// Whether nobody, as a profiler, watches the dispatcher's calls.
bool is_unwatched() {
  return !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

// Whether t holds few elements, one after another.
bool is_few(const Tensor& t) {
  const int64_t n = t.numel();
  return n <= kCosts.few && t.is_cpu() && t.is_contiguous() &&
         t.storage().nbytes() >= (t.storage_offset() + n) * t.itemsize();
}

template <typename T>
const T* in(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <typename T>
T* out(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// f.operator()<T>(inputs..., result, n) of few elements in tensors of one shape and dtype; an
// undefined tensor for others.
template <typename F, typename... Tensors>
Tensor of_few(const F& f, const Tensor& x, const Tensors&... others) {
  const bool alike =
      (... && (others.scalar_type() == x.scalar_type() && others.sizes() == x.sizes()));
  if (!alike || !is_few(x) || !(... && is_few(others)) || !is_unwatched()) return {};
  Tensor result;
  with_floating(x.scalar_type(), [&]<typename T>() {
    result = at::detail::empty_cpu(x.sizes(), x.scalar_type());
    f(in<T>(x), in<T>(others)..., out<T>(result), x.numel());
  });
  return result;
}

// --------------------------------------------------------------------------------------- the ops

using UnaryOp = Tensor(const Tensor&);
using BinaryOp = Tensor(const Tensor&, const Tensor&);

// The gradient of each input is that of the result.
template <typename Derived>
struct Identity : Gradient<Derived, 0> {
  void gradients(const Tensor& grad, const std::array<Tensor, 0>&, variable_list* into) {
    for (Tensor& each : *into) each = grad;
  }
};

struct AddOne : Identity<AddOne> {
  static constexpr const char *kName = "AddOneBackward", *kOp = "my_ops::add_one";
  static constexpr auto kLoop = []<typename T>(const T* x, T* out, int64_t n) {
    cpu::add_one(x, out, n);
  };
};
struct CustomAdd : Identity<CustomAdd> {
  static constexpr const char *kName = "CustomAddBackward", *kOp = "my_ops::custom_add";
  static constexpr auto kLoop = []<typename T>(const T* a, const T* b, T* out, int64_t n) {
    cpu::custom_add(a, b, out, n);
  };
};
struct RoundSTE : Identity<RoundSTE> {
  static constexpr const char *kName = "RoundSTEBackward", *kOp = "my_ops::round_ste";
  static constexpr auto kLoop = []<typename T>(const T* x, T* out, int64_t n) {
    cpu::round_ste(x, out, n);
  };
};

struct DSigmoid : Gradient<DSigmoid, 1> {
  static constexpr const char *kName = "DSigmoidBackward", *kOp = "my_ops::d_sigmoid";
  static constexpr auto kLoop = []<typename T>(const T* x, T* out, int64_t n) {
    cpu::d_sigmoid(x, out, n);
  };
  void gradients(const Tensor& grad, const std::array<Tensor, 1>& saved, variable_list* into) {
    static const auto backward = op<BinaryOp>("my_ops::d_sigmoid_backward");
    (*into)[0] = call_for_gradient(backward, grad, saved[0]);
  }
};

template <typename Node>
PyObject* unary(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  const Tensor* const x = count == 1 ? tensor(arguments[0]) : nullptr;
  if (!x || !is_dense(*x) || !is_plain_thread(false)) return none();
  return result_of(x->is_cpu() && x->numel() <= kCosts.brief && may_keep_gil(*x), [&] {
    Tensor result = of_few(Node::kLoop, *x);
    if (!result.defined()) {
      static const auto forward = op<UnaryOp>(Node::kOp);
      result = kernel(forward, *x);
    }
    if (recorded(*x)) {
      const auto node = make_node<Node>();
      if constexpr (std::is_same_v<Node, DSigmoid>) node->saved[0] = SavedVariable(*x, false);
      attach(result, node, *x);
    }
    return result;
  });
}

PyObject* custom_add(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  const Tensor* const a = count == 2 ? tensor(arguments[0]) : nullptr;
  const Tensor* const b = count == 2 ? tensor(arguments[1]) : nullptr;
  if (!a || !b || !is_dense(*a) || !is_dense(*b) || !is_plain_thread(false)) return none();
  // The gradients of others are sums or casts, which the general path computes.
  const bool alike = a->scalar_type() == b->scalar_type() && a->sizes() == b->sizes();
  if (recorded(*a, *b) && !alike) return none();
  const bool brief = alike && a->is_cpu() && a->numel() <= kCosts.brief && may_keep_gil(*a, *b);
  return result_of(brief, [&] {
    Tensor result = of_few(CustomAdd::kLoop, *a, *b);
    if (!result.defined()) {
      static const auto forward = op<BinaryOp>(CustomAdd::kOp);
      result = kernel(forward, *a, *b);
    }
    if (recorded(*a, *b)) attach(result, make_node<CustomAdd>(), *a, *b);
    return result;
  });
}

PyObject* fill_index(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  if (count != 4 || !is_plain_thread(false)) return none();
  const auto height = integer(arguments[0]), width = integer(arguments[1]);
  const auto type = dtype(arguments[2]);
  const auto place = device(arguments[3]);
  if (!height || !width || *height < 0 || *width < 0 || !type || !place) return none();
  if (!place->is_cpu() && !place->is_cuda()) return none();
  int64_t n;
  const bool brief =
      place->is_cpu() && !__builtin_mul_overflow(*height, *width, &n) && n <= kCosts.brief;
  return result_of(brief, [&]() -> Tensor {
    Tensor result;
    if (brief && n <= kCosts.few && is_unwatched()) {
      with_floating(*type, [&]<typename T>() {
        result = at::detail::empty_cpu({*height, *width}, *type);
        cpu::fill_index(out<T>(result), *width, 0, *height);
      });
    }
    if (!result.defined()) {
      using Op = Tensor(c10::SymInt, c10::SymInt, std::optional<at::ScalarType>,
                        std::optional<at::Device>);
      static const auto call = op<Op>("my_ops::fill_index");
      result = kernel(call, c10::SymInt(*height), c10::SymInt(*width), std::optional(*type),
                      std::optional(*place));
    }
    return result;
  });
}

}  // namespace

std::vector<Function> elementwise() {
  return {{"add_one", &unary<AddOne>},
          {"custom_add", &custom_add},
          {"d_sigmoid", &unary<DSigmoid>},
          {"fill_index", &fill_index},
          {"round_ste", &unary<RoundSTE>}};
}

}  // namespace my_ops::calls
