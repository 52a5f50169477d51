// prelu on the CPU.
#include "prelu.h"

#include "common/numeric_cpu.h"

template <typename T>
void my_ops::cpu::prelu(const T* x, const T* slope, T* out, int64_t channels, int64_t inner,
                        int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const auto value = load(x[i]);
    out[i] = store<T>(value > 0 ? value : value * load(slope[i / inner % channels]));
  }
}

#define MY_OPS_FLOATING(T) \
  template void my_ops::cpu::prelu(const T*, const T*, T*, int64_t, int64_t, int64_t, int64_t);

MY_OPS_FLOATING(float)
MY_OPS_FLOATING(double)
MY_OPS_FLOATING(my_ops::cpu::Half)
MY_OPS_FLOATING(my_ops::cpu::BFloat16)
