// d_sigmoid and its gradient as a pybind11 module, over the launch interface of include/.
#include <torch/extension.h>

#include "elementwise.h"

#ifdef MY_OPS_WITH_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace {

void check(const at::Tensor& z, const char* name) {
  TORCH_CHECK(z.is_cpu() || z.is_cuda(), "d_sigmoid: ", name, " must be on the CPU or a GPU");
  const auto dtype = z.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kDouble, "d_sigmoid: ", name,
                   " must be of dtype float32 or float64, got ", dtype);
}

at::Tensor forward(const at::Tensor& z_) {
  check(z_, "z");
  const at::Tensor z = z_.contiguous(), out = at::empty_like(z);
  AT_DISPATCH_FLOATING_TYPES(z.scalar_type(), "d_sigmoid", [&] {
    const auto* in = z.const_data_ptr<scalar_t>();
    if (z.is_cpu()) {
      my_ops::cpu::d_sigmoid(in, out.mutable_data_ptr<scalar_t>(), z.numel());
    } else {
#ifdef MY_OPS_WITH_CUDA
      const c10::cuda::CUDAGuard guard(z.device());
      C10_CUDA_CHECK(my_ops::cuda::d_sigmoid(in, out.mutable_data_ptr<scalar_t>(), z.numel(),
                                             at::cuda::getCurrentCUDAStream()));
#else
      TORCH_CHECK(false, "d_sigmoid: built without CUDA");
#endif
    }
  });
  return out;
}

at::Tensor backward(const at::Tensor& grad_, const at::Tensor& z_) {
  check(z_, "z");
  TORCH_CHECK_VALUE(grad_.sizes() == z_.sizes(), "d_sigmoid: grad must have the shape of z, got ",
                    grad_.sizes(), " and ", z_.sizes());
  const at::Tensor z = z_.contiguous(), grad = grad_.to(z).contiguous(), out = at::empty_like(z);
  AT_DISPATCH_FLOATING_TYPES(z.scalar_type(), "d_sigmoid_backward", [&] {
    const auto* in = z.const_data_ptr<scalar_t>();
    const auto* above = grad.const_data_ptr<scalar_t>();
    if (z.is_cpu()) {
      my_ops::cpu::d_sigmoid_backward(above, in, out.mutable_data_ptr<scalar_t>(), z.numel());
    } else {
#ifdef MY_OPS_WITH_CUDA
      const c10::cuda::CUDAGuard guard(z.device());
      C10_CUDA_CHECK(my_ops::cuda::d_sigmoid_backward(above, in, out.mutable_data_ptr<scalar_t>(),
                                                      z.numel(), at::cuda::getCurrentCUDAStream()));
#else
      TORCH_CHECK(false, "d_sigmoid: built without CUDA");
#endif
    }
  });
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "The derivative of the sigmoid, by hand.";
  m.def("forward", &forward, py::arg("z"), py::call_guard<py::gil_scoped_release>(),
        "s(1 - s) of each element, s = sigmoid(z); float32 or float64.");
  m.def("backward", &backward, py::arg("grad"), py::arg("z"),
        py::call_guard<py::gil_scoped_release>(), "grad s(1 - s)(1 - 2s), of the shape of z.");
}
