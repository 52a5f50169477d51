// Forward over all steps for many rows, on Hopper.
// Plan: a group of blocks holds W_h once. A block has the gates of 8 to 32 units in shared memory,
// as the B operand of wgmma. The rows of the batch are divided into tiles of 64, and the groups
// divide the tiles. Each of a block's two warpgroups runs one tile, or several in turns: while one
// waits for its group, others multiply. Per step and tile, h_{t-1} arrives by TMA in k-blocks of 64
// units; then come the products and the cell, h_t is stored, and the group's counter of the tile is
// incremented. When it shows that all of h_t is there, the next step begins. In 16 bits h_{t-1} is
// the output of the previous step; in float it is exchanged as two fp16 parts
// (warpgroup/parts.cuh). The columns of a block are ordered so that a thread's sums are all gates
// of its units, and the cell needs no exchange.
// Bound by the arrival of the k-blocks: 430 cycles each in 16 bits, of which wgmma takes 128 at 64
// columns.
#pragma once

#include "recurrent/warpgroup/parts.cuh"

namespace my_ops::cuda {

template <typename T>
struct WarpgroupParams {
  // In 16 bits h0, [1, batch, hidden], and the output; in float both are the exchange.
  CUtensorMap h0, output;
  PartsExchange exchange;  // in float
  RecurrentSequence<T> seq;
  uint32_t* arrived;  // [tiles][kArrivedStride]: steps of the tile that warps have finished
  WarpgroupPlan plan;
};

constexpr int kWarpgroupWarps = 4;

// The columns of a block, by gate and unit. wgmma leaves columns 8j + 2q + c with lane q of four.
// Taken in the order of (j, c), these are the gates of the lane's Units / 4 units: vectors of four
// units, or of two if there are no more, so that the four lanes together read and write whole
// sectors.
template <int Units>
struct WarpgroupColumn {
  static constexpr int kOwn = Units / 4, kSize = kOwn < 4 ? kOwn : 4;
  int gate, unit;

  __device__ __forceinline__ static WarpgroupColumn of(int column) {
    const int place = column / 8 * 2 + column % 2, lane = column % 8 / 2, own = place % kOwn;
    return {place / kOwn, own / kSize * 4 * kSize + lane * kSize + own % kSize};
  }
  // The sum for a lane's own unit in row `half` of its two.
  __device__ __forceinline__ static constexpr int sum(int gate, int own, int half) {
    const int place = gate * kOwn + own;
    return place / 2 * 4 + half * 2 + place % 2;
  }
};

// A block's dynamic shared memory.
template <typename Cell, typename T, int Units>
struct WarpgroupShared {
  static constexpr int kSize = WarpgroupColumn<Units>::kSize;
  static constexpr int kVectors = Units / 2 / kSize;  // of a thread, in its two rows
  using State = Vector<float, kSize>[kVectors][kStateRoom<Cell>][128];
  using Biases = float[kTerms<Cell>][Units];
  using Scales = float[Cell::kGates][Units];  // powers of two of the rows of W_h, in float

  unsigned char *weights, *rings;
  State* state;  // one for each tile in flight, those of a warpgroup together
  Biases* biases;
  Scales* scales;
  uint64_t* barriers;

