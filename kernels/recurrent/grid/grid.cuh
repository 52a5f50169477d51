// The shared parts of the forward and the backward grid kernels: the block's place in the grid and
// in the exchange, what its threads own, the choice of an instantiation, and the launch.
#pragma once

#include "common/launch.cuh"
#include "recurrent/grid/plan.h"
#include "recurrent/shared/heads.cuh"
#include "recurrent/shared/slab.cuh"

namespace my_ops::cuda {

// One unit and row of a tile. Sixteen adjacent lanes own sixteen adjacent units of one row, so that
// a warp reads and writes whole 32-byte sectors of global memory.
struct Item {
  int unit_tile, row_tile, tile_unit, tile_row;

  template <int NTiles>
  __device__ __forceinline__ static Item of(int index) {
    return {index / (128 * NTiles), index / 128 % NTiles, index % 16, index / 16 % 8};
  }
  __device__ __forceinline__ int unit() const { return unit_tile * 16 + tile_unit; }
  __device__ __forceinline__ int row() const { return row_tile * 8 + tile_row; }

  // The product's value for tile m, summed over the warps in a fixed order.
  template <int MTiles, int NTiles>
  __device__ __forceinline__ float total(
      const float4 (&partial)[kRecurrentWarps][MTiles][NTiles][32], int m) const {
    const int index = partial_index(tile_unit / 2, tile_row / 2);
    const int component = tile_row % 2 * 2 + tile_unit % 2;
    float v[kRecurrentWarps];
#pragma unroll
    for (int w = 0; w < kRecurrentWarps; ++w) {
      v[w] = reinterpret_cast<const float*>(&partial[w][m][row_tile][index])[component];
    }
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
};

template <typename Sequence>
struct GridParams {
  Sequence seq;
  uint32_t* exchange;  // [kSlots][heads][Vectors][chunks of units][batch][16 words]
  int members;
  int rows;  // rows of the batch per group
};

// A block of a group. Vectors: how many hidden-sized vectors a round exchanges: 1 in forward, the
// gates' gradients in backward. A thread owns kItems items in each tile of the group's rows.
template <typename Cell, typename T, int Vectors, int UnitTiles, int NTiles>
struct GridBlock : Head<Cell> {
  using Base = Head<Cell>;
  static constexpr int kItems = items_per_thread(UnitTiles, NTiles);
  static constexpr int kTileRows = NTiles * 8;
  static constexpr int kRowWords = kChunkBytes / 4;
  static constexpr int kQuads = UnitTiles * 16 * sizeof(T) / 16;  // in a row of the block

  uint32_t* exchange;  // of the block's head
  int64_t batch, hidden;
  int64_t first_unit, first_row;
  int rows, row_tiles;
  int unit_chunks, chunks;  // chunks of a vector, and of all vectors
  int64_t vector_words, slot_words;
  bool working;  // whether the thread has items; the same in a whole warp

  Item item[kItems];
  int64_t own_word[kItems];  // in the exchange, for tile 0
  // Units of the padding up to a whole chunk are computed like the others, from zeros, and
  // published, but they are not stored outside the exchange.
  bool has_unit[kItems], real_unit[kItems];

  // The lane's 16 bytes of the warp's first chunk, in row 0 of tile 0 and slot 0.
  const uint4* lane_vector;
  int64_t warp_stride;  // from one chunk of the warp to its next

  template <typename Sequence>
  __device__ __forceinline__ explicit GridBlock(const GridParams<Sequence>& params)
      : Base(params.seq.hidden),
        exchange(params.exchange),
        batch(params.seq.batch),
        hidden(params.seq.hidden) {
    unit_chunks =
        static_cast<int>((Base::head_units(hidden) + kChunkUnits<T> - 1) / kChunkUnits<T>);
    chunks = Vectors * unit_chunks;
    first_unit = int64_t{blockIdx.x % params.members} * (16 * UnitTiles);
    first_row = int64_t{blockIdx.x / params.members} * params.rows;
    rows = static_cast<int>(min(int64_t{params.rows}, batch - first_row));
    row_tiles = (rows + kTileRows - 1) / kTileRows;
    vector_words = int64_t{unit_chunks} * batch * kRowWords;
    slot_words = Vectors * vector_words;
    exchange += Base::head * slot_words;
    slot_words *= Base::heads;
    working = threadIdx.x < UnitTiles * NTiles * 128;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      item[i] = Item::of<NTiles>(threadIdx.x + i * kRecurrentThreads);
      const int64_t unit = first_unit + item[i].unit();
      has_unit[i] = working && unit < int64_t{unit_chunks} * kChunkUnits<T>;
      real_unit[i] = has_unit[i] && unit < Base::head_units(hidden);
      own_word[i] = word(first_row + item[i].row(), unit);
    }
    const int lane = threadIdx.x % 32;
    lane_vector = reinterpret_cast<const uint4*>(exchange) +
                  ((threadIdx.x / 32) * batch + first_row + lane / 4) * (kChunkBytes / 16) +
                  lane % 4;
    warp_stride = kRecurrentWarps * batch * (kChunkBytes / 16);
  }

