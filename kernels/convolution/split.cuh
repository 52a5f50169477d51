// The passes before the product: what a convolution reads, as 16-bit parts with the channels last,
// padded with zeros to whole blocks of 64. Of an image's points all have one power of two as scale,
// so that any window of them has; of the weight each output has its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "convolution/plan.h"
#include "fp32/split_device.cuh"
#include "ptx/griddepcontrol.cuh"

namespace my_ops::cuda::convolution_sm90 {
namespace {

constexpr int kSplitThreads = fp32_split::kThreads;
// Of a block of threads, and how many of those an SM runs at once.
constexpr int kSplitBlocks = 5;
constexpr int kNotFinite = 128;  // the exponent of Inf and NaN

// As fp32/split_device.cuh.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// What all threads of the block have seen, Extremes or Counts, in each of them.
template <typename Seen>
__device__ __forceinline__ Seen of_block(const Seen& mine) {
  __shared__ RowSmem<kSplitThreads> smem;
  return row_reduce<kSplitThreads>(mine, smem);
}

__device__ __forceinline__ void find_largest(const Points& p, int block, int blocks) {
  const int64_t count = p.elements(), step = int64_t{blocks} * kSplitThreads;
  uint32_t most = 0;
  const int64_t first = int64_t{block} * kSplitThreads + threadIdx.x;
  int64_t done = 0;
  if (reinterpret_cast<uintptr_t>(p.x) % 16 == 0) {
    constexpr int kAtOnce = 4;
    const float4* x = reinterpret_cast<const float4*>(p.x);
    for (int64_t i = first; i < count / 4; i += kAtOnce * step) {
      float4 v[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) v[j] = x[i + j * step < count / 4 ? i + j * step : i];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        each(v[j], [&](float e) { most = max(most, magnitude(e)); });
    }
    done = count / 4 * 4;
  }
  for (int64_t i = done + first; i < count; i += step) most = max(most, magnitude(p.x[i]));
  most = of_block(Extremes{most}).largest;
  if (threadIdx.x == 0) p.largest[block] = most;
}

// Writes a row's parts. Taps and channels in this order, whatever their strides.
template <typename Parts>
__device__ __forceinline__ void split_row(const Weights& w, int row) {
  const float* x = w.x + row * w.row_stride;
  uint32_t most = 0;
  // In the order of memory, more or less.
  const int count = w.taps * w.channels;
  for (int i = threadIdx.x; i < count; i += kSplitThreads) {
    const int tap = i % w.taps, channel = i / w.taps;
    most = max(most, magnitude(x[channel * w.channel_stride + tap * w.tap_stride]));
  }
  const RowScale scale(of_block(Extremes{most}).largest);
  const Pow2Pair factor = pow2_pair(Parts::kShift - scale.exponent);
  Counts counts;
  uint32_t* to = reinterpret_cast<uint32_t*>(w.parts + int64_t{row} * w.taps * w.padded);
  const int pairs = w.padded / 2;
  for (int i = threadIdx.x; i < w.taps * pairs; i += kSplitThreads) {
    const int tap = i / pairs, channel = i % pairs * 2;
    float v[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      v[j] = channel + j < w.channels ? x[(channel + j) * w.channel_stride + tap * w.tap_stride]
                                      : 0.0f;
      counts.add(v[j], scale);
      v[j] = v[j] * factor.first * factor.second;
    }
    uint32_t word[Parts::kCount];
    Parts::split(v[0], v[1], word);
#pragma unroll
    for (int part = 0; part < Parts::kCount; ++part)
      to[part * w.part_stride() / 2 + i] = word[part];
  }
  counts = of_block(counts);
  if (threadIdx.x == 0) {
    w.exponent[row] = scale.exponent;
    const SplitPath path = row_path(counts.tiny_fp16, counts.tiny_bf16, counts.nonzero, 0);
    w.status[row] = static_cast<uint8_t>(scale.exponent < kNotFinite ? path : SplitPath::kFma);
  }
}

// Of so many nonzero elements of a block one may be tiny: 4 of a whole block. What reads it reads
// far more than these.
constexpr uint32_t kNonzeroPerTiny = 1024;

// Copies a block to shared memory, with all loads in flight at once; zeros outside.
__device__ __forceinline__ void hold_points(const Points& p, const float* x, int channel0,
                                            int point0, float (&held)[kChannels][kPoints + 1]) {
  __syncthreads();  // the last block has been read
  if (p.points % 4 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0) {
    constexpr int kRow = kPoints / 4, kSteps = kChannels * kRow / kSplitThreads;
    const int in_row = threadIdx.x % kRow * 4, point = point0 + in_row;
    float4 v[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int channel = channel0 + threadIdx.x / kRow + i * (kSplitThreads / kRow);
      v[i] = channel < p.channels && point < p.points
                 ? *reinterpret_cast<const float4*>(x + int64_t{channel} * p.points + point)
                 : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      float* to = held[threadIdx.x / kRow + i * (kSplitThreads / kRow)] + in_row;
      to[0] = v[i].x, to[1] = v[i].y, to[2] = v[i].z, to[3] = v[i].w;
    }
  } else {
    constexpr int kSteps = kChannels * kPoints / kSplitThreads;
    const int in_row = threadIdx.x % kPoints, point = point0 + in_row;
    float v[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int channel = channel0 + threadIdx.x / kPoints + i * (kSplitThreads / kPoints);
      v[i] =
          channel < p.channels && point < p.points ? x[int64_t{channel} * p.points + point] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      held[threadIdx.x / kPoints + i * (kSplitThreads / kPoints)][in_row] = v[i];
    }
  }
  __syncthreads();
}

template <typename Parts>
__device__ __forceinline__ void split_points(const Points& p, const RowScale& scale, int64_t block,
                                             uint32_t* path) {
  __shared__ float held[kChannels][kPoints + 1];
  const int channel_blocks = p.padded / kChannels;
  const int point_blocks = (p.points + kPoints - 1) / kPoints;
  const int channel0 = static_cast<int>(block % channel_blocks) * kChannels;
  const int point0 = static_cast<int>(block / channel_blocks % point_blocks) * kPoints;
  const int64_t image = block / channel_blocks / point_blocks;
  const float* x = p.x + image * p.channels * p.points;
  const Pow2Pair factor = pow2_pair(Parts::kShift - scale.exponent);
  if (!p.last) {
    hold_points(p, x, channel0, point0, held);
  }
  Counts counts;
  // A thread takes eight channels of a point at a time.
  constexpr int kSteps = kChannels * kPoints / 8 / kSplitThreads;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int at = threadIdx.x + i * kSplitThreads;
    const int channel = at % (kChannels / 8) * 8, in_block = at / (kChannels / 8);
    const int point = point0 + in_block;
    float v[8];
    if (p.last) {
      const float* from = x + int64_t{point} * p.channels + channel0 + channel;
      if (p.channels % 4 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
          const bool inside = point < p.points && channel0 + channel + j < p.channels;
          const float4 four =
              inside ? *reinterpret_cast<const float4*>(from + j) : float4{0, 0, 0, 0};
          v[j] = four.x, v[j + 1] = four.y, v[j + 2] = four.z, v[j + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          v[j] = point < p.points && channel0 + channel + j < p.channels ? from[j] : 0.0f;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = held[channel + j][in_block];
    }
    if (point >= p.points) continue;
    uint32_t word[4][Parts::kCount];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      counts.add(v[2 * j], scale), counts.add(v[2 * j + 1], scale);
      Parts::split(v[2 * j] * factor.first * factor.second,
                   v[2 * j + 1] * factor.first * factor.second, word[j]);
    }
    uint16_t* to = p.parts + (image * p.points + point) * p.padded + channel0 + channel;
#pragma unroll
    for (int part = 0; part < Parts::kCount; ++part) {
      *reinterpret_cast<uint4*>(to + part * p.part_stride()) = {word[0][part], word[1][part],
                                                                word[2][part], word[3][part]};
    }
  }
  if (__syncthreads_or(counts.tiny_fp16)) {
    counts = of_block(counts);
    const uint32_t most = counts.nonzero / kNonzeroPerTiny;
    if (threadIdx.x == 0 && counts.tiny_fp16 > most) {
      const bool fma = counts.tiny_bf16 > most;
      atomicOr(path, static_cast<uint32_t>(fma ? SplitPath::kFma : SplitPath::kBf16));
    }
  }
}

__device__ __forceinline__ RowScale scale_of(const Points& p) {
  uint32_t most = 0;
  for (int i = threadIdx.x; i < p.largest_count; i += kSplitThreads) most = max(most, p.largest[i]);
  return RowScale(of_block(Extremes{most}).largest);
}
#endif

// The parts of the weight, and the largest of the rest.
__global__ void __launch_bounds__(kSplitThreads)
    prepare_kernel(const __grid_constant__ SplitArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  int block = blockIdx.x;
  if (block == 0 && threadIdx.x == 0) *p.path = 0;
  if (block < p.weights.rows) return split_row<Fp16Parts>(p.weights, block);
  block -= p.weights.rows;
  find_largest(p.points[block / p.max_blocks], block % p.max_blocks, p.max_blocks);
#endif
}

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <typename Parts>
__device__ __forceinline__ void split_all_points(const SplitArgs& p) {
#pragma unroll 1
  for (int i = 0; i < p.operands; ++i) {
    const Points& points = p.points[i];
    const RowScale scale = scale_of(points);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      *points.exponent = scale.exponent;
      if (scale.exponent == kNotFinite) atomicOr(p.path, static_cast<uint32_t>(SplitPath::kFma));
    }
    for (int64_t block = blockIdx.x; block < points.blocks(); block += gridDim.x) {
      split_points<Parts>(points, scale, block, p.path);
    }
  }
}
#endif

__global__ void __launch_bounds__(kSplitThreads, kSplitBlocks)
    split_kernel(const __grid_constant__ SplitArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  if (blockIdx.x == 0) {
    for (int i = threadIdx.x; i < p.weights.rows; i += kSplitThreads) {
      if (p.weights.status[i]) atomicOr(p.path, uint32_t{p.weights.status[i]});
    }
  }
  split_all_points<Fp16Parts>(p);
#endif
}

__device__ __forceinline__ bool needs_fma(uint32_t path) {
  constexpr auto kBits =
      static_cast<uint32_t>(SplitPath::kFma) | static_cast<uint32_t>(SplitPath::kBf16Checked);
  return path & kBits;
}

// The same again, into bf16 parts, if the data need them.
__global__ void __launch_bounds__(kSplitThreads, kSplitBlocks)
    split_bf16_kernel(const __grid_constant__ SplitArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const uint32_t path = *p.path;
  if (path == 0 || needs_fma(path)) return;
  for (int row = blockIdx.x; row < p.weights.rows; row += gridDim.x) {
    split_row<Bf16Parts>(p.weights, row);
  }
  split_all_points<Bf16Parts>(p);
#endif
}

}  // namespace
}  // namespace my_ops::cuda::convolution_sm90
