// The arguments of the kernels of fp32_sm90.cu, and the epilogue of a tile, from a warpgroup's sums
// to outputs.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <climits>

#include "fp32/split.cuh"
#include "gemm/fp32_fma.cuh"
#include "gemm/fp32_sm90/plan.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared_address.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_sm90;

// Tiles of the output, walked by clusters.
struct ProductGrid {
  int cluster_tiles_m, cluster_tiles_n;  // along m and n
  int cluster_tiles;                     // cluster_tiles_m * cluster_tiles_n * batch * slices
};

// Parts of a [parts * batch * m, ld] and of b [parts * batch * n, ld], and how to walk them. Stored
// along the rows they are [2 * batch * ld, m] and [2 * batch * ld, n].
struct ProductSource {
  CUtensorMap a, b;
  ProductGrid grid;
};

struct Fp32Product {
  ProductSource fast, full;  // of fp16 and of bf16 parts
  GemmArgs<float, float> args;
  const int32_t* a_exponent;  // [batch * m]
  const int32_t* b_exponent;  // [batch * n]
  SplitStatus a_status, b_status;
  float* partial;             // [slices][batch][m][n] partial sums, if slices > 1
  bool has_bf16;              // the bf16 split has run; otherwise full-range data use fp32 FMAs
  bool a_repeats, b_repeats;  // the same matrix for every batch
  int m, n;
  bool low_in_a;       // MixedScheme's operand with a low part is a
  int a_rows, b_rows;  // batch * m and batch * n, the distance between parts in the maps
  int ld;              // k, rounded up to whole k-blocks
  int k_blocks, k_blocks_per_slice, slices;
};

// The path that the product needs. Contains __syncthreads.
__device__ __forceinline__ SplitPath product_path(const Fp32Product& p) {
  const SplitPath path = split_path(p.a_status, p.b_status);
  return path != SplitPath::kFp16 && !p.has_bf16 ? SplitPath::kFma : path;
}

// Parts below 2^-126 may be lost; an element below 2^-102 may lose up to 2^-125. The other
// operand's elements are below 2^31, so the error of an output is less than k * 2^-93. Outputs
// below 2^25 times that are suspect, and recomputed.
constexpr float kSuspectBelow = 0x1p-68f;  // times k

struct Fp16Scheme {
  using Type = __half;
  static constexpr int kParts = 2, kShift = kFp16Shift, kLowBits = kFp16LowBits;
  static constexpr bool kAlongRows = false;  // how the parts are stored
};

struct Fp16AlongRowsScheme : Fp16Scheme {
  static constexpr bool kAlongRows = true;
};

// Beside an operand of 16 bits, which is one part. The other has two.
struct MixedScheme {
  using Type = __half;
  static constexpr bool kAlongRows = false;
  static constexpr int kParts = 2, kShift = kFp16Shift, kLowBits = kFp16LowBits;
};

// For TF32's accuracy: the leading parts only.
struct SingleScheme {
  using Type = __half;
  static constexpr bool kAlongRows = false;
  static constexpr int kParts = 1, kShift = kFp16Shift;
};

struct Bf16Scheme {
  using Type = __nv_bfloat16;
  static constexpr bool kAlongRows = false;
  static constexpr int kParts = 3, kShift = kBf16Shift, kLowBits = 0;
};

struct TileOrigin {
  int m, n, z, slice;
};

// The exponents of a warpgroup's rows and columns, copied to shared memory during the products.
struct TileExponents {
  int row[64];
  alignas(8) int column[256];  // read in pairs

  template <int kN>
  __device__ __forceinline__ void load(const Fp32Product& p, const TileOrigin& origin, int row0) {
    const int32_t* a = p.a_exponent + (p.a_repeats ? 0 : origin.z * p.m);
    const int32_t* b = p.b_exponent + (p.b_repeats ? 0 : origin.z * p.n);
    const int thread = threadIdx.x % 128;
    if (thread < 64) ptx::cp_async<4>(row + thread, a + min(row0 + thread, p.m - 1));
    for (int j = thread; j < kN; j += 128)
      ptx::cp_async<4>(column + j, b + min(origin.n + j, p.n - 1));
  }
  // Waits until the copies of all threads of the warpgroup have landed.
  static __device__ __forceinline__ void wait(int consumer) {
    ptx::cp_async_wait_all();
    ptx::bar_sync(1 + consumer, 128);
  }

