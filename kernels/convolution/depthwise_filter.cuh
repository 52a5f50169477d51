// The kernel that filters the channels of a depthwise convolution: forward, and the gradient of the
// input, which is the same with the weight turned around. With strides that gradient reads its
// image as if there were zeros between the points (kUp), forward drops windows (kDown).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "convolution/depthwise_filter_plan.h"
#include "convolution/slice.cuh"
#include "ptx/cp_async.cuh"

namespace my_ops::cuda::depthwise_filter {

// Where a tensor's points lie: in elements from image to image, and so on.
struct Strides {
  int64_t image, channel, row;
  int column;
};

// What a launch reads and writes.
struct Launch {
  const float *x, *weight, *bias;  // bias may be null
  float* y;
  Strides of_x, of_y;
  int channels;
  Geometry at;
  Split split;
};

// Of one item, what a lane reads: of a dilated convolution, the points of x with one remainder.
struct View {
  const float* x;  // at its index (0, 0)
  int64_t row;     // strides
  int column;
  int size[2], first[2];
};

// Asynchronous copies of a float, or of zero, in groups.
__device__ __forceinline__ void copy(float* to, const float* from, bool inside) {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async<4>(to, from, inside ? 4 : 0);
#else
  *to = inside ? *from : 0.0F;
#endif
}
__device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async_commit_group();
#endif
}
template <int kPending>
__device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 800
  ptx::cp_async_wait_group<kPending>();
#endif
}

__device__ __forceinline__ bool is_inside(int index, int size) {
  return static_cast<unsigned>(index) < static_cast<unsigned>(size);
}

__device__ __forceinline__ float weight_at(const Launch& a, int channel, int r, int s) {
  if (a.at.turned) r = a.at.kernel[0] - 1 - r, s = a.at.kernel[1] - 1 - s;
  return a.weight[(int64_t{channel} * a.at.kernel[0] + r) * a.at.kernel[1] + s];
}

// A point without what is in the padding, where zeros times Inf or NaN are NaN.
template <typename Tile>
__device__ __forceinline__ float careful(const Launch& a, const View& v, int channel, int y, int x,
                                         float sum) {
#pragma unroll 1
  for (int r = 0; r < a.at.kernel[0]; ++r) {
    const int down = y * Tile::kDownHigh + r, row = v.first[0] + down / Tile::kUpHigh;
    if (down % Tile::kUpHigh != 0 || !is_inside(row, v.size[0])) continue;
#pragma unroll 1
    for (int s = 0; s < a.at.kernel[1]; ++s) {
      const int right = x * Tile::kDown + s, column = v.first[1] + right / Tile::kUp;
      if (right % Tile::kUp != 0 || !is_inside(column, v.size[1])) continue;
      sum = fmaf(weight_at(a, channel, r, s), v.x[row * v.row + int64_t{column} * v.column], sum);
    }
  }
  return sum;
}

