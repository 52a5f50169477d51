// The products of convolution_sm90.cu, by the main loop of fp32_sm90 (gemm/fp32_sm90/kernel.cuh).
//
// Forward and the gradient of the input: rows are windows, columns are the weight's rows, and k
// runs over the taps of a window and, inside, the channels. With strides that gradient has several
// classes of points (geometry.h), and a tile has the sums of one after the other. Gradient of the
// weight: rows are taps and channels, columns are outputs, and k runs over windows, in slices.
#pragma once

#include <type_traits>

#include "convolution/geometry.h"
#include "convolution/plan.h"
#include "convolution/split.cuh"
#include "gemm/fp32_sm90/kernel.cuh"

namespace my_ops::cuda::convolution_sm90 {
namespace {

struct Product : Shape {
  CUtensorMap a[kParts], b[kParts];  // of each part. Forward: b[0] has all
  int slices, k_blocks_per_slice;
  ProductGrid grid;
  const uint32_t* path;
  const int32_t *a_exponent, *b_exponent;
  const float *x, *y;  // for FMAs: what the windows read; the weight, or the output's gradient
  Places x_at, y_at;   // y_at, of a weight: [row][channel][tap]
  const float* bias;
  float* out;
  Places out_at;   // [n][output][point] or, of a weight, [output][channel][tap]
  float* partial;  // [slices][m][n]
};

struct Bf16AlongRowsScheme : Bf16Scheme {
  static constexpr bool kAlongRows = true;
};

// ---- by FMAs ----

// An operand of count rows that is not a matrix in memory: what read(row(r), column(l)) returns. A
// row's or column's part of an address is computed once for several elements. Lanes run along k or
// rows, whichever is contiguous in most cases.
template <bool kAlongK, typename Row, typename Column, typename Read>
struct Gathered {
  int count;
  Row row;
  Column column;
  Read read;
};

template <bool kAlongK, typename Row, typename Column, typename Read>
__device__ __forceinline__ Gathered<kAlongK, Row, Column, Read> gathered(int count, Row row,
                                                                         Column column, Read read) {
  return {count, row, column, read};
}

// A thread's share of a 64 x 16 tile, for sum_tile_by_fma.
template <typename Operand>
struct GatherLoader;

template <bool kAlongK, typename Row, typename Column, typename Read>
struct GatherLoader<Gathered<kAlongK, Row, Column, Read>> {
  static constexpr int kRows = kAlongK ? 4 : 1, kThreadRows = kFmaThreads / kFmaK,
                       kThreadColumns = kFmaThreads / kFmaTile;
  const Gathered<kAlongK, Row, Column, Read>& operand;
  int64_t end;  // of k
  int first_row, first_column;
  std::invoke_result_t<Row, int> rows[kRows];
  float held[4];

  __device__ __forceinline__ GatherLoader(const Gathered<kAlongK, Row, Column, Read>& of, int row0,
                                          int64_t end, int thread)
      : operand(of),
        end(end),
        first_row(kAlongK ? thread / kFmaK : thread % kFmaTile),
        first_column(kAlongK ? thread % kFmaK : thread / kFmaTile) {
    // Rows beyond the last are of no use; they read that one.
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows[i] = operand.row(min(row0 + first_row + i * kThreadRows, operand.count - 1));
    }
  }
  __device__ __forceinline__ void load(int64_t l0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) held[i] = 0.0f;
    if constexpr (kAlongK) {
      if (l0 + first_column >= end) return;
      const auto column = operand.column(static_cast<int>(l0) + first_column);
#pragma unroll
      for (int i = 0; i < 4; ++i) held[i] = operand.read(rows[i], column);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int64_t l = l0 + first_column + i * kThreadColumns;
        if (l < end) held[i] = operand.read(rows[0], operand.column(static_cast<int>(l)));
      }
    }
  }
  __device__ __forceinline__ void store(float (&to)[kFmaK][kFmaTile + 4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kAlongK) {
        to[first_column][first_row + i * kThreadRows] = held[i];
      } else {
        to[first_column + i * kThreadColumns][first_row] = held[i];
      }
    }
  }
};

