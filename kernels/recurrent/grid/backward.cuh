// Backward over all steps with W_h resident on chip, exchanging the gates' gradients through L2.
// Plan: as in grid/forward.cuh, but from the last step to the first. A block owns 16 or 32 units,
// which are columns of W_h. Per step it gathers the gradients of the gates of step t + 1 from its
// group, multiplies them by W_h to get the gradient of h_t (with kGates times the K of forward, and
// a kGates-th of its M), applies the cell's derivative and publishes its own gradients. The
// gradient of the state stays in shared memory.
// Bound like forward, with kGates times the bytes exchanged.
#pragma once

#include "recurrent/grid/grid.cuh"
#include "recurrent/shared/terms.cuh"
#include "recurrent/shared/weights.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int UnitTiles, int NTiles, int Chunks>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    grid_backward_kernel(const __grid_constant__ GridParams<RecurrentSequenceBackward<T>> params) {
#if __CUDA_ARCH__ >= 800
  using Weights = Slab<T, UnitTiles, NTiles, Cell::kGates * Chunks>;
  using Block = GridBlock<Cell, T, Cell::kGates, UnitTiles, NTiles>;
  constexpr int kItems = Block::kItems, kState = kStateValues<Cell>;
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<typename Weights::Shared*>(shared_bytes);
  auto* const tile_state =
      reinterpret_cast<float (*)[kItems][kStateRoom<Cell>][kRecurrentThreads]>(&shared + 1);
  const RecurrentSequenceBackward<T>& seq = params.seq;
  const Block block(params);
  const int64_t hidden = seq.hidden;

  Weights weights;
  weights.load(shared, block.chunks, [&](int chunk, bool exists, uint4* to) {
    // Rows r and r + 8 of a tile are the units 2r and 2r + 1.
    const int lane = threadIdx.x % 32, gate = chunk / block.unit_chunks;
    const int64_t k = chunk % block.unit_chunks * kChunkUnits<T> + lane % 4 * (16 / sizeof(T));
#pragma unroll 1
    for (int part = 0; part < UnitTiles * 2; ++part) {
      const int64_t unit = block.first_unit + part / 2 * 16 + lane / 4 * 2 + part % 2;
      to[part * kRecurrentThreads] =
          exists ? load_column(seq.w_h, seq.w_row, gate, k, unit, block, hidden) : uint4{};
    }
  });

  for (int tile = 0; tile < block.row_tiles && block.working; ++tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool given = seq.grad_carried_n != nullptr && block.real(i, tile);
#pragma unroll
      for (int j = 0; j < kState; ++j) {
        const int64_t at = block.at(tile, i, Cell::kCarried) + j * hidden;
        tile_state[tile][i][j][threadIdx.x] =
            given && j < Cell::kCarried ? load(seq.grad_carried_n[at]) : 0.0f;
      }
    }
  }

  const bool zoned = seq.zoneout != nullptr;
  Kept<Cell, T> kept[kItems] = {};  // for the current step and tile
  auto load_step = [&](int64_t t, int tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (block.real(i, tile)) {
        const auto at = [&](int64_t step, int values) { return block.at(step, tile, i, values); };
        kept[i].load(seq, t, block.line(t, tile, i), at);
        if (asks_for_sector()) Kept<Cell>::template prefetch<kGridAhead>(seq, t, at);
      }
    }
  };
  load_step(seq.steps - 1, 0);
  int set = 0;

  // Round s handles step t = steps - 1 - s; the last round only has grad_h0 left to do. It reads
  // vector s - 1 of the exchange and publishes vector s.
  for (int64_t s = 0; s <= seq.steps; ++s) {
    const int64_t t = seq.steps - 1 - s;
    for (int tile = 0; tile < block.row_tiles; ++tile) {
      if (s > 0) block.multiply(weights, shared, set, tile);

      float grad_terms[kItems][kTerms<Cell>];
      if (block.working) {
        uint32_t* published = block.published(s, tile);
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const bool active = block.active(i, tile), real = block.real(i, tile);
          const int64_t at = block.at(tile, i, 1);
          float through = 0.0f;  // first the part through the weights
          if (s > 0) {
            through = block.item[i].total(shared.partial[set], block.item[i].unit_tile);
          }
          Values<float, kState> state;
#pragma unroll
          for (int j = 0; j < kState; ++j) state.at[j] = tile_state[tile][i][j][threadIdx.x];
          float grad_kept = 0.0f;
          if (s > 0) {
            if (!Cell::kReadsH && zoned && real) grad_kept = seq.grad_kept[at];
            through = Kept<Cell>::through(through, state, zoned, grad_kept);
          } else if (real && seq.grad_h_n != nullptr) {
            through = load(seq.grad_h_n[at]);
          }
          if (t < 0) {
            if (real) seq.grad_h0[at] = store<T>(through);
            continue;
          }
          float product_terms[Cell::kGates];
          float zoneout = 0.0f;
          if (zoned && real) {
            const T* const p = seq.zoneout + block.at(t, tile, i, 1);
            zoneout = load(*p);
            if (asks_for_sector() && t >= kGridAhead) {
              ptx::prefetch_l2(p - kGridAhead * seq.batch * hidden);
            }
          }
          kept[i].item(ToFloat()).template backward<T>(through, real, zoned, zoneout, grad_kept,
                                                       state, grad_terms[i], product_terms);
          if constexpr (!Cell::kReadsH) {
            if (zoned && real) seq.grad_kept[at] = grad_kept;
          }
#pragma unroll
          for (int j = 0; j < kState; ++j) tile_state[tile][i][j][threadIdx.x] = state.at[j];
#pragma unroll
          for (int gate = 0; gate < Cell::kGates; ++gate) {
            publish<T>(published + gate * block.vector_words + block.own_word[i],
                       product_terms[gate], active);
          }
          if (t == 0 && real) {
            store_values<Cell::kCarried>(seq.grad_carried0 + block.at(tile, i, Cell::kCarried),
                                         hidden, state.at);
          }
        }
      }

      // The group does not wait for what follows, so it comes after the next vector has been
      // requested once: that vector has kGates times the bytes of forward, and some of them arrive
      // early.
      const bool last_tile = tile + 1 == block.row_tiles;
      const int64_t next_s = last_tile ? s + 1 : s;
      const int next_tile = last_tile ? 0 : tile + 1;
      if (next_s > 0 && next_s <= seq.steps) block.begin(weights, next_s - 1, next_tile);
      if (block.working && t >= 0) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (block.real(i, tile)) {
            store_values<kTerms<Cell>>(seq.grad_terms + block.at(t, tile, i, kTerms<Cell>), hidden,
                                       grad_terms[i]);
          }
        }
        if (next_s < seq.steps) load_step(seq.steps - 1 - next_s, next_tile);
      }
      if (s > 0) set ^= 1;
    }
    block.recycle(s - 1);
  }
#endif
}

template <typename Cell, int UnitTiles, int NTiles, int Chunks, typename T>
const void* grid_kernel(const RecurrentSequenceBackward<T>*) {
  return reinterpret_cast<const void*>(&grid_backward_kernel<Cell, T, UnitTiles, NTiles, Chunks>);
}

}  // namespace my_ops::cuda
