// The part that the forward and the backward grid kernels share: the product of a resident slab of
// W_h with the vector that the group exchanges each step (h forward, the gate gradients backward).
//
// Exchange. The vector of a step is cut into chunks of 64 bytes per row: [slot][chunk][row][64 B].
// Words validate themselves: an unwritten word is kEmpty, which no producer writes, so a consumer
// simply reads until nothing is empty. No flags, no fences on the way from store to load.
//
// The slots are a ring, whose words are emptied before they are filled again. Once a block holds
// all of vector n, every member has published it, hence has finished reading vector n - 1; so at
// every n that is a multiple of kPeriod, each producer empties its own words of the kPeriod vectors
// before n, and the whole block fences. This one fence is a producer's release and a consumer's
// acquire. Release: the barrier ahead of it orders the block's emptying before it, and the words of
// vectors from n + 2 on are published after it. Acquire: a consumer has read the words of vector
// n + kPeriod when it fences there, and asks for the emptied slots, those of vectors from
// n + kSlots - kPeriod on, afterwards (a vector is asked for one step ahead). Whoever reads a slot
// thus finds it empty or filled anew. That a member's reads are done before another empties what
// they read needs no fence: what it has published since was computed from them.
//
// Product. Weights are the A operand of mma (16 rows of W_h), rows of the batch are N = 8. The K
// range is dealt out to the warps by chunks, so a warp reads from L2 exactly the fragments that it
// multiplies, straight into registers. The warps' partial sums meet in shared memory, added in
// a fixed order. float runs as three tf32 products, hi*hi + hi*lo + lo*hi, to float accuracy.
#pragma once

#include "recurrent/lltm_persistent.cuh"

