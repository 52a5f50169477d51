// LLTM backward over all steps with W_h resident on chip, exchanging the gate gradients through L2.
// Plan: as the forward grid kernel, run from the last step to the first. A block owns 16 or 32
// units, that is columns of W_h: per step it gathers the gate gradients of step t + 1 from its
// group, grad_h_t = grad_gates_{t+1} W_h (three times the K of forward, a third of the M), applies
// the cell's derivative and publishes its own gate gradients. grad_c stays in shared memory.
// Bound as forward, with three times the bytes exchanged.
#include "recurrent/lltm_grid.cuh"

namespace my_ops::cuda {
namespace {

[[maybe_unused]] constexpr int kAhead =
    3;  // steps from the prefetch of what forward saved to its load

template <typename T>
struct BackwardParams {
  LltmSequenceBackward<T> seq;
  uint32_t* exchange;  // [kSlots][gate][chunks of units][batch][16 words]
  int members;
  int rows;  // of the batch, per group
};

template <typename T, int UnitTiles, int NTiles, int Chunks>
struct BackwardConfig {
  using Weights = Slab<T, UnitTiles, NTiles, Chunks>;
  static constexpr int kItems = items_per_thread(UnitTiles, NTiles);
  using Shared = typename Weights::Shared;  // and behind it, [tile of rows][kItems][thread], grad_c
};

// 16 bytes of column `unit` of W_h: consecutive rows of one gate; beyond `hidden` they are zero.
template <typename T>
__device__ __forceinline__ uint4 load_column(const T* w_h, int64_t w_row, int64_t gate, int64_t k,
                                             int64_t unit, int64_t hidden) {
  constexpr int kCount = 16 / sizeof(T);
  uint32_t word[4] = {};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (k + e < hidden && unit < hidden) {
      const T v = w_h[(gate * hidden + k + e) * w_row + unit];
      word[e * sizeof(T) / 4] |= bits(v) << (e * sizeof(T) % 4 * 8);
    }
  }
  return {word[0], word[1], word[2], word[3]};
}

template <typename T, int UnitTiles, int NTiles, int Chunks>
__global__ void __launch_bounds__(kRecurrentThreads, 1)
    lltm_grid_backward_kernel(const __grid_constant__ BackwardParams<T> params) {
#if __CUDA_ARCH__ >= 800
  using Config = BackwardConfig<T, UnitTiles, NTiles, Chunks>;
  extern __shared__ uint4 shared_bytes[];
  auto& shared = *reinterpret_cast<typename Config::Shared*>(shared_bytes);
  const LltmSequenceBackward<T>& seq = params.seq;
  const int64_t batch = seq.batch, hidden = seq.hidden;
  const int unit_chunks = static_cast<int>((hidden + kChunkUnits<T> - 1) / kChunkUnits<T>);
  const int chunks = kGates * unit_chunks;
  const int lane = threadIdx.x % 32;
  const int64_t first_unit = int64_t{blockIdx.x % params.members} * (16 * UnitTiles);
  const int64_t first_row = int64_t{blockIdx.x / params.members} * params.rows;
  const int rows = static_cast<int>(min(int64_t{params.rows}, batch - first_row));
  constexpr int kItems = Config::kItems, kTileRows = NTiles * 8;
  auto* const tile_grad_c = reinterpret_cast<float (*)[kItems][kRecurrentThreads]>(&shared + 1);
  const int row_tiles = (rows + kTileRows - 1) / kTileRows;

  typename Config::Weights weights;
  weights.load(shared, chunks, [&](int m, int half, int chunk) {
    // Rows r and r + 8 of a tile are the units 2r and 2r + 1.
    const int64_t unit = first_unit + m * 16 + lane / 4 * 2 + half;
    const int64_t k = chunk % unit_chunks * kChunkUnits<T> + lane % 4 * (16 / sizeof(T));
    return load_column(seq.w_h, seq.w_row, chunk / unit_chunks, k, unit, hidden);
  });

  // Everything that depends on the item alone. Units of the padding up to a whole chunk are
  // computed like the others, from zeros, and published, but have no place outside.
  const bool working = threadIdx.x < UnitTiles * NTiles * 128;  // the same for a whole warp
  const int64_t row_words = kChunkBytes / 4;
  const int64_t gate_words = int64_t{unit_chunks} * batch * row_words;
  const int64_t slot_words = kGates * gate_words;
  Item item[kItems];
  // In tile 0: of the exchange, of [batch, hidden] and of [batch, 3 * hidden].
  int64_t own_word[kItems], own_at[kItems], own_gate[kItems];
  bool has_unit[kItems], real_unit[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    item[i] = Item::of<NTiles>(threadIdx.x + i * kRecurrentThreads);
    const int64_t unit = first_unit + item[i].unit();
    const int64_t row = first_row + item[i].row();
    has_unit[i] = working && unit < int64_t{unit_chunks} * kChunkUnits<T>;
    real_unit[i] = has_unit[i] && unit < hidden;
    own_word[i] = unit / kChunkUnits<T> * batch * row_words + row * row_words +
                  unit % kChunkUnits<T> * sizeof(T) / 4;
    own_at[i] = row * hidden + unit;
    own_gate[i] = row * kGates * hidden + unit;
  }
  // The block's words, in its first row.
  const int64_t block_word = first_unit / kChunkUnits<T> * batch * row_words +
                             first_row * row_words + first_unit % kChunkUnits<T> * sizeof(T) / 4;
  constexpr int kPieces = UnitTiles * 16 * sizeof(T) / 16;  // of 16 bytes, in a row
  for (int tile = 0; tile < row_tiles && working; ++tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const bool given =
          seq.grad_c_n != nullptr && real_unit[i] && tile * kTileRows + item[i].row() < rows;
      tile_grad_c[tile][i][threadIdx.x] =
          given ? to_float(seq.grad_c_n[own_at[i] + tile * kTileRows * hidden]) : 0.0f;
    }
  }

