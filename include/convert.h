// Launch interface of conversions on the CPU.
#pragma once

#include <cstdint>

namespace my_ops::cpu {

struct Half;
struct BFloat16;

// n elements. Narrowing rounds to nearest even.
void convert(const Half* from, int64_t n, float* to);
void convert(const BFloat16* from, int64_t n, float* to);
void convert(const float* from, int64_t n, Half* to);
void convert(const float* from, int64_t n, BFloat16* to);

}  // namespace my_ops::cpu
