// What a warpgroup of the kernel in warpgroup/backward.cuh does with its tiles: first the parts of
// a step, then all steps, consume_grad_z.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "recurrent/warpgroup/backward_shared.cuh"

namespace my_ops::cuda {

// A quad as it is loaded: two units to a register in 16 bits.
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

// What a thread reads for a step of a quad.
template <typename Cell, typename T>
struct BackwardQuad {
  Kept<Cell, LoadedQuad<T>> values;
  uint8_t reset_next;
};

// The gradients of a quad's state, and of its terms.
template <typename Cell>
using StateGradients = Values<float, kStateValues<Cell>>[4];
template <typename Cell>
using TermGradients = float[kTerms<Cell>][4];

// Where a thread's quads are: the threads of a warpgroup divide those of the block's share.
template <int Split>
struct ThreadQuads {
  int64_t batch, hidden, first_unit;
  int thread, rank;
  int row_tile;  // whose turn it is

  // In the block's share of the tile.
  __device__ __forceinline__ int own_quad(int quad) const { return thread + quad * 128; }
  __device__ __forceinline__ int own_row(int quad) const { return own_quad(quad) / kRowQuads; }
  __device__ __forceinline__ int own_unit(int quad) const { return own_quad(quad) % kRowQuads * 4; }

  __device__ __forceinline__ int64_t row(int quad) const {
    return int64_t{row_tile} * kWarpgroupRows + rank * kOwnRows<Split> + own_row(quad);
  }
  __device__ __forceinline__ int64_t unit(int quad) const { return first_unit + own_unit(quad); }
  __device__ __forceinline__ bool real(int quad) const {
    return own_row(quad) < kOwnRows<Split> && row(quad) < batch && unit(quad) < hidden;
  }
  // The index in [steps, batch, values, hidden].
  __device__ __forceinline__ int64_t at(int64_t t, int quad, int values) const {
    return (t * batch + row(quad)) * values * hidden + unit(quad);
  }
};

// What step t reads, and the reset of the step after; t is -1 in the last round.
template <typename Cell, typename T, int Split>
__device__ __forceinline__ void load_step(const RecurrentSequenceBackward<T>& seq,
                                          const ThreadQuads<Split>& quads, int64_t t,
                                          BackwardQuad<Cell, T> (&kept)[kThreadQuads<Split>]) {
#pragma unroll
  for (int quad = 0; quad < kThreadQuads<Split>; ++quad) {
    BackwardQuad<Cell, T>& to = kept[quad];
    // In float: nothing is kept in registers while the product runs.
    if constexpr (kParts<T> == 2) to = {};
    if (!quads.real(quad)) continue;
    const int64_t line = t * quads.batch + quads.row(quad);
    if (seq.reset != nullptr && t + 1 < seq.steps) {
      to.reset_next = load_byte(seq.reset + line + quads.batch);
    }
    if (t < 0) continue;
    const auto at = [&](int64_t step, int values) { return quads.at(step, quad, values); };
    to.values.load(seq, t, line, at);
  }
}

// In float: there are no registers for what is loaded before the product.
template <typename Cell, typename T, int Split>
__device__ __forceinline__ void prefetch_step(const RecurrentSequenceBackward<T>& seq,
                                              const ThreadQuads<Split>& quads, int64_t t) {
  for (int quad = 0; quad < kThreadQuads<Split>; ++quad) {
    if (!quads.real(quad)) continue;
    Kept<Cell>::template prefetch<1>(
        seq, t, [&](int64_t step, int values) { return quads.at(step, quad, values); });
  }
}

// The product of dz_t and the block's share of W_h, for the whole tile.
template <typename Cell, typename T, int Split>
__device__ __forceinline__ void multiply_grad_z(
    const WarpgroupBackwardParams<T>& params, const WarpgroupBackwardShared<Cell, T, Split>& shared,
    TileRing& ring, const ThreadQuads<Split>& quads, int lane, int64_t t,
    float (&sum)[kBackwardUnits / 2]) {
  const WarpgroupBackwardPlan& plan = params.plan;
  if constexpr (kParts<T> == 2) {
    const int64_t first_row =
        int64_t{quads.row_tile} * kWarpgroupRows + quads.thread / 32 * 16 + lane / 4;
    const auto scale_of = [&](int tile, int half) {
      const int64_t row = min(first_row + half * 8, quads.batch - 1);
      return __ldcg(&params.exchange.scale(t, min(tile, plan.tiles - 1), row));
    };
    multiply_scaled_parts<kBackwardUnits, kBackwardTileK<Cell>>(
        ring, shared.weights, quads.rank * plan.k_blocks * kWarpgroupK, 2 * plan.k_blocks, scale_of,
        sum);
  } else {
    multiply_k_blocks<T, kBackwardUnits>(ring, shared.weights, plan.k_blocks, sum);
  }
}

// In float the sums get the scales of their columns.
template <typename Cell, typename T, int Split>
__device__ __forceinline__ void write_sums(const WarpgroupBackwardShared<Cell, T, Split>& shared,
                                           int thread, int lane, float (&sum)[kBackwardUnits / 2],
                                           float* to) {
  const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kBackwardUnits / 8; ++j) {
    if constexpr (kParts<T> == 2) {
      const auto scale = *reinterpret_cast<const float2*>(shared.of_column + 8 * j + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[4 * j + i] *= i % 2 == 0 ? scale.x : scale.y;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2*>(to + (row + half * 8) * kBackwardUnits + 8 * j + lane % 4 * 2) = {
          sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]};
    }
  }
}