namespace my_ops::cuda {

constexpr uint32_t kEmpty = 0xFFFFFFFFu;
constexpr int kSlots = kExchangeSlots;
constexpr int kPeriod = (kSlots - 2) / 2;  // a fence takes about a step, so it should be rare
static_assert(kSlots - kPeriod >= kPeriod + 2);
constexpr int kGates = 3;
constexpr int kChunkBytes = 64;  // of one row: 16 bytes for each of the four lanes of an mma column

template <typename T>
constexpr int kChunkUnits = kChunkBytes / static_cast<int>(sizeof(T));

// A word as published: any NaN but the empty pattern.
__device__ __forceinline__ uint32_t publishable(uint32_t word) {
  return word == kEmpty ? 0x7FFFFFFFu : word;
}

__device__ __forceinline__ bool any_empty(const uint4& v) {
  return v.x == kEmpty || v.y == kEmpty || v.z == kEmpty || v.w == kEmpty;
}

// Of the lanes that share a published word, the one that writes it.
template <typename T>
__device__ __forceinline__ bool writes_word() {
  return sizeof(T) == 4 || threadIdx.x % 2 == 0;
}

// Publishes one value per lane; lanes 2i and 2i + 1 hold neighbouring units of a row. The whole
// warp calls this. p: the lane's word, which for 16-bit types is the pair's.
template <typename T>
__device__ __forceinline__ void publish(uint32_t* p, float v, bool active) {
  if constexpr (sizeof(T) == 4) {
    if (active) store_relaxed(p, publishable(bits(v)));
  } else {
    const T mine = from_float<T>(v);
    const uint32_t other = __shfl_down_sync(0xFFFFFFFFu, bits(mine), 1);
    if (active && writes_word<T>()) {
      store_relaxed(p, publishable(bits(mine) | (other << 16)));
    }
  }
}

// With vector `received` complete: where that is due, the block empties its own words of the
// vectors before. base: of the exchange, at the block's first row and unit; a row of the block is
// `pieces` times 16 bytes in each of `vectors` vectors, `vector_words` apart. Called by the whole
// block, with vector received + 1 published and asked for.
__device__ __forceinline__ void empty_slots(uint32_t* base, int64_t received, int64_t slot_words,
                                            int vectors, int64_t vector_words, int rows,
                                            int pieces) {
  // 32 bits suffice: more steps would not fit in memory.
  const auto n = static_cast<uint32_t>(received);
  if (received <= 0 || n % kPeriod != 0) return;
  const int per_slot = vectors * rows * pieces;
  for (int i = threadIdx.x; i < kPeriod * per_slot; i += kRecurrentThreads) {
    const int piece = i % pieces, row = i / pieces % rows;
    const int vector = i / (pieces * rows) % vectors, slot = (n - 1 - i / per_slot) % kSlots;
    store_relaxed(reinterpret_cast<uint4*>(base + slot * slot_words + vector * vector_words +
                                           row * (kChunkBytes / 4) + piece * 4),
                  uint4{kEmpty, kEmpty, kEmpty, kEmpty});
  }
  __syncthreads();
  __threadfence();
}

// hi + lo = v; hi has the 11 significant bits of tf32, rounded to nearest.
__device__ __forceinline__ void split_tf32(uint32_t v, uint32_t& hi, uint32_t& lo) {
  hi = (v + 0x1000u) & 0xFFFFE000u;
  lo = bits(__uint_as_float(v) - __uint_as_float(hi));
}

// A warp's fragments of one chunk. A lane's 16 bytes of a row serve two k-tiles: words x, y the
// first and z, w the second. Which unit a k stands for is free as long as A and b agree.
__device__ __forceinline__ uint32_t fragment(const uint4& v, int k_tile, int part) {
  return k_tile == 0 ? (part == 0 ? v.x : v.y) : (part == 0 ? v.z : v.w);
}

// sum += A b. The loops put mma of different tiles next to each other: one waits 33 cycles for the
// sum of the one before it.
template <typename T, int MTiles, int NTiles>
__device__ __forceinline__ void multiply_chunk(float (&sum)[MTiles][NTiles][4],
                                               const uint4 (&a)[MTiles][2],
                                               const uint4 (&b)[NTiles]) {
#pragma unroll
  for (int kt = 0; kt < 2; ++kt) {
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
        mma<T>(sum[m][n], fragment(a[m][0], kt, 0), fragment(a[m][1], kt, 0),
               fragment(a[m][0], kt, 1), fragment(a[m][1], kt, 1), fragment(b[n], kt, 0),
               fragment(b[n], kt, 1));
      }
    }
  }
}