  __device__ __forceinline__ WarpgroupShared(unsigned char* bytes, int k_blocks,
                                             const WarpgroupPlan& plan) {
    weights = bytes;
    rings = weights + k_blocks * kParts<T> * Cell::kGates * Units * 128;
    state = reinterpret_cast<State*>(rings + 2 * plan.stages * kWarpgroupStageBytes);
    biases = reinterpret_cast<Biases*>(state + 2 * plan.turns);
    scales = reinterpret_cast<Scales*>(biases + 1);
    barriers = reinterpret_cast<uint64_t*>(scales + (sizeof(T) == 4));
  }
  __device__ __forceinline__ TileRing ring(int tile, int stages) const {
    uint64_t* const full = barriers + tile * 2 * stages;
    return {rings + tile * stages * kWarpgroupStageBytes, full, full + stages, stages};
  }
};

// Run by one thread: keeps the ring of a warpgroup full.
template <typename T>
__device__ __forceinline__ void produce_h(const WarpgroupParams<T>& params, TileRing ring,
                                          int group, int which, int k_blocks) {
  const uint32_t arrivals = kWarpgroupWarps * params.plan.members;  // per step
  each_turns(params.seq.batch, params.plan, group, which, [&](const Turns& turns) {
    for (int t = 0; t < static_cast<int>(params.seq.steps); ++t) {
      const CUtensorMap* const map = t == 0 ? &params.h0 : &params.output;
      const int matrix = kParts<T> == 2 ? 2 * (t % 2) : t == 0 ? 0 : t - 1;
      for (int turn = 0; turn < turns.count; ++turn) {
        const int tile = turns.tile(turn);
        while (ptx::ld_acquire(counter_of(params.arrived, tile)) < arrivals * t) {
        }
        ptx::fence_proxy_async_global();
        for (int k_block = 0; k_block < k_blocks; ++k_block) {
          for (int part = 0; part < kParts<T>; ++part) {
            ring.fill(map, k_block * kWarpgroupK, tile * kWarpgroupRows, matrix + part);
          }
        }
      }
    }
  });
}

template <typename Cell, typename T, int Units>
__device__ __forceinline__ void consume_h(const WarpgroupParams<T>& params,
                                          const WarpgroupShared<Cell, T, Units>& shared,
                                          TileRing ring, int group, int which, int64_t first_unit,
                                          int k_blocks) {
  using Column = WarpgroupColumn<Units>;
  constexpr int kColumns = Cell::kGates * Units,
                kVectors = WarpgroupShared<Cell, T, Units>::kVectors;
  constexpr int kGates = Cell::kGates, kCarried = Cell::kCarried, kSaved = Cell::kSaved;
  constexpr int kSize = Column::kSize;
  constexpr bool kHasParts = kParts<T> == 2;
  using Floats = Vector<float, kSize>;
  const RecurrentSequence<T>& seq = params.seq;
  const int64_t hidden = seq.hidden, batch = seq.batch;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  auto* const states = shared.state + which * params.plan.turns;
  const auto& biases = *shared.biases;

  each_turns(batch, params.plan, group, which, [&](const Turns& turns) {
    int64_t first_row = 0;  // of this thread, in the tile whose turn it is
    const auto take = [&](int turn) {
      first_row = int64_t{turns.tile(turn)} * kWarpgroupRows + thread / 32 * 16 + lane / 4;
    };
    // A vector has units of one of the two rows.
    const auto half_of = [](int vector) { return vector / (kVectors / 2); };
    const auto row_of = [&](int vector) { return first_row + half_of(vector) * 8; };
    const auto block_unit = [&](int vector) {
      return (vector % (kVectors / 2) * 4 + lane % 4) * kSize;
    };
    const auto unit_of = [&](int vector) { return first_unit + block_unit(vector); };
    const auto real = [&](int vector) {
      return row_of(vector) < batch && unit_of(vector) < hidden;
    };
    // The index in [steps, batch, values, hidden].
    const auto at = [&](int64_t t, int vector, int values) {
      return (t * batch + row_of(vector)) * values * hidden + unit_of(vector);
    };

    for (int turn = 0; turn < turns.count; ++turn) {
      take(turn);
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const bool exists = real(vector);
#pragma unroll
        for (int j = 0; j < kCarried; ++j) {
          const T* const from = seq.carried0 + at(0, vector, kCarried) + j * hidden;
          states[turn][vector][j][thread] = exists ? load_vector<kSize>(from) : Floats{};
        }
        if constexpr (Cell::kReadsH) {
          states[turn][vector][kCarried][thread] =
              exists ? load_vector<kSize>(seq.h0 + at(0, vector, 1)) : Floats{};
        }
      }
    }

    // For the current turn; loaded while the previous one ends.
    Floats share[kVectors][kGates] = {};
    uint8_t reset[2] = {};
    int exponent[2] = {};  // of the rows of h_{t-1}
    // Whether h does not depend on the h before but through the product, so that |h| <= 1.
    const bool forgets = !Cell::kReadsH && seq.zoneout == nullptr;
    const auto load_turn = [&](int64_t t, int turn) {
      take(turn);
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        if (!real(vector)) continue;
        const float* const from = seq.gates_x + at(t, vector, kGates);
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          share[vector][gate] = load_constant<kSize>(from + gate * hidden);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first_row + half * 8;
        if (row >= batch) continue;
        if (seq.reset != nullptr) reset[half] = load_byte(seq.reset + t * batch + row);
        if constexpr (kHasParts) {
          exponent[half] = t > 0 && forgets ? kUnitExponent : params.exchange.exponents[row];
        }
      }
    };
    load_turn(0, 0);

    for (int64_t t = 0; t < seq.steps; ++t) {
      for (int turn = 0; turn < turns.count; ++turn) {
        auto& state = states[turn];
        float sum[kColumns / 2];
        if constexpr (kHasParts) {
          multiply_parts<kColumns>(ring, shared.weights, k_blocks, sum);
        } else {
          multiply_k_blocks<T, kColumns>(ring, shared.weights, k_blocks, sum);
        }

        Vector<T, kSize> saved[kVectors][kSaved], output[kVectors];
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          const int half = half_of(vector), own = vector % (kVectors / 2) * kSize;
          Values<Floats, kStateValues<Cell>> old;
#pragma unroll
          for (int j = 0; j < kStateValues<Cell>; ++j) old.at[j] = state[vector][j][thread];
          const auto of_block = [&](const float (&values)[Units]) {
            return *reinterpret_cast<const Floats*>(&values[block_unit(vector)]);
          };
          Floats bias[kTerms<Cell>], scale[kGates];
#pragma unroll
          for (int term = 0; term < kTerms<Cell>; ++term) bias[term] = of_block(biases[term]);
          if constexpr (kHasParts) {
#pragma unroll
            for (int gate = 0; gate < kGates; ++gate) {
              scale[gate] = of_block((*shared.scales)[gate]);
            }
          }
          // Loaded here, as there are no registers for values of zoneout that are loaded ahead.
          const bool zoned = seq.zoneout != nullptr && real(vector);
          Floats zoneout = {}, h_prev = {};
          if (zoned) {
            zoneout = load_vector<kSize>(seq.zoneout + at(t, vector, 1));
            if (t + 1 < seq.steps) ptx::prefetch_l2(seq.zoneout + at(t + 1, vector, 1));
            if constexpr (!Cell::kReadsH) {
              h_prev = load_vector<kSize>(t > 0 ? seq.output + at(t - 1, vector, 1)
                                                : seq.h0 + at(0, vector, 1));
            }
          }
          float h[kSize], kept[kSaved][kSize];
#pragma unroll
          for (int e = 0; e < kSize; ++e) {
            float z[kTerms<Cell>], of_unit[kSaved];
            const bool resets = reset[half] != 0;
            const auto product = [&](int gate) {
              const float v = sum[Column::sum(gate, own + e, half)];
              return kHasParts ? v * scale[gate].at[e] * pow2(exponent[half] - kPartShift) : v;
            };
            add_terms<Cell>([&](int gate) { return share[vector][gate].at[e]; },
                            [&](int term) { return bias[term].at[e]; }, product, resets, z);
            Values<float, kStateValues<Cell>> item;
#pragma unroll
            for (int j = 0; j < kStateValues<Cell>; ++j) item.at[j] = old.at[j].at[e];
            h[e] =
                forward_of<Cell, T>(z, resets, {zoned, zoneout.at[e], h_prev.at[e]}, item, of_unit);
#pragma unroll
            for (int j = 0; j < kStateValues<Cell>; ++j) old.at[j].at[e] = item.at[j];
#pragma unroll
            for (int j = 0; j < kSaved; ++j) kept[j][e] = of_unit[j];
          }
#pragma unroll
          for (int j = 0; j < kStateValues<Cell>; ++j) state[vector][j][thread] = old.at[j];
#pragma unroll
          for (int j = 0; j < kSaved; ++j) saved[vector][j] = rounded<T>(kept[j]);
          output[vector] = rounded<T>(h);
          if (!real(vector)) continue;
          if constexpr (kHasParts) {
            const int of_h = forgets || reset[half] != 0 ? kUnitExponent : exponent[half];
            params.exchange.store(t + 1, h, of_h, at(0, vector, 1), batch * hidden);
          } else {
            store_vector(seq.output + at(t, vector, 1), output[vector]);
          }
        }

        __syncwarp();
        if (lane == 0) ptx::red_release_add(counter_of(params.arrived, turns.tile(turn)), 1);

        // The group does not wait for what follows. Every block writes the same exponents, and one
        // that is behind ignores the product of the step in which they change.
        if constexpr (kHasParts) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int64_t row = first_row + half * 8;
            if (!forgets && reset[half] != 0 && row < batch) {
              params.exchange.exponents[row] = kUnitExponent;
            }
          }
        }
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          if (!real(vector)) continue;
          const bool last = t + 1 == seq.steps;
          if constexpr (kHasParts) store_vector(seq.output + at(t, vector, 1), output[vector]);
          if (last) store_vector(seq.h_n + at(0, vector, 1), output[vector]);
          if (seq.saved != nullptr) {
#pragma unroll
            for (int j = 0; j < kSaved; ++j) {
              store_vector(seq.saved + at(t, vector, kSaved) + j * hidden, saved[vector][j]);
            }
          }
#pragma unroll
          for (int j = 0; j < kCarried; ++j) {
            const auto carried = rounded<T>(state[vector][j][thread].at);
            if (seq.saved != nullptr) {
              store_vector(seq.carried + at(t, vector, kCarried) + j * hidden, carried);
            }
            if (last) store_vector(seq.carried_n + at(0, vector, kCarried) + j * hidden, carried);
          }
        }
        const bool again = turn + 1 < turns.count;  // in this step
        if (again || t + 1 < seq.steps) load_turn(again ? t : t + 1, again ? turn + 1 : 0);
      }
    }
  });
}

