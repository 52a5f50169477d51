// Forward over all steps with W_h resident on chip, exchanging h through L2.
// Plan: a group of blocks holds W_h once. A block has 16 or 32 units with all rows of their gates.
// Per step and tile of rows it reads h_{t-1} (exchange.cuh), multiplies (slab.cuh), adds the warps'
// sums, applies the cell and publishes h_t. The groups divide the batch. Tiles of rows of one group
// are independent sequences, so the exchange of one is hidden behind the product of the next.
// Bound by latency for small batches: store to L2, load, mma, shared-memory sum and cell take 1.0
// us per step of LLTM at B16 H512 in 16 bits. Bound by mma and shared memory for large ones.
#pragma once

#include "recurrent/grid/grid.cuh"
#include "recurrent/shared/math.cuh"
#include "recurrent/shared/terms.cuh"
#include "recurrent/shared/weights.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int UnitTiles, int NTiles, int Chunks>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    grid_forward_kernel(const __grid_constant__ GridParams<RecurrentSequence<T>> params) {
#if __CUDA_ARCH__ >= 800
  using Weights = Slab<T, Cell::kGates * UnitTiles, NTiles, Chunks>;
  using Block = GridBlock<Cell, T, 1, UnitTiles, NTiles>;
  constexpr int kItems = Block::kItems, kState = kStateValues<Cell>;
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<typename Weights::Shared*>(shared_bytes);
  auto* const tile_state =
      reinterpret_cast<float (*)[kItems][kStateRoom<Cell>][kRecurrentThreads]>(&shared + 1);
  const RecurrentSequence<T>& seq = params.seq;
  const Block block(params);
  const int64_t hidden = seq.hidden;

  Weights weights;
  {
    // Tile m is gate m / UnitTiles; its rows r and r + 8 are the units 2r and 2r + 1.
    constexpr int kLoads = Cell::kGates * 2;  // at once
    const int lane = threadIdx.x % 32;
    const bool aligned = (reinterpret_cast<uintptr_t>(seq.w_h) | seq.w_row * sizeof(T)) % 16 == 0;
    weights.load(shared, block.chunks, [&](int chunk, bool exists, uint4* to) {
      const int64_t k = int64_t{chunk} * kChunkUnits<T> + lane % 4 * (16 / sizeof(T));
#pragma unroll 1
      for (int u = 0; u < UnitTiles; ++u) {
        const int64_t unit = block.first_unit + u * 16 + lane / 4 * 2;
        uint4 v[kLoads] = {};
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          const T* row =
              seq.w_h + (i / 2 * hidden + block.first_of_head + unit + i % 2) * seq.w_row;
          if (exists && unit + i % 2 < block.head_units(hidden))
            v[i] = load_units(row, k, block.head_units(hidden), aligned);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          to[((i / 2 * UnitTiles + u) * 2 + i % 2) * kRecurrentThreads] = v[i];
        }
      }
    });
  }

  // h0 is vector 0 of the exchange; step t reads vector t and publishes vector t + 1.
  for (int tile = 0; tile < block.row_tiles && block.working; ++tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool real = block.real(i, tile);
#pragma unroll
      for (int j = 0; j < Cell::kCarried; ++j) {
        const int64_t at = block.at(tile, i, Cell::kCarried) + j * hidden;
        tile_state[tile][i][j][threadIdx.x] = real ? load(seq.carried0[at]) : 0.0f;
      }
      const float h0 = real ? load(seq.h0[block.at(tile, i, 1)]) : 0.0f;
      if constexpr (Cell::kReadsH) tile_state[tile][i][Cell::kCarried][threadIdx.x] = h0;
      publish<T>(block.published(0, tile) + block.own_word[i], h0, block.active(i, tile));
    }
  }

  // By term and by unit of the block.
  constexpr int kUnits = 16 * UnitTiles;
  auto& biases = *reinterpret_cast<float (*)[kTerms<Cell>][kUnits]>(tile_state + block.row_tiles);
  for (int unit = threadIdx.x; unit < kUnits; unit += kRecurrentThreads) {
    float bias[kTerms<Cell>] = {};
    if (block.first_unit + unit < block.head_units(hidden)) {
      load_biases<Cell>(seq, block.first_of_head + block.first_unit + unit, bias);
    }
#pragma unroll
    for (int term = 0; term < kTerms<Cell>; ++term) biases[term][unit] = bias[term];
  }

  // For the current step and tile. For a unit that does not exist, every step counts as one after a
  // reset, so that 0 * NaN of the padding reaches no other unit.
  float share[kItems][Cell::kGates] = {};
  uint8_t reset[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) reset[i] = !block.real_unit[i];
  auto load_step = [&](int64_t t, int tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (block.real(i, tile)) {
        const float* gates_x = seq.gates_x + block.at(t, tile, i, Cell::kGates);
#pragma unroll
        for (int gate = 0; gate < Cell::kGates; ++gate) {
          share[i][gate] = __ldg(gates_x + gate * hidden);
        }
        if (seq.reset != nullptr) reset[i] = load_byte(seq.reset + block.line(t, tile, i));
        if (asks_for_sector() && t + kGridAhead < seq.steps) {
          prefetch_values<Cell::kGates>(gates_x + kGridAhead * seq.batch * Cell::kGates * hidden,
                                        hidden);
        }
      }
    }
  };
  block.begin(weights, 0, 0);
  load_step(0, 0);
  int set = 0;

  for (int64_t t = 0; t < seq.steps; ++t) {
    for (int tile = 0; tile < block.row_tiles; ++tile) {
      block.multiply(weights, shared, set, tile);

      float saved[kItems][Cell::kSaved], h[kItems];
      Values<float, kState> state[kItems];
      if (block.working) {
        uint32_t* published = block.published(t + 1, tile);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          float z[kTerms<Cell>];
          add_terms<Cell>([&](int gate) { return share[i][gate]; },
                          [&](int term) { return biases[term][block.item[i].unit()]; },
                          [&](int gate) {
                            return block.item[i].total(shared.partial[set],
                                                       gate * UnitTiles + block.item[i].unit_tile);
                          },
                          reset[i] != 0, z);
#pragma unroll
          for (int j = 0; j < kState; ++j) state[i].at[j] = tile_state[tile][i][j][threadIdx.x];
          // Loaded only here: registers for values loaded ahead would slow calls without zoneout.
          Zoneout zoneout = {};
          if (seq.zoneout != nullptr && block.real(i, tile)) {
            const T* const p = seq.zoneout + block.at(t, tile, i, 1);
            zoneout = {true, load(*p), 0.0f};
            if (asks_for_sector() && t + kGridAhead < seq.steps) {
              ptx::prefetch_l2(p + kGridAhead * seq.batch * hidden);
            }
            if constexpr (!Cell::kReadsH) {
              zoneout.h_prev = load(t > 0 ? seq.output[block.at(t - 1, tile, i, 1)]
                                          : seq.h0[block.at(tile, i, 1)]);
            }
          }
          h[i] = forward_of<Cell, T>(z, reset[i] != 0, zoneout, state[i], saved[i]);
          publish<T>(published + block.own_word[i], h[i], block.active(i, tile));
        }
      }

      // The group does not wait for what follows. The request for the next vector comes last: an
      // earlier one would find nothing yet, and repeated requests cost 10% at B16 H512.
      const bool last_tile = tile + 1 == block.row_tiles;
      const int64_t next_t = last_tile ? t + 1 : t;
      const int next_tile = last_tile ? 0 : tile + 1;
      if (block.working) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
#pragma unroll
          for (int j = 0; j < kState; ++j) tile_state[tile][i][j][threadIdx.x] = state[i].at[j];
          if (block.real(i, tile)) {
            seq.output[block.at(t, tile, i, 1)] = store<T>(h[i]);
            const float* carried = state[i].at;
            if (seq.saved != nullptr) {
              store_values<Cell::kSaved>(seq.saved + block.at(t, tile, i, Cell::kSaved), hidden,
                                         saved[i]);
              store_values<Cell::kCarried>(seq.carried + block.at(t, tile, i, Cell::kCarried),
                                           hidden, carried);
            }
            if (t + 1 == seq.steps) {
              seq.h_n[block.at(tile, i, 1)] = store<T>(h[i]);
              store_values<Cell::kCarried>(seq.carried_n + block.at(tile, i, Cell::kCarried),
                                           hidden, carried);
            }
          }
        }
        if (next_t < seq.steps) load_step(next_t, next_tile);
      }
      if (next_t < seq.steps) block.begin(weights, next_t, next_tile);
      set ^= 1;
    }
    block.recycle(t);
  }
#endif
}

template <typename Cell, int UnitTiles, int NTiles, int Chunks, typename T>
const void* grid_kernel(const RecurrentSequence<T>*) {
  return reinterpret_cast<const void*>(&grid_forward_kernel<Cell, T, UnitTiles, NTiles, Chunks>);
}

}  // namespace my_ops::cuda