// For 256 threads. Sums over k in slices: store(slice, row, column, sum).
template <typename A, typename B, typename Store>
__device__ __noinline__ void multiply_by_fma(FmaSmem& smem, int k, int slices, int k_per_slice,
                                             const A& a, const B& b, const Store& store) {
  if (threadIdx.x >= kFmaThreads) return;
  const int thread = threadIdx.x, row0 = thread / 16 * 4, col0 = thread % 16 * 4;
  const int tiles_n = static_cast<int>(ceil_div(b.count, kFmaTile));
  const int64_t tiles = tiles_n * ceil_div(a.count, kFmaTile);
  for (int64_t i = blockIdx.x; i < tiles * slices; i += gridDim.x) {
    const int slice = static_cast<int>(i / tiles), tile = static_cast<int>(i % tiles);
    const int m0 = tile / tiles_n * kFmaTile, n0 = tile % tiles_n * kFmaTile;
    const int64_t first = int64_t{slice} * k_per_slice, end = min(first + k_per_slice, int64_t{k});
    GatherLoader<A> rows(a, m0, end, thread);
    GatherLoader<B> columns(b, n0, end, thread);
    float sum[4][4];
    sum_tile_by_fma(smem, thread, first, end, rows, columns, sum);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int row = m0 + row0 + r, col = n0 + col0 + c;
        if (row < a.count && col < b.count) store(slice, row, col, sum[r][c]);
      }
    }
  }
}

// Where a window's points, and one that a tap reads, are: in memory, and in an image.
struct PointPlace {
  int64_t at;
  int y, x;
};

__device__ __forceinline__ PointPlace window_place(const Product& p, int window) {
  const Window at(p.geometry, window);
  return {at.n * p.x_at.batch, at.first(p.geometry, 0), at.first(p.geometry, 1)};
}

// From a window's first point. i counts the taps of the class, of each channel.
__device__ __forceinline__ PointPlace tap_place(const Product& p, const PointClass& points, int i) {
  const int across = points.taps[1].count, taps = points.count(), tap = i % taps;
  return {i / taps * p.x_at.channel, points.offset(p.geometry, 0, tap / across),
          points.offset(p.geometry, 1, tap % across)};
}

// 0 outside the image.
__device__ __forceinline__ float point_of(const Product& p, const PointPlace& window,
                                          const PointPlace& tap) {
  const Geometry& g = p.geometry;
  const int y = window.y + tap.y, x = window.x + tap.x;
  if (y < 0 || y >= g.image[0] || x < 0 || x >= g.image[1]) return 0.0f;
  return p.x[window.at + tap.at + (int64_t{y} * g.image[1] + x) * p.x_at.point];
}

// Where a window's sum for a class and an output goes; null if the result has no such point.
__device__ __forceinline__ float* out_of(const Product& p, const PointClass& points, int window,
                                         int output) {
  const Geometry& g = p.geometry;
  const Window at(g, window);
  const int y = at.point(g, points, 0), x = at.point(g, points, 1);
  if (y >= g.result[0] || x >= g.result[1]) return nullptr;
  return p.out + at.n * p.out_at.batch + output * p.out_at.channel +
         (int64_t{y} * g.result[1] + x) * p.out_at.point;
}

__device__ __forceinline__ void convolve_by_fma(const Product& p, FmaSmem& smem) {
  const Geometry& g = p.geometry;
  for (int i = 0; i < g.class_count(); ++i) {
    const PointClass points(g, i);
    const int taps = points.count(), across = points.taps[1].count, k = taps * p.channels;
    multiply_by_fma(smem, k, 1, k,
                    gathered<false>(
                        p.m, [&](int row) { return window_place(p, row); },
                        [&](int l) { return tap_place(p, points, l); },
                        [&](const PointPlace& window, const PointPlace& tap) {
                          return point_of(p, window, tap);
                        }),
                    gathered<true>(
                        p.n, [&](int col) { return col * p.y_at.batch; },
                        [&](int l) {
                          const int tap = l % taps;
                          return l / taps * p.y_at.channel +
                                 points.weight_tap(g, tap / across, tap % across) * p.y_at.point;
                        },
                        [&](int64_t row, int64_t column) { return p.y[row + column]; }),
                    [&](int, int row, int col, float sum) {
                      float* out = out_of(p, points, row, col);
                      if (out) *out = sum + (p.bias ? p.bias[col] : 0.0f);
                    });
  }
}

