// Forward over all steps for up to 96 units: a warp per row, or a block of warps for up to 4 rows.
// Plan: a step multiplies h by the weights (warp.cuh), applies the cell to the lane's item and
// writes h to the other buffer. The input's shares of the next step are loaded meanwhile.
// Bound by latency with few rows: the multiply-adds of a lane, and the cell. With many, by the
// instructions.
#pragma once

#include "recurrent/warp/warp.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int Units, int Rows>
__global__ void __launch_bounds__(Units* warp_lanes(Units), warp_blocks_per_sm(Units))
    warp_forward_kernel(const __grid_constant__ RecurrentSequence<T> seq) {
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried, kSaved = Cell::kSaved;
  using Place = WarpPlace<Cell, Units, Rows>;
  __shared__ WarpVector<1, Units, Rows> vectors[2];
  const int64_t hidden = seq.hidden;
  const Place place(seq);
  clear(vectors);
  warp_kernel_barrier<Units>();

  WarpWeights<kGates, 1, Units, Rows> weights;
  weights.load(UnitWeights<T>::row(seq.w_h, seq.w_row, place.unit, place, hidden));
  Values<float, kStateValues<Cell>> state = {};
  float bias[kTerms<Cell>] = {}, h = 0.0f;
  if (place.real) {
    h = load(seq.h0[place.at(0, 1)]);
    load_values<kCarried>(seq.carried0 + place.at(0, kCarried), hidden, state.at);
    if constexpr (Cell::kReadsH) state.at[kCarried] = h;
    load_biases<Cell>(seq, place.first_of_head + place.unit, bias);
  }
  const auto put_h = [&](int64_t t) {
    // 0 * inf of a unit that does not exist must not reach the others.
    if (writes_item<Place::kLanes, Rows>()) {
      vectors[t & 1].at[place.row][0][place.unit] = place.real ? h : 0.0f;
    }
    warp_kernel_barrier<Units>();  // all of h is in place, and the other buffer has been read
  };
  put_h(0);

  struct Input {
    float share[kGates];
    float zoneout;
    uint8_t reset;
  };
  Input input = {}, next = {};
  const bool zoned = seq.zoneout != nullptr;
  const auto load_step = [&](int64_t t, Input& to) {
    const float* const gates_x = seq.gates_x + place.at(t, kGates);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) to.share[gate] = __ldg(gates_x + gate * hidden);
    if (seq.reset != nullptr) to.reset = load_byte(seq.reset + place.line(t));
    if (zoned) to.zoneout = load(seq.zoneout[place.at(t, 1)]);
    place.prefetch(seq.gates_x, min(t + kWarpAhead, seq.steps - 1), kGates);
  };
  load_step(0, input);

  for (int64_t t = 0; t < seq.steps; ++t) {
    float sum[kGates][Rows];
    weights.multiply(vectors[t & 1], sum);
    load_step(min(t + 1, seq.steps - 1), next);
    sum_items<Place::kLanes>(sum);

    const bool resets = input.reset != 0;
    float z[kTerms<Cell>], saved[kSaved];
    add_terms<Cell>([&](int gate) { return input.share[gate]; },
                    [&](int term) { return bias[term]; }, [&](int gate) { return sum[gate][0]; },
                    resets, z);
    h = forward_of<Cell, T>(z, resets, {zoned, input.zoneout, h}, state, saved);
    put_h(t + 1);

    if (place.writes) {
      seq.output[place.at(t, 1)] = store<T>(h);
      if (seq.saved != nullptr) {
        store_values<kSaved>(seq.saved + place.at(t, kSaved), hidden, saved);
        store_values<kCarried>(seq.carried + place.at(t, kCarried), hidden, state.at);
      }
    }
    input = next;
  }
  if (place.writes) {
    seq.h_n[place.at(0, 1)] = store<T>(h);
    store_values<kCarried>(seq.carried_n + place.at(0, kCarried), hidden, state.at);
  }
}

template <typename Cell, int Units, int Rows, typename T>
auto warp_kernel(const RecurrentSequence<T>*) {
  return &warp_forward_kernel<Cell, T, Units, Rows>;
}

}  // namespace my_ops::cuda
