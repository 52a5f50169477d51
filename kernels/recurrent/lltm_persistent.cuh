// Shared by the persistent LLTM kernels: conversions, activations, a step of a unit, the launchers.
#pragma once

#include "lltm_persistent.h"

#include "ptx/recurrent.cuh"
#include "recurrent/lltm_plan.h"

namespace my_ops::cuda {

// ---- conversions ----

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

__device__ __forceinline__ uint32_t bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ uint32_t bits(__half v) { return __half_as_ushort(v); }
__device__ __forceinline__ uint32_t bits(__nv_bfloat16 v) { return __bfloat16_as_ushort(v); }

// ---- activations ----
//
// float: within 1e-7 of the true value, and within a few units in the last place near zero, where
// the differences of exponentials cancel and polynomials stand in (both sides are computed, without
// a branch). fp16 leaves the polynomials out. bf16 takes the hardware's tanh, good to 2^-11.

template <typename T>
constexpr bool kHardwareTanh = false;
template <>
constexpr bool kHardwareTanh<__nv_bfloat16> = true;

template <typename T>
__device__ __forceinline__ float sigmoid(float z) {
  if constexpr (kHardwareTanh<T>) return fmaf(0.5f, tanh_approx(0.5f * z), 0.5f);
  return __fdividef(1.0f, 1.0f + __expf(-z));  // 0 for an infinite divisor
}

// expm1(z) for z <= 0
__device__ __forceinline__ float expm1_negative(float z) {
  float p = 1.648435573e-04f;
  p = fmaf(p, z, 1.370660961e-03f);
  p = fmaf(p, z, 8.328690194e-03f);
  p = fmaf(p, z, 4.166612774e-02f);
  p = fmaf(p, z, 1.666666418e-01f);
  p = fmaf(p, z, 5.000000000e-01f);
  return z > -0.5f ? fmaf(p * z, z, z) : __expf(z) - 1.0f;
}

template <typename T>
__device__ __forceinline__ float elu(float z) {
  const float below = sizeof(T) == 4 ? expm1_negative(z) : __expf(z) - 1.0f;
  return z <= 0.0f ? below : z;  // NaN passes through
}

template <typename T>
__device__ __forceinline__ float tanh_of(float c) {
  if constexpr (kHardwareTanh<T>) return tanh_approx(c);
  const float far = 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * c));
  if constexpr (sizeof(T) == 2) return far;
  const float s = c * c;
  float p = 2.373519354e-03f;
  p = fmaf(p, s, -8.412557654e-03f);
  p = fmaf(p, s, 2.178910933e-02f);
  p = fmaf(p, s, -5.396165326e-02f);
  p = fmaf(p, s, 1.333331317e-01f);
  p = fmaf(p, s, -3.333333433e-01f);
  return fabsf(c) < 0.6f ? fmaf(p * s, c, c) : far;
}

// ---- one step of one unit and row ----

// From the gates' pre-activations z (i, o, g) to their activations, in place; advances c.
template <typename T>
__device__ __forceinline__ float cell_forward(float (&z)[3], float& c) {
  z[0] = sigmoid<T>(z[0]);
  z[1] = sigmoid<T>(z[1]);
  z[2] = elu<T>(z[2]);
  c += z[2] * z[0];
  return tanh_of<T>(c) * z[1];
}

// From the gates' activations a (i, o, g) to the gradients before the activations, in place;
// grad_h is that of h_t, grad_c is carried from the step after. There is no forget gate, so grad_c
// passes to the step before unchanged.
template <typename T>
__device__ __forceinline__ void cell_backward(float (&a)[3], float c, float grad_h, float& grad_c) {
  const float i = a[0], o = a[1], g = a[2];
  // The hardware's tanh is too coarse for 1 - t^2.
  const float t = sizeof(T) == 4 ? tanh_of<float>(c) : tanh_of<__half>(c);
  grad_c += grad_h * o * (1.0f - t * t);
  a[0] = grad_c * g * i * (1.0f - i);
  a[1] = grad_h * t * o * (1.0f - o);
  a[2] = grad_c * i * (!(g <= 0.0f) ? 1.0f : g + 1.0f);  // ELU' from its value
}

// ---- host ----

constexpr int kExchangeSlots = 64;

// Bytes of the grid kernels' exchange of `vectors` hidden-sized vectors per row, `rounds` times.
template <typename T>
constexpr int64_t grid_exchange_bytes(int64_t vectors, int64_t rounds, int64_t batch,
                                      int64_t hidden) {
  constexpr int64_t kChunkUnits = 64 / sizeof(T);
  return (rounds < kExchangeSlots ? rounds : kExchangeSlots) * vectors *
         ((hidden + kChunkUnits - 1) / kChunkUnits) * batch * 64;
}

template <typename T>
cudaError_t lltm_grid(const LltmSequence<T>& args, const GridPlan& plan, void* workspace,
                      cudaStream_t stream);
template <typename T>
cudaError_t lltm_grid_backward(const LltmSequenceBackward<T>& args, const GridPlan& plan,
                               void* workspace, cudaStream_t stream);
template <typename T>
cudaError_t lltm_cluster(const LltmSequence<T>& args, const ClusterPlan& plan, cudaStream_t stream);
template <typename T>
cudaError_t lltm_cluster_backward(const LltmSequenceBackward<T>& args, const ClusterPlan& plan,
                                  cudaStream_t stream);

// Clusters of this plan's kernel that the device holds; 0 if none.
template <typename T>
int lltm_cluster_resident(const ClusterPlan& plan);
template <typename T>
int lltm_cluster_backward_resident(const ClusterPlan& plan);

}  // namespace my_ops::cuda
