// prelu's binding for CUDA.
#include "prelu_checks.h"

#include "binding_cuda.h"

namespace my_ops {
namespace {

Tensor prelu(const Tensor& x, const Tensor& slope) {
  check_prelu(x, slope);
  const Device device(x);
  const Prelu io = prelu_operands(x, slope);
  dispatch_floating<CudaTypes>(x.scalar_type(), [&]<typename T>() {
    check_launch(cuda::prelu(in<T>(io.x), in<T>(io.slope), out<T>(io.out), io.n, io.channels,
                             io.inner, device.stream()),
                 "prelu");
  });
  return io.out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(porting, CUDA, m) { m.impl("prelu", TORCH_BOX(&prelu)); }

}  // namespace my_ops