// W_h in the layout of the 128-byte swizzle. One thread copies 16 bytes of a column.
template <typename Cell, typename T, int Units>
__device__ __forceinline__ void load_weights(const RecurrentSequence<T>& seq,
                                             const WarpgroupShared<Cell, T, Units>& shared,
                                             int64_t first_unit, int k_blocks) {
  constexpr int kColumns = Cell::kGates * Units;
  const bool aligned = (reinterpret_cast<uintptr_t>(seq.w_h) | seq.w_row * sizeof(T)) % 16 == 0;
  for (int i = threadIdx.x; i < kColumns * k_blocks * 8; i += kWarpgroupThreads) {
    const int chunk = i % 8, k_block = i / 8 % k_blocks, column = i / 8 / k_blocks;
    const auto place = WarpgroupColumn<Units>::of(column);
    const int64_t unit = first_unit + place.unit;
    uint4 v{};
    if (unit < seq.hidden) {
      v = load_units(seq.w_h + (place.gate * seq.hidden + unit) * seq.w_row,
                     int64_t{k_block} * kWarpgroupK + chunk * 8, seq.hidden, aligned);
    }
    *reinterpret_cast<uint4*>(shared.weights + (k_block * kColumns + column) * 128 +
                              (chunk ^ column % 8) * 16) = v;
  }
}

