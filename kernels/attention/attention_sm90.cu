// fp32 attention on wgmma: three products of fp16 parts for each product. See docs/notes/attention.md.
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/tensor_map.h"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"
#include "ptx/wgmma_registers.cuh"

namespace my_ops::cuda {
namespace attention {

constexpr int kRows = 128;  // of a block of the stationary operand, and of a scale
constexpr float kLog2e = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

enum Mode { kForward, kGradQ, kGradK, kGradV, kGradKV };

struct Strided {
  const float* x;
  int64_t batch, head, row;  // strides; the last is 1
};

// ---- split ----

struct SplitArgs {
  Strided x;
  __half* parts;   // [2][heads][padded][kD]
  float* inverse;  // [heads][padded / kRows]: what undoes the scale of a block of rows
  int heads, length, padded, dim, head_count;
  // of the gradient of the output only
  Strided o;
  const float* lse;  // [heads][lse_stride], natural
  int lse_stride;
  float* lse2;   // [heads][padded], in units of log 2
  float* delta;  // [heads][padded]
};

// 2^(14 - exponent of max), and its inverse.
__device__ __forceinline__ float2 power_scale(float max) {
  int e = __float_as_int(max) >> 23;
  e = min(max == 0.0f ? 127 : e, 254);
  e = ::max(e, 15);
  return {__int_as_float((268 - e) << 23), __int_as_float((e - 14) << 23)};
}

__device__ __forceinline__ void split_pair(float a, float b, uint32_t& high, uint32_t& low) {
  const __half2 h = __floats2half2_rn(a, b);
  const float2 f = __half22float2(h);
  const __half2 l = __floats2half2_rn(a - f.x, b - f.y);
  high = reinterpret_cast<const uint32_t&>(h);
  low = reinterpret_cast<const uint32_t&>(l);
}

template <int kD, bool kGradient>
__global__ void __launch_bounds__(256) split_kernel(const SplitArgs p) {
  constexpr int kPerRow = kD / 4, kSteps = kRows * kPerRow / 256, kRowStep = 256 / kPerRow;
  const int head = blockIdx.y, row0 = blockIdx.x * kRows;
  const int column = threadIdx.x % kPerRow * 4, row_in = threadIdx.x / kPerRow;
  const float* x = p.x.x + head / p.head_count * p.x.batch + head % p.head_count * p.x.head;
  const float* o =
      kGradient ? p.o.x + head / p.head_count * p.o.batch + head % p.head_count * p.o.head : nullptr;
  float4 v[kSteps];
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int row = row0 + row_in + i * kRowStep;
    v[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (row < p.length && column < p.dim) {
      v[i] = *reinterpret_cast<const float4*>(x + row * p.x.row + column);
    }
    const float* f = reinterpret_cast<const float*>(&v[i]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float a = fabsf(f[c]);
      if (a < INFINITY) most = fmaxf(most, a);
    }
  }
  __shared__ float warp_most[8];
#pragma unroll
  for (int d = 16; d; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, d));
  if (threadIdx.x % 32 == 0) warp_most[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, warp_most[i]);
  const float2 scale = power_scale(most);
  if (threadIdx.x == 0) p.inverse[head * (p.padded / kRows) + blockIdx.x] = scale.y;
  const int64_t part = int64_t{p.heads} * p.padded * kD;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int row = row0 + row_in + i * kRowStep;
    uint2 high, low;
    split_pair(v[i].x * scale.x, v[i].y * scale.x, high.x, low.x);
    split_pair(v[i].z * scale.x, v[i].w * scale.x, high.y, low.y);
    __half* to = p.parts + (int64_t{head} * p.padded + row) * kD + column;
    *reinterpret_cast<uint2*>(to) = high;
    *reinterpret_cast<uint2*>(to + part) = low;
    if constexpr (kGradient) {
      float sum = 0.0f;
      if (row < p.length && column < p.dim) {
        const float4 y = *reinterpret_cast<const float4*>(o + row * p.o.row + column);
        sum = fmaf(v[i].x, y.x, fmaf(v[i].y, y.y, fmaf(v[i].z, y.z, v[i].w * y.w)));
      }
#pragma unroll
      for (int d = kPerRow / 2; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
      if (column == 0) {
        p.delta[int64_t{head} * p.padded + row] = sum;
        p.lse2[int64_t{head} * p.padded + row] =
            row < p.length ? p.lse[int64_t{head} * p.lse_stride + row] * kLog2e : INFINITY;
      }
    }
  }
}

// ---- the main kernel ----

struct MainArgs {
  CUtensorMap a[2];  // the stationary operands, in boxes of kRows rows
  CUtensorMap b[2];  // the streamed operands
  const float *a_inverse[2], *b_inverse[2];
  const float *lse2, *delta;
  float* out;
  int64_t out_batch, out_head, out_row;
  float* out2;
  int64_t out2_batch, out2_head, out2_row;
  float* lse;
  int lse_stride;
  const float* bias;  // added to the scaled scores; its strides may be 0
  int64_t bias_batch, bias_head, bias_row, bias_column;
  float* grad_bias;  // [heads][a_length][b_length] or null
  int heads, head_count, dim;
  int a_length, a_padded, b_length, b_padded;
  bool causal;
  float scale;
};

template <int kD_, Mode kMode_, bool kBias_>
struct Config {
  static constexpr bool kBias = kBias_;
  static constexpr int kD = kD_;
  static constexpr Mode kMode = kMode_;
  static constexpr bool kBoth = kMode == kGradKV;
  static constexpr int kN = kD == 64 && !kBoth ? 128 : 64;  // streamed rows
  static constexpr bool kBackward = kMode != kForward;
  static constexpr bool kTwo = kMode == kGradQ || kMode == kGradK || kBoth;  // dP too
  static constexpr bool kColumns = kMode == kGradK || kMode == kGradV || kBoth;  // queries are columns
  static constexpr int kABytes = 2 * kRows * kD * 2, kSlotBytes = 2 * kN * kD * 2;
  static constexpr int kA = kTwo ? 2 : 1;
  static constexpr int kSlots = kBoth ? 6 : kD == 64 ? 4 : kTwo ? 3 : 4;
  static constexpr int kTerms = kColumns ? kTwo ? 2 : 1 : 0;  // per column: lse2, delta
};

template <typename C>
struct alignas(1024) Smem {
  unsigned char a[C::kA][C::kABytes];
  unsigned char slot[C::kSlots][C::kSlotBytes];
  alignas(16) float terms[C::kSlots][C::kTerms ? C::kTerms : 1][C::kN];
  uint64_t a_full, full[C::kSlots], empty[C::kSlots];
};

struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  template <int kSlots>
  __device__ __forceinline__ void step() {
    if (++slot == kSlots) slot = 0, phase ^= 1;
  }
};

