// The elementwise family on the CPU: one loop template, one functor per op. Bound by memory, except
// d_sigmoid on one core. The compiler vectorizes the loops once per instruction set.
#include "elementwise.h"

#include <algorithm>
#include <type_traits>

#include "common/numeric_cpu.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace my_ops::cpu {
namespace {

struct AddOne {
  template <typename C>
  MY_OPS_INLINE C operator()(C x) const {
    return static_cast<C>(x + C(1));
  }
};
struct CustomAdd {
  template <typename C>
  MY_OPS_INLINE C operator()(C a, C b) const {
    return static_cast<C>(a + b + C(1));
  }
};
struct DSigmoid {
  template <typename C>
  MY_OPS_INLINE C operator()(C x) const {
    // s(1 - s) = e / (1 + e)^2, even in x. The square as a sum, which rounds 1 + e once, not twice.
    const C e = exp_negative(minus_abs(x));
    return e / (e * (C(2) + e) + C(1));
  }
};
struct DSigmoidBackward {
  template <typename C>
  MY_OPS_INLINE C operator()(C grad, C x) const {
    const C m = expm1_negative(minus_abs(x));  // e - 1; 1 - 2s = +-m / (1 + e) without cancellation
    const C e = exp_negative(minus_abs(x));
    const C slope = e / ((C(1) + e) * (C(1) + e)) * (m / (C(1) + e));
    return grad * (x < C(0) ? -slope : slope);
  }
};
struct RoundSte {
  template <typename C>
  MY_OPS_INLINE C operator()(C x) const {
    const C rounded = x >= C(0.5) ? C(1) : C(0);
    return x == x ? rounded : x;
  }
};

#ifdef __x86_64__

// The builtin of Clang 14 does not know f16c.
const bool kHasF16c = [] {
  unsigned eax, ebx, ecx, edx;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}();

// Converts whole vectors of eight halves with the processor's own instructions, which the compiler
// does not use. Returns how many elements these are.
template <typename Op, typename... X>
__attribute__((target("avx2,fma,f16c"))) int64_t map_f16c(Half* out, int64_t n, const X*... x) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    float in[sizeof...(X)][8], result[8];
    int operand = 0;
    ((_mm256_storeu_ps(in[operand++],
                       _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))))),
     ...);
    for (int j = 0; j < 8; ++j) {
      if constexpr (sizeof...(X) == 1) {
        result[j] = Op{}(in[0][j]);
      } else {
        result[j] = Op{}(in[0][j], in[1][j]);
      }
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(result), _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

#endif

template <typename Op, typename T, typename... X>
MY_OPS_INLINE void map(T* out, int64_t n, const X*... x) {
  int64_t begin = 0;
#ifdef __x86_64__
  if constexpr (std::is_same_v<T, Half>) {
    if (kHasF16c) begin = map_f16c<Op>(out, n, x...);
  }
#endif
#pragma GCC ivdep
  for (int64_t i = begin; i < n; ++i) out[i] = store<T>(Op{}(load(x[i])...));
}

// Runs along the innermost dimension; the outer indices are an odometer.
template <typename Op, typename T>
MY_OPS_INLINE void map_broadcast(const T* a, const T* b, T* out, const Broadcast& shape,
                                 int64_t begin, int64_t end) {
  const int inner = shape.dims - 1;
  int64_t index[Broadcast::kMaxDims];
  int64_t rest = begin;
  for (int d = inner; d >= 0; --d) {
    index[d] = rest % shape.sizes[d];
    rest /= shape.sizes[d];
  }
  const int64_t a_step = shape.a_strides[inner];
  const int64_t b_step = shape.b_strides[inner];
  while (begin < end) {
    int64_t a_offset = 0, b_offset = 0;
    for (int d = 0; d <= inner; ++d) {
      a_offset += index[d] * shape.a_strides[d];
      b_offset += index[d] * shape.b_strides[d];
    }
    const int64_t run = std::min(shape.sizes[inner] - index[inner], end - begin);
    const T* a_run = a + a_offset;
    const T* b_run = b + b_offset;
    T* out_run = out + begin;
    if (a_step == 1 && b_step == 1) {
      map<Op>(out_run, run, a_run, b_run);
    } else if (a_step == 1 && b_step == 0) {
      const auto constant = load(*b_run);
      for (int64_t i = 0; i < run; ++i) out_run[i] = store<T>(Op{}(load(a_run[i]), constant));
    } else if (a_step == 0 && b_step == 1) {
      const auto constant = load(*a_run);
      for (int64_t i = 0; i < run; ++i) out_run[i] = store<T>(Op{}(constant, load(b_run[i])));
    } else {
      for (int64_t i = 0; i < run; ++i) {
        out_run[i] = store<T>(Op{}(load(a_run[i * a_step]), load(b_run[i * b_step])));
      }
    }
    begin += run;
    index[inner] = 0;
    for (int d = inner - 1; d >= 0 && ++index[d] == shape.sizes[d]; --d) index[d] = 0;
  }
}

template <typename T>
MY_OPS_INLINE T from_index(int64_t i) {
  if constexpr (std::is_arithmetic_v<T>) {
    return static_cast<T>(i);
  } else {
    return store<T>(static_cast<float>(i));
  }
}

}  // namespace

