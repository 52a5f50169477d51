// LLTM forward over all steps with W_h resident on chip, exchanging h through L2.
// Plan: a group of blocks holds W_h once; block = 16 or 32 units with their three gate rows. Per
// step and tile of rows: read h_{t-1} (lltm_grid.cuh), multiply, add the warps' sums, apply the
// cell, publish h_t. Groups split the batch. Tiles of rows of one group are independent sequences,
// so the exchange of one hides behind the product of the next.
// Bound by latency for small batches: store to L2, load, mma, shared-memory sum and cell come to
// 1.0 us a step at B16 H512 in 16 bits. By mma and shared memory for large ones.
#include "recurrent/lltm_grid.cuh"

namespace my_ops::cuda {
namespace {

[[maybe_unused]] constexpr int kAhead = 3;  // steps from the prefetch of gx to its load

template <typename T>
struct ForwardParams {
  LltmSequence<T> seq;
  uint32_t* exchange;  // [kSlots][chunks][batch][16 words]
  int members;
  int rows;  // of the batch, per group
};

template <typename T, int UnitTiles, int NTiles, int Chunks>
struct ForwardConfig {
  static constexpr int kTiles = kGates * UnitTiles;
  using Weights = Slab<T, kTiles, NTiles, Chunks>;
  static constexpr int kItems = items_per_thread(UnitTiles, NTiles);
  using Shared = typename Weights::Shared;  // and behind it, [tile of rows][kItems][thread], c
};

// 16 bytes of a row of W_h from `unit` on; what lies beyond `hidden` is zero.
template <typename T>
__device__ __forceinline__ uint4 load_units(const T* row, int64_t unit, int64_t hidden,
                                            bool aligned) {
  constexpr int kCount = 16 / sizeof(T);
  if (aligned && unit + kCount <= hidden) {
    return __ldg(reinterpret_cast<const uint4*>(row + unit));
  }
  uint32_t word[4] = {};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (unit + e < hidden)
      word[e * sizeof(T) / 4] |= bits(row[unit + e]) << (e * sizeof(T) % 4 * 8);
  }
  return {word[0], word[1], word[2], word[3]};
}

template <typename T, int UnitTiles, int NTiles, int Chunks>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    lltm_grid_kernel(const __grid_constant__ ForwardParams<T> params) {
#if __CUDA_ARCH__ >= 800
  using Config = ForwardConfig<T, UnitTiles, NTiles, Chunks>;
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(shared_bytes);
  const LltmSequence<T>& seq = params.seq;
  const int64_t batch = seq.batch, hidden = seq.hidden;
  const int chunks = static_cast<int>((hidden + kChunkUnits<T> - 1) / kChunkUnits<T>);
  const int lane = threadIdx.x % 32;
  const int64_t first_unit = int64_t{blockIdx.x % params.members} * (16 * UnitTiles);
  const int64_t first_row = int64_t{blockIdx.x / params.members} * params.rows;
  const int rows = static_cast<int>(min(int64_t{params.rows}, batch - first_row));
  constexpr int kItems = Config::kItems, kTileRows = NTiles * 8;
  auto* const tile_c = reinterpret_cast<float (*)[kItems][kRecurrentThreads]>(&shared + 1);
  const int row_tiles = (rows + kTileRows - 1) / kTileRows;

  typename Config::Weights weights;
  {
    const bool aligned = (reinterpret_cast<uintptr_t>(seq.w_h) | seq.w_row * sizeof(T)) % 16 == 0;
    weights.load(shared, chunks, [&](int m, int half, int chunk) {
      // Tile m is gate m / UnitTiles; its rows r and r + 8 are the units 2r and 2r + 1.
      const int64_t unit = first_unit + m % UnitTiles * 16 + lane / 4 * 2 + half;
      if (unit >= hidden) return uint4{};
      const T* row = seq.w_h + (m / UnitTiles * hidden + unit) * seq.w_row;
      const int64_t k = int64_t{chunk} * kChunkUnits<T> + lane % 4 * (16 / sizeof(T));
      return load_units(row, k, hidden, aligned);
    });
  }

  // Everything that depends on the item alone. Units of the padding up to a whole chunk are
  // computed like the others, from zeros, and published, but have no place outside.
  const bool working = threadIdx.x < UnitTiles * NTiles * 128;  // the same for a whole warp
  const int64_t row_words = kChunkBytes / 4;
  const int64_t slot_words = int64_t{chunks} * batch * row_words;
  Item item[kItems];
  // In tile 0: of the exchange, of [batch, hidden] and of [batch, 3 * hidden].
  int64_t own_word[kItems], own_at[kItems], own_gate[kItems];
  bool has_unit[kItems], real_unit[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    item[i] = Item::of<NTiles>(threadIdx.x + i * kRecurrentThreads);
    const int64_t unit = first_unit + item[i].unit();
    const int64_t row = first_row + item[i].row();
    has_unit[i] = working && unit < int64_t{chunks} * kChunkUnits<T>;
    real_unit[i] = has_unit[i] && unit < hidden;
    own_word[i] = unit / kChunkUnits<T> * batch * row_words + row * row_words +
                  unit % kChunkUnits<T> * sizeof(T) / 4;
    own_at[i] = row * hidden + unit;
    own_gate[i] = row * kGates * hidden + unit;
  }
  // The block's words, in its first row.
  const int64_t block_word = first_unit / kChunkUnits<T> * batch * row_words +
                             first_row * row_words + first_unit % kChunkUnits<T> * sizeof(T) / 4;
  constexpr int kPieces = UnitTiles * 16 * sizeof(T) / 16;  // of 16 bytes, in a row

  // h0 is vector 0 of the exchange; step t reads vector t and publishes vector t + 1.
  for (int tile = 0; tile < row_tiles && working; ++tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int row = tile * kTileRows + item[i].row();
      const bool active = has_unit[i] && row < rows, real = real_unit[i] && row < rows;
      const int64_t at = own_at[i] + tile * kTileRows * hidden;
      tile_c[tile][i][threadIdx.x] = real ? to_float(seq.c0[at]) : 0.0f;
      publish<T>(params.exchange + own_word[i] + tile * kTileRows * row_words,
                 real ? to_float(seq.h0[at]) : 0.0f, active);
    }
  }