// Which streamed blocks a block of stationary rows needs.
template <typename C>
__device__ __forceinline__ void block_range(const MainArgs& p, int row0, int& first, int& last) {
  first = 0;
  last = (p.b_length + C::kN - 1) / C::kN;
  if (p.causal) {
    if (C::kColumns) {
      first = row0 / C::kN;
    } else {
      last = min(last, (row0 + kRows + C::kN - 1) / C::kN);
    }
  }
}

template <typename C>
__device__ __forceinline__ void load_parts(unsigned char* to, const CUtensorMap* map, uint64_t* full,
                                           int row, int part_rows, int rows) {
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int d = 0; d < C::kD / 64; ++d) {
      ptx::tma_load_2d(to + (part * (C::kD / 64) + d) * rows * 128, map, full, d * 64,
                       row + part * part_rows);
    }
  }
}

template <typename C>
__device__ __forceinline__ void produce(const MainArgs& p, Smem<C>& smem, int row0, int head) {
  int first, last;
  block_range<C>(p, row0, first, last);
  ptx::mbarrier_arrive_expect_tx(&smem.a_full, C::kA * C::kABytes);
#pragma unroll
  for (int i = 0; i < C::kA; ++i) {
    load_parts<C>(smem.a[i], &p.a[i], &smem.a_full, head * p.a_padded + row0, p.heads * p.a_padded,
                  kRows);
  }
  Ring at;
  const auto load = [&](int which, int block, int terms) {
    uint64_t* full = &smem.full[at.slot];
    ptx::mbarrier_wait(&smem.empty[at.slot], at.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kSlotBytes + terms * C::kN * 4);
    const int64_t first_term = int64_t{head} * p.b_padded + block * C::kN;
    if (terms > 0) ptx::bulk_load(smem.terms[at.slot][0], p.lse2 + first_term, C::kN * 4, full);
    if (terms > 1) {
      ptx::bulk_load(smem.terms[at.slot][C::kTwo], p.delta + first_term, C::kN * 4, full);
    }
    load_parts<C>(smem.slot[at.slot], &p.b[which], &smem.full[at.slot],
                  head * p.b_padded + block * C::kN, p.heads * p.b_padded, C::kN);
    at.step<C::kSlots>();
  };
  for (int block = first; block < last; ++block) {
    load(C::kTwo ? 1 : 0, block, 0);
    load(C::kTwo ? 0 : 1, block, C::kTerms);
  }
}

// s = a b^T by three products of parts: a is the warpgroup's 64 rows, b all kN rows of a slot.
template <typename C>
__device__ __forceinline__ void scores(float (&s)[C::kN / 2], const unsigned char* a,
                                       const unsigned char* b, int group) {
  constexpr int kBoxes = C::kD / 64, kABox = kRows * 128 / 16, kBBox = C::kN * 128 / 16;
  const uint32_t a0 = ptx::wgmma_address(a) + group * (64 * 128 / 16), b0 = ptx::wgmma_address(b);
  bool add = false;
#pragma unroll
  for (int product = 0; product < 3; ++product) {
    const uint32_t pa = a0 + (product == 0 ? kBoxes * kABox : 0);
    const uint32_t pb = b0 + (product == 1 ? kBoxes * kBBox : 0);
#pragma unroll
    for (int k = 0; k < C::kD / 16; ++k) {
      ptx::Wgmma<__half, C::kN>::run(s, ptx::wgmma_descriptor(pa + k / 4 * kABox + k % 4 * 2),
                                     ptx::wgmma_descriptor(pb + k / 4 * kBBox + k % 4 * 2), add);
      add = true;
    }
  }
}

