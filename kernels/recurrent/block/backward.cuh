// Backward over all steps for small hidden sizes: a block per 4 or 8 rows.
// Plan: as in block/forward.cuh, but from the last step to the first. A warp's tile has 16 units,
// which are columns of W_h, and the vector holds the gradients of all gates.
// Bound like forward.
#pragma once

#include "recurrent/block/block.cuh"
#include "recurrent/shared/weights.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int Units>
__global__ void __launch_bounds__(2 * Units) block_backward_kernel(
    const __grid_constant__ BlockParams<RecurrentSequenceBackward<T>> params) {
#if __CUDA_ARCH__ >= 800
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried;
  using Vector = BlockVector<T, kGates, Units>;
  __shared__ __align__(16) Vector vectors[2];
  const RecurrentSequenceBackward<T>& seq = params.seq;
  const int64_t hidden = seq.hidden;
  const BlockPlace<Cell> place(params);
  clear(vectors);
  __syncthreads();

  BlockWeights<T, 1, 4, Vector> weights;
  weights.load([&](int, int half, int chunk) {
    const int lane = threadIdx.x % 32;
    const int64_t k = chunk % Vector::kUnitChunks * kChunkUnits<T> + lane % 4 * (16 / sizeof(T));
    return load_column(seq.w_h, seq.w_row, chunk / Vector::kUnitChunks, k, place.unit + half, place,
                       hidden);
  });

  // By row and unit of the pair.
  Values<float, kStateValues<Cell>> state[2][2] = {};
  float through[2][2] = {}, grad_kept[2][2] = {};
  Kept<Cell, Pair<T>> kept[2] = {};
  const auto load_step = [&](int64_t t) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const auto at = [&](int64_t step, int values) { return place.at(step, j, values); };
      kept[j].load(seq, t, place.line(t, j), at);
      Kept<Cell>::template prefetch<kBlockAhead>(seq, t, at);
    }
  };
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (!place.real(j)) continue;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      if (seq.grad_carried_n != nullptr) {
        load_values<kCarried>(seq.grad_carried_n + place.at(0, j, kCarried) + u, hidden,
                              state[j][u].at);
      }
      if (seq.grad_h_n != nullptr) through[j][u] = load(seq.grad_h_n[place.at(0, j, 1) + u]);
    }
  }
  load_step(seq.steps - 1);
  const bool zoned = seq.zoneout != nullptr;

  for (int64_t t = seq.steps - 1; t >= 0; --t) {
    Vector& vector = vectors[t & 1];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!place.any(j)) continue;
      float2 zoneout = {};
      if (zoned) {
        zoneout = load_pair(seq.zoneout + place.at(t, j, 1));
        ptx::prefetch_l2(seq.zoneout + place.at(max(t - kBlockAhead, int64_t{0}), j, 1));
      }
      float grad_terms[2][kTerms<Cell>], published[2][kGates];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const auto of_unit = [u](const Pair<T>& pair) { return load(pair.at[u]); };
        kept[j].item(of_unit).template backward<T>(through[j][u], true, zoned, element(zoneout, u),
                                                   grad_kept[j][u], state[j][u], grad_terms[u],
                                                   published[u]);
      }
      if (place.has_unit()) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          vector.put(place.column(j), gate, place.unit, published[0][gate], published[1][gate]);
        }
      }
      if (!place.real(j)) continue;
      T* const grad_terms_at = seq.grad_terms + place.at(t, j, kTerms<Cell>);
#pragma unroll
      for (int term = 0; term < kTerms<Cell>; ++term) {
        store_pair(grad_terms_at + term * hidden, grad_terms[0][term], grad_terms[1][term]);
      }
    }
    load_step(max(t - 1, int64_t{0}));
    __syncthreads();  // all gradients are in place, and the other buffer has been read

    float sum[1][4];
    weights.multiply(vector, place.head_units(hidden), sum);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        through[j][u] = Kept<Cell>::through(sum[0][2 * u + j], state[j][u], zoned, grad_kept[j][u]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (!place.real(j)) continue;
    store_pair(seq.grad_h0 + place.at(0, j, 1), through[j][0], through[j][1]);
#pragma unroll
    for (int k = 0; k < kCarried; ++k) {
      store_pair(seq.grad_carried0 + place.at(0, j, kCarried) + k * hidden, state[j][0].at[k],
                 state[j][1].at[k]);
    }
  }
#endif
}

template <typename Cell, int Units, typename T>
auto block_kernel(const RecurrentSequenceBackward<T>*) {
  return &block_backward_kernel<Cell, T, Units>;
}

}  // namespace my_ops::cuda
