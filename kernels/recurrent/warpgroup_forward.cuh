// Forward over all steps for many rows, in 16 bits on Hopper.
// Plan: a group of blocks holds W_h once. A block has the gates of 16 or 32 units in shared memory,
// as the B operand of wgmma. The rows of the batch are divided into tiles of 64, and the groups
// divide the tiles. A block runs two tiles at a time, one per warpgroup: while one waits for its
// group, the other multiplies. Per step and tile, h_{t-1}, which is the output of the previous
// step, arrives by TMA in k-blocks of 64 units; then come the products and the cell, h_t is stored
// to the output, and the group's counter of the tile is incremented. When it shows that all of h_t
// is there, the next step begins. The columns of a block are ordered so that a thread's sums are
// all gates of its units, and the cell needs no exchange.
// Bound by the arrival of the k-blocks: 430 cycles each, of which wgmma takes 128 at 64 columns.
#pragma once

#include "recurrent/warpgroup.cuh"

namespace my_ops::cuda {

template <typename T>
struct WarpgroupParams {
  CUtensorMap h0, output;  // [1, batch, hidden] and [steps, batch, hidden]
  RecurrentSequence<T> seq;
  uint32_t* arrived;  // [tiles][kArrivedStride]: steps of the tile that warps have finished
  WarpgroupPlan plan;
};

constexpr int kWarpgroupWarps = 4;

using TileRing = KBlockRing<kWarpgroupStageBytes>;  // of a tile in flight

// A block's dynamic shared memory.
template <typename Cell, int Units>
struct WarpgroupShared {
  static constexpr int kParts = Units / 8;  // of four units of a row, per thread
  using State = float4[kParts][kStateRoom<Cell>][128];
  using Biases = float[kTerms<Cell>][Units];

  unsigned char *weights, *rings;
  State* state;  // one for each tile in flight
  Biases* biases;
  uint64_t* barriers;

  __device__ __forceinline__ WarpgroupShared(unsigned char* bytes, int k_blocks, int stages) {
    weights = bytes;
    rings = weights + k_blocks * Cell::kGates * Units * 128;
    state = reinterpret_cast<State*>(rings + 2 * stages * kWarpgroupStageBytes);
    biases = reinterpret_cast<Biases*>(state + 2);
    barriers = reinterpret_cast<uint64_t*>(biases + 1);
  }
  __device__ __forceinline__ TileRing ring(int tile, int stages) const {
    uint64_t* const full = barriers + tile * 2 * stages;
    return {rings + tile * stages * kWarpgroupStageBytes, full, full + stages, stages};
  }
};

// The columns of a block, by gate and unit. wgmma leaves columns 8j + 2q + c with lane q of four.
// Taken in the order of (j, c), these are the gates of the lane's Units / 4 units: four of every
// sixteen, so that the four lanes together read and write whole sectors.
template <int Units>
struct WarpgroupColumn {
  static constexpr int kOwn = Units / 4;
  int gate, unit;