__device__ __forceinline__ void sum_windows_by_fma(const Product& p, FmaSmem& smem) {
  const int taps = p.geometry.taps(), count = p.geometry.window_count();
  const PointClass points(p.geometry, 0);
  multiply_by_fma(smem, p.windows, p.slices, p.k_blocks_per_slice * kSplitBlockK,
                  gathered<true>(
                      taps * p.channels, [&](int row) { return tap_place(p, points, row); },
                      [&](int l) { return window_place(p, l); },
                      [&](const PointPlace& tap, const PointPlace& window) {
                        return point_of(p, window, tap);
                      }),
                  gathered<true>(
                      p.n, [&](int col) { return col * p.y_at.channel; },
                      [&](int l) { return l / count * p.y_at.batch + l % count * p.y_at.point; },
                      [&](int64_t row, int64_t column) { return p.y[row + column]; }),
                  [&](int slice, int row, int col, float sum) {
                    const int in_padded = row % taps * p.padded + row / taps;
                    p.partial[(int64_t{slice} * p.m + in_padded) * p.n + col] = sum;
                  });
}

// ---- by tensor cores ----

// A producer and a consumer for each of the two products. Their walks differ, over taps or over
// windows, and so do the boxes of a stage, by k or along the rows; what is alike is in
// fill_stage and sum_parts.
template <typename Scheme, typename Tile>
__device__ __forceinline__ void produce_windows(const Product& p, ProductSmem& smem,
                                                ClusterPlace place) {
  using Layout = RingLayout<Scheme, Tile>;
  constexpr int kRowsB = Tile::kN / Tile::kClusterM;
  const Geometry& g = p.geometry;
  const uint16_t same_n = (1 << Tile::kClusterM) - 1;
  RingPlace<Layout::kStages> at;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < p.grid.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const TilePlace origin =
        tile_place<Tile>(p.grid.cluster_tiles_m, p.grid.cluster_tiles_n, cluster_tile, place);
    const Window window(g, origin.m);
    const int y = window.first(g, 0), x = window.first(g, 1);
    const int b_row = origin.n + place.m * kRowsB;
    for (int i = 0; i < g.class_count(); ++i) {
      const PointClass points(g, i);
      for (int tap = 0; tap < points.count(); ++tap) {
        const int down = tap / points.taps[1].count, right = tap % points.taps[1].count;
        const int below = points.offset(g, 0, down), beside = points.offset(g, 1, right);
        int k = points.weight_tap(g, down, right) * p.padded;
        for (int block = 0; block < p.channel_blocks; ++block, k += Tile::kK) {
          fill_stage(at, smem.full, smem.empty, Layout::kBytes, [&](int stage, uint64_t* full) {
            unsigned char* const to = smem.ring + stage * Layout::kBytes;
#pragma unroll
            for (int part = 0; part < Scheme::kParts; ++part) {
              ptx::tma_load_im2col(to + Layout::a(part), &p.a[part], full, block * Tile::kK, x, y,
                                   window.n, beside, below);
              load_box<Tile::kClusterM>(to + Layout::b(part) + place.m * kRowsB * Tile::kK * 2,
                                        &p.b[0], full, k, part * p.n + b_row, same_n);
            }
          });
        }
      }
    }
  }
}

// Writes a thread's sums, of two windows.
template <typename Tile>
__device__ __forceinline__ void store_windows(const Product& p, const PointClass& points, int row0,
                                              int col0, float (&sum)[Tile::kN / 2]) {
  if (p.bias) {
#pragma unroll
    for (int j = 0; j < Tile::kN / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float bias = p.bias[min(col0 + 8 * j + c, p.n - 1)];
        sum[4 * j + c] += bias, sum[4 * j + 2 + c] += bias;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row0 + 8 * i;
    if (row >= p.m) continue;
    float* out = out_of(p, points, row, col0);
    if (!out) continue;
    if (p.out_at.channel == 1 && p.n % 2 == 0) {
#pragma unroll
      for (int j = 0; j < Tile::kN / 8; ++j) {
        if (col0 + 8 * j < p.n) {
          *reinterpret_cast<float2*>(out + 8 * j) = {sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]};
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < Tile::kN / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (col0 + 8 * j + c < p.n) *out = sum[4 * j + 2 * i + c];
          out += c == 0 ? p.out_at.channel : 7 * p.out_at.channel;
        }
      }
    }
  }
}

