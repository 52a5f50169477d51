// Backward over all steps for many rows, on Hopper.
// Plan: dh_t = grad_output_t + dz_{t+1} W_h, where dz has kGates * hidden columns. A cluster of
// four or eight blocks, Split, computes tiles of 64 rows and 72 units. Each block has its share of
// the rows of W_h for these units in shared memory, as the B operand of wgmma. Each of its two
// warpgroups runs tiles of its own, with a ring of its own: while one waits, adds or applies the
// cell, the other multiplies. A warpgroup multiplies the block's share of dz's columns. Then it
// adds the partial sums of its share of the tile's rows, which it reads from the shared memory of
// the cluster's blocks, and applies the cell's derivative. dz_t is stored to grad_terms, in float
// also as fp16 parts (warpgroup_parts.cuh). From there TMA loads it in the next round, once the
// counter of the rows shows that all of it is there.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "recurrent/warpgroup_parts.cuh"

namespace my_ops::cuda {

template <typename T>
struct WarpgroupBackwardParams {
  CUtensorMap grad_z;  // [steps, batch, kGates * hidden], in grad_terms; in float, the exchange
  GradPartsExchange exchange;  // in float
  RecurrentSequenceBackward<T> seq;
  uint32_t* arrived;  // [tiles of rows][kArrivedStride]: blocks that have finished a step
  WarpgroupBackwardPlan plan;
};

constexpr int kQuads = kBackwardUnits / 4;  // of units, in a row
template <typename Cell>
constexpr int kBackwardTileK = backward_tile_k(Cell::kGates);

// The sums of a tile over a block's share of k, in the memory of its ring. In every round the
// warpgroups of the cluster's blocks that run the tile meet twice: when these sums are written, and
// when they have been read.
struct PartialSums {
  float* sums;  // [kWarpgroupRows][kBackwardUnits]
  uint64_t *written, *read;
  uint32_t phase = 0;

  // Called by one thread.
  __device__ __forceinline__ void init(int blocks) const {
    ptx::mbarrier_init(written, blocks);
    ptx::mbarrier_init(read, blocks);
  }
};

// A block's dynamic shared memory.
template <typename Cell, typename T, int Split>
struct WarpgroupBackwardShared {
  static constexpr int kOwnRows = kWarpgroupRows / Split;  // of a tile, whose sums a block adds
  static constexpr int kOwnQuads = kOwnRows * kQuads;
  using State = Vector<float, 4>[kStateRoom<Cell>][kOwnQuads];
  unsigned char *weights, *rings;
  uint64_t* barriers;
  State* state;  // one for each tile in flight, those of a warpgroup together
  // In float.
  float* of_column;  // [kBackwardUnits]: powers of two of W_h, times 2^kGradPartShift
  int* largest;      // [2][kOwnRows]: the largest gradient of a row, of each warpgroup
  int stages;

