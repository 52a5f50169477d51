// The gradients: a warpgroup's rows.
#pragma once

#include "attention/products.cuh"

namespace my_ops::cuda::attention_sm90 {
namespace {

template <typename C>
__device__ __forceinline__ void consume_backward(const MainArgs& p, Smem<C>& smem, int row0,
                                                 int head, int group) {
  constexpr int kCount = C::kN / 2;
  const auto [row, pair, first_row, first, last] = Place::of<C>(p, row0, group);
  const int a_scale_at = head * (p.a_padded / kRows) + row0 / kRows;
  const float s_inverse = p.a_inverse[0][a_scale_at];
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
  ptx::mbarrier_wait(&smem.a_full, 0);
  for (int block = first; block < last; ++block) {
    const int column0 = block * C::kN;
    // dP from b[1], S from b[0]; the last product takes b[0], but for the gradient of V, b[1].
    const int slot0 = next_slot<C>(smem, at);
    ptx::wgmma_fence();
    if constexpr (C::kTwo) {
      scores<C>(dp, smem.a[1], smem.slot[slot0], group);
    } else {
      scores<C>(s, smem.a[0], smem.slot[slot0], group);
    }
    ptx::wgmma_commit_group();
    const int slot1 = next_slot<C>(smem, at);
    if constexpr (C::kTwo) {
      scores<C>(s, smem.a[0], smem.slot[slot1], group);
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      release(&smem.empty[slot0]);
      ptx::wgmma_wait_group<0>();
      ptx::wgmma_fence_operand(dp);
    } else {
      ptx::wgmma_wait_group<0>();
      release(&smem.empty[slot0]);
    }
    ptx::wgmma_fence_operand(s);
    const int scale_at = column0 / kRows;
    float f = unscale_scores(s_inverse, inverse0[scale_at], p.scale * kLog2eFloat);
    if constexpr (C::kBias) {
      add_bias<C>(p, s, f, head, row, column0 + pair);
      f = 1.0f;
    }
    const float g = unscale(dp_scale, inverse1[scale_at]);
    const bool edge =
        column0 + C::kN > p.b_length ||
        (p.causal && (C::kColumns ? column0 < first_row + 64 : column0 + C::kN > first_row));
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      float2 l2, d2;
      if constexpr (C::kColumns) {
        l2 = *reinterpret_cast<const float2*>(smem.terms[slot1] + 8 * j + pair);
        if (C::kTwo)
          d2 = *reinterpret_cast<const float2*>(smem.terms[slot1] + C::kN + 8 * j + pair);
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
      const float2 scale = power_scale(row_max(most[i]));
      row_scale[i] = scale.y;
      factor[i] = scale.y * b_scale;
      split_row(i, s, scale.x, high, low);
    }
    ptx::wgmma_fence_operand(high);
    ptx::wgmma_fence_operand(low);
    ptx::wgmma_fence();
    weighted<C>(part, high, low, smem.slot[slot1],
                p.causal && !C::kColumns ? first_row + 64 - column0 : C::kN);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(part);
    release(&smem.empty[slot1]);
    if (hidden<C>(p, first_row, column0)) continue;
    if (fminf(factor[0], factor[1]) >= FLT_MIN && fmaxf(factor[0], factor[1]) <= FLT_MAX) {
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
  store<0, C>(p, o, row, head, factor);
}

// The gradients of K and V together.
template <typename C>
__device__ __forceinline__ void consume_both(const MainArgs& p, Smem<C>& smem, int row0, int head,
                                             int group) {
  constexpr int kCount = C::kN / 2;
  const auto [row, pair, first_row, first, last] = Place::of<C>(p, row0, group);
  const int a_scale_at = head * (p.a_padded / kRows) + row0 / kRows;
  const float s_inverse = p.a_inverse[0][a_scale_at];
  const float dp_scale = p.a_inverse[1][a_scale_at];
  const float* inverse0 = p.b_inverse[0] + head * (p.b_padded / kRows);
  const float* inverse1 = p.b_inverse[1] + head * (p.b_padded / kRows);
  float ok[C::kD / 2], ov[C::kD / 2], part[C::kD / 2], s[kCount], dp[kCount];
  uint32_t high[kCount / 2], low[kCount / 2], high2[kCount / 2], low2[kCount / 2];
#pragma unroll
  for (int x = 0; x < C::kD / 2; ++x) ok[x] = ov[x] = 0.0f;
  Ring at;
  ptx::mbarrier_wait(&smem.a_full, 0);
  for (int block = first; block < last; ++block) {
    const int column0 = block * C::kN;
    const int slot0 = next_slot<C>(smem, at);
    ptx::wgmma_fence();
    scores<C>(dp, smem.a[1], smem.slot[slot0], group);
    const int slot1 = next_slot<C>(smem, at);
    scores<C>(s, smem.a[0], smem.slot[slot1], group);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(dp);
    ptx::wgmma_fence_operand(s);
    const int scale_at = column0 / kRows;
    float f = unscale_scores(s_inverse, inverse0[scale_at], p.scale * kLog2eFloat);
    if constexpr (C::kBias) {
      add_bias<C>(p, s, f, head, row, column0 + pair);
      f = 1.0f;
    }
    const float g = unscale(dp_scale, inverse1[scale_at]);
    const bool edge = column0 + C::kN > p.b_length || (p.causal && column0 < first_row + 64);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 l2 = *reinterpret_cast<const float2*>(smem.terms[slot1] + 8 * j + pair);
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
    ptx::wgmma_fence_operand(high);
    ptx::wgmma_fence_operand(low);
    ptx::wgmma_fence();
    weighted<C>(part, high, low, smem.slot[slot0], C::kN);
    ptx::wgmma_commit_group();
    float most[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 d2 = *reinterpret_cast<const float2*>(smem.terms[slot1] + C::kN + 8 * j + pair);
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
      const float2 scale = power_scale(row_max(most[i]));
      row_scale[i] = scale.y;
      split_row(i, dp, scale.x, high2, low2);
    }
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(part);
    release(&smem.empty[slot0]);
    const float v_scale = inverse1[scale_at];
    const bool counts = !hidden<C>(p, first_row, column0);
    if (counts) {
#pragma unroll
      for (int x = 0; x < C::kD / 2; ++x) ov[x] = fmaf(part[x] * 0x1p-14f, v_scale, ov[x]);
    }
    ptx::wgmma_fence_operand(high2);
    ptx::wgmma_fence_operand(low2);
    ptx::wgmma_fence_operand(part);
    ptx::wgmma_fence();
    weighted<C>(part, high2, low2, smem.slot[slot1], C::kN);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_fence_operand(part);
    release(&smem.empty[slot1]);
    const float b_scale = inverse0[scale_at];
    if (!counts) continue;
#pragma unroll
    for (int x = 0; x < C::kD / 2; ++x) {
      ok[x] = fmaf(part[x] * row_scale[x / 2 % 2], b_scale, ok[x]);
    }
  }
  const float factor[2] = {p.scale, p.scale}, one[2] = {1.0f, 1.0f};
  store<0, C>(p, ok, row, head, factor);
  store<1, C>(p, ov, row, head, one);
}

}  // namespace
}  // namespace my_ops::cuda::attention_sm90