// out = x b by three products of parts: x [64, kN] in registers, b the rows of a slot.
template <typename C>
__device__ __forceinline__ void weighted(float (&out)[C::kD / 2], const uint32_t (&high)[C::kN / 4],
                                         const uint32_t (&low)[C::kN / 4], const unsigned char* b) {
  constexpr int kBoxes = C::kD / 64, kBBox = C::kN * 128 / 16;
  const uint32_t b0 = ptx::wgmma_address(b);
  bool add = false;
#pragma unroll
  for (int product = 0; product < 3; ++product) {
    const uint32_t pb = b0 + (product == 1 ? kBoxes * kBBox : 0);
#pragma unroll
    for (int k = 0; k < C::kN / 16; ++k) {
      ptx::WgmmaRegisters<__half, C::kD, true>::run(
          out, (product == 0 ? low : high) + 4 * k, ptx::wgmma_descriptor_rows<C::kN>(pb + 128 * k),
          add);
      add = true;
    }
  }
}

template <int kCount>
__device__ __forceinline__ void fence(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

template <typename C, bool kSecond = false>
__device__ __forceinline__ void store(const MainArgs& p, const float (&o)[C::kD / 2], int row,
                                      int head, const float (&factor)[2]) {
  const int column = threadIdx.x % 4 * 2;
  float* base = kSecond ? p.out2 + head / p.head_count * p.out2_batch +
                              head % p.head_count * p.out2_head
                        : p.out + head / p.head_count * p.out_batch +
                              head % p.head_count * p.out_head;
  const int64_t out_row = kSecond ? p.out2_row : p.out_row;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + 8 * i >= p.a_length) continue;
    float* to = base + (row + 8 * i) * out_row + column;
#pragma unroll
    for (int j = 0; j < C::kD / 8; ++j) {
      if (8 * j >= p.dim) continue;
      *reinterpret_cast<float2*>(to + 8 * j) = {o[4 * j + 2 * i] * factor[i],
                                                o[4 * j + 2 * i + 1] * factor[i]};
    }
  }
}

// s = s f + bias, in units of log 2. Rows and columns beyond the lengths get any of the values.
template <typename C>
__device__ __forceinline__ void add_bias(const MainArgs& p, float (&s)[C::kN / 2], float f,
                                         int head, int row, int column) {
  const float* bias = p.bias + head / p.head_count * p.bias_batch +
                      head % p.head_count * p.bias_head;
  const int64_t along_row = C::kColumns ? p.bias_column : p.bias_row;
  const int64_t along_column = C::kColumns ? p.bias_row : p.bias_column;
  const float* at[2] = {bias + min(row, p.a_length - 1) * along_row,
                        bias + min(row + 8, p.a_length - 1) * along_row};
#pragma unroll
  for (int x = 0; x < C::kN / 2; ++x) {
    const int c = min(column + x / 4 * 8 + x % 2, p.b_length - 1);
    s[x] = fmaf(s[x], f, __ldg(at[x / 2 % 2] + c * along_column) * kLog2e);
  }
}