  __device__ __forceinline__ WarpgroupBackwardShared(unsigned char* bytes,
                                                     const WarpgroupBackwardPlan& plan)
      : weights(bytes),
        rings(bytes + plan.k_blocks * kBackwardUnits * 128 * kParts<T>),
        barriers(reinterpret_cast<uint64_t*>(rings + 2 * plan.stages * kWarpgroupStageBytes)),
        state(reinterpret_cast<State*>(barriers + 4 * plan.stages + 4)),
        of_column(reinterpret_cast<float*>(state + 2 * plan.turns)),
        largest(reinterpret_cast<int*>(of_column + kBackwardUnits)),
        stages(plan.stages) {}
  __device__ __forceinline__ TileRing ring(int which) const {
    uint64_t* const full = barriers + which * 2 * stages;
    return {rings + which * stages * kWarpgroupStageBytes, full, full + stages, stages};
  }
  __device__ __forceinline__ PartialSums partial_sums(int which) const {
    uint64_t* const written = barriers + 4 * stages + 2 * which;
    return {reinterpret_cast<float*>(ring(which).stages_at), written, written + 1};
  }
};

// Run by one thread: keeps the ring of a warpgroup full.
template <int Split, typename T>
__device__ __forceinline__ void produce_grad_z(const WarpgroupBackwardParams<T>& params,
                                               TileRing ring, PartialSums partial, int group,
                                               int which, int rank) {
  const WarpgroupBackwardPlan& plan = params.plan;
  const uint32_t arrivals = Split * plan.tiles;  // per step
  const int k_blocks = kParts<T> * plan.k_blocks;
  each_turns(params.seq.batch, plan, group, which, [&](const Turns& turns) {
    for (int t = static_cast<int>(params.seq.steps) - 1, step = 1; t >= 0; --t, ++step) {
      for (int turn = 0; turn < turns.count; ++turn) {
        const int tile = turns.tile(turn);
        ptx::mbarrier_wait(partial.read, partial.phase ^ 1);
        partial.phase ^= 1;
        while (ptx::ld_acquire(params.arrived + tile * kArrivedStride) < arrivals * step) {
        }
        ptx::fence_proxy_async_global();
        ptx::fence_proxy_async();  // the partial sums have been there
        for (int k_block = 0; k_block < k_blocks; ++k_block) {
          ring.fill(&params.grad_z, (rank * k_blocks + k_block) * kWarpgroupK,
                    tile * kWarpgroupRows, kParts<T> == 2 ? t % 2 : t);
        }
      }
    }
  });
}

// Four units of a row as they are loaded: two to a register in 16 bits.
template <typename T>
using LoadedQuad = std::conditional_t<sizeof(T) == 2, uint2, float4>;

template <typename T>
__device__ __forceinline__ float element(uint2 quad, int e) {
  const float2 pair = unpack<T>(e < 2 ? quad.x : quad.y);
  return e % 2 == 0 ? pair.x : pair.y;
}
template <typename T>
__device__ __forceinline__ float element(float4 quad, int e) {
  return (&quad.x)[e];
}

// What a thread reads for a step of four units of a row.
template <typename Cell, typename T>
struct BackwardQuad {
  Kept<Cell, LoadedQuad<T>> values;
  uint8_t reset_next;
};

template <typename Cell, typename T, int Split>
__device__ __forceinline__ void consume_grad_z(
    const WarpgroupBackwardParams<T>& params, const WarpgroupBackwardShared<Cell, T, Split>& shared,
    TileRing ring, PartialSums partial, int group, int which, int64_t first_unit, int rank) {
  using Shared = WarpgroupBackwardShared<Cell, T, Split>;
  constexpr int kColumns = kBackwardUnits, kCarried = Cell::kCarried;
  constexpr int kOwnRows = Shared::kOwnRows, kOwnQuads = (Shared::kOwnQuads + 127) / 128;
  constexpr bool kHasParts = kParts<T> == 2;
  const RecurrentSequenceBackward<T>& seq = params.seq;
  const int64_t hidden = seq.hidden, batch = seq.batch;
  const bool zoned = seq.zoneout != nullptr;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  auto* const states = shared.state + which * params.plan.turns;
  int* const largest_of = shared.largest + which * kOwnRows;
  const auto meet = [which] { ptx::bar_sync(1 + which, 128); };

  each_turns(batch, params.plan, group, which, [&](const Turns& turns) {
    int row_tile = turns.tile(0);  // whose turn it is
    // A quad is four units of a row of the block's share.
    const auto own_quad = [&](int quad) { return thread + quad * 128; };
    const auto own_row = [&](int quad) { return own_quad(quad) / kQuads; };
    const auto own_unit = [&](int quad) { return own_quad(quad) % kQuads * 4; };
    const auto row_of = [&](int quad) {
      return int64_t{row_tile} * kWarpgroupRows + rank * kOwnRows + own_row(quad);
    };
    const auto unit_of = [&](int quad) { return first_unit + own_unit(quad); };
    const auto real = [&](int quad) {
      return own_row(quad) < kOwnRows && row_of(quad) < batch && unit_of(quad) < hidden;
    };
    const auto at = [&](int64_t t, int quad, int values) {
      return (t * batch + row_of(quad)) * values * hidden + unit_of(quad);
    };

    BackwardQuad<Cell, T> kept[kOwnQuads] = {};
    const auto load_step = [&](int64_t t) {
#pragma unroll
      for (int quad = 0; quad < kOwnQuads; ++quad) {
        BackwardQuad<Cell, T>& to = kept[quad];
        // In float: nothing is kept in registers while the product runs.
        if constexpr (kHasParts) to = {};
        if (!real(quad)) continue;
        const int64_t line = t * batch + row_of(quad);
        if (seq.reset != nullptr && t + 1 < seq.steps) {
          to.reset_next = load_byte(seq.reset + line + batch);
        }
        if (t < 0) continue;
        const auto of_quad = [&](int64_t step, int values) { return at(step, quad, values); };
        to.values.load(seq, t, line, of_quad);
      }
    };

    // In float: the gates' gradients as parts, with a power of two for each row.
    const auto publish = [&](int64_t t, const float (&grad_terms)[kOwnQuads][kTerms<Cell>][4]) {
      const GradPartsExchange& to = params.exchange;
      const int64_t tile = first_unit / kBackwardUnits;
      const auto grad = [&](int quad, int gate, int e) {
        return grad_terms[quad][Cell::kApart + gate][e];
      };
#pragma unroll
      for (int quad = 0; quad < kOwnQuads; ++quad) {
        if (!real(quad)) continue;
        float largest = 0.0f;
#pragma unroll
        for (int gate = 0; gate < Cell::kGates; ++gate) {
#pragma unroll
          for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(grad(quad, gate, e)));
        }
        atomicMax(largest_of + own_row(quad), __float_as_int(largest));
      }
      meet();
#pragma unroll
      for (int quad = 0; quad < kOwnQuads; ++quad) {
        if (!real(quad)) continue;
        const int exponent = part_exponent(__int_as_float(largest_of[own_row(quad)]));
        if (own_unit(quad) == 0) {
          to.scale(t, tile, row_of(quad)) = pow2(exponent - kPartShift) * pow2(-kGradPartShift);
        }
#pragma unroll
        for (int gate = 0; gate < Cell::kGates; ++gate) {
          const int64_t column =
              tile * kBackwardTileK<Cell> + gate * kBackwardUnits + own_unit(quad);
          const float values[4] = {grad(quad, gate, 0), grad(quad, gate, 1), grad(quad, gate, 2),
                                   grad(quad, gate, 3)};
          to.store(t, values, exponent, row_of(quad), column);
        }
      }
    };
    const auto store_terms = [&](int64_t t, const float (&grad_terms)[kOwnQuads][kTerms<Cell>][4]) {
#pragma unroll
      for (int quad = 0; quad < kOwnQuads; ++quad) {
        if (!real(quad)) continue;
#pragma unroll
        for (int term = 0; term < kTerms<Cell>; ++term) {
          store_vector(seq.grad_terms + at(t, quad, kTerms<Cell>) + term * hidden,
                       rounded<T>(grad_terms[quad][term]));
        }
      }
    };

    if constexpr (!kHasParts) load_step(seq.steps - 1);
    for (int64_t t = seq.steps - 1; t >= -1; --t) {
      for (int turn = 0; turn < turns.count; ++turn) {
        row_tile = turns.tile(turn);
        float through[kOwnQuads][4] = {};
        Values<float, kStateValues<Cell>> state[kOwnQuads][4] = {};
        if (t + 1 == seq.steps) {
          if constexpr (kHasParts) load_step(t);
          meet();  // the largest gradients of the turn before are cleared
#pragma unroll
          for (int quad = 0; quad < kOwnQuads; ++quad) {
            if (!real(quad)) continue;
            if (seq.grad_h_n != nullptr) {
              const auto v = load_vector<4>(seq.grad_h_n + at(0, quad, 1));
#pragma unroll
              for (int e = 0; e < 4; ++e) through[quad][e] = v.at[e];
            }
            if (seq.grad_carried_n != nullptr) {
#pragma unroll
              for (int j = 0; j < kCarried; ++j) {
                const auto v =
                    load_vector<4>(seq.grad_carried_n + at(0, quad, kCarried) + j * hidden);
#pragma unroll
                for (int e = 0; e < 4; ++e) state[quad][e].at[j] = v.at[e];
              }
            }
          }
        } else {
          float sum[kColumns / 2];
          if constexpr (kHasParts) {
            const int64_t first_row =
                int64_t{row_tile} * kWarpgroupRows + thread / 32 * 16 + lane / 4;
            const auto scale_of = [&](int tile, int half) {
              const int64_t row = min(first_row + half * 8, batch - 1);
              return __ldcg(&params.exchange.scale(t + 1, min(tile, params.plan.tiles - 1), row));
            };
            multiply_scaled_parts<kColumns, kBackwardTileK<Cell>>(
                ring, shared.weights, rank * params.plan.k_blocks * kWarpgroupK,
                2 * params.plan.k_blocks, scale_of, sum);
          } else {
            multiply_k_blocks<T, kColumns>(ring, shared.weights, params.plan.k_blocks, sum);
          }

          meet();  // the whole ring has been read
          const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j) {
            if constexpr (kHasParts) {
              const auto scale =
                  *reinterpret_cast<const float2*>(shared.of_column + 8 * j + lane % 4 * 2);
#pragma unroll
              for (int i = 0; i < 4; ++i) sum[4 * j + i] *= i % 2 == 0 ? scale.x : scale.y;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              *reinterpret_cast<float2*>(partial.sums + (row + half * 8) * kColumns + 8 * j +
                                         lane % 4 * 2) = {sum[4 * j + 2 * half],
                                                          sum[4 * j + 2 * half + 1]};
            }
          }
          if constexpr (kHasParts) load_step(t);
          meet();
          if (thread < Split) ptx::mbarrier_release_cluster(partial.written, thread);
          ptx::mbarrier_wait<ptx::Scope::kCluster>(partial.written, partial.phase);
          partial.phase ^= 1;
#pragma unroll
          for (int quad = 0; quad < kOwnQuads; ++quad) {
            if (!real(quad)) continue;
#pragma unroll
            for (int j = 0; j < kStateValues<Cell>; ++j) {
              const auto v = states[turn][j][own_quad(quad)];
#pragma unroll
              for (int e = 0; e < 4; ++e) state[quad][e].at[j] = v.at[e];
            }
            float4 v[Split];
#pragma unroll
            for (int peer = 0; peer < Split; ++peer) {
              const float* const from =
                  partial.sums + (rank * kOwnRows + own_row(quad)) * kColumns + own_unit(quad);
              v[peer] = ptx::ld_cluster(ptx::mapa(from, peer));
            }
            const auto grad_kept = zoned && !Cell::kReadsH
                                       ? load_vector<4>(seq.grad_kept + at(0, quad, 1))
                                       : Vector<float, 4>{};
            const uint8_t reset_next = kept[quad].reset_next;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              float total = 0.0f;
#pragma unroll
              for (int peer = 0; peer < Split; ++peer) total += (&v[peer].x)[e];
              through[quad][e] = Kept<Cell>::through(reset_next != 0 ? 0.0f : total, state[quad][e],
                                                     zoned, grad_kept.at[e]);
            }
          }
        }
        // Called when the warpgroup's threads have met after they stored what they made of the
        // sums: so these have been read, and nothing is published. At cluster scope it would take 3
        // to 10 % of a step in 16 bits.
        const auto release_sums = [&] {
          if (t + 1 < seq.steps && thread < Split) {
            ptx::mbarrier_arrive_cluster(partial.read, thread);
          }
        };

        if (t < 0) {
#pragma unroll
          for (int quad = 0; quad < kOwnQuads; ++quad) {
            if (!real(quad)) continue;
            store_vector(seq.grad_h0 + at(0, quad, 1), rounded<T>(through[quad]));
#pragma unroll
            for (int j = 0; j < kCarried; ++j) {
              float grad[4];
#pragma unroll
              for (int e = 0; e < 4; ++e) grad[e] = state[quad][e].at[j];
              store_vector(seq.grad_carried0 + at(0, quad, kCarried) + j * hidden,
                           rounded<T>(grad));
            }
          }
          meet();
          release_sums();
        } else {
          float grad_terms[kOwnQuads][kTerms<Cell>][4];
#pragma unroll
          for (int quad = 0; quad < kOwnQuads; ++quad) {
            if (!real(quad)) continue;
            const Kept<Cell, LoadedQuad<T>>& from = kept[quad].values;
            const auto zoneout =
                zoned ? load_vector<4>(seq.zoneout + at(t, quad, 1)) : Vector<float, 4>{};
            float grad_kept[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const Kept<Cell> item =
                  from.item([e](LoadedQuad<T> four) { return element<T>(four, e); });
              float of_unit[kTerms<Cell>], published[Cell::kGates];
              item.template backward<T>(through[quad][e], true, zoned, zoneout.at[e], grad_kept[e],
                                        state[quad][e], of_unit, published);
#pragma unroll
              for (int term = 0; term < kTerms<Cell>; ++term) {
                grad_terms[quad][term][e] = of_unit[term];
              }
            }
#pragma unroll
            for (int j = 0; j < kStateValues<Cell>; ++j) {
              states[turn][j][own_quad(quad)] = {state[quad][0].at[j], state[quad][1].at[j],
                                                 state[quad][2].at[j], state[quad][3].at[j]};
            }
            if (zoned && !Cell::kReadsH) {
              store_vector(seq.grad_kept + at(0, quad, 1), rounded<float>(grad_kept));
            }
          }
          if constexpr (kHasParts) {
            publish(t, grad_terms);
          } else {
            store_terms(t, grad_terms);
          }
          meet();
          release_sums();
          if (thread == 127) ptx::red_release_add(params.arrived + row_tile * kArrivedStride, 1);
          if constexpr (kHasParts) {
            if (thread < kOwnRows) largest_of[thread] = 0;
            store_terms(t, grad_terms);  // the group does not wait for these
            // There are no registers for what is loaded before the product.
            for (int quad = 0; quad < kOwnQuads; ++quad) {
              if (!real(quad)) continue;
              Kept<Cell>::template prefetch<1>(
                  seq, t, [&](int64_t step, int values) { return at(step, quad, values); });
            }
          }
        }
        if constexpr (!kHasParts) {
          const bool again = turn + 1 < turns.count;  // in this step
          row_tile = turns.tile(again ? turn + 1 : 0);
          if (again || t >= 0) load_step(again ? t : t - 1);
        }
      }
    }
  });
}

