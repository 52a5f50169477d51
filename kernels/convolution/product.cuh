// The products of convolution_sm90.cu, by the main loop of fp32_sm90 (gemm/fp32_sm90/kernel.cuh).
//
// Forward and the gradient of the input: rows are windows, columns are the weight's rows, and k
// runs over the taps of a window and, inside, the channels. With strides that gradient has several
// classes of points (geometry.h), and a tile has the sums of one after the other. Gradient of the
// weight: rows are taps and channels, columns are outputs, and k runs over windows, in slices.
#pragma once

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

// For 256 threads. a(row, k) and b(column, k) are elements, 0 outside.
template <typename A, typename B, typename Store>
__device__ __noinline__ void multiply_by_fma(FmaSmem& smem, int m, int n, int k, const A& a,
                                             const B& b, const Store& store) {
  if (threadIdx.x >= kFmaThreads) return;
  const int tiles_n = static_cast<int>(ceil_div(n, kFmaTile));
  const int64_t tiles = int64_t{tiles_n} * ceil_div(m, kFmaTile);
  const int row0 = threadIdx.x / 16 * 4, col0 = threadIdx.x % 16 * 4;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int m0 = static_cast<int>(tile / tiles_n) * kFmaTile;
    const int n0 = static_cast<int>(tile % tiles_n) * kFmaTile;
    float sum[4][4] = {}, segment[4][4] = {};
    for (int k0 = 0; k0 < k; k0 += kFmaK) {
      fma_barrier();
      for (int i = threadIdx.x; i < kFmaK * kFmaTile; i += kFmaThreads) {
        const int l = i / kFmaTile, at = i % kFmaTile;
        const bool inside = k0 + l < k;
        smem.a[l][at] = inside && m0 + at < m ? a(m0 + at, k0 + l) : 0.0f;
        smem.b[l][at] = inside && n0 + at < n ? b(n0 + at, k0 + l) : 0.0f;
      }
      fma_barrier();
#pragma unroll
      for (int l = 0; l < kFmaK; ++l) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            segment[i][j] = fmaf(smem.a[l][row0 + i], smem.b[l][col0 + j], segment[i][j]);
          }
        }
      }
      if (k0 / kFmaK % 8 != 7 && k0 + kFmaK < k) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] += segment[i][j], segment[i][j] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (m0 + row0 + i < m && n0 + col0 + j < n) store(m0 + row0 + i, n0 + col0 + j, sum[i][j]);
      }
    }
  }
}

// The point of a window's tap, 0 outside the image. `tap` counts the taps of the class.
__device__ __forceinline__ float point_of(const Product& p, const PointClass& points, int window,
                                          int tap, int channel) {
  const Geometry& g = p.geometry;
  const Window at(g, window);
  const int y = at.first(g, 0) + points.offset(g, 0, tap / points.taps[1].count);
  const int x = at.first(g, 1) + points.offset(g, 1, tap % points.taps[1].count);
  if (y < 0 || y >= g.image[0] || x < 0 || x >= g.image[1]) return 0.0f;
  return p.x[at.n * p.x_at.batch + channel * p.x_at.channel +
             (int64_t{y} * g.image[1] + x) * p.x_at.point];
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
    const int taps = points.count();
    multiply_by_fma(
        smem, p.m, p.n, taps * p.channels,
        [&](int row, int k) { return point_of(p, points, row, k % taps, k / taps); },
        [&](int col, int k) {
          const int across = points.taps[1].count, tap = k % taps;
          return p.y[col * p.y_at.batch + k / taps * p.y_at.channel +
                     points.weight_tap(g, tap / across, tap % across) * p.y_at.point];
        },
        [&](int row, int col, float sum) {
          float* out = out_of(p, points, row, col);
          if (out) *out = sum + (p.bias ? p.bias[col] : 0.0f);
        });
  }
}

__device__ __forceinline__ void sum_windows_by_fma(const Product& p, FmaSmem& smem) {
  const int taps = p.geometry.taps(), count = p.geometry.window_count();
  const PointClass points(p.geometry, 0);
  multiply_by_fma(
      smem, taps * p.channels, p.n, p.windows,
      [&](int row, int k) { return point_of(p, points, k, row % taps, row / taps); },
      [&](int col, int k) {
        return p.y[k / count * p.y_at.batch + col * p.y_at.channel + k % count * p.y_at.point];
      },
      [&](int row, int col, float sum) {
        p.out[col * p.out_at.batch + row / taps * p.out_at.channel + row % taps * p.out_at.point] =
            sum;
      });
}

// ---- by tensor cores ----

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
  if (needs_fma(path)) return;
  const int shift = 2 * (path ? kBf16Shift : kFp16Shift);
  const Pow2Pair factor = pow2_pair(*p.a_exponent + *p.b_exponent - shift);
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