  // The exponents of a thread's columns 8 j and 8 j + 1.
  __device__ __forceinline__ int2 column_pair(int j) const {
    return ptx::ld_shared_v2(ptx::shared_address(column + threadIdx.x % 4 * 2) + j * 32);
  }

  // Whether an output is suspect: below `limit`, while neither its row nor its column is all zeros.
  // rows, columns: how many the product has, counted from this tile's first.
  template <int kCount>
  __device__ __forceinline__ bool suspect(const float (&acc)[kCount], float limit, int rows,
                                          int columns) const {
    const int thread = threadIdx.x % 128, of_thread = thread / 32 * 16 + thread % 32 / 4;
    bool low = false;
#pragma unroll
    for (int x = 0; x < kCount; ++x) low |= fabsf(acc[x]) < limit;
    if (!low) return false;
    const bool live[2] = {of_thread < rows && row[of_thread] != kZeroExponent,
                          of_thread + 8 < rows && row[of_thread + 8] != kZeroExponent};
    bool found = false;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int2 e = column_pair(j);
      const int left = columns - j * 8 - thread % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        found |= live[i] && left > 0 && e.x != kZeroExponent && fabsf(acc[j * 4 + i * 2]) < limit;
        found |=
            live[i] && left > 1 && e.y != kZeroExponent && fabsf(acc[j * 4 + i * 2 + 1]) < limit;
      }
    }
    return found;
  }

  // Undoes the scaling, exactly: acc *= 2^(row + column - 2 * shift).
  template <typename Scheme, int kCount>
  __device__ __forceinline__ void unscale(float (&acc)[kCount]) const {
    constexpr unsigned kWarp = 0xFFFFFFFF;
    constexpr int kN = kCount * 2;
    const int thread = threadIdx.x % 128, of_thread = thread / 32 * 16 + thread % 32 / 4;
    const int e_row[2] = {row[of_thread] - 2 * Scheme::kShift,
                          row[of_thread + 8] - 2 * Scheme::kShift};
    // Whether every factor is a normal float. Lanes check different columns of the tile.
    int lowest = INT_MAX, highest = INT_MIN;
#pragma unroll
    for (int j = threadIdx.x % 32; j < kN; j += 32) {
      lowest = min(lowest, column[j]);
      highest = max(highest, column[j]);
    }
    lowest = __reduce_min_sync(kWarp, lowest) + __reduce_min_sync(kWarp, min(e_row[0], e_row[1]));
    highest = __reduce_max_sync(kWarp, highest) + __reduce_max_sync(kWarp, max(e_row[0], e_row[1]));
    if (lowest >= -126 && highest <= 127) {
      const int bits[2] = {__float_as_int(1.0f) + (e_row[0] << 23),
                           __float_as_int(1.0f) + (e_row[1] << 23)};
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const int2 e = column_pair(j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          acc[j * 4 + i * 2] *= __int_as_float(bits[i] + (e.x << 23));
          acc[j * 4 + i * 2 + 1] *= __int_as_float(bits[i] + (e.y << 23));
        }
      }
      return;
    }
    // The factor is applied as two factors, which reach twice as far; below 2^-252 every float
    // becomes zero.
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        const int2 e = column_pair(j);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          acc[j * 4 + x] *= pow2(max((e_row[x / 2] + (x % 2 ? e.y : e.x) + half) >> 1, -126));
        }
      }
    }
  }
};

// Where a warp stages its sums, 16 rows of 32 columns at a time, so that adjacent lanes store
// adjacent elements.
struct StagedSubtile {
  static constexpr int kRows = 16, kColumns = 32;
  alignas(8) float x[kRows * kColumns];  // written in pairs

  // XORed with the row, so that neither accesses by rows nor those in the accumulators' layout have
  // bank conflicts.
  __device__ __forceinline__ float* at(int row, int col) {
    return x + row * kColumns + (col ^ row % 4 * 8);
  }
};

