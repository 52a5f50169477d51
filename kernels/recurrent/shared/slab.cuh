// The product of a slab of W_h, which stays in a block, with the vector that the group exchanges.
//
// Weights are the A operand of mma (16 rows of W_h), and rows of the batch are N = 8. The chunks of
// K are distributed over the warps. A warp reads from L2 exactly the fragments that it multiplies,
// directly into registers. Shared memory collects the warps' partial sums, which are added in a
// fixed order. float runs as three tf32 products, hi*hi + hi*lo + lo*hi, with float accuracy.
#pragma once

#include "ptx/mma.cuh"
#include "ptx/registers.cuh"
#include "recurrent/shared/exchange.cuh"

namespace my_ops::cuda {

// hi + lo = v; hi has the 11 significant bits of tf32, rounded to nearest.
__device__ __forceinline__ void split_tf32(uint32_t v, uint32_t& hi, uint32_t& lo) {
  hi = (v + 0x1000u) & 0xFFFFE000u;
  lo = bits(__uint_as_float(v) - __uint_as_float(hi));
}

// A warp's fragments of one chunk. A lane's 16 bytes of a row are used in two k-steps: words x, y
// in the first and z, w in the second. Which units they belong to is arbitrary as long as A and b
// agree.
__device__ __forceinline__ uint32_t fragment(const uint4& v, int k_step, int word) {
  return k_step == 0 ? (word == 0 ? v.x : v.y) : (word == 0 ? v.z : v.w);
}

// sum += A b. The loops put mmas of different tiles next to each other, because an mma waits 33
// cycles for the sum of the one before it.
template <typename T, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_chunk(float (&sum)[MTiles][NTiles][4],
                                               const uint4 (&a)[MTiles][2],
                                               const uint4 (&b)[NTiles]) {
#pragma unroll
  for (int k_step = 0; k_step < 2; ++k_step) {
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
        ptx::mma<T>(sum[m][n], fragment(a[m][0], k_step, 0), fragment(a[m][1], k_step, 0),
                    fragment(a[m][0], k_step, 1), fragment(a[m][1], k_step, 1),
                    fragment(b[n], k_step, 0), fragment(b[n], k_step, 1));
      }
    }
  }
}

// The same for float, from the tf32 parts of A, which part(m, k_step, hi, lo) gives. The tensor
// cores truncate sums, so a chunk starts from zero, adds the small products first, and is added to
// the sum with rounding.
template <int MTiles, int NTiles, typename Part>
__device__ __forceinline__ void multiply_chunk_parts(float (&sum)[MTiles][NTiles][4], Part part,
                                                     const uint4 (&b)[NTiles]) {
  float d[MTiles][NTiles][4] = {};
#pragma unroll
  for (int k_step = 0; k_step < 2; ++k_step) {
    uint32_t b_hi[NTiles][2], b_lo[NTiles][2];
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      split_tf32(fragment(b[n], k_step, 0), b_hi[n][0], b_lo[n][0]);
      split_tf32(fragment(b[n], k_step, 1), b_hi[n][1], b_lo[n][1]);
    }
    uint32_t hi[MTiles][4], lo[MTiles][4];
#pragma unroll
    for (int m = 0; m < MTiles; ++m) part(m, k_step, hi[m], lo[m]);
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {
          const auto& x = product == 0 ? lo[m] : hi[m];
          const auto& y = product == 1 ? b_lo[n] : b_hi[n];
          ptx::mma<float>(d[m][n], x[0], x[1], x[2], x[3], y[0], y[1]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < MTiles; ++m) {
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[m][n][e] += d[m][n][e];
    }
  }
}

template <int MTiles, int NTiles>
__device__ __forceinline__ void multiply_chunk_float(float (&sum)[MTiles][NTiles][4],
                                                     const uint4 (&a)[MTiles][2],
                                                     const uint4 (&b)[NTiles]) {
  const auto part = [&](int m, int k_step, uint32_t (&hi)[4], uint32_t (&lo)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      // Opaque, because otherwise the compiler would split the weights once before the loop, which
      // takes twice the registers.
      split_tf32(ptx::opaque(fragment(a[m][e % 2], k_step, e / 2)), hi[e], lo[e]);
    }
  };
  multiply_chunk_parts(sum, part, b);
}

