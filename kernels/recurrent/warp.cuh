// The shared parts of the forward and the backward warp kernels, for up to 32 units: a warp runs a
// row of the batch on its own, so any number of rows is possible.
//
// A lane has a unit, with all weights of its sums in registers as float: 32 for each gate. The
// vector of the step (h, or the gradients of the gates) is in shared memory, double-buffered, and
// all lanes read the same 16 bytes at a time.
#pragma once

#include "common/launch.cuh"
#include "recurrent/plan.h"
#include "recurrent/terms.cuh"

namespace my_ops::cuda {

constexpr int kWarpAhead = 4;  // steps between the prefetch of a value and its load

// Vectors: 1 if all gates multiply the same, else one for each gate.
template <int Vectors>
struct __align__(16) WarpVector {
  float at[Vectors][kLaneUnits];
};

template <int Gates, int Vectors>
struct WarpWeights {
  float at[Gates][kLaneUnits];

  // fill(gate, k): the lane's weight of element k.
  template <typename Fill>
  __device__ __forceinline__ void load(Fill fill) {
#pragma unroll
    for (int gate = 0; gate < Gates; ++gate) {
#pragma unroll
      for (int k = 0; k < kLaneUnits; ++k) at[gate][k] = fill(gate, k);
    }
  }

  __device__ __forceinline__ void multiply(const WarpVector<Vectors>& vector,
                                           float (&sum)[Gates]) const {
#pragma unroll
    for (int gate = 0; gate < Gates; ++gate) sum[gate] = 0.0f;
#pragma unroll
    for (int k = 0; k < kLaneUnits; k += 4) {
#pragma unroll
      for (int gate = 0; gate < Gates; ++gate) {
        const float4 v = *reinterpret_cast<const float4*>(&vector.at[Vectors > 1 ? gate : 0][k]);
        sum[gate] = fmaf(at[gate][k], v.x, sum[gate]);
        sum[gate] = fmaf(at[gate][k + 1], v.y, sum[gate]);
        sum[gate] = fmaf(at[gate][k + 2], v.z, sum[gate]);
        sum[gate] = fmaf(at[gate][k + 3], v.w, sum[gate]);
      }
    }
  }
};

// What a lane works on.
struct WarpPlace {
  int64_t batch, hidden, row;
  int unit;
  bool real;

  template <typename Sequence>
  __device__ __forceinline__ explicit WarpPlace(const Sequence& seq)
      : batch(seq.batch),
        hidden(seq.hidden),
        row(blockIdx.x),
        unit(threadIdx.x),
        real(unit < hidden) {}

  // Of the row in [steps, batch].
  __device__ __forceinline__ int64_t line(int64_t t) const { return t * batch + row; }
  // Of the first of the unit's `values` values in [steps, batch, values, hidden]. For a unit that
  // does not exist, those of the last that does, so that loads need no branch.
  __device__ __forceinline__ int64_t at(int64_t t, int values) const {
    const auto units = static_cast<int>(hidden);
    return line(t) * (units * values) + min(unit, units - 1);
  }
  // Requests a row's values of a step, up to 1 KiB: a sector of memory for each lane.
  template <typename T>
  __device__ __forceinline__ void prefetch(const T* p, int64_t t, int values) const {
    constexpr int kSector = 32 / sizeof(T);
    const int width = static_cast<int>(hidden) * values;
    ptx::prefetch_l2(p + line(t) * width + min(static_cast<int>(threadIdx.x) * kSector, width - 1));
  }
};

// ---- host ----

template <typename Sequence>
cudaError_t launch_warp(void (*kernel)(Sequence), const Sequence& args, cudaStream_t stream) {
  return launch(kernel, args.batch, 32, 0, stream, args);
}

}  // namespace my_ops::cuda
