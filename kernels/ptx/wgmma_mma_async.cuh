// wgmma.mma_async: d = a * b (+ d), a is [64, 16], b is [kN, 16] in shared memory, d is float. a is
// in shared memory (Wgmma) or in registers (WgmmaRegisters). kMajorA is set if a is stored along m,
// not k; kMajorB if b is stored along n.
// Thread t of the warpgroup holds d[64][kN] as d[4*j + 2*i + c] at row 16*(t/32) + 8*i + t%32/4,
// column 8*j + 2*(t%4) + c. In registers, a[2 * h + i] holds row 16*(t/32) + 8*i + t%32/4, columns
// 8*h + 2*(t%4) and the next.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace my_ops::cuda::ptx {

// FIRST(0) NEXT(1) NEXT(2) ... for the registers of d: as text of an instruction, and as operands.
// clang-format off
#define MY_OPS_EACH_12(FIRST, NEXT)                                                               \
  FIRST(0) NEXT(1) NEXT(2) NEXT(3) NEXT(4) NEXT(5) NEXT(6) NEXT(7) NEXT(8) NEXT(9) NEXT(10)       \
  NEXT(11)
#define MY_OPS_EACH_16(FIRST, NEXT)                                                               \
  MY_OPS_EACH_12(FIRST, NEXT) NEXT(12) NEXT(13) NEXT(14) NEXT(15)
#define MY_OPS_EACH_24(FIRST, NEXT)                                                               \
  MY_OPS_EACH_16(FIRST, NEXT) NEXT(16) NEXT(17) NEXT(18) NEXT(19) NEXT(20) NEXT(21) NEXT(22)      \
  NEXT(23)
#define MY_OPS_EACH_32(FIRST, NEXT)                                                               \
  MY_OPS_EACH_24(FIRST, NEXT) NEXT(24) NEXT(25) NEXT(26) NEXT(27) NEXT(28) NEXT(29) NEXT(30)      \
  NEXT(31)
#define MY_OPS_EACH_36(FIRST, NEXT)                                                               \
  MY_OPS_EACH_32(FIRST, NEXT) NEXT(32) NEXT(33) NEXT(34) NEXT(35)
#define MY_OPS_EACH_48(FIRST, NEXT)                                                               \
  MY_OPS_EACH_36(FIRST, NEXT) NEXT(36) NEXT(37) NEXT(38) NEXT(39) NEXT(40) NEXT(41) NEXT(42)      \
  NEXT(43) NEXT(44) NEXT(45) NEXT(46) NEXT(47)
#define MY_OPS_EACH_64(FIRST, NEXT)                                                               \
  MY_OPS_EACH_48(FIRST, NEXT) NEXT(48) NEXT(49) NEXT(50) NEXT(51) NEXT(52) NEXT(53) NEXT(54)      \
  NEXT(55) NEXT(56) NEXT(57) NEXT(58) NEXT(59) NEXT(60) NEXT(61) NEXT(62) NEXT(63)
#define MY_OPS_EACH_96(FIRST, NEXT)                                                               \
  MY_OPS_EACH_64(FIRST, NEXT) NEXT(64) NEXT(65) NEXT(66) NEXT(67) NEXT(68) NEXT(69) NEXT(70)      \
  NEXT(71) NEXT(72) NEXT(73) NEXT(74) NEXT(75) NEXT(76) NEXT(77) NEXT(78) NEXT(79) NEXT(80)       \
  NEXT(81) NEXT(82) NEXT(83) NEXT(84) NEXT(85) NEXT(86) NEXT(87) NEXT(88) NEXT(89) NEXT(90)       \
  NEXT(91) NEXT(92) NEXT(93) NEXT(94) NEXT(95)
#define MY_OPS_EACH_128(FIRST, NEXT)                                                              \
  MY_OPS_EACH_96(FIRST, NEXT) NEXT(96) NEXT(97) NEXT(98) NEXT(99) NEXT(100) NEXT(101) NEXT(102)   \
  NEXT(103) NEXT(104) NEXT(105) NEXT(106) NEXT(107) NEXT(108) NEXT(109) NEXT(110) NEXT(111)       \
  NEXT(112) NEXT(113) NEXT(114) NEXT(115) NEXT(116) NEXT(117) NEXT(118) NEXT(119) NEXT(120)       \
  NEXT(121) NEXT(122) NEXT(123) NEXT(124) NEXT(125) NEXT(126) NEXT(127)
// clang-format on
#define MY_OPS_NAME(i) "%" #i
#define MY_OPS_NEXT_NAME(i) ", %" #i
#define MY_OPS_OPERAND(i) "+f"(d[i])
#define MY_OPS_NEXT_OPERAND(i) , "+f"(d[i])

template <typename T, int kN, bool kMajorA = false, bool kMajorB = false>
struct Wgmma;

template <typename T, int kN, bool kMajorB = false>
struct WgmmaRegisters;

