// The gradients of a recurrent layer's input and parameters on the CPU: ATen's products, except the
// small ones, which take less time than ATen takes to begin. The 16-bit types are computed in
// float, except bf16 where the processor multiplies it.
#include "binding_cpu.h"
#include "recurrent/cpu/costs.h"
#include "recurrent_weights_backward.h"

namespace my_ops {
namespace {

constexpr cpu::RecurrentCosts kCosts{};

// Whether ATen's product of so many rows and columns, summed over k, takes longer to begin.
bool is_small(int64_t m, int64_t n, int64_t k) {
  return m * n * k <= kCosts.few_products && k <= kCosts.few_terms;
}

// Whether ATen multiplies bf16 as it is: in oneDNN, which sums in float and rounds once, as a
// conversion of the float result does. It takes two terms of a sum at a time.
bool multiplies_bf16(const WeightsBackward& a) {
#ifdef __x86_64__
  const int64_t terms = a.steps() * a.batch(), width = std::min(a.inputs(), a.hidden());
  return a.grad_gates.scalar_type() == ScalarType::BFloat16 && terms % 2 == 0 &&
         a.rows() % 2 == 0 && !is_small(a.rows(), width, terms) &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

template <typename T>
void small(const T* a, int64_t a_row, int64_t a_col, const Tensor& b, const Tensor& c) {
  const int64_t n = b.size(1);
  cpu::few_products<T>({.a = a,
                        .b = in<T>(b),
                        .c = out<T>(c),
                        .a_row = a_row,
                        .b_row = b.stride(0),
                        .b_col = 1,
                        .c_row = n,
                        .m = c.size(0),
                        .k = b.size(0)},
                       a_col, n);
}

template <typename F>
void dispatch(const Tensor& t, const F& f) {
  if (t.scalar_type() == ScalarType::Double) {
    f.template operator()<double>();
  } else {
    f.template operator()<float>();
  }
}

void mm_into(const Tensor& a, const Tensor& b, const Tensor& c) {
  if (a.dim() == 3) {
    aten("aten::bmm", "out", a, b, c);
    return;
  }
  const int64_t m = a.size(0), n = b.size(1);
  const bool is_bf16 = a.scalar_type() == ScalarType::BFloat16;
  if (!is_bf16 && b.stride(1) == 1 && is_small(m, n, a.size(1))) {
    dispatch(a, [&]<typename T>() { small(in<T>(a), a.stride(0), a.stride(1), b, c); });
  } else {
    aten("aten::mm", "out", a, b, c);
  }
}

Tensor mm(const Tensor& a, const Tensor& b) {
  const Tensor c = empty(a, {a.size(0), b.size(1)});
  mm_into(a, b, c);
  return c;
}

Tensor sum_of(const Tensor& rows) {
  const int64_t n = rows.size(1), k = rows.size(0);
  const Tensor c = empty(rows, {1, n});
  if (rows.scalar_type() != ScalarType::BFloat16 && is_small(1, n, k)) {
    dispatch(rows, [&]<typename T>() {
      const T one = 1;
      small(&one, 0, 0, rows, c);
    });
  } else {
    Tensor ones = empty(rows, {1, k});
    torch::stable::fill_(ones, 1.0);
    aten("aten::mm", "out", ones, rows, c);
  }
  return as_strided(c, {n}, {1});
}

}  // namespace

WeightsGradients cpu::weights_backward(WeightsBackward a, bool one_matrix) {
  const ScalarType dtype = a.grad_gates.scalar_type();
  const ScalarType acc = multiplies_bf16(a) ? dtype : compute_dtype(dtype);
  for (Tensor* t : {&a.grad_gates, &a.input, &a.h0, &a.output}) *t = cast(*t, acc);
  a.weight_x = cast(a.weight_x, acc);
  const bool one = one_matrix && a.parameters;
  if (one) a.parameters = false;
  WeightsGradients grads = weights_gradients(a, mm_into, sum_of);
  if (one) {
    const Tensor rows = all_steps(as_contiguous(a.grad_gates));
    const Tensor x = all_steps(as_contiguous(a.input));
    grads.one = cast(mm(transposed(rows), joined({before_steps(a), x}, 1)), dtype);
    grads.bias_x = sum_of(rows);
  }
  for (Tensor* t : {&grads.input, &grads.w_x, &grads.w_h, &grads.bias_x, &grads.bias_h}) {
    if (t->defined()) *t = cast(*t, dtype);
  }
  for (Tensor& t : grads.vectors) t = cast(t, dtype);
  return grads;
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl(WeightsBackward::kName, [](StableIValue* stack, uint64_t, uint64_t) {
    give(stack, cpu::weights_backward(weights_backward_arguments(stack)));
  });
}

}  // namespace my_ops
