// Backward over all steps for up to 96 units: a warp per row, or a block of warps for up to 4 rows.
// Plan: as in warp/forward.cuh, but from the last step to the first. A unit is a column of W_h, and
// the vectors hold the gradients of all gates.
// Bound like forward.
#pragma once

#include "recurrent/warp/warp.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int Units, int Rows>
__global__ void __launch_bounds__(Units* warp_lanes(Units), warp_blocks_per_sm(Units))
    warp_backward_kernel(const __grid_constant__ RecurrentSequenceBackward<T> seq) {
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried;
  using Place = WarpPlace<Cell, Units, Rows>;
  __shared__ WarpVector<kGates, Units, Rows> vectors[2];
  const int64_t hidden = seq.hidden;
  const Place place(seq);
  clear(vectors);
  warp_kernel_barrier<Units>();

  WarpWeights<kGates, kGates, Units, Rows> weights;
  weights.load(UnitWeights<T>::column(seq.w_h, seq.w_row, place.unit, place, hidden));
  Values<float, kStateValues<Cell>> state = {};
  float through = 0.0f, grad_kept = 0.0f, zoneout = 0.0f;
  if (place.real) {
    if (seq.grad_carried_n != nullptr) {
      load_values<kCarried>(seq.grad_carried_n + place.at(0, kCarried), hidden, state.at);
    }
    if (seq.grad_h_n != nullptr) through = load(seq.grad_h_n[place.at(0, 1)]);
  }
  Kept<Cell, T> kept = {};
  const bool zoned = seq.zoneout != nullptr;
  const auto load_step = [&](int64_t t) {
    const auto at = [&](int64_t step, int values) { return place.at(step, values); };
    kept.load(seq, t, place.line(t), at);
    if (zoned) zoneout = load(seq.zoneout[place.at(t, 1)]);
    Kept<Cell>::visit_arrays(seq, [&]<int Values>(const T* p, Count<Values>) {
      place.prefetch(p, max(t - kWarpAhead, int64_t{0}), Values);
    });
  };
  load_step(seq.steps - 1);

  for (int64_t t = seq.steps - 1; t >= 0; --t) {
    float grad_terms[kTerms<Cell>], published[kGates];
    kept.item(ToFloat()).template backward<T>(through, place.real, zoned, zoneout, grad_kept, state,
                                              grad_terms, published);
    auto& vector = vectors[t & 1];
    if (writes_item<Place::kLanes, Rows>()) {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        vector.at[place.row][gate][place.unit] = published[gate];
      }
    }
    // All gradients are in place, and the other buffer has been read.
    warp_kernel_barrier<Units>();

    if (place.writes) {
      store_values<kTerms<Cell>>(seq.grad_terms + place.at(t, kTerms<Cell>), hidden, grad_terms);
    }
    float sum[kGates][Rows], total[1][Rows];
    weights.multiply(vector, sum);
    load_step(max(t - 1, int64_t{0}));
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      total[0][r] = sum[0][r];
#pragma unroll
      for (int gate = 1; gate < kGates; ++gate) total[0][r] += sum[gate][r];
    }
    sum_items<Place::kLanes>(total);
    through = Kept<Cell>::through(total[0][0], state, zoned, grad_kept);
  }
  if (place.writes) {
    seq.grad_h0[place.at(0, 1)] = store<T>(through);
    store_values<kCarried>(seq.grad_carried0 + place.at(0, kCarried), hidden, state.at);
  }
}

template <typename Cell, int Units, int Rows, typename T>
auto warp_kernel(const RecurrentSequenceBackward<T>*) {
  return &warp_backward_kernel<Cell, T, Units, Rows>;
}

}  // namespace my_ops::cuda
