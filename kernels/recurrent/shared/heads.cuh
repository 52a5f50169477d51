// Heads: units of a layer whose gates see h of the units of their own head alone, so that each head
// is a layer of its own.
#pragma once

#include "common/numeric.cuh"

namespace my_ops::cuda {

// The cell of a layer of heads, all of which run in one launch: blockIdx.y is the head. Its w_h is
// [kGates * hidden, hidden / heads]. Whatever else a unit has lies as in a layer of one head.
template <typename Cell>
struct Headed : Cell {};

template <typename Cell>
constexpr bool kHeaded = false;
template <typename Cell>
constexpr bool kHeaded<Headed<Cell>> = true;

// The block's head, which a block's place derives from: unit u of the head is unit first_of_head +
// u of the layer. With one head it is empty, so that such kernels are as if there were no heads.
template <typename Cell>
struct Head {
  static constexpr int head = 0, heads = 1, first_of_head = 0;

  __device__ __forceinline__ explicit Head(const int64_t& /*hidden*/) {}

  __device__ __forceinline__ static int64_t head_units(const int64_t& hidden) { return hidden; }
};

template <typename Cell>
struct Head<Headed<Cell>> {
  int head, heads;
  int64_t units, first_of_head;

  __device__ __forceinline__ explicit Head(const int64_t& hidden)
      : head(static_cast<int>(blockIdx.y)),
        heads(static_cast<int>(gridDim.y)),
        units(static_cast<uint32_t>(hidden) / gridDim.y),
        first_of_head(units * head) {}

  __device__ __forceinline__ int64_t head_units(const int64_t& /*hidden*/) const { return units; }
};

}  // namespace my_ops::cuda