// A block's share of W_h, transposed, in the layout of the 128-byte swizzle. Threads next to each
// other read units next to each other.
template <typename Cell, typename T, int Split>
__device__ __forceinline__ void load_weights(const RecurrentSequenceBackward<T>& seq,
                                             const WarpgroupBackwardPlan& plan,
                                             const WarpgroupBackwardShared<Cell, T, Split>& shared,
                                             int64_t first_unit, int rank) {
  const int64_t first_k = int64_t{rank} * plan.k_blocks * kWarpgroupK, hidden = seq.hidden;
  const auto place = [](int chunk, int column) {
    return (chunk / 8 * kParts<T> * kBackwardUnits + column) * 128 + (chunk % 8 ^ column % 8) * 16;
  };
  const int chunks = plan.k_blocks * 8;  // of 8 rows of W_h
  if constexpr (kParts<T> == 2) {
    // The element of the block's row k, in the order of the exchange.
    const auto element = [&](int64_t k, int column) {
      constexpr int kTileK = kBackwardTileK<Cell>;
      const int64_t tile = k / kTileK, of_tile = k % kTileK;
      const int64_t gate = of_tile / kBackwardUnits,
                    unit = tile * kBackwardUnits + of_tile % kBackwardUnits;
      const bool exists = gate < Cell::kGates && unit < hidden && first_unit + column < hidden;
      return exists ? __ldg(seq.w_h + (gate * hidden + unit) * seq.w_row + first_unit + column)
                    : 0.0f;
    };
    auto* const largest = reinterpret_cast<int*>(shared.of_column);
    if (threadIdx.x < kBackwardUnits) largest[threadIdx.x] = 0;
    if (threadIdx.x < 2 * shared.kOwnRows) shared.largest[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < chunks * kBackwardUnits; i += kWarpgroupThreads) {
      const int column = i % kBackwardUnits, chunk = i / kBackwardUnits;
      float of_chunk = 0.0f;
      for (int e = 0; e < 8; ++e) {
        of_chunk = fmaxf(of_chunk, fabsf(element(first_k + chunk * 8 + e, column)));
      }
      atomicMax(largest + column, __float_as_int(of_chunk));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < chunks * kBackwardUnits; i += kWarpgroupThreads) {
      const int column = i % kBackwardUnits, chunk = i / kBackwardUnits;
      const float scale = pow2(kPartShift - part_exponent(__int_as_float(largest[column])));
      Vector<__half, 8> high, low;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const Parts of(element(first_k + chunk * 8 + e, column) * scale);
        high.at[e] = of.high;
        low.at[e] = of.low;
      }
      unsigned char* const to = shared.weights + place(chunk, column);
      *reinterpret_cast<Vector<__half, 8>*>(to) = high;
      *reinterpret_cast<Vector<__half, 8>*>(to + kBackwardUnits * 128) = low;
    }
    __syncthreads();
    if (threadIdx.x < kBackwardUnits) {
      const int exponent = part_exponent(__int_as_float(largest[threadIdx.x]));
      shared.of_column[threadIdx.x] = pow2(exponent - kPartShift + kGradPartShift);
    }
  } else {
    for (int i = threadIdx.x; i < chunks * kBackwardUnits; i += kWarpgroupThreads) {
      const int column = i % kBackwardUnits, chunk = i / kBackwardUnits;
      const int64_t k = first_k + chunk * 8, unit = first_unit + column;
      *reinterpret_cast<uint4*>(shared.weights + place(chunk, column)) = gather(
          seq.w_h + k * seq.w_row + unit, seq.w_row, unit < hidden ? Cell::kGates * hidden - k : 0);
    }
  }
}