template <typename Scheme, typename Tile>
__device__ __forceinline__ void consume_windows(const Product& p, ProductSmem& smem,
                                                ClusterPlace place) {
  const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // provably uniform
  const int thread = threadIdx.x % 128;
  const Releaser<Tile> release{smem.empty};
  TileExponents& exponents = smem.exponents[consumer];
  float sum[Tile::kN / 2];
  RingPlace<RingLayout<Scheme, Tile>::kStages> at;
  int i = 0;  // a class; one loop over tiles and classes needs fewer registers than two
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < p.grid.cluster_tiles;) {
    const TilePlace origin =
        tile_place<Tile>(p.grid.cluster_tiles_m, p.grid.cluster_tiles_n, cluster_tile, place);
    TileExponents::wait(consumer);  // those of the previous sums have been read
    if (thread < 64) ptx::cp_async<4>(exponents.row + thread, p.a_exponent);
    for (int j = thread; j < Tile::kN; j += 128) {
      ptx::cp_async<4>(exponents.column + j, p.b_exponent + min(origin.n + j, p.n - 1));
    }
    if (const int taps = PointClass(p.geometry, i).count(); taps > 0) {
      sum_parts<Scheme, Tile>(smem, release, consumer, false, taps * p.channel_blocks, at, sum);
      TileExponents::wait(consumer);
      exponents.unscale<Scheme>(sum);
    } else {
#pragma unroll
      for (float& x : sum) x = 0.0f;
    }
    const int row0 = origin.m + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
    store_windows<Tile>(p, PointClass(p.geometry, i), row0, origin.n + thread % 4 * 2, sum);
    if (++i == p.geometry.class_count()) i = 0, cluster_tile += cluster_tile_step<Tile>();
  }
}

template <typename Scheme, typename Tile>
__device__ __forceinline__ void produce_taps(const Product& p, ProductSmem& smem,
                                             ClusterPlace place) {
  using Layout = RingLayout<Scheme, Tile>;
  constexpr int kShareB = Tile::kK / Tile::kClusterM;
  const Geometry& g = p.geometry;
  const uint16_t same_n = (1 << Tile::kClusterM) - 1;
  RingPlace<Layout::kStages> at;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < p.grid.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const TilePlace origin =
        tile_place<Tile>(p.grid.cluster_tiles_m, p.grid.cluster_tiles_n, cluster_tile, place);
    const int first = origin.plane * p.k_blocks_per_slice;
    const int blocks = min(p.k_blocks_per_slice, p.k_blocks - first);
    int channel[Tile::kM / 64], right[Tile::kM / 64], down[Tile::kM / 64];
#pragma unroll
    for (int i = 0; i < Tile::kM / 64; ++i) {
      // Rows beyond the last are of no use; they read any tap.
      const int tap = min(origin.m / 64 + i, p.m / 64 - 1) / p.channel_blocks;
      channel[i] = (origin.m / 64 + i) % p.channel_blocks * 64;
      right[i] = tap % g.kernel[1] * g.dilation[1], down[i] = tap / g.kernel[1] * g.dilation[0];
    }
    for (int k = first * Tile::kK; k < (first + blocks) * Tile::kK; k += Tile::kK) {
      const Window window(g, k);
      const int y = window.first(g, 0), x = window.first(g, 1);
      fill_stage(at, smem.full, smem.empty, Layout::kBytes, [&](int stage, uint64_t* full) {
        unsigned char* const to = smem.ring + stage * Layout::kBytes;
#pragma unroll
        for (int part = 0; part < Scheme::kParts; ++part) {
#pragma unroll
          for (int i = 0; i < Tile::kM / 64; ++i) {
            ptx::tma_load_im2col(to + Layout::a(part) + i * 64 * Tile::kK * 2, &p.a[part], full,
                                 channel[i], x, y, window.n, right[i], down[i]);
          }
#pragma unroll
          for (int j = 0; j < Tile::kN; j += 64) {
            load_box<Tile::kClusterM>(
                to + Layout::b(part) + j * Tile::kK * 2 + place.m * kShareB * 128, &p.b[part], full,
                origin.n + j, k + place.m * kShareB, same_n);
          }
        }
      });
    }
  }
}