template <typename C>
__device__ __forceinline__ void consume_forward(const MainArgs& p, Smem<C>& smem, int row0,
                                                int head, int group) {
  constexpr int kCount = C::kN / 2;
  const int thread = threadIdx.x % 128;
  const int row = row0 + group * 64 + thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
  int first, last;
  block_range<C>(p, row0, first, last);
  const float q_scale = p.a_inverse[0][head * (p.a_padded / kRows) + row0 / kRows] *
                        (p.scale * kLog2e);
  const float* k_inverse = p.b_inverse[0] + head * (p.b_padded / kRows);
  const float* v_inverse = p.b_inverse[1] + head * (p.b_padded / kRows);
  float o[C::kD / 2], pv[C::kD / 2], s[kCount];
  uint32_t high[kCount / 2], low[kCount / 2];
#pragma unroll
  for (float& x : o) x = 0.0f;
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
  Ring at;
  const bool lane0 = thread == 0;
  if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
  ptx::mbarrier_wait(&smem.a_full, 0);
  ptx::bar_sync(1 + group, 256);
  ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
  ptx::wgmma_fence();
  scores<C>(s, smem.a[0], smem.slot[at.slot], group);
  ptx::wgmma_commit_group();
  asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
  float alpha[2], v_scale;
  // The next weights, from the scores of a block.
  const auto weights = [&](int block) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(s);
    if (lane0) ptx::mbarrier_arrive(&smem.empty[at.slot]);
    at.step<C::kSlots>();
    const int scale_at = block * C::kN / kRows;
    float f = q_scale * k_inverse[scale_at];
    if constexpr (C::kBias) {
      add_bias<C>(p, s, f, head, row, block * C::kN + pair);
      f = 1.0f;
    }
    v_scale = v_inverse[scale_at];
    const int column0 = block * C::kN;
    if (column0 + C::kN > p.b_length || (p.causal && column0 + C::kN > row0 + group * 64)) {
#pragma unroll
      for (int x = 0; x < kCount; ++x) {
        const int column = column0 + x / 4 * 8 + pair + x % 2, r = row + x / 2 % 2 * 8;
        if (column >= p.b_length || (p.causal && column > r)) s[x] = -INFINITY;
      }
    }
    float minus_m[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = s[2 * i];
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        most = fmaxf(most, fmaxf(s[4 * j + 2 * i], s[4 * j + 2 * i + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      // A whole number, so that rescaling is exact.
      const float next = fmaxf(m[i], ceilf(most * f));
      alpha[i] = next == -INFINITY ? 1.0f : ptx::ex2_approx_ftz(m[i] - next);
      m[i] = next;
      minus_m[i] = next == -INFINITY ? 0.0f : -next;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        float a = ptx::ex2_approx_ftz(fmaf(s[4 * j + 2 * i], f, minus_m[i])) * 0x1p15f;
        float b = ptx::ex2_approx_ftz(fmaf(s[4 * j + 2 * i + 1], f, minus_m[i])) * 0x1p15f;
        sum += a + b;
        split_pair(a, b, high[2 * j + i], low[2 * j + i]);
      }
      l[i] = fmaf(l[i], alpha[i], sum);
    }
    fence(high);
    fence(low);
  };
  const auto add = [&] {
    ptx::wgmma_fence_operand(pv);
#pragma unroll
    for (int x = 0; x < C::kD / 2; ++x) {
      o[x] = fmaf(o[x], alpha[x / 2 % 2], pv[x] * v_scale);
    }
  };
  for (int block = first; block < last - 1; ++block) {
    weights(block);
    ptx::bar_sync(1 + group, 256);
    const int v_slot = at.slot;
    ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
    at.step<C::kSlots>();
    ptx::wgmma_fence_operand(s);
    ptx::wgmma_fence_operand(pv);
    ptx::wgmma_fence();
    weighted<C>(pv, high, low, smem.slot[v_slot]);
    ptx::wgmma_commit_group();
    ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
    scores<C>(s, smem.a[0], smem.slot[at.slot], group);
    ptx::wgmma_commit_group();
    asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
    ptx::wgmma_wait_group<1>();
    if (lane0) ptx::mbarrier_arrive(&smem.empty[v_slot]);
    add();
  }
  weights(last - 1);
  ptx::bar_sync(1 + group, 256);
  ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
  ptx::wgmma_fence();
  weighted<C>(pv, high, low, smem.slot[at.slot]);
  ptx::wgmma_commit_group();
  if (group == 0) asm volatile("bar.arrive 2, 256;" ::: "memory");
  ptx::wgmma_wait_group<0>();
  add();
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    l[i] += __shfl_xor_sync(~0u, l[i], 1);
    l[i] += __shfl_xor_sync(~0u, l[i], 2);
    factor[i] = l[i] == 0.0f ? 0.0f : 1.0f / l[i];
    const int r = row + 8 * i;
    if (pair == 0 && r < p.lse_stride) {
      p.lse[int64_t{head} * p.lse_stride + r] =
          r >= p.a_length || l[i] == 0.0f ? INFINITY : (m[i] - 15.0f + log2f(l[i])) * kLn2;
    }
  }
  store<C>(p, o, row, head, factor);
}

template <typename C>
__device__ __forceinline__ void consume_backward(const MainArgs& p, Smem<C>& smem, int row0,
                                                 int head, int group) {
  constexpr int kCount = C::kN / 2;
  const int thread = threadIdx.x % 128;
  const int row = row0 + group * 64 + thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
  int first, last;
  block_range<C>(p, row0, first, last);
  const int a_scale_at = head * (p.a_padded / kRows) + row0 / kRows;
  const float s_scale = p.a_inverse[0][a_scale_at] * (p.scale * kLog2e);
  const float dp_scale = C::kTwo ? p.a_inverse[1][a_scale_at] : 0.0f;
  const float* inverse0 = p.b_inverse[0] + head * (p.b_padded / kRows);
  const float* inverse1 = p.b_inverse[1] + head * (p.b_padded / kRows);
  float lse[2], delta[2];
  if constexpr (!C::kColumns) {
    const int64_t terms = int64_t{head} * p.a_padded;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      lse[i] = -p.lse2[terms + row + 8 * i];
      delta[i] = -p.delta[terms + row + 8 * i];
    }
  }
  float o[C::kD / 2], part[C::kD / 2], s[kCount], dp[C::kTwo ? kCount : 1];