template <typename Cell, typename T, int Split>
__global__ void __launch_bounds__(kWarpgroupThreads, 1)
    warpgroup_backward_kernel(const __grid_constant__ WarpgroupBackwardParams<T> params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char bytes[];
  const RecurrentSequenceBackward<T>& seq = params.seq;
  const WarpgroupBackwardPlan& plan = params.plan;
  const int64_t hidden = seq.hidden;
  const int rank = ptx::cluster_ctarank(), cluster = blockIdx.x / Split;
  const int64_t first_unit = int64_t{cluster % plan.tiles} * kBackwardUnits;
  const WarpgroupBackwardShared<Cell, T, Split> shared(bytes, plan);

  if (threadIdx.x == 0) {
    for (int which = 0; which < 2; ++which) {
      shared.ring(which).init();
      shared.partial_sums(which).init(Split);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&params.grad_z);
  }
  load_weights(seq, plan, shared, first_unit, rank);
  ptx::fence_proxy_async();  // wgmma reads W_h
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();

  const int group = cluster / plan.tiles;
  const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);  // provably uniform
  if (warpgroup == 2) {
    ptx::setmaxnreg_dec<kWarpgroupFewRegisters>();
    const int which = threadIdx.x % 128 / 32;
    if (which < 2 && threadIdx.x % 32 == 0) {
      produce_grad_z<Split>(params, shared.ring(which), shared.partial_sums(which), group, which,
                            rank);
    }
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<kWarpgroupManyRegisters>();
    consume_grad_z(params, shared, shared.ring(warpgroup), shared.partial_sums(warpgroup), group,
                   warpgroup, first_unit, rank);
  }
  // No block ends while another reads its sums or signals it.
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
#endif
}