// The same for float. The tensor cores truncate sums, so a chunk starts from zero, adds the small
// products first, and joins the sum by a rounded addition.
template <int MTiles, int NTiles>
__device__ __forceinline__ void multiply_chunk_float(float (&sum)[MTiles][NTiles][4],
                                                     const uint4 (&a)[MTiles][2],
                                                     const uint4 (&b)[NTiles]) {
  float d[MTiles][NTiles][4] = {};
#pragma unroll
  for (int kt = 0; kt < 2; ++kt) {
    uint32_t b_hi[NTiles][2], b_lo[NTiles][2];
#pragma unroll
    for (int n = 0; n < NTiles; ++n) {
      split_tf32(fragment(b[n], kt, 0), b_hi[n][0], b_lo[n][0]);
      split_tf32(fragment(b[n], kt, 1), b_hi[n][1], b_lo[n][1]);
    }
    uint32_t hi[MTiles][4], lo[MTiles][4];
#pragma unroll
    for (int m = 0; m < MTiles; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Opaque, since splitting the weights once ahead of the loop, as the compiler would, takes
        // twice their registers.
        split_tf32(opaque(fragment(a[m][e % 2], kt, e / 2)), hi[m][e], lo[m][e]);
      }
    }
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
#pragma unroll
        for (int n = 0; n < NTiles; ++n) {
          const auto& x = product == 0 ? lo[m] : hi[m];
          const auto& y = product == 1 ? b_lo[n] : b_hi[n];
          mma<float>(d[m][n], x[0], x[1], x[2], x[3], y[0], y[1]);
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

// Where a tile of partial sums keeps the float4 of units 2 pair, 2 pair + 1 and of rows 2 column,
// 2 column + 1. No bank conflicts, whether eight lanes of the mma layout (two pairs by four
// columns) write it or the eight pairs of a column are read.
__device__ __forceinline__ int partial_slot(int pair, int column) {
  return column * 8 + (pair ^ (column * 2));
}

// MTiles: 16-row tiles of the slab. Chunks: slots of a warp; kResident of them live in registers
// and the rest in shared memory, since 256 threads cannot hold more than about 160 weights each.
template <typename T, int MTiles, int NTiles, int Chunks>
struct Slab {
  static constexpr int kResident = resident_chunks(sizeof(T), MTiles, NTiles, Chunks);
  static constexpr int kSpilled = Chunks - kResident;
  static constexpr int kTileWords = 8 * kChunkBytes / 16;  // from a tile of rows to the next
  // Chunks whose loads are in flight together; two such batches are.
  static constexpr int kBatch = NTiles == 2 || Chunks < 4 ? 2 : Chunks % 4 == 0 ? 4 : 3;
  // Sums in turn, where there are too few tiles for the mma of one warp to overlap.
  static constexpr int kSums = sizeof(T) == 4         ? 1
                               : MTiles * NTiles == 1 ? 4
                               : MTiles * NTiles <= 3 ? 2
                                                      : 1;
  static_assert(Chunks % kBatch == 0);

  struct Shared {
    uint4 weights[kSpilled ? kSpilled : 1][MTiles][2][kRecurrentThreads];
    // Two sets in turn, so that one barrier per product suffices: the set written now was last
    // read before the barrier of the product in between.
    float4 partial[2][kRecurrentWarps][MTiles][NTiles][32];
  };
  static_assert(sizeof(Shared) == slab_shared_bytes(sizeof(T), MTiles, NTiles, Chunks));

  uint4 weights[kResident][MTiles][2];

  // fill(m, half, chunk): the lane's 16 bytes of row (lane / 4 + 8 * half) of tile m.
  template <typename Fill>
  __device__ __forceinline__ void load(Shared& shared, int chunks, Fill fill) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < Chunks; ++c) {
      const int chunk = warp + c * kRecurrentWarps;
#pragma unroll
      for (int m = 0; m < MTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 v = chunk < chunks ? fill(m, half, chunk) : uint4{};
          if (c < kResident) {
            weights[c < kResident ? c : 0][m][half] = v;
          } else {
            shared.weights[c < kResident ? 0 : c - kResident][m][half][threadIdx.x] = v;
          }
        }
      }
    }
  }

  // The exchange loads in flight, and where they come from.
  uint4 v[2][kBatch][NTiles];
  const uint4* from[2];
  const uint4* next_from;

  __device__ __forceinline__ void issue(int b, int64_t warp_stride, int chunks, int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    from[b & 1] = next_from;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int n = 0; n < NTiles; ++n) {
        const bool exists =
            warp + (b * kBatch + i) * kRecurrentWarps < chunks && n * 8 + lane / 4 < rows;
        v[b & 1][i][n] = uint4{};
        if (exists) v[b & 1][i][n] = load_relaxed(next_from + n * kTileWords);
      }
      next_from += warp_stride;
    }
  }

  // Starts to read a vector for the next multiply. vector: the lane's 16 bytes of the warp's first
  // chunk, in row 0 of the tile. warp_stride: from a chunk of the warp to its next. rows: how many
  // of the NTiles * 8 rows exist.
  __device__ __forceinline__ void begin(const uint4* vector, int64_t warp_stride, int chunks,
                                        int rows) {
    next_from = vector;
    issue(0, warp_stride, chunks, rows);
  }

  // Leaves this warp's partial sums in shared.partial[set]; the caller's barrier publishes them.
  __device__ __forceinline__ void multiply(Shared& shared, int set, int64_t warp_stride, int chunks,
                                           int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum[kSums][MTiles][NTiles][4] = {};
    // Reads again what was still empty, all of it in flight together.
    auto settle = [&](int b) {
      bool again = true;
      while (again) {
        again = false;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int n = 0; n < NTiles; ++n) {
            if (any_empty(v[b & 1][i][n])) {
              v[b & 1][i][n] = load_relaxed(from[b & 1] + i * warp_stride + n * kTileWords);
              again = true;
            }
          }
        }
      }
      __syncwarp();  // mma needs the warp whole
    };