// The same in float, split: a warp has a column, and a lane two adjacent elements of each k-block.
template <typename Cell, int Units>
__device__ __forceinline__ void load_weights(const RecurrentSequence<float>& seq,
                                             const WarpgroupShared<Cell, float, Units>& shared,
                                             int64_t first_unit, int k_blocks) {
  constexpr int kColumns = Cell::kGates * Units;
  const int lane = threadIdx.x % 32;
  for (int column = threadIdx.x / 32; column < kColumns; column += kWarpgroupThreads / 32) {
    const auto place = WarpgroupColumn<Units>::of(column);
    const int64_t unit = first_unit + place.unit;
    const float* const row = seq.w_h + (place.gate * seq.hidden + unit) * seq.w_row;
    const auto value = [&](int64_t k) {
      return unit < seq.hidden && k < seq.hidden ? __ldg(row + k) : 0.0f;
    };
    float largest = 0.0f;
    for (int64_t k = lane; k < seq.hidden; k += 32) largest = fmaxf(largest, fabsf(value(k)));
    const int exponent = part_exponent(warp_largest(largest));
    if (lane == 0) (*shared.scales)[place.gate][place.unit] = pow2(exponent - kPartShift);
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      const int64_t k = int64_t{k_block} * kWarpgroupK + 2 * lane;
      const Parts first(value(k) * pow2(kPartShift - exponent)),
          second(value(k + 1) * pow2(kPartShift - exponent));
      unsigned char* const to = shared.weights + (2 * k_block * kColumns + column) * 128 +
                                (lane / 4 ^ column % 8) * 16 + lane % 4 * 4;
      *reinterpret_cast<__half2*>(to) = {first.high, second.high};
      *reinterpret_cast<__half2*>(to + kColumns * 128) = {first.low, second.low};
    }
  }
}