// The sums of a quad in each of the cluster's blocks, and their total for one of its units.
template <int Split>
__device__ __forceinline__ void load_sums(const ThreadQuads<Split>& quads, int quad,
                                          const float* sums, float4 (&of_block)[Split]) {
  const int row = quads.rank * kOwnRows<Split> + quads.own_row(quad);
#pragma unroll
  for (int peer = 0; peer < Split; ++peer) {
    const float* const from = sums + row * kBackwardUnits + quads.own_unit(quad);
    of_block[peer] = ptx::ld_cluster(ptx::mapa(from, peer));
  }
}
template <int Split>
__device__ __forceinline__ float add_sums(const float4 (&of_block)[Split], int e) {
  float total = 0.0f;
#pragma unroll
  for (int peer = 0; peer < Split; ++peer) total += (&of_block[peer].x)[e];
  return total;
}

template <typename Cell, int Split>
__device__ __forceinline__ void store_state(const StateGradients<Cell>& state, int own_quad,
                                            BackwardState<Cell, Split>& to) {
#pragma unroll
  for (int j = 0; j < kStateValues<Cell>; ++j) {
    to[j][own_quad] = {state[0].at[j], state[1].at[j], state[2].at[j], state[3].at[j]};
  }
}

template <typename Cell, typename T, int Split>
__device__ __forceinline__ void store_terms(
    const RecurrentSequenceBackward<T>& seq, const ThreadQuads<Split>& quads, int64_t t,
    const TermGradients<Cell> (&grad_terms)[kThreadQuads<Split>]) {
#pragma unroll
  for (int quad = 0; quad < kThreadQuads<Split>; ++quad) {
    if (!quads.real(quad)) continue;
#pragma unroll
    for (int term = 0; term < kTerms<Cell>; ++term) {
      store_vector(seq.grad_terms + quads.at(t, quad, kTerms<Cell>) + term * quads.hidden,
                   rounded<T>(grad_terms[quad][term]));
    }
  }
}