  float x[kItems][kGates] = {};  // gx + bias of the step and tile at hand
  auto load_x = [&](int64_t t, int tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (real_unit[i] && tile * kTileRows + item[i].row() < rows) {
        const float* gx = seq.gx + (t * batch + tile * kTileRows) * kGates * hidden + own_gate[i];
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          x[i][gate] = __ldg(gx + gate * hidden) +
                       to_float(seq.bias[gate * hidden + first_unit + item[i].unit()]);
        }
        // From memory to L2 some steps ahead, a request per sector: answers arrive in order, so a
        // load from memory would hold up the exchange behind it.
        if (threadIdx.x % 8 == 0 && t + kAhead < seq.steps) {
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) {
            prefetch_l2(gx + gate * hidden + kAhead * batch * kGates * hidden);
          }
        }
      }
    }
  };
  const uint4* const lane_vector =
      reinterpret_cast<const uint4*>(params.exchange) +
      ((threadIdx.x / 32) * batch + first_row + lane / 4) * (kChunkBytes / 16) + lane % 4;
  const int64_t warp_stride = kRecurrentWarps * batch * (kChunkBytes / 16);
  auto begin = [&](int64_t t, int tile) {
    weights.begin(
        lane_vector + t % kSlots * (slot_words / 4) + tile * kTileRows * (kChunkBytes / 16),
        warp_stride, chunks, rows - tile * kTileRows);
  };
  begin(0, 0);
  load_x(0, 0);
  int set = 0;

  for (int64_t t = 0; t < seq.steps; ++t) {
    for (int tile = 0; tile < row_tiles; ++tile) {
      const int tile_rows = rows - tile * kTileRows;
      weights.multiply(shared, set, warp_stride, chunks, tile_rows);
      __syncthreads();  // the partial sums of all warps are in place

      float z[kItems][kGates], c[kItems], h[kItems];
      if (working) {
        uint32_t* published =
            params.exchange + (t + 1) % kSlots * slot_words + tile * kTileRows * row_words;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) {
            z[i][gate] = x[i][gate] +
                         item[i].total(shared.partial[set], gate * UnitTiles + item[i].unit_tile);
          }
          c[i] = tile_c[tile][i][threadIdx.x];
          h[i] = cell_forward<T>(z[i], c[i]);
          publish<T>(published + own_word[i], h[i], has_unit[i] && item[i].row() < tile_rows);
        }
      }

      // What follows is not what the group waits for. The request for the next vector comes last:
      // at once, it would find nothing yet, and asking again and again costs 10% at B16 H512.
      const bool last_tile = tile + 1 == row_tiles;
      const int64_t next_t = last_tile ? t + 1 : t;
      const int next_tile = last_tile ? 0 : tile + 1;
      if (working) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          tile_c[tile][i][threadIdx.x] = c[i];
          if (real_unit[i] && item[i].row() < tile_rows) {
            const int64_t tile_row = t * batch + tile * kTileRows;
            seq.output[tile_row * hidden + own_at[i]] = from_float<T>(h[i]);
            if (seq.gates != nullptr) {
              T* gates = seq.gates + tile_row * kGates * hidden + own_gate[i];
#pragma unroll
              for (int gate = 0; gate < kGates; ++gate) {
                gates[gate * hidden] = from_float<T>(z[i][gate]);
              }
              seq.cells[tile_row * hidden + own_at[i]] = c[i];
            }
            if (t + 1 == seq.steps) {
              seq.c_n[tile * kTileRows * hidden + own_at[i]] = from_float<T>(c[i]);
            }
          }
        }
        if (next_t < seq.steps) load_x(next_t, next_tile);
      }
      if (next_t < seq.steps) begin(next_t, next_tile);
      set ^= 1;
    }
    empty_slots(params.exchange + block_word, t, slot_words, 1, 0, rows, kPieces);
  }
