// The output and its log-sum-exp: a warpgroup's rows.
#pragma once

#include "attention/products.cuh"

namespace my_ops::cuda::attention_sm90 {
namespace {

template <typename C>
__device__ __forceinline__ void consume_forward(const MainArgs& p, Smem<C>& smem, int row0,
                                                int head, int group) {
  constexpr int kCount = C::kN / 2;
  const int thread = threadIdx.x % 128;
  const int row = row0 + group * 64 + thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
  int first, last;
  block_range<C>(p, row0, first, last);
  const int first_row = row0 + group * 64;
  const float q_inverse = p.a_inverse[0][head * (p.a_padded / kRows) + row0 / kRows];
  const float* k_inverse = p.b_inverse[0] + head * (p.b_padded / kRows);
  float o[C::kD / 2], pv[C::kD / 2], s[kCount];
  uint32_t high[kCount / 2], low[kCount / 2];
#pragma unroll
  for (float& x : o) x = 0.0f;
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
  Ring at;
  if (group == 1) ptx::bar_arrive(1, 256);
  ptx::mbarrier_wait(&smem.a_full, 0);
  ptx::bar_sync(1 + group, 256);
  ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
  ptx::wgmma_fence();
  scores<C>(s, smem.a[0], smem.slot[at.slot], group);
  ptx::wgmma_commit_group();
  ptx::bar_arrive(2 - group, 256);
  float alpha[2];
  // The next weights, from the scores of a block.
  const auto weights = [&](int block) {
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(s);
    release(&smem.empty[at.slot]);
    at.step<C::kSlots>();
    const int scale_at = block * C::kN / kRows;
    float f = unscale_scores(q_inverse, k_inverse[scale_at], p.scale * kLog2eFloat);
    if constexpr (C::kBias) {
      add_bias<C>(p, s, f, head, row, block * C::kN + pair);
      f = 1.0f;
    }
    const int column0 = block * C::kN;
    if (column0 + C::kN > p.b_length || (p.causal && column0 + C::kN > first_row)) {
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
      most = row_max(most);
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
    ptx::wgmma_fence_operand(high);
    ptx::wgmma_fence_operand(low);
  };
  const auto add = [&](int block, int v_slot) {
    ptx::wgmma_fence_operand(pv);
    if (!hidden<C>(p, first_row, block * C::kN)) {
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) {
        const float2 inverse = *reinterpret_cast<const float2*>(smem.terms[v_slot] + 8 * j + pair);
#pragma unroll
        for (int x = 4 * j; x < 4 * j + 4; ++x) {
          o[x] = fmaf(o[x], alpha[x / 2 % 2], pv[x] * (x % 2 ? inverse.y : inverse.x));
        }
      }
    }
    release(&smem.empty[v_slot]);
  };
  // Of a block's columns, how many the group's rows see at most.
  const auto end = [&](int block) { return p.causal ? first_row + 64 - block * C::kN : C::kN; };
  for (int block = first; block < last - 1; ++block) {
    weights(block);
    ptx::bar_sync(1 + group, 256);
    const int v_slot = next_slot<C>(smem, at);
    ptx::wgmma_fence_operand(s);
    ptx::wgmma_fence_operand(pv);
    ptx::wgmma_fence();
    weighted<C>(pv, high, low, smem.slot[v_slot], end(block));
    ptx::wgmma_commit_group();
    ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
    scores<C>(s, smem.a[0], smem.slot[at.slot], group);
    ptx::wgmma_commit_group();
    ptx::bar_arrive(2 - group, 256);
    ptx::wgmma_wait_group<1>();
    add(block, v_slot);
  }
  weights(last - 1);
  ptx::bar_sync(1 + group, 256);
  ptx::mbarrier_wait(&smem.full[at.slot], at.phase);
  ptx::wgmma_fence();
  weighted<C>(pv, high, low, smem.slot[at.slot], end(last - 1));
  ptx::wgmma_commit_group();
  if (group == 0) ptx::bar_arrive(2, 256);
  ptx::wgmma_wait_group<0>();
  add(last - 1, at.slot);
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    l[i] += __shfl_xor_sync(~0u, l[i], 1);
    l[i] += __shfl_xor_sync(~0u, l[i], 2);
    factor[i] = l[i] == 0.0f ? 0.0f : 1.0f / l[i];
    const int r = row + 8 * i;
    if (pair == 0 && r < p.lse_stride) {
      // In double, as one rounding of a large sum moves all weights of the row in the gradient.
      const double sum = (static_cast<double>(m[i]) - 15.0 + log2f(l[i])) * kLn2;
      p.lse[int64_t{head} * p.lse_stride + r] =
          r >= p.a_length || l[i] == 0.0f ? INFINITY : static_cast<float>(sum);
    }
  }
  store<0, C>(p, o, row, head, factor);
}

}  // namespace
}  // namespace my_ops::cuda::attention_sm90
