// Forward over all steps for small hidden sizes: a block per 4 or 8 rows.
// Plan: a step multiplies h by the weights (block.cuh), applies the cell in the registers that hold
// the sums, writes h to the other buffer and waits for the block. The input's shares of the next
// step are loaded meanwhile.
// Bound by latency with few rows: mma, cell and barrier. With many, by the instructions of the
// cell.
#pragma once

#include "recurrent/block/block.cuh"
#include "recurrent/shared/weights.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int Units>
__global__ void __launch_bounds__(2 * Units, block_blocks_per_sm(sizeof(T), Units))
    block_forward_kernel(const __grid_constant__ BlockParams<RecurrentSequence<T>> params) {
#if __CUDA_ARCH__ >= 800
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried, kSaved = Cell::kSaved;
  using Vector = BlockVector<T, 1, Units>;
  __shared__ __align__(16) Vector vectors[2];
  const RecurrentSequence<T>& seq = params.seq;
  const int64_t hidden = seq.hidden;
  const BlockPlace<Cell> place(params);
  clear(vectors);
  __syncthreads();

  BlockWeights<T, kGates, 1, Vector> weights;
  {
    const int lane = threadIdx.x % 32;
    const bool aligned = (reinterpret_cast<uintptr_t>(seq.w_h) | seq.w_row * sizeof(T)) % 16 == 0;
    weights.load([&](int gate, int half, int chunk) {
      if (!place.has_unit()) return uint4{};
      const T* row =
          seq.w_h + (gate * hidden + place.first_of_head + place.unit + half) * seq.w_row;
      return load_units(row, chunk * kChunkUnits<T> + lane % 4 * (16 / sizeof(T)),
                        place.head_units(hidden), aligned);
    });
  }

  // By row and unit of the pair.
  Values<float, kStateValues<Cell>> state[2][2] = {};
  float h[2][2] = {}, bias[2][kTerms<Cell>] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (!place.real(j)) continue;
    const float2 h0 = load_pair(seq.h0 + place.at(0, j, 1));
    vectors[0].put(place.column(j), 0, place.unit, h0.x, h0.y);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      h[j][u] = element(h0, u);
      load_values<kCarried>(seq.carried0 + place.at(0, j, kCarried) + u, hidden, state[j][u].at);
      if constexpr (Cell::kReadsH) state[j][u].at[kCarried] = h[j][u];
    }
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    if (place.has_unit()) load_biases<Cell>(seq, place.first_of_head + (place.unit + u), bias[u]);
  }

  struct Input {
    float2 share[2][kGates];
    uint8_t reset[2];
  };
  Input input = {}, next = {};
  const auto load_step = [&](int64_t t, Input& to) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* gates_x = seq.gates_x + place.at(t, j, kGates);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        to.share[j][gate] = __ldg(reinterpret_cast<const float2*>(gates_x + gate * hidden));
      }
      if (seq.reset != nullptr) to.reset[j] = load_byte(seq.reset + place.line(t, j));
      prefetch_values<kGates>(
          seq.gates_x + place.at(min(t + kBlockAhead, seq.steps - 1), j, kGates), hidden);
    }
  };
  load_step(0, input);
  __syncthreads();  // h0 is in place

  for (int64_t t = 0; t < seq.steps; ++t) {
    load_step(min(t + 1, seq.steps - 1), next);
    float sum[kGates][4];
    weights.multiply(vectors[t & 1], place.head_units(hidden), sum);

    float saved[2][2][kSaved];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!place.any(j)) continue;
      const bool resets = input.reset[j] != 0, zoned = seq.zoneout != nullptr;
      float2 zoneout = {};
      if (zoned) {
        zoneout = load_pair(seq.zoneout + place.at(t, j, 1));
        ptx::prefetch_l2(seq.zoneout + place.at(min(t + kBlockAhead, seq.steps - 1), j, 1));
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float z[kTerms<Cell>];
        add_terms<Cell>([&](int gate) { return element(input.share[j][gate], u); },
                        [&](int term) { return bias[u][term]; },
                        [&](int gate) { return sum[gate][2 * u + j]; }, resets, z);
        h[j][u] = forward_of<Cell, T>(z, resets, {zoned, element(zoneout, u), h[j][u]}, state[j][u],
                                      saved[j][u]);
      }
      if (place.has_unit()) {
        vectors[(t + 1) & 1].put(place.column(j), 0, place.unit, h[j][0], h[j][1]);
      }
    }
    __syncthreads();  // all of h is in place, and the other buffer has been read

#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!place.real(j)) continue;
      store_pair(seq.output + place.at(t, j, 1), h[j][0], h[j][1]);
      if (seq.saved == nullptr) continue;
      T* const saved_at = seq.saved + place.at(t, j, kSaved);
      T* const carried_at = seq.carried + place.at(t, j, kCarried);
#pragma unroll
      for (int k = 0; k < kSaved; ++k) {
        store_pair(saved_at + k * hidden, saved[j][0][k], saved[j][1][k]);
      }
#pragma unroll
      for (int k = 0; k < kCarried; ++k) {
        store_pair(carried_at + k * hidden, state[j][0].at[k], state[j][1].at[k]);
      }
    }
    input = next;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (!place.real(j)) continue;
    store_pair(seq.h_n + place.at(0, j, 1), h[j][0], h[j][1]);
#pragma unroll
    for (int k = 0; k < kCarried; ++k) {
      store_pair(seq.carried_n + place.at(0, j, kCarried) + k * hidden, state[j][0].at[k],
                 state[j][1].at[k]);
    }
  }
#endif
}

template <typename Cell, int Units, typename T>
auto block_kernel(const RecurrentSequence<T>*) {
  return &block_forward_kernel<Cell, T, Units>;
}

}  // namespace my_ops::cuda