#pragma unroll
  for (float& x : o) x = 0.0f;
  Ring at;
  const bool lane0 = thread == 0;
  ptx::mbarrier_wait(&smem.a_full, 0);
  for (int block = first; block < last; ++block) {
    const int column0 = block * C::kN;
    // dP from b[1], S from b[0]; the last product takes b[0], but for the gradient of V, b[1].
    const int slot0 = at.slot;
    ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
    at.step<C::kSlots>();
    ptx::wgmma_fence();
    if constexpr (C::kTwo) {
      scores<C>(dp, smem.a[1], smem.slot[slot0], group);
    } else {
      scores<C>(s, smem.a[0], smem.slot[slot0], group);
    }
    ptx::wgmma_commit_group();
    const int slot1 = at.slot;
    ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
    at.step<C::kSlots>();
    if constexpr (C::kTwo) {
      scores<C>(s, smem.a[0], smem.slot[slot1], group);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      if (lane0) ptx::mbarrier_arrive(&smem.empty[slot0]);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_fence_operand(dp);
    } else {
      ptx::wgmma_wait_group<0>();
      if (lane0) ptx::mbarrier_arrive(&smem.empty[slot0]);
    }
    ptx::wgmma_fence_operand(s);
    const int scale_at = column0 / kRows;
    float f = s_scale * inverse0[scale_at];
    if constexpr (C::kBias) {
      add_bias<C>(p, s, f, head, row, column0 + pair);
      f = 1.0f;
    }
    const float g = dp_scale * inverse1[scale_at];
    const bool edge =
        column0 + C::kN > p.b_length ||
        (p.causal && (C::kColumns ? column0 < row0 + group * 64 + 64
                                  : column0 + C::kN > row0 + group * 64));
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      float2 l2, d2;
      if constexpr (C::kColumns) {
        l2 = *reinterpret_cast<const float2*>(smem.terms[slot1][0] + 8 * j + pair);
        if (C::kTwo) d2 = *reinterpret_cast<const float2*>(smem.terms[slot1][C::kTwo] + 8 * j + pair);
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int i = x / 2;
        const float minus_lse = C::kColumns ? (x % 2 ? -l2.y : -l2.x) : lse[i];
        float y = ptx::ex2_approx_ftz(fmaf(s[4 * j + x], f, minus_lse));
        if constexpr (C::kTwo) {
          const float minus_delta = C::kColumns ? (x % 2 ? -d2.y : -d2.x) : delta[i];
          y *= fmaf(dp[4 * j + x], g, minus_delta);
        }
        if (edge) {
          const int column = column0 + 8 * j + pair + x % 2, r = row + 8 * i;
          if (column >= p.b_length || (p.causal && (C::kColumns ? column < r : column > r))) y = 0;
        }
        s[4 * j + x] = y;
        most[i] = fmaxf(most[i], fabsf(y));
      }
    }
    if constexpr (C::kBias && C::kMode == kGradQ) {
      if (p.grad_bias) {
        float* to = p.grad_bias + (int64_t{head} * p.a_length + row) * p.b_length;
#pragma unroll
        for (int x = 0; x < kCount; ++x) {
          const int column = column0 + x / 4 * 8 + pair + x % 2, down = x / 2 % 2 * 8;
          if (row + down < p.a_length && column < p.b_length) {
            to[int64_t{down} * p.b_length + column] = s[x];
          }
        }
      }
    }
    uint32_t high[kCount / 2], low[kCount / 2];
    float factor[2], row_scale[2];
    const float b_scale = C::kMode == kGradV ? inverse1[scale_at] : inverse0[scale_at];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
      const float2 scale = power_scale(most[i]);
      row_scale[i] = scale.y;
      factor[i] = scale.y * b_scale;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        split_pair(s[4 * j + 2 * i] * scale.x, s[4 * j + 2 * i + 1] * scale.x, high[2 * j + i],
                   low[2 * j + i]);
      }
    }
    fence(high);
    fence(low);
    ptx::wgmma_fence();
    weighted<C>(part, high, low, smem.slot[slot1]);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(part);
    if (lane0) ptx::mbarrier_arrive(&smem.empty[slot1]);
    if (fminf(factor[0], factor[1]) >= 0x1p-126f) {
#pragma unroll
      for (int x = 0; x < C::kD / 2; ++x) o[x] = fmaf(part[x], factor[x / 2 % 2], o[x]);
    } else {
#pragma unroll
      for (int x = 0; x < C::kD / 2; ++x) {
        o[x] = fmaf(part[x] * row_scale[x / 2 % 2], b_scale, o[x]);
      }
    }
  }
  const float scale = C::kMode == kGradV ? 1.0f : p.scale;
  const float factor[2] = {scale, scale};
  store<C>(p, o, row, head, factor);
}