// With A already in parts.
template <int MTiles, int NTiles>
__device__ __forceinline__ void multiply_chunk_split(float (&sum)[MTiles][NTiles][4],
                                                     const uint4 (&a_hi)[MTiles][2],
                                                     const uint4 (&a_lo)[MTiles][2],
                                                     const uint4 (&b)[NTiles]) {
  const auto part = [&](int m, int k_step, uint32_t (&hi)[4], uint32_t (&lo)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      hi[e] = fragment(a_hi[m][e % 2], k_step, e / 2);
      lo[e] = fragment(a_lo[m][e % 2], k_step, e / 2);
    }
  };
  multiply_chunk_parts(sum, part, b);
}

template <typename T, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_chunk_any(float (&sum)[MTiles][NTiles][4],
                                                   const uint4 (&a)[MTiles][2],
                                                   const uint4 (&b)[NTiles]) {
  if constexpr (sizeof(T) == 4) {
    multiply_chunk_float(sum, a, b);
  } else {
    multiply_chunk<T>(sum, a, b);
  }
}

// Index of the float4 for units 2 pair, 2 pair + 1 and rows 2 column, 2 column + 1 in a tile of
// partial sums. There are no bank conflicts when eight lanes of the mma layout (two pairs by four
// columns) write it, nor when the eight pairs of a column are read.
__device__ __forceinline__ int partial_index(int pair, int column) {
  return column * 8 + (pair ^ (column * 2));
}

// MTiles: 16-row tiles of the slab. Chunks: the number that a warp takes. The weights of kResident
// of them stay in registers and the rest in shared memory, because 256 threads cannot hold more
// than about 160 weights each.
template <typename T, int MTiles, int NTiles, int Chunks>
struct Slab {
  static constexpr int kResident = resident_chunks(sizeof(T), MTiles, NTiles, Chunks);
  static constexpr int kSpilled = Chunks - kResident;
  static constexpr int kTileWords = 8 * kChunkBytes / 16;  // from one tile of rows to the next
  // Chunks whose loads are issued together. Two such batches are in flight.
  static constexpr int kBatch = NTiles == 2 || Chunks < 4 ? 2
                                : Chunks % 4 == 0         ? 4
                                : Chunks % 3 == 0         ? 3
                                                          : 2;
  // Sums used in turn, if a warp has too few tiles for its mmas to overlap.
  static constexpr int kSums = sizeof(T) == 4         ? 1
                               : MTiles * NTiles == 1 ? 4
                               : MTiles * NTiles <= 3 ? 2
                                                      : 1;
  static_assert(Chunks % kBatch == 0);

  struct Shared {
    uint4 weights[kSpilled ? kSpilled : 1][MTiles][2][kRecurrentThreads];
    // Two sets, used in turn, so that one barrier per product is enough: the set written now was
    // last read before the barrier of the product in between.
    float4 partial[2][kRecurrentWarps][MTiles][NTiles][32];
  };
  static_assert(sizeof(Shared) == slab_shared_bytes(sizeof(T), MTiles, NTiles, Chunks));

  uint4 weights[kResident][MTiles][2];

  // fill(chunk, exists, to) puts the lane's 16 bytes of row (lane / 4 + 8 * half) of tile m in
  // to[(2 * m + half) * kRecurrentThreads], zeros if the chunk does not exist. All weights go
  // through shared memory, first those of the registers: a loop over registers has to be unrolled,
  // and with the loads in it, it would be most of the kernel's code.
  template <typename Fill>
  __device__ __forceinline__ void load(Shared& shared, int chunks, Fill fill) {
    constexpr int kParts = MTiles * 2;  // of a chunk
    constexpr int kRoom = sizeof(Shared) / (kParts * kRecurrentThreads * sizeof(uint4));
    auto* const staged = reinterpret_cast<uint4*>(&shared) + threadIdx.x;
    const auto stage = [&](int first, int count) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int chunk = threadIdx.x / 32 + (first + i) * kRecurrentWarps;
        fill(chunk, chunk < chunks, staged + i * kParts * kRecurrentThreads);
      }
    };
