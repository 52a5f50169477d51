// Elementwise ops on CUDA.
#include "elementwise_checks.h"

#include "binding_cuda.h"
#include "elementwise_layout.h"

namespace my_ops {
namespace {

Tensor add_one(const Tensor& x) {
  check_real(x, "add_one", "x");
  const Device device(x);
  const Unary io = unary(x);
  dispatch_real<CudaTypes>(x.scalar_type(), [&]<typename T>() {
    check_launch(cuda::add_one(in<T>(io.x), out<T>(io.out), x.numel(), device.stream()), "add_one");
  });
  return io.out;
}

Tensor custom_add(const Tensor& a, const Tensor& b) {
  const auto [sizes, dtype] = check_custom_add(a, b);
  const Device device(a);
  const Binary io = binary(a, b, sizes, dtype);
  dispatch_real<CudaTypes>(dtype, [&]<typename T>() {
    const T* a_ = in<T>(io.a);
    const T* b_ = in<T>(io.b);
    T* out_ = out<T>(io.out);
    check_launch(io.flat ? cuda::custom_add(a_, b_, out_, io.out.numel(), device.stream())
                         : cuda::custom_add(a_, b_, out_, io.shape, device.stream()),
                 "custom_add");
  });
  return io.out;
}

Tensor d_sigmoid(const Tensor& z) {
  check_floating(z, "d_sigmoid", "z");
  const Device device(z);
  const Unary io = unary(z);
  dispatch_floating<CudaTypes>(z.scalar_type(), [&]<typename T>() {
    check_launch(cuda::d_sigmoid(in<T>(io.x), out<T>(io.out), z.numel(), device.stream()),
                 "d_sigmoid");
  });
  return io.out;
}

Tensor d_sigmoid_backward(const Tensor& grad, const Tensor& z) {
  check_d_sigmoid_backward(grad, z);
  const Device device(z);
  const Gradient io = gradient(grad, z);
  dispatch_floating<CudaTypes>(z.scalar_type(), [&]<typename T>() {
    check_launch(cuda::d_sigmoid_backward(in<T>(io.grad), in<T>(io.z), out<T>(io.out), z.numel(),
                                          device.stream()),
                 "d_sigmoid_backward");
  });
  return io.out;
}

Tensor round_ste(const Tensor& x) {
  check_floating(x, "round_ste", "x");
  const Device device(x);
  const Unary io = unary(x);
  dispatch_floating<CudaTypes>(x.scalar_type(), [&]<typename T>() {
    check_launch(cuda::round_ste(in<T>(io.x), out<T>(io.out), x.numel(), device.stream()),
                 "round_ste");
  });
  return io.out;
}

void fill_index_out(Tensor out_) {
  check_fill_index(out_);
  const Device device(out_);
  const Tensor dense = out_.is_contiguous() ? out_ : empty(out_, sizes_of(out_));
  const auto fill = [&]<typename T>() {
    check_launch(cuda::fill_index(out<T>(dense), out_.size(0), out_.size(1), device.stream()),
                 "fill_index");
  };
  switch (out_.scalar_type()) {
    case ScalarType::Int:
      fill.operator()<int32_t>();
      break;
    case ScalarType::Long:
      fill.operator()<int64_t>();
      break;
    default:
      dispatch_floating<CudaTypes>(out_.scalar_type(), fill);
  }
  if (!out_.is_contiguous()) torch::stable::copy_(out_, dense);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("add_one", TORCH_BOX(&add_one));
  m.impl("custom_add", TORCH_BOX(&custom_add));
  m.impl("d_sigmoid", TORCH_BOX(&d_sigmoid));
  m.impl("d_sigmoid_backward", TORCH_BOX(&d_sigmoid_backward));
  m.impl("round_ste", TORCH_BOX(&round_ste));
  m.impl("fill_index.out", TORCH_BOX(&fill_index_out));
}

}  // namespace my_ops