  __device__ __forceinline__ static WarpgroupColumn of(int column) {
    const int place = column / 8 * 2 + column % 2, lane = column % 8 / 2, own = place % kOwn;
    return {place / kOwn, own / 4 * 16 + lane * 4 + own % 4};
  }
  // The sum for a lane's own unit in row `half` of its two.
  __device__ __forceinline__ static constexpr int sum(int gate, int own, int half) {
    const int place = gate * kOwn + own;
    return place / 2 * 4 + half * 2 + place % 2;
  }
};

// Calls f for the tiles of warpgroup `which` in a group's blocks; each tile runs through all steps.
template <typename F>
__device__ __forceinline__ void each_tile(int64_t batch, const WarpgroupPlan& plan, int group,
                                          int which, F f) {
  const int tiles = static_cast<int>((batch + kWarpgroupRows - 1) / kWarpgroupRows);
  for (int tile = group + which * plan.groups; tile < tiles; tile += 2 * plan.groups) f(tile);
}

// Run by one thread: keeps the ring of a tile full.
template <typename T>
__device__ __forceinline__ void produce_h(const WarpgroupParams<T>& params, TileRing ring,
                                          int group, int which, int k_blocks) {
  const uint32_t arrivals = kWarpgroupWarps * params.plan.members;  // per step
  each_tile(params.seq.batch, params.plan, group, which, [&](int tile) {
    const uint32_t* const arrived = params.arrived + tile * kArrivedStride;
    for (int t = 0; t < static_cast<int>(params.seq.steps); ++t) {
      while (ptx::ld_acquire(arrived) < arrivals * t) {
      }
      ptx::fence_proxy_async_global();
      const CUtensorMap* const map = t == 0 ? &params.h0 : &params.output;
      for (int k_block = 0; k_block < k_blocks; ++k_block) {
        ring.fill(map, k_block * kWarpgroupK, tile * kWarpgroupRows, t == 0 ? 0 : t - 1);
      }
    }
  });
}

template <typename Cell, typename T, int Units>
__device__ __forceinline__ void consume_h(const WarpgroupParams<T>& params,
                                          const WarpgroupShared<Cell, Units>& shared, TileRing ring,
                                          int group, int which, int64_t first_unit, int k_blocks) {
  using Column = WarpgroupColumn<Units>;
  constexpr int kColumns = Cell::kGates * Units, kParts = WarpgroupShared<Cell, Units>::kParts;
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried, kSaved = Cell::kSaved;
  const RecurrentSequence<T>& seq = params.seq;
  const int64_t hidden = seq.hidden, batch = seq.batch;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  auto& state = shared.state[which];
  const auto& biases = *shared.biases;

  each_tile(batch, params.plan, group, which, [&](int tile) {
    const int64_t first_row = int64_t{tile} * kWarpgroupRows + thread / 32 * 16 + lane / 4;
    // A part is four units of one of the two rows.
    const auto row_of = [&](int part) { return first_row + part / (kParts / 2) * 8; };
    const auto block_unit = [&](int part) { return part % (kParts / 2) * 16 + lane % 4 * 4; };
    const auto unit_of = [&](int part) { return first_unit + block_unit(part); };
    const auto real = [&](int part) { return row_of(part) < batch && unit_of(part) < hidden; };
    // The index in [steps, batch, values, hidden].
    const auto at = [&](int64_t t, int part, int values) {
      return (t * batch + row_of(part)) * values * hidden + unit_of(part);
    };

#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const bool exists = real(part);
#pragma unroll
      for (int j = 0; j < kCarried; ++j) {
        const T* const from = seq.carried0 + at(0, part, kCarried) + j * hidden;
        state[part][j][thread] = exists ? load_four(from) : float4{};
      }
      if constexpr (Cell::kReadsH) {
        state[part][kCarried][thread] = exists ? load_four(seq.h0 + at(0, part, 1)) : float4{};
      }
    }

    // For the current step; loaded while the previous step ends.
    float4 share[kParts][kGates] = {};
    uint8_t reset[2] = {};
    const auto load_step = [&](int64_t t) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!real(part)) continue;
        const float* const from = seq.gates_x + at(t, part, kGates);
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          share[part][gate] = __ldg(reinterpret_cast<const float4*>(from + gate * hidden));
        }
      }
      if (seq.reset != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t row = first_row + half * 8;
          if (row < batch) reset[half] = load_byte(seq.reset + t * batch + row);
        }
      }
    };
    load_step(0);

    for (int64_t t = 0; t < seq.steps; ++t) {
      float sum[kColumns / 2];
      multiply_k_blocks<T, kColumns>(ring, 0, shared.weights, k_blocks, sum);

      uint2 saved[kParts][kSaved];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int half = part / (kParts / 2), own = part % (kParts / 2) * 4;
        Values<float4, kStateValues<Cell>> old;
#pragma unroll
        for (int j = 0; j < kStateValues<Cell>; ++j) old.at[j] = state[part][j][thread];
        float4 bias[kTerms<Cell>];
#pragma unroll
        for (int term = 0; term < kTerms<Cell>; ++term) {
          bias[term] = *reinterpret_cast<const float4*>(&biases[term][block_unit(part)]);
        }
        // Loaded here, as there are no registers for values of zoneout that are loaded ahead.
        const bool zoned = seq.zoneout != nullptr && real(part);
        float4 zoneout = {}, h_prev = {};
        if (zoned) {
          zoneout = load_four(seq.zoneout + at(t, part, 1));
          if constexpr (!Cell::kReadsH) {
            h_prev = load_four(t > 0 ? seq.output + at(t - 1, part, 1) : seq.h0 + at(0, part, 1));
          }
        }
        float h[4], kept[kSaved][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const auto element = [&](float4& v) -> float& { return (&v.x)[e]; };
          float z[kTerms<Cell>], of_unit[kSaved];
          const bool resets = reset[half] != 0;
          add_terms<Cell>([&](int gate) { return element(share[part][gate]); },
                          [&](int term) { return element(bias[term]); },
                          [&](int gate) { return sum[Column::sum(gate, own + e, half)]; }, resets,
                          z);
          Values<float, kStateValues<Cell>> item;
#pragma unroll
          for (int j = 0; j < kStateValues<Cell>; ++j) item.at[j] = element(old.at[j]);
          h[e] = forward_of<Cell, T>(z, resets, {zoned, element(zoneout), element(h_prev)}, item,
                                     of_unit);
#pragma unroll
          for (int j = 0; j < kStateValues<Cell>; ++j) element(old.at[j]) = item.at[j];
#pragma unroll
          for (int j = 0; j < kSaved; ++j) kept[j][e] = of_unit[j];
        }
#pragma unroll
        for (int j = 0; j < kStateValues<Cell>; ++j) state[part][j][thread] = old.at[j];
#pragma unroll
        for (int j = 0; j < kSaved; ++j) saved[part][j] = rounded<T>(kept[j]);
        if (real(part)) {
          store_four(seq.output + at(t, part, 1), rounded<T>(h));
          if (t + 1 == seq.steps) store_four(seq.h_n + at(0, part, 1), rounded<T>(h));
        }
      }

      __syncwarp();
      if (lane == 0) ptx::red_release_add(params.arrived + tile * kArrivedStride, 1);

      // The group does not wait for what follows.
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        if (!real(part)) continue;
        if (seq.saved != nullptr) {
#pragma unroll
          for (int j = 0; j < kSaved; ++j) {
            store_four(seq.saved + at(t, part, kSaved) + j * hidden, saved[part][j]);
          }
#pragma unroll
          for (int j = 0; j < kCarried; ++j) {
            const float4 v = state[part][j][thread];
            store_four(seq.carried + at(t, part, kCarried) + j * hidden,
                       rounded<T>({v.x, v.y, v.z, v.w}));
          }
        }
        if (t + 1 == seq.steps) {
#pragma unroll
          for (int j = 0; j < kCarried; ++j) {
            const float4 v = state[part][j][thread];
            store_four(seq.carried_n + at(0, part, kCarried) + j * hidden,
                       rounded<T>({v.x, v.y, v.z, v.w}));
          }
        }
      }
      if (t + 1 < seq.steps) load_step(t + 1);
    }
  });
}

