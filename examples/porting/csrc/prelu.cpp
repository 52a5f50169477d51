// The schema of prelu, and its binding for the CPU.
#include "prelu_checks.h"

#include "binding_cpu.h"

namespace my_ops {
namespace {

constexpr int64_t kGrain = 32768;  // elements a thread: below it, waking another costs more

Tensor prelu(const Tensor& x, const Tensor& slope) {
  check_prelu(x, slope);
  const Prelu io = prelu_operands(x, slope);
  dispatch_floating<CpuTypes>(x.scalar_type(), [&]<typename T>() {
    parallel(io.n, kGrain, [&](int64_t begin, int64_t end) {
      cpu::prelu(in<T>(io.x), in<T>(io.slope), out<T>(io.out), io.channels, io.inner, begin, end);
    });
  });
  return io.out;
}

}  // namespace

STABLE_TORCH_LIBRARY(porting, m) { m.def("prelu(Tensor x, Tensor slope) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(porting, CPU, m) { m.impl("prelu", TORCH_BOX(&prelu)); }

}  // namespace my_ops
