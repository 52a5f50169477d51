// Kernels of gradients of the weights of depthwise convolutions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "convolution.h"
#include "convolution/depthwise_plan.h"
#include "convolution/slice.cuh"

namespace my_ops::cuda::depthwise_fma {

// What a launch reads and writes.
struct Launch {
  const float *input, *grad;
  float* partial;  // [slices][channels][taps], or [slices][taps][channels] with the channels last
  int batch, channels, height, width, out_height, out_width;
  int kernel[2], padding[2];
  int slices;
  int segment;  // of kRows
};

// ---- a thread's sums ----

// What a thread reads of one channel of one image: it walks along one dimension, the width with the
// channels last, otherwise the height.
struct Path {
  const float *x, *grad;                 // x at its index (0, 0), grad at the first output
  int x_along, grad_along, grad_across;  // strides; that of x across is a parameter
  int size_along, size_across;           // of x
  int first_along, first_across;         // indices in x of the first output's first tap
  int steps, outputs;                    // along, across
};

__device__ __forceinline__ const float* after(const float* p, uint64_t bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(p) + bytes);
}

// Adds to the sums of kAlong * kAcross taps. A window of x in registers slides along the path: its
// slots rotate, which unrolled loops resolve. Padding is zeros, so sums are wrong where a gradient
// is Inf or NaN: *bad is then NaN, otherwise it stays zero.
template <int kAlong, int kAcross, int kStride, int kOutputs, int kAhead>
__device__ __forceinline__ void walk(const Path& p, int x_across, float (&sums)[kAlong * kAcross],
                                     float* bad) {
  constexpr int kLines = (kOutputs - 1) * kStride + kAcross;
  constexpr int kSlots = kAlong + kAhead * kStride;
  constexpr int kPeriod = kSlots % kStride == 0 ? kSlots / kStride : kSlots;
  constexpr int kLoaded = kAlong + (kAhead - 1) * kStride;  // before the first step's load
  static_assert(kStride <= 2 && kPeriod > kAhead);
  float window[kLines][kSlots];
  float grads[kOutputs][kPeriod];
  unsigned inside = 0;  // a bit for each line
#pragma unroll
  for (int l = 0; l < kLines; ++l) {
    const bool is =
        static_cast<unsigned>(p.first_across + l) < static_cast<unsigned>(p.size_across);
    inside |= is ? 1U << l : 0U;
  }
  const unsigned x_across_bytes = 4U * x_across, x_bytes = 4U * p.x_along;
  const unsigned grad_bytes = 4U * p.grad_along, grad_across_bytes = 4U * p.grad_across;
  int index = p.first_along, loaded = 0;
  const float* x = p.x + (int64_t{p.first_along} * p.x_along + int64_t{p.first_across} * x_across);
  const float* grad = p.grad;
  const auto load = [&](int slot) {
    const bool has = static_cast<unsigned>(index) < static_cast<unsigned>(p.size_along);
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      window[l][slot] = has && (inside >> l & 1) ? *after(x, l * uint64_t{x_across_bytes}) : 0.0F;
    }
    x = after(x, x_bytes);
    ++index;
  };
  const auto load_grads = [&](int slot) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      const bool has = loaded < p.steps && o < p.outputs;
      grads[o][slot] = has ? *after(grad, o * uint64_t{grad_across_bytes}) : 0.0F;
    }
    grad = after(grad, grad_bytes);
    ++loaded;
  };
#pragma unroll
  for (int i = 0; i < kLoaded; ++i) load(i);
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_grads(i);
#pragma unroll 1
  for (int begin = 0; begin < p.steps; begin += kPeriod) {
#pragma unroll
    for (int t = 0; t < kPeriod; ++t) {
      if (begin + t >= p.steps) return;
#pragma unroll
      for (int d = 0; d < kStride; ++d) load((t * kStride + kLoaded + d) % kSlots);
      load_grads((t + kAhead) % kPeriod);
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        if (o > 0 && o >= p.outputs) continue;
        const float g = grads[o][t];
        *bad = fmaf(g, 0.0F, *bad);
#pragma unroll
        for (int a = 0; a < kAlong; ++a) {
#pragma unroll
          for (int b = 0; b < kAcross; ++b) {
            sums[a * kAcross + b] =
                fmaf(g, window[o * kStride + b][(t * kStride + a) % kSlots], sums[a * kAcross + b]);
          }
        }
      }
    }
  }
}

// The sum of one tap over a path, without what is in the padding.
template <int kStride>
__device__ __forceinline__ float careful(const Path& p, int x_across, int a, int b, float sum) {
#pragma unroll 1
  for (int o = 0; o < p.outputs; ++o) {
    const int across = p.first_across + o * kStride + b;
    if (across < 0 || across >= p.size_across) continue;
#pragma unroll 1
    for (int t = 0; t < p.steps; ++t) {
      const int along = p.first_along + t * kStride + a;
      if (along < 0 || along >= p.size_along) continue;
      sum = fmaf(p.grad[int64_t{t} * p.grad_along + int64_t{o} * p.grad_across],
                 p.x[int64_t{along} * p.x_along + int64_t{across} * x_across], sum);
    }
  }
  return sum;
}