// The gradients of K and V together.
template <typename C>
__device__ __forceinline__ void consume_both(const MainArgs& p, Smem<C>& smem, int row0, int head,
                                             int group) {
  constexpr int kCount = C::kN / 2;
  const int thread = threadIdx.x % 128;
  const int row = row0 + group * 64 + thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
  int first, last;
  block_range<C>(p, row0, first, last);
  const int a_scale_at = head * (p.a_padded / kRows) + row0 / kRows;
  const float s_scale = p.a_inverse[0][a_scale_at] * (p.scale * kLog2e);
  const float dp_scale = p.a_inverse[1][a_scale_at];
  const float* inverse0 = p.b_inverse[0] + head * (p.b_padded / kRows);
  const float* inverse1 = p.b_inverse[1] + head * (p.b_padded / kRows);
  float ok[C::kD / 2], ov[C::kD / 2], part[C::kD / 2], s[kCount], dp[kCount];
  uint32_t high[kCount / 2], low[kCount / 2], high2[kCount / 2], low2[kCount / 2];
#pragma unroll
  for (int x = 0; x < C::kD / 2; ++x) ok[x] = ov[x] = 0.0f;
  Ring at;
  const bool lane0 = thread == 0;
  ptx::mbarrier_wait(&smem.a_full, 0);
  for (int block = first; block < last; ++block) {
    const int column0 = block * C::kN;
    const int slot0 = at.slot;
    ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
    at.step<C::kSlots>();
    ptx::wgmma_fence();
    scores<C>(dp, smem.a[1], smem.slot[slot0], group);
    const int slot1 = at.slot;
    ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
    at.step<C::kSlots>();
    scores<C>(s, smem.a[0], smem.slot[slot1], group);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(dp);
    ptx::wgmma_fence_operand(s);
    const int scale_at = column0 / kRows;
    float f = s_scale * inverse0[scale_at];
    if constexpr (C::kBias) {
      add_bias<C>(p, s, f, head, row, column0 + pair);
      f = 1.0f;
    }
    const float g = dp_scale * inverse1[scale_at];
    const bool edge = column0 + C::kN > p.b_length ||
                      (p.causal && column0 < row0 + group * 64 + 64);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 l2 = *reinterpret_cast<const float2*>(smem.terms[slot1][0] + 8 * j + pair);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        float y = ptx::ex2_approx_ftz(fmaf(s[4 * j + x], f, x % 2 ? -l2.y : -l2.x));
        if (edge) {
          const int column = column0 + 8 * j + pair + x % 2, r = row + x / 2 * 8;
          if (column >= p.b_length || (p.causal && column < r)) y = 0.0f;
        }
        s[4 * j + x] = y;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split_pair(s[4 * j + 2 * i] * 0x1p14f, s[4 * j + 2 * i + 1] * 0x1p14f, high[2 * j + i],
                   low[2 * j + i]);
      }
    }
    fence(high);
    fence(low);
    ptx::wgmma_fence();
    weighted<C>(part, high, low, smem.slot[slot0]);
    ptx::wgmma_commit_group();
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 d2 = *reinterpret_cast<const float2*>(smem.terms[slot1][1] + 8 * j + pair);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float y = s[4 * j + x] * fmaf(dp[4 * j + x], g, x % 2 ? -d2.y : -d2.x);
        dp[4 * j + x] = s[4 * j + x] == 0.0f ? 0.0f : y;
        most[x / 2] = fmaxf(most[x / 2], fabsf(dp[4 * j + x]));
      }
    }
    float row_scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
      const float2 scale = power_scale(most[i]);
      row_scale[i] = scale.y;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        split_pair(dp[4 * j + 2 * i] * scale.x, dp[4 * j + 2 * i + 1] * scale.x, high2[2 * j + i],
                   low2[2 * j + i]);
      }
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(part);
    if (lane0) ptx::mbarrier_arrive(&smem.empty[slot0]);
    const float v_scale = inverse1[scale_at];
#pragma unroll
    for (int x = 0; x < C::kD / 2; ++x) ov[x] = fmaf(part[x] * 0x1p-14f, v_scale, ov[x]);
    fence(high2);
    fence(low2);
    ptx::wgmma_fence_operand(part);
    ptx::wgmma_fence();
    weighted<C>(part, high2, low2, smem.slot[slot1]);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(part);
    if (lane0) ptx::mbarrier_arrive(&smem.empty[slot1]);
    const float b_scale = inverse0[scale_at];
#pragma unroll
    for (int x = 0; x < C::kD / 2; ++x) {
      ok[x] = fmaf(part[x] * row_scale[x / 2 % 2], b_scale, ok[x]);
    }
  }
  const float factor[2] = {p.scale, p.scale}, one[2] = {1.0f, 1.0f};
  store<C>(p, ok, row, head, factor);
  store<C, true>(p, ov, row, head, one);
}

