// Backward over all steps for small hidden sizes and few rows: a cluster per 1, 2 or 4 rows.
// Plan: as in cluster/forward.cuh, but from the last step to the first. A thread's units are
// columns of W_h, and the exchanged vectors are the gradients of the gates, kept in float between
// blocks.
// Bound by latency, like forward, with kGates times the reads of shared memory and messages.
#pragma once

#include "recurrent/cluster/cluster.cuh"
#include "recurrent/shared/terms.cuh"
#include "recurrent/shared/weights.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int Rows, int Chunks>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    cluster_backward_kernel(const __grid_constant__ RecurrentSequenceBackward<T> seq) {
#if __CUDA_ARCH__ >= 900
  using Exchange = Exchange<Cell::kGates, Rows, Chunks>;
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried;
  __shared__ typename Exchange::Shared shared;
  const int64_t batch = seq.batch, hidden = seq.hidden;
  const uint32_t blocks = ptx::cluster_nctarank(), rank = ptx::cluster_ctarank();
  const ClusterBlock<Cell, Exchange, Rows> block(batch, hidden, blocks, rank);

  ClusterWeights<kGates, kGates, Rows, Chunks> weights;
  weights.load(block.first_unit, [&](int64_t unit) {
    return UnitWeights<T>::column(seq.w_h, seq.w_row, unit, block, hidden);
  });
  Exchange::init(shared, blocks);

  const typename Exchange::Target target(shared, rank, blocks);
  Values<float, kStateValues<Cell>> state = {};
  if (block.real && seq.grad_carried_n != nullptr) {
    load_values<kCarried>(seq.grad_carried_n + block.at(0, kCarried), hidden, state.at);
  }
  float through = block.real && seq.grad_h_n != nullptr ? load(seq.grad_h_n[block.at(0, 1)]) : 0.0f;

  Kept<Cell, T> kept = {};
  const bool zoned = seq.zoneout != nullptr;
  // Converted when it is loaded: else GRU in 16 bits takes 1.08 of the time without zoneout.
  float zoneout = 0.0f, grad_kept = 0.0f;
  auto load_step = [&](int64_t t) {
    const auto at = [&](int64_t step, int values) { return block.at(step, values); };
    kept.load(seq, t, t * batch + block.row, at);
    Kept<Cell>::template prefetch<kClusterAhead>(seq, t, at);
    if (zoned) zoneout = load(seq.zoneout[block.at(t, 1)]);
  };
  if (block.real) load_step(seq.steps - 1);

  // Round s handles step t = steps - 1 - s; the last round only has grad_h0 left to do.
  for (int64_t s = 0; s <= seq.steps; ++s) {
    const int64_t t = seq.steps - 1 - s;
    if (s > 0) {
      Exchange::wait(shared, static_cast<uint32_t>(s), blocks);
      float sum[kGates][Exchange::kItems] = {};
      weights.multiply(shared, s & 1, block.head_units(hidden), sum);
      float total[1][Exchange::kItems];
#pragma unroll
      for (int m = 0; m < Exchange::kItems; ++m) {
        total[0][m] = sum[0][m];
#pragma unroll
        for (int gate = 1; gate < kGates; ++gate) total[0][m] += sum[gate][m];
      }
      sum_items<Exchange::kLanes>(total);
      through = Kept<Cell>::through(total[0][0], state, zoned, grad_kept);
    }
    if (t < 0) break;

    float grad_terms[kTerms<Cell>], published[kGates];
    kept.item(ToFloat()).template backward<T>(through, block.real, zoned, zoneout, grad_kept, state,
                                              grad_terms, published);
    // Round `steps` still reads this one, but pushes nothing.
    Exchange::push(target, static_cast<uint32_t>(s) + 1, published);
    if (block.writes) {
      store_values<kTerms<Cell>>(seq.grad_terms + block.at(t, kTerms<Cell>), hidden, grad_terms);
    }
    if (block.real && t > 0) load_step(t - 1);
  }
  if (block.writes) {
    seq.grad_h0[block.at(0, 1)] = store<T>(through);
    store_values<kCarried>(seq.grad_carried0 + block.at(0, kCarried), hidden, state.at);
  }
#endif
}

template <typename Cell, int Rows, int Chunks, typename T>
const void* cluster_kernel(const RecurrentSequenceBackward<T>*) {
  return reinterpret_cast<const void*>(&cluster_backward_kernel<Cell, T, Rows, Chunks>);
}

}  // namespace my_ops::cuda
