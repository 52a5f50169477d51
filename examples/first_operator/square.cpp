// square(x) = x * x on the CPU, and its schema.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

namespace {

Tensor square(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "square: x must be of dtype float32");
  const Tensor dense = torch::stable::contiguous(x);
  const Tensor out = torch::stable::empty_like(dense);
  const auto* from = static_cast<const float*>(dense.const_data_ptr());
  auto* to = static_cast<float*>(out.mutable_data_ptr());
  for (int64_t i = 0; i < dense.numel(); ++i) to[i] = from[i] * from[i];
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(first_operator, m) { m.def("square(Tensor x) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(first_operator, CPU, m) { m.impl("square", TORCH_BOX(&square)); }
