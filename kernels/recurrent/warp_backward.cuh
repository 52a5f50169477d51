// Backward over all steps for up to 32 units: a warp per row.
// Plan: as in warp_forward.cuh, but from the last step to the first. A lane's unit is a column of
// W_h, and the vectors hold the gradients of all gates.
// Bound like forward.
#pragma once

#include "recurrent/warp.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T>
__global__ void __launch_bounds__(32, kWarpsPerSm)
    warp_backward_kernel(const __grid_constant__ RecurrentSequenceBackward<T> seq) {
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried;
  __shared__ WarpVector<kGates> vectors[2];
  const int64_t hidden = seq.hidden;
  const WarpPlace place(seq);

  WarpWeights<kGates, kGates> weights;
  weights.load([&](int gate, int k) {
    return place.real && k < hidden ? load(seq.w_h[(gate * hidden + k) * seq.w_row + place.unit])
                                    : 0.0f;
  });
  Values<float, kStateValues<Cell>> state = {};
  float through = 0.0f, grad_kept = 0.0f, zoneout = 0.0f;
  if (place.real) {
    if (seq.grad_carried_n != nullptr) {
      load_values<kCarried>(seq.grad_carried_n + place.at(0, kCarried), hidden, state.at);
    }
    if (seq.grad_h_n != nullptr) through = load(seq.grad_h_n[place.at(0, 1)]);
  }
  Kept<Cell> kept = {};
  const bool zoned = seq.zoneout != nullptr;
  const auto load_step = [&](int64_t t) {
    const auto at = [&](int64_t step, int values) { return place.at(step, values); };
    kept.template load<kWarpAhead>(seq, t, place.line(t), at, false);
    if (zoned) zoneout = load(seq.zoneout[place.at(t, 1)]);
    const int64_t ahead = max(t - kWarpAhead, int64_t{0});
    place.prefetch(seq.saved, ahead, Cell::kSaved);
    if constexpr (kCarried > 0) place.prefetch(seq.carried, ahead, kCarried);
    if constexpr (Cell::kReadsH) place.prefetch(seq.output, ahead, 1);
    if (seq.grad_output != nullptr) place.prefetch(seq.grad_output, ahead, 1);
  };
  load_step(seq.steps - 1);

  for (int64_t t = seq.steps - 1; t >= 0; --t) {
    float grad_terms[kTerms<Cell>], published[kGates];
    kept.template backward<T>(through, place.real, zoned, zoneout, grad_kept, state, grad_terms,
                              published);
    WarpVector<kGates>& vector = vectors[t & 1];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) vector.at[gate][place.unit] = published[gate];
    __syncwarp();  // all gradients are in place, and the other buffer has been read

    if (place.real) {
      store_values<kTerms<Cell>>(seq.grad_terms + place.at(t, kTerms<Cell>), hidden, grad_terms);
    }
    float sum[kGates];
    weights.multiply(vector, sum);
    load_step(max(t - 1, int64_t{0}));
    through = sum[0];
#pragma unroll
    for (int gate = 1; gate < kGates; ++gate) through += sum[gate];
    if constexpr (Cell::kReadsH) {
      through += state.at[kCarried];
    } else if (zoned) {
      through += grad_kept;
    }
  }
  if (place.real) {
    seq.grad_h0[place.at(0, 1)] = store<T>(through);
    store_values<kCarried>(seq.grad_carried0 + place.at(0, kCarried), hidden, state.at);
  }
}

template <typename Cell, typename T>
auto warp_kernel(const RecurrentSequenceBackward<T>*) {
  return &warp_backward_kernel<Cell, T>;
}

}  // namespace my_ops::cuda