// Replaces sums that walk() has called bad. path_of(item) is a path in memory.
template <int kAlong, int kAcross, int kStride, typename PathOf>
__device__ __forceinline__ void sum_carefully(int begin, int end, int step, PathOf path_of,
                                              int x_across, float (&sums)[kAlong * kAcross]) {
#pragma unroll 1
  for (int k = 0; k < kAlong * kAcross; ++k) {
    float sum = 0;
#pragma unroll 1
    for (int item = begin; item < end; item += step) {
      sum = careful<kStride>(path_of(item), x_across, k / kAcross, k % kAcross, sum);
    }
#pragma unroll
    for (int i = 0; i < kAlong * kAcross; ++i) sums[i] = i == k ? sum : sums[i];
  }
}

// ---- channels last: a lane has a channel, a warp strips of rows ----

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    depthwise_last_kernel(const Launch a) {
  constexpr int kSize = Tile::kSize, kTaps = Tile::kTaps, kWarps = Tile::kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int channel = blockIdx.x * 32 + lane, c = min(channel, a.channels - 1);
  const int strips = (a.out_height + Tile::kOutputs - 1) / Tile::kOutputs;
  const Range range = slice_of(a.batch * strips, blockIdx.y, a.slices);
  const int row = a.width * a.channels, out_row = a.out_width * a.channels;
  const auto path_of = [&](int item) {
    const int n = item / strips, p = (item - n * strips) * Tile::kOutputs;
    return Path{.x = a.input + int64_t{n} * a.height * row + c,
                .grad = a.grad + (int64_t{n} * a.out_height + p) * out_row + c,
                .x_along = a.channels,
                .grad_along = a.channels,
                .grad_across = out_row,
                .size_along = a.width,
                .size_across = a.height,
                .first_along = -a.padding[1],
                .first_across = p * Tile::kStride - a.padding[0],
                .steps = a.out_width,
                .outputs = min(Tile::kOutputs, a.out_height - p)};
  };
  float sums[kTaps] = {}, bad = 0;
#pragma unroll 1
  for (int item = range.begin + warp; item < range.end; item += kWarps) {
    walk<kSize, kSize, Tile::kStride, Tile::kOutputs, Tile::kAhead>(path_of(item), row, sums, &bad);
  }
  if (bad != bad) {
    sum_carefully<kSize, kSize, Tile::kStride>(range.begin + warp, range.end, kWarps, path_of, row,
                                               sums);
  }
  __shared__ float shared[kWarps / 2][kTaps][32];
#pragma unroll
  for (int half = kWarps / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) {
#pragma unroll
      for (int i = 0; i < kTaps; ++i) shared[warp - half][i][lane] = sums[i];
    }
    __syncthreads();
    if (warp < half) {
#pragma unroll
      for (int i = 0; i < kTaps; ++i) sums[i] += shared[warp][i][lane];
    }
    __syncthreads();
  }
  if (warp > 0 || channel >= a.channels) return;
  float* const out = a.partial + int64_t{blockIdx.y} * a.kernel[0] * a.kernel[1] * a.channels;
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int r = i % kSize, s = i / kSize;
    if (r < a.kernel[0] && s < a.kernel[1]) {
      out[int64_t{r * a.kernel[1] + s} * a.channels + channel] = sums[i];
    }
  }
}

// ---- otherwise: a block has a channel ----

// Sums v over a block's threads and calls write(i, sum) for each i. In a warp, a lane exchanges
// half of its numbers with another, then half of those.
template <int kWarps, int kCount, typename Write>
__device__ __forceinline__ void sum_block(float (&v)[kCount], Write write) {
  __shared__ float shared[kWarps][kCount];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int first = 0, end = kCount, n = kCount;  // what a lane then has
#pragma unroll
  for (int step = 0; step < 5; ++step) {
    const int other = 16 >> step, half = (n + 1) / 2;
    const bool upper = lane & other;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i >= half) continue;
      const float low = v[i], high = i + half < n ? v[(i + half) % kCount] : 0.0F;
      v[i] = (upper ? high : low) + __shfl_xor_sync(~0U, upper ? low : high, other);
    }
    if (upper) {
      first += half;
    } else {
      end = min(end, first + half);
    }
    n = half;
  }
#pragma unroll
  for (int i = 0; i < (kCount + 31) / 32; ++i) {
    if (first + i < end) shared[warp][first + i] = v[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kCount; i += 32 * kWarps) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w][i];
    write(i, sum);
  }
}