// A warp walks down strips of rows. Its ring in shared memory holds the next rows of x, each of
// which a lane multiplies by all taps at once: sums of points that are not complete move on by a
// row with each step. A lane has kColumns columns of a channel: with the channels last, lanes have
// neighbouring channels; otherwise neighbouring columns, of several images if these are narrow.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    depthwise_filter_kernel(const Launch a) {
  constexpr bool kLast = Tile::kLast;
  constexpr int kHigh = Tile::kHigh, kWide = Tile::kWide, kColumns = Tile::kColumns;
  constexpr int kUp = Tile::kUp, kDown = Tile::kDown, kWindow = Tile::kWindow;
  constexpr int kUpHigh = Tile::kUpHigh, kDownHigh = Tile::kDownHigh, kSums = Tile::kSums;
  constexpr int kSlots = Tile::kAhead + 1;
  extern __shared__ float4 rings[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int groups = kLast ? 1 : a.split.groups, of_warp = images_of_warp<Tile>(groups);
  const int image = kLast ? 0 : lane / groups, group = kLast ? 0 : lane % groups;
  const int row_of_ring = row_floats<Tile>(groups), step_floats = kDownHigh * row_of_ring;
  float* const ring = reinterpret_cast<float*>(rings) + warp * warp_floats<Tile>(groups);
  float* const staged = ring + kSlots * step_floats;  // rows of y, unless channels are last
  const int channel = kLast ? static_cast<int>(blockIdx.x) * 32 + lane : blockIdx.y;
  const int c = min(channel, a.channels - 1);

  float weight[kHigh * kWide];
  if constexpr (kLast) {
    // Transposed through shared memory: the taps of a channel are neighbours in memory.
    float* const taps = reinterpret_cast<float*>(rings);
    for (int i = threadIdx.x; i < kHigh * kWide * kWeightPitch; i += Tile::kThreads) taps[i] = 0;
    __syncthreads();
    const int count = a.at.kernel[0] * a.at.kernel[1], begin = blockIdx.x * 32;
    const int end = min(32, a.channels - begin) * count;
    for (int i = threadIdx.x; i < end; i += Tile::kThreads) {
      const int of = i / count, r = i % count / a.at.kernel[1], s = i % count % a.at.kernel[1];
      taps[(r * kWide + s) * kWeightPitch + of] = weight_at(a, begin + of, r, s);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHigh * kWide; ++i) weight[i] = taps[i * kWeightPitch + lane];
    __syncthreads();
  } else {
#pragma unroll
    for (int i = 0; i < kHigh * kWide; ++i) {
      const int r = i / kWide, s = i % kWide;
      weight[i] = r < a.at.kernel[0] && s < a.at.kernel[1] ? weight_at(a, c, r, s) : 0.0F;
    }
  }
  const float bias = a.bias ? a.bias[c] : 0.0F;

  const Range range = slice_of(a.split.items, kLast ? blockIdx.y : blockIdx.x, a.split.slices);
#pragma unroll 1
  for (int item = range.begin + warp; item < range.end; item += Tile::kWarps) {
    // ---- where the item lies ----
    int rest = item;
    const auto next = [&](int count) {
      const int all = rest;
      rest /= count;
      return all - rest * count;
    };
    const int x0 = next(a.split.tiles) * groups * kColumns;
    const int phase[2] = {next(a.at.dilation[0]), next(a.at.dilation[1])};
    const int y0 = next(a.split.strips) * a.split.rows;
    const int n = rest * of_warp + image;
    const bool live = image < of_warp && n < a.at.images && channel < a.channels;
    const int64_t at = int64_t{live ? n : 0};
    View v{.x = a.x + at * a.of_x.image + c * a.of_x.channel,
           .row = a.of_x.row * a.at.dilation[0],
           .column = a.of_x.column * a.at.dilation[1]};
    int y_size[2];
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      const int step = a.at.dilation[d], index = phase[d] + a.at.first[d];
      const int remainder = index % step + (index % step < 0 ? step : 0);
      v.first[d] = (index - remainder) / step;
      v.size[d] = (a.at.size[d] - remainder + step - 1) / step;
      v.x += remainder * (d == 0 ? a.of_x.row : a.of_x.column);
      y_size[d] = (a.at.out_size[d] + a.at.shift[d] - phase[d] + step - 1) / step;
    }
    const int y1 = min(y0 + a.split.rows, y_size[0]);
    const int64_t y_row = a.of_y.row * a.at.dilation[0];
    const int y_column = a.of_y.column * a.at.dilation[1];
    float* const out = a.y + at * a.of_y.image + c * a.of_y.channel +
                       (phase[0] - a.at.shift[0]) * a.of_y.row +
                       int64_t{phase[1] - a.at.shift[1]} * a.of_y.column;

    // ---- copies to the ring ----
    const int column0 = v.first[1] + x0 * kDown / kUp + group, stride = groups;
    const int copies = kLast  ? kWindow
                       : live ? (width_of<Tile>(groups) - 1 - group) / groups + 1
                              : 0;
    const int plane = kLast ? lane : (image < of_warp ? image : 0) * pitch_of<Tile>(groups);
    unsigned inside = 0;
    for (int i = 0; i < copies; ++i) {
      inside |= is_inside(column0 + i * stride, v.size[1]) ? 1U << i : 0U;
    }
    const float* const from = v.x + int64_t{column0} * v.column;
    const int64_t next_copy = int64_t{stride} * v.column;
    const auto load = [&](int row, float* slot) {
      float* const to = slot + plane + group;
#pragma unroll
      for (int e = 0; e < kDownHigh; ++e) {
        const bool has = is_inside(row + e, v.size[0]);
        const float* const of_row = from + (row + e) * v.row;
        if constexpr (kLast) {
#pragma unroll
          for (int i = 0; i < kWindow; ++i) {
            copy(to + e * row_of_ring + i * 32, of_row + i * next_copy, has && (inside >> i & 1));
          }
        } else {
#pragma unroll 4
          for (int i = 0; i < copies; ++i) {
            copy(to + e * row_of_ring + i * stride, of_row + i * next_copy,
                 has && (inside >> i & 1));
          }
        }
      }
    };
    const auto has_rows = [&](int row) { return row > -kDownHigh && row < v.size[0]; };

    // ---- the walk ----
    const int t0 = y0 / kUpHigh;
    const int steps = (y1 - y0 + kUpHigh - 1) / kUpHigh + (kSums - 1) / kUpHigh;
    const int row0 = v.first[0] + t0 * kDownHigh;
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < Tile::kAhead; ++i) {
      if (i < steps && has_rows(row0 + i * kDownHigh)) {
        load(row0 + i * kDownHigh, ring + i * step_floats);
      }
      commit();
    }
    float sums[kSums][kColumns];
