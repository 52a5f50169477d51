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
  static constexpr float kMost = 89.0f;    // exp(x) is infinite from here on
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
  static constexpr double kMost = 710.0;
  static constexpr int kBias = 512;
  static constexpr double kUnbias = 0x1p-512;
  static constexpr double kLog2E = 0x1.71547652b82fep+0;
  static constexpr double kLn2High = 0x1.62e42fee00000p-1;
  static constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  static constexpr double kRound = 0x1.8p52;
};

// x = n ln(2) + r, and n + kRound.
template <typename T>
struct Reduced {
  T rounded, n, r;
};
template <typename T>
MY_OPS_INLINE Reduced<T> reduced(T x) {
  using E = ExpConstants<T>;
  const T rounded = x * E::kLog2E + E::kRound;
  const T n = rounded - E::kRound;
  return {rounded, n, (x - n * E::kLn2High) - n * E::kLn2Low};
}

// exp(x) and exp(x) - 1 for x <= 0, to about 2 ulp: the second is 2^n (exp(r) - 1) + (2^n - 1). NaN
// stays NaN.
template <typename T>
struct Exp {
  T value, minus_one;
};
template <typename T>
MY_OPS_INLINE Exp<T> exp_and_expm1_negative(T x) {
  using E = ExpConstants<T>;
  const T clamped = x < E::kLow ? E::kLow : x;
  const auto [rounded, n, r] = reduced(clamped);
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
  const auto [rounded, n, r] = reduced(clamped);
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

// exp(x) for any x, to about 1 ulp, subnormal results included; NaN stays NaN.
template <typename T>
MY_OPS_INLINE T exp(T x) {
  using E = ExpConstants<T>;
  const T least = x < E::kZero ? E::kZero : x, clamped = least > E::kMost ? E::kMost : least;
  const auto [rounded, n, r] = reduced(clamped);
  // 2^n itself may be infinite or not a normal number.
  const T half = n * T(0.5) + E::kRound, rest = n - (half - E::kRound) + E::kRound;
  const T scale = pow2(half, 0);
  return (scale * expm1_poly(r) + scale) * pow2(rest, 0);
}

// exp(x) - 1 for any x, to about 2 ulp; NaN stays NaN.
template <typename T>
MY_OPS_INLINE T expm1(T x) {
  using E = ExpConstants<T>;
  const T least = x < E::kLow ? E::kLow : x, clamped = least > E::kMost ? E::kMost : least;
  const auto [rounded, n, r] = reduced(clamped);
  const T half = pow2(rounded, -1);  // 2^n itself may be infinite
  return (half * expm1_poly(r) + (half - T(0.5))) * T(2);
}

// (log(1 + f) - f + f^2 / 2) / s - f^2 / 2 for s = f / (2 + f), from s^2: the rest of the series of
// 2 atanh(s), until its terms are below half an ulp for 1 + f from sqrt(1/2) to sqrt(2).
MY_OPS_INLINE float log1p_poly(float z) {
  float p = 2.0f / 9;
  p = p * z + 2.0f / 7;
  p = p * z + 2.0f / 5;
  p = p * z + 2.0f / 3;
  return p * z;
}
MY_OPS_INLINE double log1p_poly(double z) {
  double p = 2.0 / 21;
  p = p * z + 2.0 / 19;
  p = p * z + 2.0 / 17;
  p = p * z + 2.0 / 15;
  p = p * z + 2.0 / 13;
  p = p * z + 2.0 / 11;
  p = p * z + 2.0 / 9;
  p = p * z + 2.0 / 7;
  p = p * z + 2.0 / 5;
  p = p * z + 2.0 / 3;
  return p * z;
}

template <typename T>
struct LogConstants;
template <>
struct LogConstants<float> {
  using Bits = uint32_t;
  static constexpr int kExponent = 23, kBias = 127;
  static constexpr Bits kRootHalf = 0x3f3504f3;  // sqrt(1/2)
  static constexpr float kNormal = 0x1p-126f, kScale = 0x1p32f, kScaled = 32.0f;
};
template <>
struct LogConstants<double> {
  using Bits = uint64_t;
  static constexpr int kExponent = 52, kBias = 1023;
  static constexpr Bits kRootHalf = 0x3fe6a09e667f3bcd;
  static constexpr double kNormal = 0x1p-1022, kScale = 0x1p64, kScaled = 64.0;
};

// log(x) to about 1 ulp: x = 2^n (1 + f). -inf for 0, NaN below and for NaN.
template <typename T>
MY_OPS_INLINE T log(T x) {
  using E = ExpConstants<T>;
  using L = LogConstants<T>;
  using Bits = typename L::Bits;
  const bool is_subnormal = x < L::kNormal;
  const T normal = x * (is_subnormal ? L::kScale : T(1));
  const Bits bits = bit_cast<Bits>(normal);
  constexpr Bits kOne = Bits{L::kBias} << L::kExponent;
  const Bits biased = (bits - L::kRootHalf + kOne) >> L::kExponent;
  // As in pow2: no conversion of integers.
  const T shifted = bit_cast<T>(bit_cast<Bits>(E::kRound) + biased) - (E::kRound + T(L::kBias));
  const T n = is_subnormal ? shifted - L::kScaled : shifted;
  const T f = bit_cast<T>(bits - (biased << L::kExponent) + kOne) - T(1);
  const T s = f / (f + T(2)), half_square = T(0.5) * f * f;
  const T rest = s * (half_square + log1p_poly(s * s)) + n * E::kLn2Low;
  const T finite = n * E::kLn2High - ((half_square - rest) - f);
  // One comparison each, or GCC does not vectorize them.
  const T below_infinity = x < T(__builtin_inf()) ? finite : x;
  const T from_zero = x == T(0) ? T(-__builtin_inf()) : below_infinity;
  return x < T(0) ? T(__builtin_nan("")) : from_zero;
}

// log(1 + x), with what the sum's rounding takes from it.
template <typename T>
MY_OPS_INLINE T log1p(T x) {
  const T sum = T(1) + x;
  const T lost = x - (sum - T(1));
  const T more = lost == T(0) ? T(0) : lost / sum, result = log(sum) + more;
  return sum < T(__builtin_inf()) ? result : sum;
}

// As torch's: x itself beyond 20.
template <typename T>
MY_OPS_INLINE T softplus(T x) {
  const T least = x < T(0) ? T(0) : x;
  const T sum = least + log1p(exp_negative(minus_abs(x)));
  return x > T(20) ? x : sum;
}

MY_OPS_INLINE float sqrt(float x) { return __builtin_sqrtf(x); }
MY_OPS_INLINE double sqrt(double x) { return __builtin_sqrt(x); }

}  // namespace my_ops::cpu
