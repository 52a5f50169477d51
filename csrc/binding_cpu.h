// What the CPU bindings share.
#pragma once

#include "binding.h"
#include "common/numeric_cpu.h"

namespace my_ops {

struct CpuTypes {
  using Half = cpu::Half;
  using BFloat16 = cpu::BFloat16;
};

// Divides [0, n) among torch's threads. Each calls f(begin, end) with its share, which is at least
// grain.
template <typename F>
void parallel(int64_t n, int64_t grain, const F& f) {
  if (n <= grain) {
    if (n > 0) f(0, n);
  } else {
    torch::stable::parallel_for(0, n, grain, f);
  }
}

}  // namespace my_ops
