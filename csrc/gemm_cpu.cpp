// gemm and linear on the CPU, where no kernel is known to be faster than ATen's libraries.
#include "gemm_checks.h"

#include "binding_cpu.h"

namespace my_ops {
namespace {

void compute(const Tensor& a, const Tensor& b, const Tensor& out) {
  const Operands operands = of_one_dtype(a, b);
  aten_gemm(product(operands.a, operands.b, out));
}

// precision is about tensor cores. Here it is checked, but has no effect.
void gemm_out(const Tensor& a, const Tensor& b, Tensor out, const std::optional<Name>& precision) {
  check_gemm(a, b, "gemm");
  check_precision(precision, "gemm");
  check_out(out, a, b, "gemm");
  compute(a, b, out);
}

Tensor gemm(const Tensor& a, const Tensor& b, const std::optional<Name>& precision) {
  check_gemm(a, b, "gemm");
  check_precision(precision, "gemm");
  const Tensor out = empty(wider(a, b), gemm_sizes(a, b));
  compute(a, b, out);
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const Name& activation, const std::optional<Tensor>& residual,
              const std::optional<Name>& precision, const std::optional<Tensor>& packed) {
  check_linear(x, weight, bias, activation, residual, precision, packed);
  const Operands operands = of_one_dtype(x, weight);
  return aten_linear(operands.a, operands.b, bias, activation, residual);
}

// The packed form is empty: ATen's products take the weight itself.
Tensor prepack(const Tensor& weight) {
  check_prepack(weight);
  return empty(weight, {0}, ScalarType::Byte);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm.out", TORCH_BOX(&gemm_out));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("prepack", TORCH_BOX(&prepack));
}

}  // namespace my_ops