// A thread has columns of outputs.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    depthwise_planes_kernel(const Launch a) {
  constexpr int kSize = Tile::kSize;
  const int c = blockIdx.y;
  const Range range = slice_of(a.batch * a.out_width, blockIdx.x, a.slices);
  const auto path_of = [&](int item) {
    const int n = item / a.out_width, q = item - n * a.out_width;
    const int64_t plane = int64_t{n} * a.channels + c;
    return Path{.x = a.input + plane * a.height * a.width,
                .grad = a.grad + plane * a.out_height * a.out_width + q,
                .x_along = a.width,
                .grad_along = a.out_width,
                .grad_across = 0,
                .size_along = a.height,
                .size_across = a.width,
                .first_along = -a.padding[0],
                .first_across = q * Tile::kStride - a.padding[1],
                .steps = a.out_height,
                .outputs = 1};
  };
  float sums[Tile::kTaps] = {}, bad = 0;
  const int begin = range.begin + static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int item = begin; item < range.end; item += Tile::kThreads) {
    walk<kSize, kSize, Tile::kStride, 1, Tile::kAhead>(path_of(item), 1, sums, &bad);
  }
  if (bad != bad) {
    sum_carefully<kSize, kSize, Tile::kStride>(begin, range.end, Tile::kThreads, path_of, 1, sums);
  }
  __syncwarp();
  float* const out = a.partial + (int64_t{blockIdx.x} * a.channels + c) * a.kernel[0] * a.kernel[1];
  sum_block<Tile::kWarps>(sums, [&](int i, float sum) {
    const int r = i / kSize, s = i % kSize;
    if (r < a.kernel[0] && s < a.kernel[1]) out[r * a.kernel[1] + s] = sum;
  });
}

// A warp copies part of a row, of x and of the gradient, to shared memory, where each lane walks
// over a segment.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    depthwise_rows_kernel(const Launch a) {
  extern __shared__ float buffers[];
  constexpr int kSize = Tile::kSize, kStride = Tile::kStride;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.y;
  const int part = 32 * a.segment, x_count = (part - 1) * kStride + kSize;
  float* const x_part = buffers + warp * (part * (kStride + 1) + kSize);
  float* const grad_part = x_part + part * kStride + kSize;
  const int parts = (a.out_width + part - 1) / part;
  const Range range = slice_of(a.batch * parts, blockIdx.x, a.slices);
  float sums[kSize] = {}, bad = 0;
#pragma unroll 1
  for (int item = range.begin + warp; item < range.end; item += Tile::kWarps) {
    const int n = item / parts, q = (item - n * parts) * part;
    const int64_t row = int64_t{n} * a.channels + c;
    const float *const x = a.input + row * a.width, *const grad = a.grad + row * a.out_width + q;
    const int first = q * kStride - a.padding[1], count = min(part, a.out_width - q);
    __syncwarp();
#pragma unroll 8
    for (int i = lane; i < x_count; i += 32) {
      const bool inside = static_cast<unsigned>(first + i) < static_cast<unsigned>(a.width);
      x_part[i] = inside ? x[first + i] : 0.0F;
    }
#pragma unroll 8
    for (int i = lane; i < count; i += 32) grad_part[i] = grad[i];
    __syncwarp();
    const int before = lane * a.segment;
    const Path path{.x = x_part + before * kStride,
                    .grad = grad_part + before,
                    .x_along = 1,
                    .grad_along = 1,
                    .grad_across = 0,
                    .size_along = x_count - before * kStride,
                    .size_across = 1,
                    .first_along = 0,
                    .first_across = 0,
                    .steps = min(a.segment, count - before),
                    .outputs = 1};
    walk<kSize, 1, kStride, 1, Tile::kAhead>(path, 0, sums, &bad);
  }
  if (bad != bad) {
    const auto path_of = [&](int item) {
      const int n = item / parts, q = (item - n * parts) * part + lane * a.segment;
      const int64_t row = int64_t{n} * a.channels + c;
      const int end = min((item - n * parts + 1) * part, a.out_width);
      return Path{.x = a.input + row * a.width,
                  .grad = a.grad + row * a.out_width + q,
                  .x_along = 1,
                  .grad_along = 1,
                  .grad_across = 0,
                  .size_along = a.width,
                  .size_across = 1,
                  .first_along = q * kStride - a.padding[1],
                  .first_across = 0,
                  .steps = min(a.segment, end - q),
                  .outputs = 1};
    };
    sum_carefully<kSize, 1, kStride>(range.begin + warp, range.end, Tile::kWarps, path_of, 0, sums);
  }
  __syncwarp();
  float* const out = a.partial + (int64_t{blockIdx.x} * a.channels + c) * a.kernel[1];
  sum_block<Tile::kWarps>(sums, [&](int i, float sum) {
    if (i < a.kernel[1]) out[i] = sum;
  });
}

// ---- the sum over slices, in double: there are few ----

inline constexpr int kSumColumns = 32, kSumRows = 8;

template <bool kLast>
__global__ void __launch_bounds__(kSumColumns* kSumRows)
    depthwise_sum_kernel(const float* partial, float* result, int slices, int channels, int taps) {
  __shared__ double shared[kSumRows][kSumColumns];
  const int64_t count = int64_t{channels} * taps;
  const int64_t i = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  double sum = 0;
  if (i < count) {
#pragma unroll 8
    for (int k = threadIdx.y; k < slices; k += kSumRows) sum += partial[k * count + i];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || i >= count) return;
#pragma unroll
  for (int k = 1; k < kSumRows; ++k) sum += shared[k][threadIdx.x];
  result[kLast ? i % channels * taps + i / channels : i] = static_cast<float>(sum);
}

}  // namespace my_ops::cuda::depthwise_fma
