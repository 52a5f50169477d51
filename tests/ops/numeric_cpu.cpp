// Prints the largest error of exp_and_expm1_negative in ulps, where subnormal numbers are flushed.
#include <cmath>
#include <cstdio>
#include <limits>

#include "common/numeric_cpu.h"

using namespace my_ops::cpu;

template <typename T>
double worst() {
  const FlushDenormals flush;
  double most = 0;
  for (int i = 0; i <= 100000; ++i) {
    const T x = ExpConstants<T>::kLow * static_cast<T>(i) / T(100000);
    const long double exact = std::exp(static_cast<long double>(x));
    const Exp<T> got = exp_and_expm1_negative(x);
    const long double ulp = std::numeric_limits<T>::epsilon() * exact;
    most = std::fmax(most, static_cast<double>(std::fabs((got.value - exact) / ulp)));
  }
  return most;
}

int main() { std::printf("%g %g\n", worst<float>(), worst<double>()); }
