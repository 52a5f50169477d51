// LLTM backward over all steps for small hidden sizes and few rows: a cluster per 1, 2 or 4 rows.
// Plan: as the forward cluster kernel, from the last step to the first. A thread's units are
// columns of W_h, the exchanged vectors are the three gate gradients, kept in float between blocks.
// Bound by latency, as forward, with three times the reads of shared memory and messages.
#include "recurrent/lltm_cluster.cuh"

namespace my_ops::cuda {
namespace {

[[maybe_unused]] constexpr int kAhead =
    4;  // steps from the prefetch of what forward saved to its load

template <typename T, int UnitsPerThread, int Rows, int Pieces>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    lltm_cluster_backward_kernel(const __grid_constant__ LltmSequenceBackward<T> seq) {
#if __CUDA_ARCH__ >= 900
  using Exchange = Exchange<3, UnitsPerThread, Rows, Pieces>;
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
                                       ? to_float(seq.w_h[(gate * hidden + k) * seq.w_row + unit])
                                       : 0.0f;
        }
      }
    }
  }
  Exchange::init(shared, blocks);

  const int64_t unit = first_unit + Exchange::item_unit();
  const int64_t row = first_row + Exchange::item_row();
  const bool real = unit < hidden && row < batch;
  const bool writes = real && Exchange::writes();
  const int64_t row_step = batch * hidden;
  const int64_t at = row * hidden + unit;
  const typename Exchange::Targets targets(shared, rank, blocks);
  float grad_c = real && seq.grad_c_n != nullptr ? to_float(seq.grad_c_n[at]) : 0.0f;
  float through = real && seq.grad_h_n != nullptr ? to_float(seq.grad_h_n[at]) : 0.0f;

  float a[3] = {}, c = 0.0f, grad_h = 0.0f;
  auto load_step = [&](int64_t t) {
    const T* gates = seq.gates + (t * batch + row) * 3 * hidden + unit;
    const float* cells = seq.cells + t * row_step + at;
    const T* grad_output = seq.grad_output + t * row_step + at;
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) a[gate] = to_float(gates[gate * hidden]);
    c = *cells;
    if (seq.grad_output != nullptr) grad_h = to_float(*grad_output);
    if (t >= kAhead) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        prefetch_l2(gates + gate * hidden - kAhead * 3 * row_step);
      }
      prefetch_l2(cells - kAhead * row_step);
      if (seq.grad_output != nullptr) prefetch_l2(grad_output - kAhead * row_step);
    }
  };
  if (real) load_step(seq.steps - 1);

  // Round s handles step t = steps - 1 - s; the last round only has grad_h0 left to do.
  for (int64_t s = 0; s <= seq.steps; ++s) {
    const int64_t t = seq.steps - 1 - s;
    if (s > 0) {
      Exchange::wait(shared, static_cast<uint32_t>(s), blocks);
      // One sum per gate, so that the chains of multiply-adds stay short.
      float sum[3][kItems] = {};
#pragma unroll
      for (int p = 0; p < Pieces; ++p) {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
#pragma unroll
          for (int gate = 0; gate < 3; ++gate) {
            const float4 d = shared.vector[s & 1][r][gate][p * 16 + k_lane];
#pragma unroll
            for (int j = 0; j < UnitsPerThread; ++j) {
              float& v = sum[gate][j * Rows + r];
              v = fmaf(weights[gate][j][p][0], d.x, v);
              v = fmaf(weights[gate][j][p][1], d.y, v);
              v = fmaf(weights[gate][j][p][2], d.z, v);
              v = fmaf(weights[gate][j][p][3], d.w, v);
            }
          }
        }
      }
      float total[1][kItems];
#pragma unroll
      for (int m = 0; m < kItems; ++m) total[0][m] = sum[0][m] + sum[1][m] + sum[2][m];
      Exchange::sum_items(total);
      through = total[0][0];
    }
    if (t < 0) break;

    cell_backward<T>(a, c, grad_h + through, grad_c);
    if (!real) a[0] = a[1] = a[2] = 0.0f;  // 0 * inf of a padding unit must not reach the others
    // Round `steps` still reads this one, and nothing is pushed in it.
    Exchange::push(targets, static_cast<uint32_t>(s) + 1, a);
    if (writes) {
      T* grad_gates = seq.grad_gates + (t * batch + row) * 3 * hidden + unit;
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) grad_gates[gate * hidden] = from_float<T>(a[gate]);
    }
    if (real && t > 0) load_step(t - 1);
  }
  if (writes) {
    seq.grad_h0[at] = from_float<T>(through);
    seq.grad_c0[at] = from_float<T>(grad_c);
  }
#endif
}

template <typename T>
const void* find_kernel(const ClusterPlan& plan) {
  return visit_cluster_plan(plan, [&]<int Units, int Rows, int Pieces>() {
    return reinterpret_cast<const void*>(&lltm_cluster_backward_kernel<T, Units, Rows, Pieces>);
  });
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
int my_ops::cuda::lltm_cluster_backward_resident(const ClusterPlan& plan) {
  return resident_clusters(find_kernel<T>(plan), plan);
}

template <typename T>
cudaError_t my_ops::cuda::lltm_cluster_backward(const LltmSequenceBackward<T>& args,
                                                const ClusterPlan& plan, cudaStream_t stream) {
  LltmSequenceBackward<T> params = args;
  return launch_cluster(find_kernel<T>(plan), plan, args.batch, params, stream);
}

template int my_ops::cuda::lltm_cluster_backward_resident<float>(const ClusterPlan&);
template int my_ops::cuda::lltm_cluster_backward_resident<__half>(const ClusterPlan&);
template int my_ops::cuda::lltm_cluster_backward_resident<__nv_bfloat16>(const ClusterPlan&);
template cudaError_t my_ops::cuda::lltm_cluster_backward<float>(const LltmSequenceBackward<float>&,
                                                                const ClusterPlan&, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_cluster_backward<__half>(
    const LltmSequenceBackward<__half>&, const ClusterPlan&, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_cluster_backward<__nv_bfloat16>(
    const LltmSequenceBackward<__nv_bfloat16>&, const ClusterPlan&, cudaStream_t);