template <typename C>
__global__ void __launch_bounds__(384, 1) main_kernel(const __grid_constant__ MainArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<C>& smem = *reinterpret_cast<Smem<C>*>(raw);
  const int head = blockIdx.y;
  // The longest first.
  const int row0 = (C::kColumns ? blockIdx.x : gridDim.x - 1 - blockIdx.x) * kRows;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&smem.a_full, 1);
    for (int i = 0; i < C::kSlots; ++i) {
      ptx::mbarrier_init(&smem.full[i], 1);
      ptx::mbarrier_init(&smem.empty[i], 2);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == 0) produce<C>(p, smem, row0, head);
  } else {
    ptx::setmaxnreg_inc<240>();
    const int group = threadIdx.x / 128 - 1;
    if constexpr (C::kBoth) {
      consume_both<C>(p, smem, row0, head, group);
    } else if constexpr (C::kBackward) {
      consume_backward<C>(p, smem, row0, head, group);
    } else {
      consume_forward<C>(p, smem, row0, head, group);
    }
  }
#endif
}

// ---- host ----

struct Tensor4 {
  float* x;
  int64_t batch, head, row;
};

struct Problem {
  int batch, heads, lq, lk, dim;
  int causal;
  float scale;
};

inline int padded(int n) { return (n + kRows - 1) / kRows * kRows; }
inline int width(int dim) { return dim <= 64 ? 64 : 128; }

struct Bias {
  const float* x;  // null: none
  int64_t batch, head, row, column;
  float* grad;
};

struct Parts {
  __half* parts;
  float* inverse;
};

struct Cursor {
  char* at;
  template <typename T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 255) / 256 * 256;
    return p;
  }
  Parts parts(int64_t heads, int rows, int d) {
    Parts p;
    p.parts = take<__half>(2 * heads * rows * d);
    p.inverse = take<float>(heads * (rows / kRows));
    return p;
  }
};

struct Workspace {
  Parts q, k, v, g;
  float *lse2, *delta;
  int64_t bytes;
};

Workspace workspace(const Problem& s, void* base, bool backward) {
  Cursor c{static_cast<char*>(base)};
  const int d = width(s.dim), heads = s.batch * s.heads;
  Workspace w{};
  w.q = c.parts(heads, padded(s.lq), d);
  w.k = c.parts(heads, padded(s.lk), d);
  w.v = c.parts(heads, padded(s.lk), d);
  if (backward) {
    w.g = c.parts(heads, padded(s.lq), d);
    w.lse2 = c.take<float>(int64_t{heads} * padded(s.lq));
    w.delta = c.take<float>(int64_t{heads} * padded(s.lq));
  }
  w.bytes = c.at - static_cast<char*>(base);
  return w;
}

template <int kD>
void split(const Problem& s, const Tensor4& x, const Parts& to, int length, cudaStream_t stream,
           const Tensor4* o = nullptr, const float* lse = nullptr, int lse_stride = 0,
           float* lse2 = nullptr, float* delta = nullptr) {
  SplitArgs a{};
  a.x = {x.x, x.batch, x.head, x.row};
  a.parts = to.parts;
  a.inverse = to.inverse;
  a.heads = s.batch * s.heads;
  a.head_count = s.heads;
  a.length = length;
  a.padded = padded(length);
  a.dim = s.dim;
  const dim3 grid(a.padded / kRows, a.heads);
  if (o) {
    a.o = {o->x, o->batch, o->head, o->row};
    a.lse = lse;
    a.lse_stride = lse_stride;
    a.lse2 = lse2;
    a.delta = delta;
    split_kernel<kD, true><<<grid, 256, 0, stream>>>(a);
  } else {
    split_kernel<kD, false><<<grid, 256, 0, stream>>>(a);
  }
}

template <typename C>
cudaError_t run_main(const Problem& s, const Parts* a, int a_length, const Parts* b, int b_length,
                     MainArgs& p, const Tensor4& out, cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  p.heads = s.batch * s.heads;
  p.head_count = s.heads;
  p.dim = s.dim;
  p.a_length = a_length;
  p.a_padded = padded(a_length);
  p.b_length = b_length;
  p.b_padded = padded(b_length);
  p.causal = s.causal;
  p.scale = s.scale;
  p.out = out.x;
  p.out_batch = out.batch;
  p.out_head = out.head;
  p.out_row = out.row;
  for (int i = 0; i < 2; ++i) {
    if (i < C::kA) {
      if (auto err = sm90::make_tensor_map(encoder, &p.a[i], a[i].parts,
                                           int64_t{2} * p.heads * p.a_padded, C::kD, C::kD, kRows);
          err != cudaSuccess) {
        return err;
      }
      p.a_inverse[i] = a[i].inverse;
    }
    if (auto err = sm90::make_tensor_map(encoder, &p.b[i], b[i].parts,
                                         int64_t{2} * p.heads * p.b_padded, C::kD, C::kD, C::kN);
        err != cudaSuccess) {
      return err;
    }
    p.b_inverse[i] = b[i].inverse;
  }
  static_assert(sizeof(Smem<C>) <= 232448);
  const int bytes = sizeof(Smem<C>);
  if (auto err = cudaFuncSetAttribute(main_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      bytes);
      err != cudaSuccess) {
    return err;
  }
  main_kernel<C><<<dim3(p.a_padded / kRows, p.heads), 384, bytes, stream>>>(p);
  return cudaGetLastError();
}

