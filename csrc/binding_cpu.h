// What the CPU bindings share.
#pragma once

#include "binding.h"
#include "common/numeric_cpu.h"

namespace my_ops {

struct CpuTypes {
  using Half = cpu::Half;
  using BFloat16 = cpu::BFloat16;
};

// Shares [0, n) out among torch's threads, each of which calls f(begin, end); grain is the least
// share of one.
template <typename F>
void parallel(int64_t n, int64_t grain, const F& f) {
  if (n <= grain) {
    if (n > 0) f(0, n);
  } else {
    torch::stable::parallel_for(0, n, grain, f);
  }
}

}  // namespace my_ops