template <typename Cell, typename T, int Units>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_forward_kernel(const __grid_constant__ WarpgroupParams<T> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char bytes[];
  constexpr int kColumns = Cell::kGates * Units;
  const RecurrentSequence<T>& seq = params.seq;
  const WarpgroupPlan& plan = params.plan;
  const int64_t hidden = seq.hidden;
  const auto k_blocks = static_cast<int>((hidden + kWarpgroupK - 1) / kWarpgroupK);
  const WarpgroupShared<Cell, Units> shared(bytes, k_blocks, plan.stages);
  const int group = blockIdx.x / plan.members;
  const int64_t first_unit = int64_t{blockIdx.x % plan.members} * Units;

  if (threadIdx.x == 0) {
    for (int which = 0; which < 2; ++which) {
      shared.ring(which, plan.stages).init(1);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&params.h0);
    ptx::prefetch_tensormap(&params.output);
  }

  // W_h in the layout of the 128-byte swizzle. One thread copies 16 bytes of a column.
  const bool aligned = (reinterpret_cast<uintptr_t>(seq.w_h) | seq.w_row * sizeof(T)) % 16 == 0;
  for (int i = threadIdx.x; i < kColumns * k_blocks * 8; i += kWarpgroupThreads) {
    const int chunk = i % 8, k_block = i / 8 % k_blocks, column = i / 8 / k_blocks;
    const auto place = WarpgroupColumn<Units>::of(column);
    const int64_t unit = first_unit + place.unit;
    uint4 v{};
    if (unit < hidden) {
      v = load_units(seq.w_h + (place.gate * hidden + unit) * seq.w_row,
                     int64_t{k_block} * kWarpgroupK + chunk * 8, hidden, aligned);
    }
    *reinterpret_cast<uint4*>(shared.weights + (k_block * kColumns + column) * 128 +
                              (chunk ^ column % 8) * 16) = v;
  }
  for (int unit = threadIdx.x; unit < Units; unit += kWarpgroupThreads) {
    float bias[kTerms<Cell>] = {};
    if (first_unit + unit < hidden) load_biases<Cell>(seq, first_unit + unit, bias);
#pragma unroll
    for (int term = 0; term < kTerms<Cell>; ++term) (*shared.biases)[term][unit] = bias[term];
  }
  ptx::fence_proxy_async();  // wgmma reads W_h
  __syncthreads();

  const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);  // provably uniform
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<kWarpgroupFewRegisters>();
    const int which = threadIdx.x % 128 / 32;
    if (which < 2 && threadIdx.x % 32 == 0) {
      produce_h(params, shared.ring(which, plan.stages), group, which, k_blocks);
    }
  } else {
    ptx::setmaxnreg_inc<kWarpgroupManyRegisters>();
    consume_h<Cell, T, Units>(params, shared, shared.ring(warpgroup, plan.stages), group, warpgroup,
                              first_unit, k_blocks);
  }
