// The pointwise part of one LLTM step, forward and backward: one thread a unit of a row.
// Bound by memory: 6 to 9 values of [batch, hidden] are moved once.
#include "lltm.h"

#include "common/launch.cuh"
#include "common/numeric.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kThreads = 128;

template <typename T, typename Acc>
__global__ void __launch_bounds__(kThreads)
    lltm_cell_kernel(const __grid_constant__ LltmCell<T, Acc> args) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // in [batch, hidden]
  if (at >= args.batch * args.hidden) return;
  const int64_t gate = at / args.hidden * 3 * args.hidden + at % args.hidden;
  Acc z[3];  // input, output, candidate
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    const int64_t shift = j * args.hidden;
    z[j] = args.gates_x[gate + shift] + args.gates_h[gate + shift] +
           load(args.bias[at % args.hidden + shift]);
  }
  const Acc i = sigmoid(z[0]);
  const Acc o = sigmoid(z[1]);
  const Acc g = elu(z[2]);
  const Acc cell = args.old_cell[at] + g * i;
  args.new_cell[at] = cell;
  args.new_h[at] = store<T>(tanh(cell) * o);
  if (args.gates) {
    args.gates[gate] = store<T>(i);
    args.gates[gate + args.hidden] = store<T>(o);
    args.gates[gate + 2 * args.hidden] = store<T>(g);
  }
}

template <typename T, typename Acc>
__global__ void __launch_bounds__(kThreads)
    lltm_cell_backward_kernel(const __grid_constant__ LltmCellBackward<T, Acc> args) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // in [batch, hidden]
  if (at >= args.batch * args.hidden) return;
  const int64_t gate = at / args.hidden * 3 * args.hidden + at % args.hidden;
  const Acc i = load(args.gates[gate]);
  const Acc o = load(args.gates[gate + args.hidden]);
  const Acc g = load(args.gates[gate + 2 * args.hidden]);
  const Acc cell = args.old_cell[at] + g * i;
  const Acc squashed = tanh(cell);
  Acc grad_h = args.grad_h ? load(args.grad_h[at]) : Acc(0);
  if (args.grad_h_next) grad_h += args.grad_h_next[at];
  Acc grad_cell = args.grad_cell ? args.grad_cell[at] : Acc(0);
  grad_cell += grad_h * o * tanh_slope(cell);
  args.grad_gates[gate] = store<T>(grad_cell * g * i * (Acc(1) - i));
  args.grad_gates[gate + args.hidden] = store<T>(grad_h * squashed * o * (Acc(1) - o));
  // ELU'(z) = 1 for z > 0, else exp(z) = g + 1: exact at 0, and nothing can overflow.
  args.grad_gates[gate + 2 * args.hidden] =
      store<T>(grad_cell * i * (g > Acc(0) ? Acc(1) : g + Acc(1)));
  args.grad_old_cell[at] = grad_cell;  // no forget gate
}

template <typename Args>
cudaError_t run(void (*kernel)(Args), const Args& args, cudaStream_t stream) {
  const int64_t units = args.batch * args.hidden;
  if (units == 0) return cudaSuccess;
  return launch(kernel, ceil_div(units, kThreads), kThreads, 0, stream, args);
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T, typename Acc>
cudaError_t my_ops::cuda::lltm_cell(const LltmCell<T, Acc>& args, cudaStream_t stream) {
  return run(lltm_cell_kernel<T, Acc>, args, stream);
}

template <typename T, typename Acc>
cudaError_t my_ops::cuda::lltm_cell_backward(const LltmCellBackward<T, Acc>& args,
                                             cudaStream_t stream) {
  return run(lltm_cell_backward_kernel<T, Acc>, args, stream);
}

#define MY_OPS_LLTM(T, Acc)                                                              \
  template cudaError_t my_ops::cuda::lltm_cell(const LltmCell<T, Acc>&, cudaStream_t);   \
  template cudaError_t my_ops::cuda::lltm_cell_backward(const LltmCellBackward<T, Acc>&, \
                                                        cudaStream_t);
MY_OPS_LLTM(double, double)
MY_OPS_LLTM(float, float)
MY_OPS_LLTM(__half, float)
MY_OPS_LLTM(__nv_bfloat16, float)