  // The index of a word in a vector of the exchange.
  __device__ __forceinline__ int64_t word(int64_t row, int64_t unit) const {
    return unit / kChunkUnits<T> * batch * kRowWords + row * kRowWords +
           unit % kChunkUnits<T> * sizeof(T) / 4;
  }

  __device__ __forceinline__ bool active(int i, int tile) const {
    return has_unit[i] && tile * kTileRows + item[i].row() < rows;
  }
  __device__ __forceinline__ bool real(int i, int tile) const {
    return real_unit[i] && tile * kTileRows + item[i].row() < rows;
  }
  __device__ __forceinline__ int64_t unit(int i) const { return first_unit + item[i].unit(); }

  // The index of the first of an item's `values` values in [batch, values, hidden], and at step t
  // in [steps, batch, values, hidden].
  __device__ __forceinline__ int64_t at(int tile, int i, int values) const {
    return at(0, tile, i, values);
  }
  __device__ __forceinline__ int64_t at(int64_t t, int tile, int i, int values) const {
    return line(t, tile, i) * (values * hidden) + (Base::first_of_head + unit(i));
  }
  // The index in [steps, batch].
  __device__ __forceinline__ int64_t line(int64_t t, int tile, int i) const {
    return t * batch + first_row + tile * kTileRows + item[i].row();
  }

  // The address of an item's word of vector n is this plus own_word.
  __device__ __forceinline__ uint32_t* published(int64_t n, int tile) const {
    return exchange + n % kSlots * slot_words + tile * kTileRows * kRowWords;
  }

  // Starts to read vector n.
  template <typename Weights>
  __device__ __forceinline__ void begin(Weights& weights, int64_t n, int tile) const {
    weights.begin(
        lane_vector + n % kSlots * (slot_words / 4) + tile * kTileRows * (kChunkBytes / 16),
        warp_stride, chunks, rows - tile * kTileRows);
  }

  // Multiplies by the vector that begin() has started to read.
  template <typename Weights>
  __device__ __forceinline__ void multiply(Weights& weights, typename Weights::Shared& shared,
                                           int set, int tile) const {
    weights.multiply(shared, set, warp_stride, chunks, rows - tile * kTileRows);
    __syncthreads();  // the partial sums of all warps are in place
  }

  // Called when vector `received` is complete: see empty_slots.
  __device__ __forceinline__ void recycle(int64_t received) const {
    empty_slots(exchange + word(first_row, first_unit), received, slot_words, Vectors, vector_words,
                rows, kQuads);
  }
};

constexpr int kGridAhead = 3;  // steps between the prefetch of a value and its load

// Values are prefetched from memory to L2 some steps ahead, with one request per sector. Answers
// arrive in order, so a load from memory would delay the exchange behind it.
__device__ __forceinline__ bool asks_for_sector() { return threadIdx.x % 8 == 0; }

// ---- host ----
#ifndef __CUDACC_RTC__

// Calls visit<unit_tiles, row_tiles, chunks>() for the plan's instantiation; null if there is none.
template <typename T, typename Visit>
const void* visit_grid_plan(const GridPlan& plan, Visit visit) {
  const auto rows = [&]<int UnitTiles, int Chunks>() {
    return plan.row_tiles == 2 ? visit.template operator()<UnitTiles, 2, Chunks>()
                               : visit.template operator()<UnitTiles, 1, Chunks>();
  };
  if (plan.unit_tiles == 1) {
    switch (plan.chunks) {
      case 2:
        return rows.template operator()<1, 2>();
      case 4:
        return rows.template operator()<1, 4>();
      case 8:
        return rows.template operator()<1, 8>();
      default:
        return nullptr;
    }
  }
  if constexpr (sizeof(T) == 2) {
    if (plan.chunks == 4) return rows.template operator()<2, 4>();
  }
  return nullptr;
}

// Empties the exchange and launches. Blocks wait for each other, so the launch is cooperative:
// either all of the grid is resident or the launch fails. A null kernel means no instantiation.
template <typename Sequence>
cudaError_t launch_grid(const void* kernel, const GridPlan& plan, int heads, size_t exchange_bytes,
                        const Sequence& args, void* workspace, cudaStream_t stream) {
  if (kernel == nullptr) return cudaErrorNotSupported;
  if (auto err = allow_all_shared_bytes(kernel); err != cudaSuccess) return err;
  if (auto err = cudaMemsetAsync(workspace, 0xFF, exchange_bytes, stream); err != cudaSuccess) {
    return err;
  }
  GridParams<Sequence> params{args, static_cast<uint32_t*>(workspace), plan.members, plan.rows};
  void* arguments[] = {&params};
  return cudaLaunchCooperativeKernel(kernel, dim3(plan.members * plan.groups, heads),
                                     dim3(kRecurrentThreads), arguments, plan.shared_bytes, stream);
}

#endif

}  // namespace my_ops::cuda