#pragma unroll
    for (int first = 0; first < kResident; first += kRoom) {
      stage(first, kResident - first < kRoom ? kResident - first : kRoom);
#pragma unroll
      for (int i = 0; i < kRoom * kParts; ++i) {
        const int c = first + i / kParts;
        if (c < kResident) {
          weights[c < kResident ? c : 0][i % kParts / 2][i % 2] = staged[i * kRecurrentThreads];
        }
      }
    }
    __syncthreads();  // nobody needs the room of the partial sums any more
    stage(kResident, kSpilled);
  }

  // The exchange loads in flight, and their addresses.
  uint4 v[2][kBatch][NTiles];
  const uint4* from[2];
  const uint4* next_from;

  // Starts to read batch b, in buffer b % 2.
  __device__ __forceinline__ void issue(int buffer, int b, int64_t warp_stride, int chunks,
                                        int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    from[buffer] = next_from;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
        const bool exists =
            warp + (b * kBatch + i) * kRecurrentWarps < chunks && n * 8 + lane / 4 < rows;
        v[buffer][i][n] = uint4{};
        if (exists) v[buffer][i][n] = ptx::ld_relaxed(next_from + n * kTileWords);
      }
      next_from += warp_stride;
    }
  }

  // Reads again what was still empty, all at once.
  __device__ __forceinline__ void settle(int buffer, int64_t warp_stride) {
    bool again = true;
    while (again) {
      again = false;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {
          if (any_empty(v[buffer][i][n])) {
            v[buffer][i][n] = ptx::ld_relaxed(from[buffer] + i * warp_stride + n * kTileWords);
            again = true;
          }
        }
      }
    }
    __syncwarp();  // mma needs the whole warp
  }

  using Sums = float[kSums][MTiles][NTiles][4];

  // Multiplies batch b. kAllSpilled: none of its weights is in registers.
  template <bool kAllSpilled>
  __device__ __forceinline__ void multiply_batch(const Shared& shared, int buffer, int b,
                                                 int chunks, Sums& sum) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int c = b * kBatch + i;
      if (threadIdx.x / 32 + c * kRecurrentWarps >= chunks) continue;
      auto& of_chunk = sum[(buffer * kBatch + i) % kSums];
      if (!kAllSpilled && c < kResident) {
        multiply_chunk_any<T>(of_chunk, weights[c < kResident ? c : 0], v[buffer][i]);
      } else {
        uint4 a[MTiles][2];
#pragma unroll
        for (int m = 0; m < MTiles; ++m) {
          a[m][0] = shared.weights[c < kResident ? 0 : c - kResident][m][0][threadIdx.x];
          a[m][1] = shared.weights[c < kResident ? 0 : c - kResident][m][1][threadIdx.x];
        }
        multiply_chunk_any<T>(of_chunk, a, v[buffer][i]);
      }
    }
  }

  // Starts to read a vector for the next multiply. vector: the lane's 16 bytes of the warp's first
  // chunk, in row 0 of the tile. warp_stride: from one chunk of the warp to its next. rows: how
  // many of the NTiles * 8 rows exist.
  __device__ __forceinline__ void begin(const uint4* vector, int64_t warp_stride, int chunks,
                                        int rows) {
    next_from = vector;
    issue(0, 0, warp_stride, chunks, rows);
  }

  // Leaves this warp's partial sums in shared.partial[set]; the caller's barrier publishes them.
  __device__ __forceinline__ void multiply(Shared& shared, int set, int64_t warp_stride, int chunks,
                                           int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Sums sum = {};
    // The batches from kLooped on are a loop over pairs of them.
    constexpr int kBatches = Chunks / kBatch;
    constexpr int kEven = (kResident + 2 * kBatch - 1) / (2 * kBatch) * 2;
    constexpr int kLooped = kBatches % 2 == 0 && kBatches - kEven >= 4 ? kEven : kBatches;
#pragma unroll
    for (int b = 0; b < kLooped; ++b) {
      if (b + 1 < kBatches) issue((b + 1) % 2, b + 1, warp_stride, chunks, rows);
      settle(b % 2, warp_stride);
      multiply_batch<false>(shared, b % 2, b, chunks, sum);
    }
#pragma unroll 1
    for (int b = kLooped; b < kBatches; b += 2) {
      issue(1, b + 1, warp_stride, chunks, rows);
      settle(0, warp_stride);
      multiply_batch<true>(shared, 0, b, chunks, sum);
      issue(0, b + 2, warp_stride, b + 2 < kBatches ? chunks : 0, rows);
      settle(1, warp_stride);
      multiply_batch<true>(shared, 1, b + 1, chunks, sum);
    }
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
        float total[4] = {};
#pragma unroll
        for (int s = 0; s < kSums; ++s) {
#pragma unroll
          for (int e = 0; e < 4; ++e) total[e] += sum[s][m][n][e];
        }
        // Tile rows r and r + 8 are adjacent units: one pair per row of the batch.
        shared.partial[set][warp][m][n][partial_index(lane / 4, lane % 4)] =
            float4{total[0], total[2], total[1], total[3]};
      }
    }
  }
};

}  // namespace my_ops::cuda