  float a[kItems][kGates] = {}, c[kItems] = {},
        grad_h[kItems] = {};  // of the step and tile at hand
  auto load_step = [&](int64_t t, int tile) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (real_unit[i] && tile * kTileRows + item[i].row() < rows) {
        const int64_t tile_row = t * batch + tile * kTileRows;
        const T* gates = seq.gates + tile_row * kGates * hidden + own_gate[i];
        const int64_t at = tile_row * hidden + own_at[i];
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) a[i][gate] = to_float(gates[gate * hidden]);
        c[i] = seq.cells[at];
        if (seq.grad_output != nullptr) grad_h[i] = to_float(seq.grad_output[at]);
        // From memory to L2 some steps ahead, a request per sector: answers arrive in order, so a
        // load from memory would hold up the exchange behind it.
        if (threadIdx.x % 8 == 0 && t >= kAhead) {
          const int64_t back = kAhead * batch * hidden;
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) {
            prefetch_l2(gates + gate * hidden - back * kGates);
          }
          prefetch_l2(seq.cells + at - back);
          if (seq.grad_output != nullptr) prefetch_l2(seq.grad_output + at - back);
        }
      }
    }
  };
  const uint4* const lane_vector =
      reinterpret_cast<const uint4*>(params.exchange) +
      ((threadIdx.x / 32) * batch + first_row + lane / 4) * (kChunkBytes / 16) + lane % 4;
  const int64_t warp_stride = kRecurrentWarps * batch * (kChunkBytes / 16);
  load_step(seq.steps - 1, 0);
  int set = 0;

  // Round s handles step t = steps - 1 - s; the last round only has grad_h0 left to do. It reads
  // vector s - 1 of the exchange and publishes vector s.
  for (int64_t s = 0; s <= seq.steps; ++s) {
    const int64_t t = seq.steps - 1 - s;
    for (int tile = 0; tile < row_tiles; ++tile) {
      const int tile_rows = rows - tile * kTileRows;
      if (s > 0) {
        weights.multiply(shared, set, warp_stride, chunks, tile_rows);
        __syncthreads();  // the partial sums of all warps are in place
      }

      if (working) {
        uint32_t* published =
            params.exchange + s % kSlots * slot_words + tile * kTileRows * row_words;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const bool active = has_unit[i] && item[i].row() < tile_rows;
          const bool real = real_unit[i] && item[i].row() < tile_rows;
          const int64_t at = own_at[i] + tile * kTileRows * hidden;
          float through = 0.0f;  // what reaches h_t from step t + 1
          if (s > 0) {
            through = item[i].total(shared.partial[set], item[i].unit_tile);
          } else if (real && seq.grad_h_n != nullptr) {
            through = to_float(seq.grad_h_n[at]);
          }
          if (t < 0) {
            if (real) seq.grad_h0[at] = from_float<T>(through);
            continue;
          }
          float grad_c = tile_grad_c[tile][i][threadIdx.x];
          cell_backward<T>(a[i], c[i], grad_h[i] + through, grad_c);
          tile_grad_c[tile][i][threadIdx.x] = grad_c;
#pragma unroll
          for (int gate = 0; gate < kGates; ++gate) {
            if (!real) a[i][gate] = 0.0f;  // 0 * inf of a padding unit must not reach the others
            publish<T>(published + gate * gate_words + own_word[i], a[i][gate], active);
          }
          if (t == 0 && real) seq.grad_c0[at] = from_float<T>(grad_c);
        }
      }

      // What follows is not what the group waits for, so it comes after the first request for the
      // next vector: three times the bytes of forward, of which some are there early.
      const bool last_tile = tile + 1 == row_tiles;
      const int64_t next_s = last_tile ? s + 1 : s;
      const int next_tile = last_tile ? 0 : tile + 1;
      if (next_s > 0 && next_s <= seq.steps) {
        weights.begin(lane_vector + (next_s - 1) % kSlots * (slot_words / 4) +
                          next_tile * kTileRows * (kChunkBytes / 16),
                      warp_stride, chunks, rows - next_tile * kTileRows);
      }
      if (working && t >= 0) {
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (real_unit[i] && item[i].row() < tile_rows) {
            T* grad_gates =
                seq.grad_gates + (t * batch + tile * kTileRows) * kGates * hidden + own_gate[i];
#pragma unroll
            for (int gate = 0; gate < kGates; ++gate) {
              grad_gates[gate * hidden] = from_float<T>(a[i][gate]);
            }
          }
        }
        if (next_s < seq.steps) load_step(seq.steps - 1 - next_s, next_tile);
      }
      if (s > 0) set ^= 1;
    }
    empty_slots(params.exchange + block_word, s - 1, slot_words, kGates, gate_words, rows, kPieces);
  }