// In float: the gates' gradients as parts, with a power of two for each row. largest_of: of the
// block's rows.
template <typename Cell, int Split, typename Meet>
__device__ __forceinline__ void store_parts(
    const GradPartsExchange& to, const ThreadQuads<Split>& quads, int64_t t,
    const TermGradients<Cell> (&grad_terms)[kThreadQuads<Split>], int* largest_of, Meet meet) {
  const int64_t tile = quads.first_unit / kBackwardUnits;
  const auto grad = [&](int quad, int gate, int e) {
    return grad_terms[quad][Cell::kApart + gate][e];
  };
#pragma unroll
  for (int quad = 0; quad < kThreadQuads<Split>; ++quad) {
    if (!quads.real(quad)) continue;
    float largest = 0.0f;
#pragma unroll
    for (int gate = 0; gate < Cell::kGates; ++gate) {
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = fmaxf(largest, fabsf(grad(quad, gate, e)));
    }
    atomicMax(largest_of + quads.own_row(quad), __float_as_int(largest));
  }
  meet();
#pragma unroll
  for (int quad = 0; quad < kThreadQuads<Split>; ++quad) {
    if (!quads.real(quad)) continue;
    const int exponent = part_exponent(__int_as_float(largest_of[quads.own_row(quad)]));
    if (quads.own_unit(quad) == 0) {
      to.scale(t, tile, quads.row(quad)) = pow2(exponent - kPartShift) * pow2(-kGradPartShift);
    }
#pragma unroll
    for (int gate = 0; gate < Cell::kGates; ++gate) {
      const int64_t column =
          tile * kBackwardTileK<Cell> + gate * kBackwardUnits + quads.own_unit(quad);
      const float values[4] = {grad(quad, gate, 0), grad(quad, gate, 1), grad(quad, gate, 2),
                               grad(quad, gate, 3)};
      to.store(t, values, exponent, quads.row(quad), column);
    }
  }
}

template <typename Cell, typename T, int Split>
__device__ __forceinline__ void store_first(
    const RecurrentSequenceBackward<T>& seq, const ThreadQuads<Split>& quads,
    const float (&through)[kThreadQuads<Split>][4],
    const StateGradients<Cell> (&state)[kThreadQuads<Split>]) {
#pragma unroll
  for (int quad = 0; quad < kThreadQuads<Split>; ++quad) {
    if (!quads.real(quad)) continue;
    store_vector(seq.grad_h0 + quads.at(0, quad, 1), rounded<T>(through[quad]));
#pragma unroll
    for (int j = 0; j < Cell::kCarried; ++j) {
      float grad[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) grad[e] = state[quad][e].at[j];
      store_vector(seq.grad_carried0 + quads.at(0, quad, Cell::kCarried) + j * quads.hidden,
                   rounded<T>(grad));
    }
  }
}

