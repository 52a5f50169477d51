// How a warp's sums become outputs in fp32_short: suspect ones are recomputed, scales undone, and
// the rest is linear's epilogue.
#pragma once

#include "common/numeric.cuh"
#include "gemm/epilogue.cuh"
#include "gemm/fp32_fma.cuh"
#include "gemm/fp32_short/shared.cuh"
#include "ptx/tma.cuh"

namespace my_ops::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Which of a thread's scaled sums are suspect.
template <int kCount>
__device__ __forceinline__ Suspects<kCount> find_suspects(const Line (&row)[2], const int2* columns,
                                                          int64_t k, const float (&sum)[kCount]) {
  const float limit = kTinyError * kTinyMargin * static_cast<float>(k);
  Suspects<kCount> suspects;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int2 pair = columns[4 * j];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int trust = max(Line(e % 2 ? pair.y : pair.x).trust(), row[e / 2].trust());
      const bool small = fabsf(sum[4 * j + e]) < limit;
      suspects.add(4 * j + e, trust == kRecompute || (trust == kBounded && small));
    }
  }
  return suspects;
}

// Undoes the scaling, exactly.
template <int kCount>
__device__ __forceinline__ void unscale(const Line (&row)[2], const int2* columns,
                                        float (&sum)[kCount]) {
  const int of_row[2] = {row[0].exponent() - 2 * kFp16Shift, row[1].exponent() - 2 * kFp16Shift};
  int lowest = INT_MAX, highest = INT_MIN;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int2 pair = columns[4 * j];
    lowest = min(lowest, min(pair.x, pair.y));
    highest = max(highest, max(pair.x, pair.y));
  }
  lowest = (lowest >> 2) + min(of_row[0], of_row[1]);
  highest = (highest >> 2) + max(of_row[0], of_row[1]);
  const bool normal = __all_sync(~0u, lowest >= -126 && highest <= 127);
  const int bits[2] = {__float_as_int(1.0f) + (of_row[0] << 23),
                       __float_as_int(1.0f) + (of_row[1] << 23)};
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const int2 pair = columns[4 * j];
    const int e[2] = {Line(pair.x).exponent(), Line(pair.y).exponent()};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = sum[4 * j + i];
      if (normal) {
        x *= __int_as_float(bits[i / 2] + (e[i % 2] << 23));
      } else {
        const Pow2Pair factor = pow2_pair(of_row[i / 2] + e[i % 2]);
        x = x * factor.first * factor.second;
      }
    }
  }
}

// Stores a warp's outputs of a chunk, 32 columns at a time.
template <int kCount>
__device__ __forceinline__ void store_chunk(const Short& p, OutputBox (&boxes)[2], int& turn,
                                            int row0, int col0, const float (&sum)[kCount]) {
  const Args& args = p.args;
  const int lane = threadIdx.x % 32, row = lane / 4, t = lane % 4;
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const bool odd = row % 2 != 0;
#pragma unroll
  for (int c = 0; c < kCount / 16; ++c) {
    const int col = col0 + c * OutputBox::kBoxColumns;
    if (col >= n) break;
    OutputBox& box = boxes[turn];
    turn ^= 1;
    if (p.tma_out && lane == 0) ptx::tma_store_wait_group_read<1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Odd rows store their pairs in another order, so that banks do not conflict.
        const float* const x = sum + 16 * c + 4 * j + 2 * i;
        const float2 front{x[0], x[1]}, back{x[8], x[9]};
        const auto at = [&](int pair) {
          return reinterpret_cast<float2*>(box.at(row + 8 * i, 2 * pair + t / 2) + t % 2 * 8);
        };
        *at(odd ? j + 2 : j) = odd ? back : front;
        *at(odd ? j : j + 2) = odd ? front : back;
      }
    }
    if (p.tma_out) {
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        ptx::tma_store_3d(&p.out, box.bytes, col, row0, 0);
        ptx::tma_store_commit_group();
      }
      continue;
    }
    __syncwarp();
    if (col + lane >= n) continue;
    float* to = args.out + row0 * args.out_row + col + lane;
#pragma unroll 4
    for (int r = 0; r < min(OutputBox::kBoxRows, m - row0); ++r, to += args.out_row) {
      *to = *reinterpret_cast<const float*>(box.at(r, lane / 4) + lane % 4 * 4);
    }
  }
}

// Finishes a warp's sums of a chunk. row0: the warp's first row.
template <int kCount>
__device__ __forceinline__ void finish_chunk(const Short& p, ShortSmem& smem, int tile, int row0,
                                             int chunk_column, const Line (&row)[2], int& box,
                                             float (&sum)[kCount]) {
  constexpr uint32_t kMaxRecomputed = 64;  // by a warp; more are left to the tile's other pass
  const Args& args = p.args;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
  const int own_row = row0 + lane / 4, own_col = chunk_column + lane % 4 * 2;
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const int2* const columns = reinterpret_cast<const int2*>(p.columns + own_col);
  int trust = max(row[0].trust(), row[1].trust());
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) trust |= (columns[4 * j].x | columns[4 * j].y) & 3;
  Suspects<kCount> suspects;
  const bool any = __any_sync(~0u, trust != kExact);
  if (any) suspects = find_suspects(row, columns, args.k, sum);
  unscale(row, columns, sum);
  if (any) {
    if (warp_sum(suspects.count()) > kMaxRecomputed) {
      const int turn = tile / gridDim.x % (32 * ShortSmem::kRedoWords);
      if (lane == 0) atomicOr(&smem.redo[turn / 32], 1u << turn % 32);
    } else {
      recompute(args, own_row, own_col, false, suspects, sum);
    }
  }
  if (args.bias) {
    const float* const bias = args.bias + own_col;
    const int left = n - own_col;
    apply_column_terms(sum, [&](int c) { return ColumnTerms<float>{c < left ? bias[c] : 0.0f}; });
  }
  activate<Activate>(args.activation, sum);
  if (args.residual) {
#pragma unroll
    for (int x = 0; x < kCount; ++x) {
      sum[x] += residual_at(args, 0, min(own_row + x / 2 % 2 * 8, m - 1),
                            min(own_col + x / 4 * 8 + x % 2, n - 1));
    }
  }
  if (row0 < m) store_chunk(p, smem.boxes[warp], box, row0, chunk_column, sum);
}

#endif

}  // namespace
}  // namespace my_ops::cuda