// The operands follow d: COUNT, the number of d's registers, is the first operand's number.
#define MY_OPS_WGMMA_TEXT(TYPE, N, COUNT, ADD)                                           \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N \
  "k16.f32." TYPE "." TYPE " {" MY_OPS_EACH_##COUNT(MY_OPS_NAME, MY_OPS_NEXT_NAME) "}, "
#define MY_OPS_WGMMA(T, TYPE, N, COUNT, B, ADD, MAJOR_A, MAJOR_B)                                \
  template <bool kMajorA, bool kMajorB>                                                          \
  struct Wgmma<T, N, kMajorA, kMajorB> {                                                         \
    static __device__ __forceinline__ void run(float (&d)[COUNT], uint64_t a, uint64_t b,        \
                                               bool add) {                                       \
      asm volatile(MY_OPS_WGMMA_TEXT(TYPE, N, COUNT, ADD) "%" #COUNT ", %" #B                    \
                                                          ", p, 1, 1, %" #MAJOR_A ", %" #MAJOR_B \
                                                          ";\n}"                                 \
                   : MY_OPS_EACH_##COUNT(MY_OPS_OPERAND, MY_OPS_NEXT_OPERAND)                    \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kMajorA), "n"(kMajorB));    \
    }                                                                                            \
  };
#define MY_OPS_WGMMA_REGISTERS(T, TYPE, N, COUNT, A1, A2, A3, B, ADD, MAJOR_B)                   \
  template <bool kMajorB>                                                                        \
  struct WgmmaRegisters<T, N, kMajorB> {                                                         \
    static __device__ __forceinline__ void run(float (&d)[COUNT], const uint32_t* a, uint64_t b, \
                                               bool add) {                                       \
      asm volatile(MY_OPS_WGMMA_TEXT(TYPE, N, COUNT, ADD) "{%" #COUNT ", %" #A1 ", %" #A2        \
                                                          ", %" #A3 "}, %" #B                    \
                                                          ", p, 1, 1, %" #MAJOR_B ";\n}"         \
                   : MY_OPS_EACH_##COUNT(MY_OPS_OPERAND, MY_OPS_NEXT_OPERAND)                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                         \
                     "r"(static_cast<int>(add)), "n"(kMajorB));                                  \
    }                                                                                            \
  };

MY_OPS_WGMMA(__half, "f16", 24, 12, 13, 14, 15, 16)
MY_OPS_WGMMA(__half, "f16", 32, 16, 17, 18, 19, 20)
MY_OPS_WGMMA(__half, "f16", 48, 24, 25, 26, 27, 28)
MY_OPS_WGMMA(__nv_bfloat16, "bf16", 48, 24, 25, 26, 27, 28)
MY_OPS_WGMMA(__half, "f16", 64, 32, 33, 34, 35, 36)
MY_OPS_WGMMA(__nv_bfloat16, "bf16", 64, 32, 33, 34, 35, 36)
MY_OPS_WGMMA(__half, "f16", 72, 36, 37, 38, 39, 40)
MY_OPS_WGMMA(__nv_bfloat16, "bf16", 72, 36, 37, 38, 39, 40)
MY_OPS_WGMMA(__half, "f16", 96, 48, 49, 50, 51, 52)
MY_OPS_WGMMA(__nv_bfloat16, "bf16", 96, 48, 49, 50, 51, 52)
MY_OPS_WGMMA(__half, "f16", 128, 64, 65, 66, 67, 68)
MY_OPS_WGMMA(__nv_bfloat16, "bf16", 128, 64, 65, 66, 67, 68)
MY_OPS_WGMMA(__half, "f16", 192, 96, 97, 98, 99, 100)
MY_OPS_WGMMA(__nv_bfloat16, "bf16", 192, 96, 97, 98, 99, 100)
MY_OPS_WGMMA(__half, "f16", 256, 128, 129, 130, 131, 132)
MY_OPS_WGMMA(__nv_bfloat16, "bf16", 256, 128, 129, 130, 131, 132)
MY_OPS_WGMMA_REGISTERS(__half, "f16", 64, 32, 33, 34, 35, 36, 37, 38)
MY_OPS_WGMMA_REGISTERS(__nv_bfloat16, "bf16", 64, 32, 33, 34, 35, 36, 37, 38)
MY_OPS_WGMMA_REGISTERS(__half, "f16", 128, 64, 65, 66, 67, 68, 69, 70)

#undef MY_OPS_EACH_12
#undef MY_OPS_EACH_16
#undef MY_OPS_EACH_24
#undef MY_OPS_EACH_32
#undef MY_OPS_EACH_36
#undef MY_OPS_EACH_48
#undef MY_OPS_EACH_64
#undef MY_OPS_EACH_96
#undef MY_OPS_EACH_128
#undef MY_OPS_NAME
#undef MY_OPS_NEXT_NAME
#undef MY_OPS_OPERAND
#undef MY_OPS_NEXT_OPERAND
#undef MY_OPS_WGMMA_TEXT
#undef MY_OPS_WGMMA
#undef MY_OPS_WGMMA_REGISTERS

}  // namespace my_ops::cuda::ptx