// ---- host ----

inline int64_t warpgroup_backward_counter_bytes(int64_t batch) {
  return ceil_div(batch, kWarpgroupRows) * kArrivedStride * int64_t{sizeof(uint32_t)};
}

// Of the workspace: the counters and, in float, the parts of two steps and the rows' scales.
template <typename Cell, typename T>
int64_t warpgroup_backward_exchange_bytes(int64_t batch, int64_t hidden) {
  const int64_t tiles = ceil_div(hidden, kBackwardUnits);
  const int64_t columns = tiles * kBackwardTileK<Cell>;
  const int64_t parts = sizeof(T) == 4 ? 4 * batch * columns * int64_t{sizeof(__half)} +
                                             2 * tiles * batch * int64_t{sizeof(float)}
                                       : 0;
  return warpgroup_backward_counter_bytes(batch) + parts;
}

template <typename Cell, typename T>
const void* warpgroup_backward_kernel_of(const WarpgroupBackwardPlan& plan) {
  return plan.split == 8 ? reinterpret_cast<const void*>(&warpgroup_backward_kernel<Cell, T, 8>)
                         : reinterpret_cast<const void*>(&warpgroup_backward_kernel<Cell, T, 4>);
}

// Clusters wait for each other, so the launch is cooperative.
struct WarpgroupBackwardLaunch {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};

  WarpgroupBackwardLaunch(const WarpgroupBackwardPlan& plan, cudaStream_t stream) {
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {static_cast<unsigned>(plan.split), 1, 1};
    attributes[1].id = cudaLaunchAttributeCooperative;
    attributes[1].val.cooperative = 1;
    config.gridDim = dim3(plan.tiles * plan.groups * plan.split);
    config.blockDim = dim3(kWarpgroupThreads);
    config.dynamicSmemBytes = plan.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
  }
  WarpgroupBackwardLaunch(const WarpgroupBackwardLaunch&) = delete;
};