#endif
}

template <typename T, int UnitTiles, int NTiles, int Chunks>
const void* instantiation() {
  return reinterpret_cast<const void*>(&lltm_grid_backward_kernel<T, UnitTiles, NTiles, Chunks>);
}

// The instantiations; a plan outside them has no kernel. K is that of forward three times over.
template <typename T>
const void* find_kernel(const GridPlan& plan) {
  const bool wide = plan.row_tiles == 2;
  if (plan.unit_tiles == 1) {
    switch (plan.chunks) {
      case 2:
        return wide ? instantiation<T, 1, 2, 6>() : instantiation<T, 1, 1, 6>();
      case 4:
        return wide ? instantiation<T, 1, 2, 12>() : instantiation<T, 1, 1, 12>();
      case 8:
        return wide ? instantiation<T, 1, 2, 24>() : instantiation<T, 1, 1, 24>();
      default:
        return nullptr;
    }
  }
  if constexpr (sizeof(T) == 2) {
    if (plan.chunks == 4) {
      return wide ? instantiation<T, 2, 2, 12>() : instantiation<T, 2, 1, 12>();
    }
  }
  return nullptr;
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
cudaError_t my_ops::cuda::lltm_grid_backward(const LltmSequenceBackward<T>& args,
                                             const GridPlan& plan, void* workspace,
                                             cudaStream_t stream) {
  BackwardParams<T> params{args, static_cast<uint32_t*>(workspace), plan.members, plan.rows};
  return launch_grid(find_kernel<T>(plan), plan,
                     lltm_persistent_backward_workspace<T>(args.steps, args.batch, args.hidden),
                     params, stream);
}

template cudaError_t my_ops::cuda::lltm_grid_backward<float>(const LltmSequenceBackward<float>&,
                                                             const GridPlan&, void*, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_grid_backward<__half>(const LltmSequenceBackward<__half>&,
                                                              const GridPlan&, void*, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_grid_backward<__nv_bfloat16>(
    const LltmSequenceBackward<__nv_bfloat16>&, const GridPlan&, void*, cudaStream_t);