#endif
}

template <typename T, int UnitTiles, int NTiles, int Chunks>
const void* instantiation() {
  return reinterpret_cast<const void*>(&lltm_grid_kernel<T, UnitTiles, NTiles, Chunks>);
}

// The instantiations; a plan outside them has no kernel.
template <typename T>
const void* find_kernel(const GridPlan& plan) {
  const bool wide = plan.row_tiles == 2;
  if (plan.unit_tiles == 1) {
    switch (plan.chunks) {
      case 2:
        return wide ? instantiation<T, 1, 2, 2>() : instantiation<T, 1, 1, 2>();
      case 4:
        return wide ? instantiation<T, 1, 2, 4>() : instantiation<T, 1, 1, 4>();
      case 8:
        return wide ? instantiation<T, 1, 2, 8>() : instantiation<T, 1, 1, 8>();
      default:
        return nullptr;
    }
  }
  if constexpr (sizeof(T) == 2) {
    if (plan.chunks == 4) {
      return wide ? instantiation<T, 2, 2, 4>() : instantiation<T, 2, 1, 4>();
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
cudaError_t my_ops::cuda::lltm_grid(const LltmSequence<T>& args, const GridPlan& plan,
                                    void* workspace, cudaStream_t stream) {
  ForwardParams<T> params{args, static_cast<uint32_t*>(workspace), plan.members, plan.rows};
  return launch_grid(find_kernel<T>(plan), plan,
                     lltm_persistent_workspace<T>(args.steps, args.batch, args.hidden), params,
                     stream);
}

template cudaError_t my_ops::cuda::lltm_grid<float>(const LltmSequence<float>&, const GridPlan&,
                                                    void*, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_grid<__half>(const LltmSequence<__half>&, const GridPlan&,
                                                     void*, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_grid<__nv_bfloat16>(const LltmSequence<__nv_bfloat16>&,
                                                            const GridPlan&, void*, cudaStream_t);
