// Plain calls of gemm and linear where torch's own product is the faster one, gradients included.
// The rule is that of calls_aten in my_ops/ops/gemm.py and linear.py, for tensors of one dtype; a
// test compares the two.
#include "calls.h"

namespace my_ops::calls {
namespace {

bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Whether the two are on one device and of one floating-point dtype.
bool are_alike(const Tensor& a, const Tensor& b) {
  const at::ScalarType dtype = a.scalar_type();
  return b.scalar_type() == dtype && a.device() == b.device() &&
         (is_half(dtype) || dtype == at::kFloat || dtype == at::kDouble);
}

bool has_aligned_half_rows(const Tensor& a, int64_t n, int64_t k) {
  return is_half(a.scalar_type()) && n % 8 == 0 && k % 8 == 0;
}

bool prefer_aten_gemm(const Tensor& a, const Tensor& b) {
  if (!are_alike(a, b) || a.dim() != b.dim() || a.dim() < 2 || a.dim() > 3) return false;
  if (a.is_cpu() && a.dim() == 2) return true;
  return (a.dim() == 2 || a.size(0) == b.size(0)) &&
         has_aligned_half_rows(a, b.size(-1), a.size(-1)) &&
         (a.stride(-1) == 1 || a.size(-2) % 8 == 0);
}

bool prefer_aten_linear(const Tensor& x, const Tensor& weight) {
  return are_alike(x, weight) && weight.dim() == 2 &&
         (x.is_cpu() || has_aligned_half_rows(x, weight.size(0), weight.size(1)));
}

// Of n columns.
bool is_brief(const Tensor& a, const Tensor& b, int64_t n) {
  int64_t work;
  return a.is_cpu() && !__builtin_mul_overflow(a.numel(), n, &work) && work <= kCosts.brief &&
         may_keep_gil(a, b);
}

PyObject* gemm(PyObject*, PyObject* const* arguments, std::ptrdiff_t count) {
  const Tensor* const a = count == 2 ? tensor(arguments[0]) : nullptr;
  const Tensor* const b = count == 2 ? tensor(arguments[1]) : nullptr;
  if (!a || !b || !is_dense(*a) || !is_dense(*b) || !is_plain_thread(true)) return none();
  if (!prefer_aten_gemm(*a, *b)) return none();
  return result_of(is_brief(*a, *b, b->size(-1)), [&] {
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
  if (!prefer_aten_linear(*x, *weight)) return none();
  std::optional<Tensor> bias;
  if (!is_none(arguments[2])) {
    const Tensor* const given = tensor(arguments[2]);
    if (!given || !is_dense(*given) || !are_alike(*given, *weight) || given->dim() != 1 ||
        given->size(0) != weight->size(0) || !adds_before_rounding(*x)) {
      return none();
    }
    bias = *given;
  }
  const bool brief = is_brief(*x, *weight, weight->size(0)) && (!bias || may_keep_gil(*bias));
  return result_of(brief, [&] {
    static const auto call =
        op<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&)>("aten::linear");
    return call.call(*x, *weight, bias);
  });
}

}  // namespace

std::vector<Function> products() { return {{"gemm", &gemm}, {"linear", &linear}}; }

}  // namespace my_ops::calls
