// Conversions on the CPU. Bound by memory: the compiler vectorizes the loops once per instruction
// set.
#include "convert.h"

#include "common/numeric_cpu.h"

namespace my_ops::cpu {
namespace {

template <typename From, typename To>
MY_OPS_INLINE void convert_all(const From* __restrict from, int64_t n, To* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = store<To>(load(from[i]));
}

}  // namespace

#define MY_OPS_CONVERT(From, To) \
  MY_OPS_CLONES void convert(const From* from, int64_t n, To* to) { convert_all(from, n, to); }
MY_OPS_CONVERT(Half, float)
MY_OPS_CONVERT(BFloat16, float)
MY_OPS_CONVERT(float, Half)
MY_OPS_CONVERT(float, BFloat16)

}  // namespace my_ops::cpu
