// LLTM forward over all steps for small hidden sizes and few rows: a cluster per 1, 2 or 4 rows.
// Plan: weights in registers as float; every warp owns two or four units with all their gates, so
// a step is wait, read h from shared memory, multiply, shuffle, cell, push h to the cluster. See
// lltm_cluster.cuh for the exchange.
// Bound by latency: about 1100 cycles a step at B1 H256, half of them between blocks.
#include "recurrent/lltm_cluster.cuh"

namespace my_ops::cuda {
namespace {

[[maybe_unused]] constexpr int kAhead = 4;  // steps from the prefetch of gx to its load

template <typename T, int UnitsPerThread, int Rows, int Pieces>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    lltm_cluster_kernel(const __grid_constant__ LltmSequence<T> seq) {
#if __CUDA_ARCH__ >= 900
  using Exchange = Exchange<1, UnitsPerThread, Rows, Pieces>;
  constexpr int kItems = Exchange::kItems;
  __shared__ typename Exchange::Shared shared;
  const int64_t batch = seq.batch, hidden = seq.hidden;
  const uint32_t blocks = cluster_size(), rank = cluster_rank();
  const int64_t first_row = int64_t{blockIdx.x / blocks} * Rows;
  const int k_lane = threadIdx.x % 16;
  const int64_t first_unit = int64_t{rank} * Exchange::kBlockUnits;

  float weights[3][UnitsPerThread][Pieces][4];
#pragma unroll
  for (int gate = 0; gate < 3; ++gate) {
#pragma unroll
    for (int j = 0; j < UnitsPerThread; ++j) {
      const int64_t unit = first_unit + threadIdx.x / 32 * Exchange::kWarpUnits +
                           threadIdx.x % 32 / 16 * UnitsPerThread + j;
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t k = p * kPieceUnits + k_lane * 4 + e;
          weights[gate][j][p][e] = unit < hidden && k < hidden
                                       ? to_float(seq.w_h[(gate * hidden + unit) * seq.w_row + k])
                                       : 0.0f;
        }
      }
    }
  }

  Exchange::init(shared, blocks);
  for (int r = 0; r < Rows; ++r) {
    auto* h = reinterpret_cast<float*>(shared.vector[0][r][0]);
    if (first_row + r < batch) {
      for (int64_t k = threadIdx.x; k < hidden; k += blockDim.x) {
        h[k] = to_float(seq.h0[(first_row + r) * hidden + k]);
      }
    }
  }
  __syncthreads();  // h0 is in place

  const int64_t unit = first_unit + Exchange::item_unit();
  const int64_t row = first_row + Exchange::item_row();
  const bool real = unit < hidden && row < batch;
  const bool writes = real && Exchange::writes();
  float c = real ? to_float(seq.c0[row * hidden + unit]) : 0.0f;
  // All of these move on by one step at the end of a step.
  const int64_t row_step = batch * hidden;
  const int64_t at = row * hidden + unit;
  const float* gx[3];
  for (int gate = 0; gate < 3; ++gate) gx[gate] = seq.gx + row * 3 * hidden + gate * hidden + unit;
  float bias[3] = {};
  for (int gate = 0; real && gate < 3; ++gate)
    bias[gate] = to_float(seq.bias[gate * hidden + unit]);
  T* output = seq.output + at;
  const typename Exchange::Targets targets(shared, rank, blocks);

  float x[3] = {};
  auto load_x = [&](bool ahead) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      x[gate] = __ldg(gx[gate]) + bias[gate];
      // From memory to L2 some steps ahead: the load then takes no longer than the exchange does.
      if (ahead) prefetch_l2(gx[gate] + kAhead * 3 * row_step);
      gx[gate] += 3 * row_step;
    }
  };
  if (real) load_x(seq.steps > kAhead);

  for (int64_t t = 0; t < seq.steps; ++t) {
    if (t > 0) Exchange::wait(shared, static_cast<uint32_t>(t), blocks);
    float sum[3][kItems] = {};
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const float4 h = shared.vector[t & 1][r][0][p * 16 + k_lane];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
#pragma unroll
          for (int j = 0; j < UnitsPerThread; ++j) {
            float& s = sum[gate][j * Rows + r];
            s = fmaf(weights[gate][j][p][0], h.x, s);
            s = fmaf(weights[gate][j][p][1], h.y, s);
            s = fmaf(weights[gate][j][p][2], h.z, s);
            s = fmaf(weights[gate][j][p][3], h.w, s);
          }
        }
      }
    }
    Exchange::sum_items(sum);

    float z[3] = {sum[0][0] + x[0], sum[1][0] + x[1], sum[2][0] + x[2]};
    const float h[1] = {cell_forward<T>(z, c)};
    // The last step is nobody's input, and a block that has finished must not be written to.
    if (t + 1 < seq.steps) {
      Exchange::push(targets, static_cast<uint32_t>(t) + 1, h);
      if (real) load_x(t + 1 + kAhead < seq.steps);
    }

    if (writes) {
      *output = from_float<T>(h[0]);
      if (seq.gates != nullptr) {
        T* gates = seq.gates + (t * batch + row) * 3 * hidden + unit;
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) gates[gate * hidden] = from_float<T>(z[gate]);
        seq.cells[t * row_step + at] = c;
      }
    }
    output += row_step;
  }
  if (writes) seq.c_n[at] = from_float<T>(c);
#endif
}

template <typename T>
const void* find_kernel(const ClusterPlan& plan) {
  return visit_cluster_plan(plan, [&]<int Units, int Rows, int Pieces>() {
    return reinterpret_cast<const void*>(&lltm_cluster_kernel<T, Units, Rows, Pieces>);
  });
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
int my_ops::cuda::lltm_cluster_resident(const ClusterPlan& plan) {
  return resident_clusters(find_kernel<T>(plan), plan);
}

template <typename T>
cudaError_t my_ops::cuda::lltm_cluster(const LltmSequence<T>& args, const ClusterPlan& plan,
                                       cudaStream_t stream) {
  LltmSequence<T> params = args;
  return launch_cluster(find_kernel<T>(plan), plan, args.batch, params, stream);
}

template int my_ops::cuda::lltm_cluster_resident<float>(const ClusterPlan&);
template int my_ops::cuda::lltm_cluster_resident<__half>(const ClusterPlan&);
template int my_ops::cuda::lltm_cluster_resident<__nv_bfloat16>(const ClusterPlan&);
template cudaError_t my_ops::cuda::lltm_cluster<float>(const LltmSequence<float>&,
                                                       const ClusterPlan&, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_cluster<__half>(const LltmSequence<__half>&,
                                                        const ClusterPlan&, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_cluster<__nv_bfloat16>(const LltmSequence<__nv_bfloat16>&,
                                                               const ClusterPlan&, cudaStream_t);
