// Elementwise ops on the CPU.
#include "elementwise_checks.h"

#include "binding_cpu.h"
#include "elementwise/costs.h"
#include "elementwise_layout.h"

namespace my_ops {
namespace {

constexpr int64_t kGrain = cpu::kElementwiseCosts.grain;
constexpr int64_t kGrainExp = cpu::kElementwiseCosts.grain_exp;

Tensor add_one(const Tensor& x) {
  check_real(x, "add_one", "x");
  const Unary io = unary(x);
  dispatch_real<CpuTypes>(x.scalar_type(), [&]<typename T>() {
    parallel(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      cpu::add_one(in<T>(io.x) + begin, out<T>(io.out) + begin, end - begin);
    });
  });
  return io.out;
}

Tensor custom_add(const Tensor& a, const Tensor& b) {
  const auto [sizes, dtype] = check_custom_add(a, b);
  const Binary io = binary(a, b, sizes, dtype);
  dispatch_real<CpuTypes>(dtype, [&]<typename T>() {
    parallel(io.out.numel(), kGrain, [&](int64_t begin, int64_t end) {
      if (io.flat) {
        cpu::custom_add(in<T>(io.a) + begin, in<T>(io.b) + begin, out<T>(io.out) + begin,
                        end - begin);
      } else {
        cpu::custom_add(in<T>(io.a), in<T>(io.b), out<T>(io.out), io.shape, begin, end);
      }
    });
  });
  return io.out;
}

Tensor d_sigmoid(const Tensor& z) {
  check_floating(z, "d_sigmoid", "z");
  const Unary io = unary(z);
  dispatch_floating<CpuTypes>(z.scalar_type(), [&]<typename T>() {
    parallel(z.numel(), kGrainExp, [&](int64_t begin, int64_t end) {
      cpu::d_sigmoid(in<T>(io.x) + begin, out<T>(io.out) + begin, end - begin);
    });
  });
  return io.out;
}

Tensor d_sigmoid_backward(const Tensor& grad, const Tensor& z) {
  check_d_sigmoid_backward(grad, z);
  const Gradient io = gradient(grad, z);
  dispatch_floating<CpuTypes>(z.scalar_type(), [&]<typename T>() {
    parallel(z.numel(), kGrainExp, [&](int64_t begin, int64_t end) {
      cpu::d_sigmoid_backward(in<T>(io.grad) + begin, in<T>(io.x) + begin, out<T>(io.out) + begin,
                              end - begin);
    });
  });
  return io.out;
}

Tensor round_ste(const Tensor& x) {
  check_floating(x, "round_ste", "x");
  const Unary io = unary(x);
  dispatch_floating<CpuTypes>(x.scalar_type(), [&]<typename T>() {
    parallel(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      cpu::round_ste(in<T>(io.x) + begin, out<T>(io.out) + begin, end - begin);
    });
  });
  return io.out;
}

void fill_index_out(Tensor out_) {
  check_fill_index(out_);
  const Tensor dense = out_.is_contiguous() ? out_ : empty(out_, sizes_of(out_));
  const int64_t height = out_.size(0), width = out_.size(1);
  const auto fill = [&]<typename T>() {
    parallel(height, kGrain / (width + 1) + 1, [&](int64_t begin, int64_t end) {
      cpu::fill_index(out<T>(dense), width, begin, end);
    });
  };
  switch (out_.scalar_type()) {
    case ScalarType::Int:
      fill.operator()<int32_t>();
      break;
    case ScalarType::Long:
      fill.operator()<int64_t>();
      break;
    default:
      dispatch_floating<CpuTypes>(out_.scalar_type(), fill);
  }
  if (!out_.is_contiguous()) torch::stable::copy_(out_, dense);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("add_one", TORCH_BOX(&add_one));
  m.impl("custom_add", TORCH_BOX(&custom_add));
  m.impl("d_sigmoid", TORCH_BOX(&d_sigmoid));
  m.impl("d_sigmoid_backward", TORCH_BOX(&d_sigmoid_backward));
  m.impl("round_ste", TORCH_BOX(&round_ste));
  m.impl("fill_index.out", TORCH_BOX(&fill_index_out));
}

}  // namespace my_ops