template <typename Cell, typename T, int Split>
__device__ __forceinline__ void consume_grad_z(
    const WarpgroupBackwardParams<T>& params, const WarpgroupBackwardShared<Cell, T, Split>& shared,
    TileRing ring, PartialSums partial, int group, int which, int64_t first_unit, int rank) {
  constexpr int kQuads = kThreadQuads<Split>;
  constexpr bool kHasParts = kParts<T> == 2;
  const RecurrentSequenceBackward<T>& seq = params.seq;
  const int64_t hidden = seq.hidden, batch = seq.batch;
  const bool zoned = seq.zoneout != nullptr;
  const int thread = threadIdx.x % 128, lane = thread % 32;
  auto* const states = shared.state + which * params.plan.turns;
  int* const largest_of = shared.largest + which * kOwnRows<Split>;
  const auto meet = [which] { ptx::bar_sync(1 + which, 128); };

  each_turns(batch, params.plan, group, which, [&](const Turns& turns) {
    ThreadQuads<Split> quads{batch, hidden, first_unit, thread, rank, turns.tile(0)};
    BackwardQuad<Cell, T> kept[kQuads] = {};
    if constexpr (!kHasParts) load_step(seq, quads, seq.steps - 1, kept);
    for (int64_t t = seq.steps - 1; t >= -1; --t) {
      for (int turn = 0; turn < turns.count; ++turn) {
        quads.row_tile = turns.tile(turn);
        float through[kQuads][4] = {};
        StateGradients<Cell> state[kQuads] = {};
        if (t + 1 == seq.steps) {
          if constexpr (kHasParts) load_step(seq, quads, t, kept);
          meet();  // the largest gradients of the turn before are cleared

          // The gradients of the last state.
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            if (!quads.real(quad)) continue;
            if (seq.grad_h_n != nullptr) {
              const auto v = load_vector<4>(seq.grad_h_n + quads.at(0, quad, 1));
#pragma unroll
              for (int e = 0; e < 4; ++e) through[quad][e] = v.at[e];
            }
            if (seq.grad_carried_n != nullptr) {
#pragma unroll
              for (int j = 0; j < Cell::kCarried; ++j) {
                const auto v = load_vector<4>(seq.grad_carried_n +
                                              quads.at(0, quad, Cell::kCarried) + j * hidden);
#pragma unroll
                for (int e = 0; e < 4; ++e) state[quad][e].at[j] = v.at[e];
              }
            }
          }
        } else {
          float sum[kBackwardUnits / 2];
          multiply_grad_z(params, shared, ring, quads, lane, t + 1, sum);
          meet();  // the whole ring has been read
          write_sums(shared, thread, lane, sum, partial.sums);
          if constexpr (kHasParts) load_step(seq, quads, t, kept);
          meet();
          partial.exchange<Split>(thread);
          // The gradients that reach the quads from the step after.
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            if (!quads.real(quad)) continue;
#pragma unroll
            for (int j = 0; j < kStateValues<Cell>; ++j) {
              const auto v = states[turn][j][quads.own_quad(quad)];
#pragma unroll
              for (int e = 0; e < 4; ++e) state[quad][e].at[j] = v.at[e];
            }
            float4 of_block[Split];
            load_sums(quads, quad, partial.sums, of_block);
            const auto grad_kept = zoned && !Cell::kReadsH
                                       ? load_vector<4>(seq.grad_kept + quads.at(0, quad, 1))
                                       : Vector<float, 4>{};
            const uint8_t reset_next = kept[quad].reset_next;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const float total = add_sums(of_block, e);
              through[quad][e] = Kept<Cell>::through(reset_next != 0 ? 0.0f : total, state[quad][e],
                                                     zoned, grad_kept.at[e]);
            }
          }
        }
        const auto release_sums = [&] {
          if (t + 1 < seq.steps) partial.release<Split>(thread);
        };

        if (t < 0) {
          store_first<Cell>(seq, quads, through, state);
          meet();
          release_sums();
        } else {
          // The cell's backward.
          TermGradients<Cell> grad_terms[kQuads];
#pragma unroll
          for (int quad = 0; quad < kQuads; ++quad) {
            if (!quads.real(quad)) continue;
            Vector<float, 4> zoneout = {};
            if (zoned) {
              zoneout = load_vector<4>(seq.zoneout + quads.at(t, quad, 1));
              if (t > 0) ptx::prefetch_l2(seq.zoneout + quads.at(t - 1, quad, 1));
            }
            float grad_kept[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const Kept<Cell> item =
                  kept[quad].values.item([e](LoadedQuad<T> four) { return element<T>(four, e); });
              float of_unit[kTerms<Cell>], published[Cell::kGates];
              item.template backward<T>(through[quad][e], true, zoned, zoneout.at[e], grad_kept[e],
                                        state[quad][e], of_unit, published);
#pragma unroll
              for (int term = 0; term < kTerms<Cell>; ++term) {
                grad_terms[quad][term][e] = of_unit[term];
              }
            }
            store_state<Cell, Split>(state[quad], quads.own_quad(quad), states[turn]);
            if (zoned && !Cell::kReadsH) {
              store_vector(seq.grad_kept + quads.at(0, quad, 1), rounded<float>(grad_kept));
            }
          }
          if constexpr (kHasParts) {
            store_parts<Cell>(params.exchange, quads, t, grad_terms, largest_of, meet);
          } else {
            store_terms<Cell>(seq, quads, t, grad_terms);
          }
          meet();
          release_sums();
          if (thread == 127) {
            ptx::red_release_add(counter_of(params.arrived, quads.row_tile), 1);
          }
          if constexpr (kHasParts) {
            if (thread < kOwnRows<Split>) largest_of[thread] = 0;
            store_terms<Cell>(seq, quads, t, grad_terms);  // the group does not wait for these
            prefetch_step<Cell>(seq, quads, t);
          }
        }
        if constexpr (!kHasParts) {
          const bool again = turn + 1 < turns.count;  // in this step
          quads.row_tile = turns.tile(again ? turn + 1 : 0);
          if (again || t >= 0) load_step(seq, quads, again ? t : t - 1, kept);
        }
      }
    }
  });
}

}  // namespace my_ops::cuda