inline void set(MainArgs& p, const Bias& bias) {
  p.bias = bias.x;
  p.bias_batch = bias.batch;
  p.bias_head = bias.head;
  p.bias_row = bias.row;
  p.bias_column = bias.column;
  p.grad_bias = bias.grad;
}

template <int kD, bool kBias>
cudaError_t gradients(const Problem& s, const Parts (&queries)[2], const Parts (&keys)[2],
                      MainArgs& p, const Tensor4& dq, const Tensor4& dk, const Tensor4& dv,
                      cudaStream_t stream) {
  if (auto err = run_main<Config<kD, kGradQ, kBias>>(s, queries, s.lq, keys, s.lk, p, dq, stream);
      err != cudaSuccess) {
    return err;
  }
  if constexpr (kD == 64) {
    p.out2 = dv.x;
    p.out2_batch = dv.batch;
    p.out2_head = dv.head;
    p.out2_row = dv.row;
    return run_main<Config<kD, kGradKV, kBias>>(s, keys, s.lk, queries, s.lq, p, dk, stream);
  } else {
  if (auto err = run_main<Config<kD, kGradK, kBias>>(s, keys, s.lk, queries, s.lq, p, dk, stream);
      err != cudaSuccess) {
    return err;
  }
  return run_main<Config<kD, kGradV, kBias>>(s, keys, s.lk, queries, s.lq, p, dv, stream);
  }
}

template <int kD>
cudaError_t forward(const Problem& s, const Tensor4& q, const Tensor4& k, const Tensor4& v,
                    const Tensor4& o, float* lse, int lse_stride, const Bias& bias, void* base,
                    cudaStream_t stream) {
  const Workspace w = workspace(s, base, false);
  split<kD>(s, q, w.q, s.lq, stream);
  split<kD>(s, k, w.k, s.lk, stream);
  split<kD>(s, v, w.v, s.lk, stream);
  MainArgs p{};
  p.lse = lse;
  p.lse_stride = lse_stride;
  const Parts b[2] = {w.k, w.v};
  set(p, bias);
  return bias.x ? run_main<Config<kD, kForward, true>>(s, &w.q, s.lq, b, s.lk, p, o, stream)
                : run_main<Config<kD, kForward, false>>(s, &w.q, s.lq, b, s.lk, p, o, stream);
}

template <int kD>
cudaError_t backward(const Problem& s, const Tensor4& q, const Tensor4& k, const Tensor4& v,
                     const Tensor4& o, const Tensor4& g, const float* lse, int lse_stride,
                     const Tensor4& dq, const Tensor4& dk, const Tensor4& dv, const Bias& bias,
                     void* base, cudaStream_t stream) {
  const Workspace w = workspace(s, base, true);
  split<kD>(s, q, w.q, s.lq, stream);
  split<kD>(s, k, w.k, s.lk, stream);
  split<kD>(s, v, w.v, s.lk, stream);
  split<kD>(s, g, w.g, s.lq, stream, &o, lse, lse_stride, w.lse2, w.delta);
  MainArgs p{};
  p.lse2 = w.lse2;
  p.delta = w.delta;
  const Parts queries[2] = {w.q, w.g}, keys[2] = {w.k, w.v};
  set(p, bias);
  if (bias.grad && s.causal) {
    const auto bytes = int64_t{s.batch} * s.heads * s.lq * s.lk * sizeof(float);
    if (auto err = cudaMemsetAsync(bias.grad, 0, bytes, stream); err != cudaSuccess) return err;
  }
  return bias.x ? gradients<kD, true>(s, queries, keys, p, dq, dk, dv, stream)
                : gradients<kD, false>(s, queries, keys, p, dq, dk, dv, stream);
}

}  // namespace attention
}  // namespace my_ops::cuda

using namespace my_ops::cuda::attention;

extern "C" int64_t attention_workspace(const Problem* s, int backward) {
  return workspace(*s, nullptr, backward).bytes;
}
extern "C" int attention_forward(const Problem* s, const Tensor4* t, float* lse, int lse_stride,
                                 const Bias* bias, void* base, cudaStream_t stream) {
  return width(s->dim) == 64
             ? forward<64>(*s, t[0], t[1], t[2], t[3], lse, lse_stride, *bias, base, stream)
             : forward<128>(*s, t[0], t[1], t[2], t[3], lse, lse_stride, *bias, base, stream);
}
extern "C" int attention_backward(const Problem* s, const Tensor4* t, const float* lse,
                                  int lse_stride, const Bias* bias, void* base,
                                  cudaStream_t stream) {
  return width(s->dim) == 64 ? backward<64>(*s, t[0], t[1], t[2], t[3], t[4], lse, lse_stride, t[5],
                                            t[6], t[7], *bias, base, stream)
                             : backward<128>(*s, t[0], t[1], t[2], t[3], t[4], lse, lse_stride,
                                             t[5], t[6], t[7], *bias, base, stream);
}
