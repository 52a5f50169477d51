// Shared by the CPU kernels: 16-bit storage types, conversions and exp-family functions written so
// that the compiler can vectorize the loops around them, and the clones per instruction set.
#pragma once

#include <cstdint>
#include <cstring>

// One binary for every x86-64: the loader picks the widest version that the processor supports.
// These are levels, because GCC compares processor names with the exact model.
// With MY_OPS_ONE_LEVEL the compiler's options say which instructions there are.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && \
    !defined(MY_OPS_ONE_LEVEL)
#define MY_OPS_LEVELS
#define MY_OPS_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define MY_OPS_CLONES
#endif
// Inlined into every clone, so that it is compiled for the clone's instruction set.
#define MY_OPS_INLINE inline __attribute__((always_inline))

namespace my_ops::cpu {

// While it lives, this thread takes numbers below the smallest normal one for 0. Gradients of
// saturated units are that small, and arithmetic with them takes x86 many times as long.
class [[maybe_unused]] FlushDenormals {
#ifdef __x86_64__
 public:
  FlushDenormals() : before_(__builtin_ia32_stmxcsr()) {
    constexpr unsigned kResults = 0x8000, kOperands = 0x0040;
    __builtin_ia32_ldmxcsr(before_ | kResults | kOperands);
  }
  FlushDenormals(const FlushDenormals&) = delete;
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before_); }

 private:
  unsigned before_;
#endif
};

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename To, typename From>
MY_OPS_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The arithmetic type of a storage type.
template <typename T>
struct Compute {
  using type = T;
};
template <>
struct Compute<Half> {
  using type = float;
};
template <>
struct Compute<BFloat16> {
  using type = float;
};

template <typename T>
MY_OPS_INLINE T load(T x) {
  return x;
}
MY_OPS_INLINE float load(BFloat16 x) { return bit_cast<float>(uint32_t{x.bits} << 16); }
MY_OPS_INLINE float load(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  // The exponent's bias grows by 112, and infinity and NaN keep all exponent bits.
  const uint32_t rebias = magnitude >= (0x7c00u << 13) ? 224u << 23 : 112u << 23;
  // A subnormal's bits below a leading 1. No operand is a subnormal float, which may count as 0.
  const float subnormal = bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;
  const bool is_subnormal = magnitude < (1u << 23);
  const uint32_t value = is_subnormal ? bit_cast<uint32_t>(subnormal) : magnitude + rebias;
  return bit_cast<float>(value | sign);
}

template <typename T, typename C>
MY_OPS_INLINE T store(C x) {
  if constexpr (sizeof(T) == sizeof(C)) {
    return x;
  } else if constexpr (__is_same(T, BFloat16)) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
    return BFloat16{static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
  } else {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal results: rebias by -112 and round to nearest even. Beyond 65520 that is infinity.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal results: adding 0.5 puts the rounding point at bit 0 of the sum.
    const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - (126u << 23);
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t capped = magnitude >= (143u << 23) ? 0x7c00u : finite;
    return Half{static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? 0x7e00u : capped))};
  }
}

// 2^(n + bias) from n + kRound (see ExpConstants), whose low bits hold the integer n. This avoids a
// conversion, which SSE and AVX2 lack for 64 bits and which is undefined for NaN.
MY_OPS_INLINE float pow2(float rounded, int bias) {
  return bit_cast<float>((bit_cast<uint32_t>(rounded) + (127 + bias)) << 23);
}
MY_OPS_INLINE double pow2(double rounded, int bias) {
  return bit_cast<double>((bit_cast<uint64_t>(rounded) + (1023 + bias)) << 52);
}

// exp(r) - 1 for |r| <= ln(2) / 2: Taylor terms until they are below half an ulp.
MY_OPS_INLINE float expm1_poly(float r) {
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  return p * (r * r) + r;
}
MY_OPS_INLINE double expm1_poly(double r) {
  double p = 1.0 / 6227020800;  // 1 / 13!
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  return p * (r * r) + r;
}

template <typename T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kLow = -87.33f;   // exp(x) is a normal number down to here
  static constexpr float kZero = -104.0f;  // exp(x) is 0 from here on
  static constexpr int kBias = 64;
  static constexpr float kUnbias = 0x1p-64f;
  static constexpr float kLog2E = 0x1.715476p+0f;
  static constexpr float kLn2High = 0x1.62e400p-1f;  // trailing zeros: n * high is exact
  static constexpr float kLn2Low = 0x1.7f7d1cp-20f;
  static constexpr float kRound = 0x1.8p23f;  // x + kRound - kRound rounds to an integer
};
template <>
struct ExpConstants<double> {
  static constexpr double kLow = -708.39;
  static constexpr double kZero = -746.0;
  static constexpr int kBias = 512;
  static constexpr double kUnbias = 0x1p-512;
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kLn2High = 0x1.62e42fee00000p-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kRound = 0x1.8p52;
};

// exp(x) and exp(x) - 1 for x <= 0, to about 2 ulp: x = n ln(2) + r, the second is
// 2^n (exp(r) - 1) + (2^n - 1). NaN stays NaN.
template <typename T>
struct Exp {
  T value, minus_one;
};
template <typename T>
MY_OPS_INLINE Exp<T> exp_and_expm1_negative(T x) {
  using E = ExpConstants<T>;
  const T clamped = x < E::kLow ? E::kLow : x;
  const T rounded = clamped * E::kLog2E + E::kRound;
  const T n = rounded - E::kRound;
  const T r = (clamped - n * E::kLn2High) - n * E::kLn2Low;
  const T scale = pow2(rounded, 0);
  const T m = expm1_poly(r);
  // scale * m alone might not be a normal number.
  return {x < E::kLow ? T(0) : scale * (m + T(1)), scale * m + (scale - T(1))};
}
template <typename T>
MY_OPS_INLINE T expm1_negative(T x) {
  return exp_and_expm1_negative(x).minus_one;
}

// exp(x) for x <= 0, to about 2 ulp, subnormal results included; NaN stays NaN.
template <typename T>
MY_OPS_INLINE T exp_negative(T x) {
  using E = ExpConstants<T>;
  const T clamped = x < E::kZero ? E::kZero : x;
  const T rounded = clamped * E::kLog2E + E::kRound;
  const T n = rounded - E::kRound;
  const T r = (clamped - n * E::kLn2High) - n * E::kLn2Low;
  const T scale = pow2(rounded, E::kBias);  // 2^n itself may not be a normal number
  return (scale * expm1_poly(r) + scale) * E::kUnbias;
}

template <typename T>
MY_OPS_INLINE T minus_abs(T x) {
  return x < T(0) ? x : -x;  // NaN stays NaN
}

template <typename T>
MY_OPS_INLINE T sigmoid(T x) {
  const T e = exp_negative(minus_abs(x));
  return (x < T(0) ? e : T(1)) / (T(1) + e);
}

// tanh and its derivative, both without cancellation: 1 - tanh^2 would be inaccurate for large x.
template <typename T>
struct Tanh {
  T value, slope;
};
template <typename T>
MY_OPS_INLINE Tanh<T> tanh(T x) {
  const auto [e, m] = exp_and_expm1_negative(T(2) * minus_abs(x));
  const T inverse = T(1) / (m + T(2));
  const T magnitude = m * inverse;
  return {x < T(0) ? magnitude : -magnitude, T(4) * e * inverse * inverse};
}

}  // namespace my_ops::cpu
