// Forward over all steps for small hidden sizes and few rows: a cluster per 1, 2 or 4 rows.
// Plan: weights are in registers as float. Every warp owns four units with all their gates,
// so a step is: wait, read h from shared memory, multiply, shuffle, cell, push h to the cluster.
// See cluster.cuh for the exchange.
// Bound by latency: about 1100 cycles per step of LLTM at B1 H256, half of them between blocks.
#pragma once

#include "recurrent/cluster/cluster.cuh"
#include "recurrent/shared/terms.cuh"
#include "recurrent/shared/weights.cuh"

namespace my_ops::cuda {

template <typename Cell, typename T, int Rows, int Chunks>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    cluster_forward_kernel(const __grid_constant__ RecurrentSequence<T> seq) {
#if __CUDA_ARCH__ >= 900
  using Exchange = Exchange<1, Rows, Chunks>;
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried;
  __shared__ typename Exchange::Shared shared;
  const int64_t batch = seq.batch, hidden = seq.hidden;
  const uint32_t blocks = ptx::cluster_nctarank(), rank = ptx::cluster_ctarank();
  const ClusterBlock<Cell, Exchange, Rows> block(batch, hidden, blocks, rank);

  ClusterWeights<kGates, 1, Rows, Chunks> weights;
  weights.load(block.first_unit, [&](int64_t unit) {
    return UnitWeights<T>::row(seq.w_h, seq.w_row, unit, block, hidden);
  });

  Exchange::init(shared, blocks);
  for (int r = 0; r < Rows; ++r) {
    auto* h = reinterpret_cast<float*>(shared.vector[0][r][0]);
    if (block.first_row + r < batch) {
      for (int64_t k = threadIdx.x; k < block.head_units(hidden); k += blockDim.x) {
        h[k] = load(seq.h0[(block.first_row + r) * hidden + (block.first_of_head + k)]);
      }
    }
  }
  __syncthreads();  // h0 is in place

  Values<float, kStateValues<Cell>> state = {};
  float bias[kTerms<Cell>] = {};
  if (block.real) {
    load_values<kCarried>(seq.carried0 + block.at(0, kCarried), hidden, state.at);
    if constexpr (Cell::kReadsH) state.at[kCarried] = load(seq.h0[block.at(0, 1)]);
    load_biases<Cell>(seq, block.first_of_head + block.unit, bias);
  }
  // These advance by one step at the end of a step.
  const int64_t row_step = batch * hidden;
  const float* gates_x[kGates];
  for (int gate = 0; gate < kGates; ++gate) {
    gates_x[gate] = seq.gates_x + block.at(0, kGates) + gate * hidden;
  }
  T* output = seq.output + block.at(0, 1);
  const typename Exchange::Target target(shared, rank, blocks);

  // For a unit that does not exist, every step counts as one after a reset, so that 0 * NaN of the
  // padding reaches no other unit.
  float share[kGates] = {}, h[1] = {};
  uint8_t reset = !block.real;
  const bool zoned = seq.zoneout != nullptr;
  T zoneout = {};  // not converted before its step: the conversion would wait for the load
  if (zoned && block.real) h[0] = load(seq.h0[block.at(0, 1)]);
  auto load_step = [&](int64_t t) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      share[gate] = __ldg(gates_x[gate]);
      // Prefetches from memory to L2 some steps ahead, so that the load takes no longer than the
      // exchange.
      if (t + kClusterAhead < seq.steps) {
        ptx::prefetch_l2(gates_x[gate] + kClusterAhead * kGates * row_step);
      }
      gates_x[gate] += kGates * row_step;
    }
    if (seq.reset != nullptr) reset = load_byte(seq.reset + t * batch + block.row);
    if (zoned) zoneout = seq.zoneout[block.at(t, 1)];
  };
  if (block.real) load_step(0);

  for (int64_t t = 0; t < seq.steps; ++t) {
    if (t > 0) Exchange::wait(shared, static_cast<uint32_t>(t), blocks);
    float sum[kGates][Exchange::kItems] = {};
    weights.multiply(shared, t & 1, block.head_units(hidden), sum);
    sum_items<Exchange::kLanes>(sum);

    float z[kTerms<Cell>], saved[Cell::kSaved];
    add_terms<Cell>([&](int gate) { return share[gate]; }, [&](int term) { return bias[term]; },
                    [&](int gate) { return sum[gate][0]; }, reset != 0, z);
    h[0] = forward_of<Cell, T>(z, reset != 0, {zoned, load(zoneout), h[0]}, state, saved);
    // No step reads the last h, and a block that has finished must not be written to.
    if (t + 1 < seq.steps) {
      Exchange::push(target, static_cast<uint32_t>(t) + 1, h);
      if (block.real) load_step(t + 1);
    }

    if (block.writes) {
      *output = store<T>(h[0]);
      if (seq.saved != nullptr) {
        store_values<Cell::kSaved>(seq.saved + block.at(t, Cell::kSaved), hidden, saved);
        store_values<kCarried>(seq.carried + block.at(t, kCarried), hidden, state.at);
      }
    }
    output += row_step;
  }
  if (block.writes) {
    seq.h_n[block.at(0, 1)] = output[-row_step];
    store_values<kCarried>(seq.carried_n + block.at(0, kCarried), hidden, state.at);
  }
#endif
}

template <typename Cell, int Rows, int Chunks, typename T>
const void* cluster_kernel(const RecurrentSequence<T>*) {
  return reinterpret_cast<const void*>(&cluster_forward_kernel<Cell, T, Rows, Chunks>);
}

}  // namespace my_ops::cuda
