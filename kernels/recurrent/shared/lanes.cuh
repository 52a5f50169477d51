// Sums over the lanes that share a unit.
#pragma once

namespace my_ops::cuda {

// Lanes adjacent lanes hold partial sums of Items items, each with some values, and end with one
// item each: item i is that of the lanes item_of<Lanes, Items>() == i.
template <int Lanes, int Items>
__device__ __forceinline__ int item_of() {
  return threadIdx.x % Lanes / (Lanes / Items);
}
// Exactly one of the lanes with the same item, to write it to memory.
template <int Lanes, int Items>
__device__ __forceinline__ bool writes_item() {
  return threadIdx.x % (Lanes / Items) == 0;
}

// Sums in a fixed tree, which halves what a lane holds while it can. v[g][0] becomes the lane's own
// item.
template <int Lanes, int Values, int Items>
__device__ __forceinline__ void sum_items(float (&v)[Values][Items]) {
  static_assert(Lanes % Items == 0);
  int mask = Lanes / 2;
#pragma unroll
  for (int n = Items / 2; n >= 1; n /= 2) {
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int g = 0; g < Values; ++g) {
#pragma unroll
      for (int m = 0; m < n; ++m) {
        const float give = upper ? v[g][m] : v[g][m + n];
        const float keep = upper ? v[g][m + n] : v[g][m];
        v[g][m] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, mask);
      }
    }
    mask /= 2;
  }
#pragma unroll
  for (int bit = Lanes / Items / 2; bit >= 1; bit /= 2) {
#pragma unroll
    for (int g = 0; g < Values; ++g) v[g][0] += __shfl_xor_sync(0xFFFFFFFFu, v[g][0], bit);
  }
}

}  // namespace my_ops::cuda
