// Plain calls of gemm and linear where torch's own product is the faster one, gradients included:
// what calls_torchs, _is_torchs_gemm and is_torchs_linear of my_ops/ops say, for tensors of one
// dtype.
#include "calls.h"

namespace my_ops::calls {
namespace {

bool in_whole_vectors(int64_t n, int64_t k) { return n % 8 == 0 && k % 8 == 0; }

// Whether the two are on one device and of one dtype: a floating-point one on the CPU, one of 16
// bits on CUDA.
bool have_torchs_dtype(const Tensor& a, const Tensor& b) {
  const at::ScalarType dtype = a.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  return b.scalar_type() == dtype && a.device() == b.device() &&
         (half || (a.is_cpu() && (dtype == at::kFloat || dtype == at::kDouble)));
}

bool is_torchs_gemm(const Tensor& a, const Tensor& b) {
  if (!have_torchs_dtype(a, b) || a.dim() != b.dim()) return false;
  if (a.is_cpu()) return a.dim() == 2;
  if (a.dim() != 2 && (a.dim() != 3 || a.size(0) != b.size(0))) return false;
  return in_whole_vectors(b.size(-1), a.size(-1)) && (a.stride(-1) == 1 || a.size(-2) % 8 == 0);
}

// Of a and n columns.
bool is_brief(const Tensor& a, int64_t n) {
  int64_t work;
  return a.is_cpu() && !__builtin_mul_overflow(a.numel(), n, &work) && work <= kCosts.brief;
}

PyObject* gemm(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  const Tensor* const a = count == 2 ? tensor(arguments[0]) : nullptr;
  const Tensor* const b = count == 2 ? tensor(arguments[1]) : nullptr;
  if (!a || !b || !is_dense(*a) || !is_dense(*b) || !is_plain_thread(true)) return none();
  if (!is_torchs_gemm(*a, *b)) return none();
  return result_of(is_brief(*a, b->size(-1)), [&] {
    using Product = Tensor(const Tensor&, const Tensor&);
    static const auto mm = op<Product>("aten::mm"), bmm = op<Product>("aten::bmm");
    return (a->dim() == 2 ? mm : bmm).call(*a, *b);
  });
}

// torch rounds the product before it adds the bias, unless x is a matrix or can be seen as one.
bool adds_before_rounding(const Tensor& x) {
  return x.dim() == 2 || (x.dim() == 3 && x.is_contiguous());
}

PyObject* linear(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  const Tensor* const x = count == 3 ? tensor(arguments[0]) : nullptr;
  const Tensor* const weight = count == 3 ? tensor(arguments[1]) : nullptr;
  if (!x || !weight || !is_dense(*x) || !is_dense(*weight) || !is_plain_thread(true)) return none();
  if (!have_torchs_dtype(*x, *weight) || weight->dim() != 2) return none();
  if (!x->is_cpu() && !in_whole_vectors(weight->size(0), weight->size(1))) return none();
  std::optional<Tensor> bias;
  if (!is_none(arguments[2])) {
    const Tensor* const given = tensor(arguments[2]);
    if (!given || !is_dense(*given) || !have_torchs_dtype(*given, *weight) || given->dim() != 1 ||
        given->size(0) != weight->size(0) || !adds_before_rounding(*x)) {
      return none();
    }
    bias = *given;
  }
  return result_of(is_brief(*x, weight->size(0)), [&] {
    static const auto call =
        op<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>("aten::linear");
    return call.call(*x, *weight, bias);
  });
}

}  // namespace

std::vector<Function> products() { return {{"gemm", &gemm}, {"linear", &linear}}; }

}  // namespace my_ops::calls