template <typename Cell, typename T, int Units>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_forward_kernel(const __grid_constant__ WarpgroupParams<T> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char bytes[];
  const RecurrentSequence<T>& seq = params.seq;
  const WarpgroupPlan& plan = params.plan;
  const int64_t hidden = seq.hidden;
  const auto k_blocks = static_cast<int>((hidden + kWarpgroupK - 1) / kWarpgroupK);
  const WarpgroupShared<Cell, T, Units> shared(bytes, k_blocks, plan);
  const int group = blockIdx.x / plan.members;
  const int64_t first_unit = int64_t{blockIdx.x % plan.members} * Units;

  if (threadIdx.x == 0) {
    for (int which = 0; which < 2; ++which) {
      shared.ring(which, plan.stages).init();
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&params.h0);
    ptx::prefetch_tensormap(&params.output);
  }

  load_weights(seq, shared, first_unit, k_blocks);
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

template <typename Cell, typename T>
const void* warpgroup_forward_kernel_of(const WarpgroupPlan& plan) {
  const auto of = [&]<int Units>() -> const void* {
    if constexpr (warpgroup_takes(kCellFacts<Cell>, sizeof(T), Units)) {
      return reinterpret_cast<const void*>(&warpgroup_forward_kernel<Cell, T, Units>);
    } else {
      return nullptr;
    }
  };
  switch (plan.units) {
    case 8:
      return of.template operator()<8>();
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
                            .exchange = {},
                            .seq = args,
                            .arrived = static_cast<uint32_t*>(workspace),
                            .plan = plan};
  const int64_t batch = args.batch, hidden = args.hidden, counters = warpgroup_counter_bytes(batch);
  const auto encode = [&](CUtensorMap* map, const void* base, int64_t matrices) {
    return sm90::make_tensor_map(encoder, map, const_cast<void*>(base), batch, hidden, hidden,
                                 kWarpgroupRows, matrices, batch * hidden);
  };
  const void *h0 = args.h0, *output = args.output;
  if constexpr (kParts<T> == 2) {
    auto* const parts = reinterpret_cast<__half*>(static_cast<char*>(workspace) + counters);
    params.exchange = {parts, reinterpret_cast<int32_t*>(parts + 4 * batch * hidden)};
    h0 = output = parts;
  }
  if (auto err = encode(&params.h0, h0, sizeof(T) == 4 ? 4 : 1); err != cudaSuccess) return err;
  if (auto err = encode(&params.output, output, sizeof(T) == 4 ? 4 : args.steps);
      err != cudaSuccess) {
    return err;
  }
  if (auto err = allow_all_shared_bytes(kernel); err != cudaSuccess) return err;
  if (auto err = cudaMemsetAsync(workspace, 0, counters, stream); err != cudaSuccess) return err;
  if constexpr (kParts<T> == 2) {
    if (auto err = launch(split_h0_kernel<float>, ceil_div(batch, kSplitThreads / 32),
                          kSplitThreads, 0, stream, args.h0, params.exchange, batch, hidden);
        err != cudaSuccess) {
      return err;
    }
  }
  void* arguments[] = {&params};
  return cudaLaunchCooperativeKernel(kernel, dim3(plan.members * plan.groups),
                                     dim3(kWarpgroupThreads), arguments, plan.shared_bytes, stream);
}

}  // namespace my_ops::cuda