template <typename Scheme, typename Tile>
__device__ __forceinline__ void consume_taps(const Product& p, ProductSmem& smem,
                                             ClusterPlace place) {
  const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;  // provably uniform
  const int thread = threadIdx.x % 128;
  const Releaser<Tile> release{smem.empty};
  float sum[Tile::kN / 2];
  RingPlace<RingLayout<Scheme, Tile>::kStages> at;
  for (int cluster_tile = first_cluster_tile<Tile>(); cluster_tile < p.grid.cluster_tiles;
       cluster_tile += cluster_tile_step<Tile>()) {
    const TilePlace origin =
        tile_place<Tile>(p.grid.cluster_tiles_m, p.grid.cluster_tiles_n, cluster_tile, place);
    const int blocks = min(p.k_blocks_per_slice, p.k_blocks - origin.plane * p.k_blocks_per_slice);
    sum_parts<Scheme, Tile>(smem, release, consumer, false, blocks, at, sum);
    const int row0 = origin.m + consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int col0 = origin.n + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row0 + 8 * i;
      if (row >= p.m) continue;
      float* out = p.partial + (int64_t{origin.plane} * p.m + row) * p.n + col0;
#pragma unroll
      for (int j = 0; j < Tile::kN / 8; ++j) {
        if (col0 + 8 * j < p.n) out[8 * j] = sum[4 * j + 2 * i];
        if (col0 + 8 * j + 1 < p.n) out[8 * j + 1] = sum[4 * j + 2 * i + 1];
      }
    }
  }
}

template <bool kTaps, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    convolution_kernel(const __grid_constant__ Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Fp16 = std::conditional_t<kTaps, Fp16AlongRowsScheme, Fp16Scheme>;
  using Bf16 = std::conditional_t<kTaps, Bf16AlongRowsScheme, Bf16Scheme>;
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  ProductSmem& smem = *reinterpret_cast<ProductSmem*>(raw_smem);
  const ClusterPlace place = cluster_place<Tile>();
  if (threadIdx.x == 0) {
    init_ring<Tile>(ProductSmem::kMaxStages, smem.full, smem.empty);
    ptx::fence_mbarrier_init();
  }
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const uint32_t path = *p.path;
  __syncthreads();
  cluster_sync();
  if (needs_fma(path)) {
    FmaSmem& fma_smem = reinterpret_cast<FmaSmem&>(smem.ring);
    if constexpr (kTaps) {
      sum_windows_by_fma(p, fma_smem);
    } else {
      convolve_by_fma(p, fma_smem);
    }
  } else if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      if constexpr (kTaps) {
        path ? produce_taps<Bf16, Tile>(p, smem, place) : produce_taps<Fp16, Tile>(p, smem, place);
      } else {
        path ? produce_windows<Bf16, Tile>(p, smem, place)
             : produce_windows<Fp16, Tile>(p, smem, place);
      }
    }
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    if constexpr (kTaps) {
      path ? consume_taps<Bf16, Tile>(p, smem, place) : consume_taps<Fp16, Tile>(p, smem, place);
    } else {
      path ? consume_windows<Bf16, Tile>(p, smem, place)
           : consume_windows<Fp16, Tile>(p, smem, place);
    }
  }
  cluster_sync();
#endif
}

// Adds the slices of a weight's gradient, in double and in order.
constexpr int kReduceThreads = 256;

__global__ void __launch_bounds__(kReduceThreads) reduce_kernel(const __grid_constant__ Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const uint32_t path = *p.path;
  Pow2Pair factor{1.0f, 1.0f};
  if (!needs_fma(path)) {
    const int shift = 2 * (path ? kBf16Shift : kFp16Shift);
    factor = pow2_pair(*p.a_exponent + *p.b_exponent - shift);
  }
  const int64_t plane = int64_t{p.m} * p.n;
  const int64_t i = int64_t{blockIdx.x} * kReduceThreads + threadIdx.x;
  if (i >= plane) return;
  const int row = static_cast<int>(i / p.n), col = static_cast<int>(i % p.n);
  const int tap = row / p.padded, channel = row % p.padded;
  if (channel >= p.channels) return;
  double sum = 0.0;
  for (int slice = 0; slice < p.slices; ++slice) sum += p.partial[slice * plane + i];
  p.out[col * p.out_at.batch + channel * p.out_at.channel + tap * p.out_at.point] =
      static_cast<float>(sum) * factor.first * factor.second;
#endif
}

}  // namespace
}  // namespace my_ops::cuda::convolution_sm90
