// gemm and linear on the CPU, where ATen's libraries are the best known answer.
#include "gemm_checks.h"

#include "binding_cpu.h"

namespace my_ops {
namespace {

void gemm_out(const Tensor& a, const Tensor& b, Tensor out) {
  check_gemm(a, b, "gemm");
  check_out(out, a, b, "gemm");
  aten_gemm(product(a, b, out));
}

Tensor gemm(const Tensor& a, const Tensor& b) {
  check_gemm(a, b, "gemm");
  const Tensor out = empty(a, gemm_sizes(a, b));
  aten_gemm(product(a, b, out));
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
              const std::string& activation) {
  check_linear(x, weight, bias, activation);
  return aten_linear(x, weight, bias, activation);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("gemm", TORCH_BOX(&gemm));
  m.impl("gemm.out", TORCH_BOX(&gemm_out));
  m.impl("linear", TORCH_BOX(&linear));
}

}  // namespace my_ops