#endif
}

// ---- host ----

inline int64_t warpgroup_exchange_bytes(int64_t batch) {
  return ceil_div(batch, kWarpgroupRows) * kArrivedStride * int64_t{sizeof(uint32_t)};
}

template <typename Cell, typename T>
const void* warpgroup_forward_kernel_of(const WarpgroupPlan& plan) {
  const auto of = [&]<int Units>() -> const void* {
    if constexpr (sizeof(T) == 2 && warpgroup_takes(Cell::kGates * Units)) {
      return reinterpret_cast<const void*>(&warpgroup_forward_kernel<Cell, T, Units>);
    } else {
      return nullptr;
    }
  };
  switch (plan.units) {
    case 16:
      return of.template operator()<16>();
    case 32:
      return of.template operator()<32>();
    default:
      return nullptr;
  }
}

// Empties the counters and launches. Blocks wait for each other, so the launch is cooperative:
// either all of the grid is resident or the launch fails.
template <typename Cell, typename T>
cudaError_t warpgroup_forward(const RecurrentSequence<T>& args, const WarpgroupPlan& plan,
                              void* workspace, cudaStream_t stream) {
  const void* kernel = warpgroup_forward_kernel_of<Cell, T>(plan);
  if (kernel == nullptr) return cudaErrorNotSupported;
  sm90::TensorMapEncoder encoder;  // if it fails, it fails before any launch
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  WarpgroupParams<T> params{.h0 = {},
                            .output = {},
                            .seq = args,
                            .arrived = static_cast<uint32_t*>(workspace),
                            .plan = plan};
  const auto encode = [&](CUtensorMap* map, const T* base, int64_t steps) {
    return sm90::make_tensor_map(encoder, map, const_cast<T*>(base), args.batch, args.hidden,
                                 args.hidden, kWarpgroupRows, steps, args.batch * args.hidden);
  };
  if (auto err = encode(&params.h0, args.h0, 1); err != cudaSuccess) return err;
  if (auto err = encode(&params.output, args.output, args.steps); err != cudaSuccess) return err;
  if (auto err = allow_all_shared_bytes(kernel); err != cudaSuccess) return err;
  if (auto err = cudaMemsetAsync(workspace, 0, warpgroup_exchange_bytes(args.batch), stream);
      err != cudaSuccess) {
    return err;
  }
  void* arguments[] = {&params};
  return cudaLaunchCooperativeKernel(kernel, dim3(plan.members * plan.groups),
                                     dim3(kWarpgroupThreads), arguments, plan.shared_bytes, stream);
}

}  // namespace my_ops::cuda