// Whether the device holds all clusters of the plan at once, which depends on how its SMs are
// distributed among GPCs.
template <typename Cell, typename T>
bool warpgroup_backward_fits(const WarpgroupBackwardPlan& plan) {
  const void* const kernel = warpgroup_backward_kernel_of<Cell, T>(plan);
  if (kernel == nullptr) return false;
  const WarpgroupBackwardLaunch launch(plan, nullptr);
  int clusters = 0;
  if (allow_all_shared_bytes(kernel) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the refusal is the answer; clear the error
    return false;
  }
  return clusters >= plan.tiles * plan.groups;
}

// Empties the counters and launches.
template <typename Cell, typename T>
cudaError_t warpgroup_backward(const RecurrentSequenceBackward<T>& args,
                               const WarpgroupBackwardPlan& plan, void* workspace,
                               cudaStream_t stream) {
  const void* const kernel = warpgroup_backward_kernel_of<Cell, T>(plan);
  if (kernel == nullptr) return cudaErrorNotSupported;
  sm90::TensorMapEncoder encoder;  // if it fails, it fails before any launch
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  WarpgroupBackwardParams<T> params{.grad_z = {},
                                    .exchange = {},
                                    .seq = args,
                                    .arrived = static_cast<uint32_t*>(workspace),
                                    .plan = plan};
  const int64_t batch = args.batch, hidden = args.hidden;
  const auto encode = [&](void* base, int64_t columns, int64_t width, int64_t matrices) {
    return sm90::make_tensor_map(encoder, &params.grad_z, base, batch, columns, width,
                                 kWarpgroupRows, matrices, batch * width);
  };
  cudaError_t encoded;
  if constexpr (kParts<T> == 2) {
    const int64_t columns = int64_t{plan.tiles} * kBackwardTileK<Cell>;
    auto* const parts = reinterpret_cast<__half*>(static_cast<char*>(workspace) +
                                                  warpgroup_backward_counter_bytes(batch));
    params.exchange = {parts, reinterpret_cast<float*>(parts + 4 * batch * columns), columns,
                       plan.tiles, batch};
    encoded = encode(parts, 2 * columns, 2 * columns, 2);
  } else {
    encoded = encode(args.grad_terms + Cell::kApart * hidden, Cell::kGates * hidden,
                     kTerms<Cell> * hidden, args.steps);
  }
  if (encoded != cudaSuccess) return encoded;
  if (auto err = allow_all_shared_bytes(kernel); err != cudaSuccess) return err;
  // The counters, and columns of parts that belong to no unit.
  if (auto err = cudaMemsetAsync(workspace, 0,
                                 warpgroup_backward_exchange_bytes<Cell, T>(batch, hidden), stream);
      err != cudaSuccess) {
    return err;
  }
  const WarpgroupBackwardLaunch launch(plan, stream);
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&launch.config, kernel, arguments);
}

}  // namespace my_ops::cuda