#pragma unroll
    for (int i = 0; i < kSums * kColumns; ++i) sums[i / kColumns][i % kColumns] = bias;
    int slot = 0, last_slot = kSlots - 1;
#pragma unroll 1
    for (int t = 0; t < steps; ++t) {
      wait<Tile::kAhead - 1>();
      __syncwarp();
      const int row = row0 + t * kDownHigh, ahead = row + Tile::kAhead * kDownHigh;
      if (t + Tile::kAhead < steps && has_rows(ahead)) load(ahead, ring + last_slot * step_floats);
      commit();
      if (has_rows(row)) {
        float x[kDownHigh][Tile::kRead];
#pragma unroll
        for (int e = 0; e < kDownHigh; ++e) {
          const float* const read = ring + slot * step_floats + e * row_of_ring + plane;
          if constexpr (kLast) {
#pragma unroll
            for (int i = 0; i < kWindow; ++i) x[e][i] = read[i * 32];
          } else {
            constexpr int kVector = Tile::kVector;
            using Vector = std::conditional_t<kVector == 4, float4, float2>;
            const auto* const vectors =
                reinterpret_cast<const Vector*>(read + group * (kColumns * kDown / kUp));
#pragma unroll
            for (int i = 0; i < Tile::kRead / kVector; ++i) {
              const Vector loaded = vectors[i];
              x[e][i * kVector] = loaded.x, x[e][i * kVector + 1] = loaded.y;
              if constexpr (kVector == 4) {
                x[e][i * kVector + 2] = loaded.z, x[e][i * kVector + 3] = loaded.w;
              }
            }
          }
        }
#pragma unroll
        for (int i = kSums - 1; i >= 0; --i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            float sum = i < kUpHigh ? bias : sums[i < kUpHigh ? 0 : i - kUpHigh][j];
#pragma unroll
            for (int e = 0; e < kDownHigh; ++e) {
              const int r = i * kDownHigh + e;
#pragma unroll
              for (int s = 0; s < kWide; ++s) {
                const int right = j * kDown + s;
                if (r < kHigh && right % kUp == 0) {
                  sum = fmaf(weight[r * kWide + s], x[e][right / kUp], sum);
                }
              }
            }
            sums[i][j] = sum;
          }
        }
      } else {
#pragma unroll
        for (int i = kSums - 1; i >= 0; --i) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            sums[i][j] = i < kUpHigh ? bias : sums[i < kUpHigh ? 0 : i - kUpHigh][j];
          }
        }
      }
      last_slot = slot;
      slot = slot + 1 == kSlots ? 0 : slot + 1;

      // ---- the rows that are complete ----
      const int y = (t0 + t) * kUpHigh - (kSums - 1);
#pragma unroll
      for (int o = 0; o < kUpHigh; ++o) {
        if (y + o < max(y0, a.at.shift[0]) || y + o >= y1) continue;
        float (&done)[kColumns] = sums[kSums - 1 - o];
        float all = 0;  // NaN if one is
#pragma unroll
        for (int j = 0; j < kColumns; ++j) all += done[j];
        if (all != all) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            done[j] = careful<Tile>(a, v, c, y + o, x0 + group * kColumns + j, bias);
          }
        }
        float* const to = out + (y + o) * y_row;
        if constexpr (kLast) {
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const int x = x0 + j;
            if (live && x >= a.at.shift[1] && x < y_size[1]) to[int64_t{x} * y_column] = done[j];
          }
        } else {
          float* const line = staged + o * 32 * kColumns;
          reinterpret_cast<float4*>(line)[lane] = make_float4(done[0], done[1], done[2], done[3]);
          __syncwarp();
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            const int offset = group + j * groups, x = x0 + offset;
            if (live && x >= a.at.shift[1] && x < y_size[1]) {
              to[int64_t{x} * y_column] = line[image * groups * kColumns + offset];
            }
          }
        }
      }
    }
  }
}

}  // namespace my_ops::cuda::depthwise_filter