// Templates cannot carry target_clones, so the public functions are explicit specialisations.
#define MY_OPS_REAL(T)                                                                  \
  template <>                                                                           \
  MY_OPS_CLONES void add_one(const T* x, T* out, int64_t n) {                           \
    map<AddOne>(out, n, x);                                                             \
  }                                                                                     \
  template <>                                                                           \
  MY_OPS_CLONES void custom_add(const T* a, const T* b, T* out, int64_t n) {            \
    map<CustomAdd>(out, n, a, b);                                                       \
  }                                                                                     \
  template <>                                                                           \
  MY_OPS_CLONES void custom_add(const T* a, const T* b, T* out, const Broadcast& shape, \
                                int64_t begin, int64_t end) {                           \
    map_broadcast<CustomAdd>(a, b, out, shape, begin, end);                             \
  }
#define MY_OPS_FLOATING(T)                                                              \
  MY_OPS_REAL(T)                                                                        \
  template <>                                                                           \
  MY_OPS_CLONES void d_sigmoid(const T* x, T* out, int64_t n) {                         \
    map<DSigmoid>(out, n, x);                                                           \
  }                                                                                     \
  template <>                                                                           \
  MY_OPS_CLONES void d_sigmoid_backward(const T* grad, const T* x, T* out, int64_t n) { \
    map<DSigmoidBackward>(out, n, grad, x);                                             \
  }                                                                                     \
  template <>                                                                           \
  MY_OPS_CLONES void round_ste(const T* x, T* out, int64_t n) {                         \
    map<RoundSte>(out, n, x);                                                           \
  }
#define MY_OPS_INDEX(T)                                                              \
  template <>                                                                        \
  MY_OPS_CLONES void fill_index(T* out, int64_t width, int64_t begin, int64_t end) { \
    if (width == 0) return;                                                          \
    for (int64_t y = begin; y < end; ++y) {                                          \
      for (int64_t x = 0; x < width; ++x) out[y * width + x] = from_index<T>(x + y); \
    }                                                                                \
  }

MY_OPS_REAL(uint8_t)
MY_OPS_REAL(uint16_t)
MY_OPS_REAL(uint32_t)
MY_OPS_REAL(uint64_t)
MY_OPS_FLOATING(float)
MY_OPS_FLOATING(double)
MY_OPS_FLOATING(Half)
MY_OPS_FLOATING(BFloat16)
MY_OPS_INDEX(float)
MY_OPS_INDEX(double)
MY_OPS_INDEX(Half)
MY_OPS_INDEX(BFloat16)
MY_OPS_INDEX(int32_t)
MY_OPS_INDEX(int64_t)

}  // namespace my_ops::cpu