#pragma unroll
    for (int b = 0; b < Chunks / kBatch; ++b) {
      if ((b + 1) * kBatch < Chunks) issue(b + 1, warp_stride, chunks, rows);
      settle(b);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int c = b * kBatch + i;
        if (warp + c * kRecurrentWarps < chunks) {
          if (c < kResident) {
            multiply_chunk_any<T>(sum[c % kSums], weights[c < kResident ? c : 0], v[b & 1][i]);
          } else {
            uint4 a[MTiles][2];
#pragma unroll
            for (int m = 0; m < MTiles; ++m) {
              a[m][0] = shared.weights[c < kResident ? 0 : c - kResident][m][0][threadIdx.x];
              a[m][1] = shared.weights[c < kResident ? 0 : c - kResident][m][1][threadIdx.x];
            }
            multiply_chunk_any<T>(sum[c % kSums], a, v[b & 1][i]);
          }
        }
      }
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
        // Tile rows r and r + 8 are neighbouring units: one pair per row of the batch.
        shared.partial[set][warp][m][n][partial_slot(lane / 4, lane % 4)] =
            float4{total[0], total[2], total[1], total[3]};
      }
    }
  }
};

// One unit and row of a tile. Sixteen neighbouring lanes own sixteen neighbouring units of one row,
// so that a warp reads and writes whole 32-byte sectors of global memory.
struct Item {
  int unit_tile, row_tile, tile_unit, tile_row;

  template <int NTiles>
  __device__ __forceinline__ static Item of(int index) {
    return {index / (128 * NTiles), index / 128 % NTiles, index % 16, index / 16 % 8};
  }
  __device__ __forceinline__ int unit() const { return unit_tile * 16 + tile_unit; }
  __device__ __forceinline__ int row() const { return row_tile * 8 + tile_row; }

  // The product's value for tile m, summed over the warps in a fixed order.
  template <int MTiles, int NTiles>
  __device__ __forceinline__ float total(
      const float4 (&partial)[kRecurrentWarps][MTiles][NTiles][32], int m) const {
    const int slot = partial_slot(tile_unit / 2, tile_row / 2);
    const int part = tile_row % 2 * 2 + tile_unit % 2;
    float v[kRecurrentWarps];
#pragma unroll
    for (int w = 0; w < kRecurrentWarps; ++w) {
      v[w] = reinterpret_cast<const float*>(&partial[w][m][row_tile][slot])[part];
    }
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
};

// ---- host ----

// Empties the exchange and launches. Blocks spin on one another, so the launch is cooperative: all
// of the grid is resident, or the launch fails. A null kernel: no instantiation.
template <typename Params>
cudaError_t launch_grid(const void* kernel, const GridPlan& plan, size_t exchange_bytes,
                        Params& params, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorNotSupported;
  if (auto err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      plan.shared_bytes);
      err != cudaSuccess) {
    return err;
  }
  if (auto err = cudaMemsetAsync(params.exchange, 0xFF, exchange_bytes, stream);
      err != cudaSuccess) {
    return err;
  }
  void* arguments[] = {&params};
  return cudaLaunchCooperativeKernel(kernel, dim3(plan.members * plan.groups),
                                     dim3(kRecurrentThreads), arguments, plan.shared_bytes, stream);
}

}  // namespace my_ops::cuda