// Stores a warp's sums, with the residual, if rows may start at any element.
template <typename Tile, int kCount>
__device__ __forceinline__ void store_staged(const Fp32Product& p, const TileOrigin& origin,
                                             float* out, int64_t ld, bool residual,
                                             StagedSubtile* subtiles, const float (&acc)[kCount]) {
  const int thread = ptx::tid_x();  // read again, so that no register holds it during the products
  const int lane = thread % 32, warp = thread / 32 - 4;
  StagedSubtile& subtile = subtiles[warp];
  const int row0 = origin.m + warp * StagedSubtile::kRows;
  const int rows = min(StagedSubtile::kRows, p.m - row0);
#pragma unroll
  for (int c = 0; c < Tile::kN / StagedSubtile::kColumns; ++c) {
    const int col = origin.n + c * StagedSubtile::kColumns + lane;
    const int stored = col < p.n ? rows : 0;
    __syncwarp();
    if (residual) {
      const float* from = p.args.residual + origin.z * p.args.residual_batch +
                          row0 * p.args.residual_row + col * p.args.residual_col;
#pragma unroll 2
      for (int row = 0; row < stored; ++row, from += p.args.residual_row) {
        ptx::cp_async<4>(subtile.at(row, lane), from);
      }
      ptx::cp_async_wait_all();
      __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float2* to = reinterpret_cast<float2*>(subtile.at(lane / 4 + 8 * i, 8 * j + lane % 4 * 2));
        float2 x{acc[16 * c + 4 * j + 2 * i], acc[16 * c + 4 * j + 2 * i + 1]};
        if (residual) x = {x.x + to->x, x.y + to->y};
        *to = x;
      }
    }
    __syncwarp();
    float* to = out + row0 * ld + col;
#pragma unroll 2
    for (int row = 0; row < stored; ++row, to += ld) *to = *subtile.at(row, lane);
  }
}

// Stores a warpgroup's rows, after the epilogue or, if k is sliced, as partial sums.
template <typename Scheme, typename Tile, int kCount>
__device__ __forceinline__ void finish(const Fp32Product& p, const TileOrigin& origin, int row0,
                                       const TileExponents& exponents, int consumer,
                                       StagedSubtile* subtiles, float (&acc)[kCount]) {
  const int col0 = origin.n + threadIdx.x % 4 * 2;
  const bool whole = p.slices == 1;
  float* base;
  int64_t ld;
  if (whole) {
    base = p.args.out + origin.z * p.args.out_batch;
    ld = p.args.out_row;
    exponents.wait(consumer);
    exponents.unscale<Scheme>(acc);
    if (p.args.bias) {
      const float* bias = p.args.bias + col0;
      const int columns = p.n - col0;
      apply_column_terms(acc,
                         [&](int c) { return ColumnTerms<float>{c < columns ? bias[c] : 0.0f}; });
    }
    activate<Activate>(p.args.activation, acc);
  } else {
    base = p.partial + (int64_t{origin.slice} * p.args.batch + origin.z) * p.m * p.n;
    ld = p.n;
  }
  const bool pairs = ld % 2 == 0 && reinterpret_cast<uintptr_t>(base) % 8 == 0;
  const bool residual = whole && p.args.residual;
  if (!pairs) return store_staged<Tile>(p, origin, base, ld, residual, subtiles, acc);
  // Column pairs that are loaded together; more would not fit in registers.
  constexpr int kPairs = Tile::kN % 64 == 0 ? 8 : 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = row0 + 8 * i;
    if (row >= p.m) continue;
    float* out = base + row * ld;
#pragma unroll
    for (int j0 = 0; j0 < Tile::kN / 8; j0 += kPairs) {
      if (residual) {
#pragma unroll
        for (int j = j0; j < j0 + kPairs; ++j) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int col = min(col0 + 8 * j + c, p.n - 1);
            acc[4 * j + 2 * i + c] += residual_at(p.args, origin.z, row, col);
          }
        }
      }
#pragma unroll
      for (int j = j0; j < j0 + kPairs; ++j) {
        const int col = col0 + 8 * j;
        const float2 x{acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]};
        if (col + 1 < p.n) {
          *reinterpret_cast<float2*>(out + col) = x;
        } else if (col < p.n) {
          out[col] = x.x;
        }
      }
    }
  }
}

}  // namespace
}  // namespace my_ops::cuda
