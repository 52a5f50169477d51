// Backward over all steps for many rows, in 16 bits on Hopper.
// Plan: dh_t = grad_output_t + dz_{t+1} W_h, where dz has kGates * hidden columns. A cluster of
// four or eight blocks, Split, computes tiles of 128 rows and 72 units. Each block has its share of
// the rows of W_h for these units in shared memory, as the B operand of wgmma, and multiplies the
// same share of dz's columns. Then it adds the partial sums of its share of the tile's rows, which
// it reads from its peers' shared memory, and applies the cell's derivative. dz_t is stored to
// grad_terms, from which TMA loads it in the next round, once the counter of the rows shows that
// all of it is there.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "recurrent/warpgroup.cuh"

namespace my_ops::cuda {

template <typename T>
struct WarpgroupBackwardParams {
  CUtensorMap grad_z;  // [steps, batch, kGates * hidden], in grad_terms
  RecurrentSequenceBackward<T> seq;
  uint32_t* arrived;  // [tiles of rows][kArrivedStride]: blocks that have finished a step
  WarpgroupBackwardPlan plan;
};

constexpr int kBackwardWorkers = 2 * 128;   // threads that multiply
constexpr int kQuads = kBackwardUnits / 4;  // of units, in a row

// Of a block. The partial sums use its memory.
using BackwardRing = KBlockRing<kBackwardStageBytes>;

// Run by one warp: keeps the ring full. The cluster's blocks meet twice a round: when the partial
// sums are written, and when they have been read.
template <int Split, typename T>
__device__ __forceinline__ void produce_grad_z(const WarpgroupBackwardParams<T>& params,
                                               BackwardRing& ring, int row_tile, int rank) {
  const WarpgroupBackwardPlan& plan = params.plan;
  const uint32_t arrivals = Split * plan.tiles;  // per step
  const uint32_t* const arrived = params.arrived + row_tile * kArrivedStride;
  for (int t = static_cast<int>(params.seq.steps) - 1, round = 1; t >= 0; --t, ++round) {
    if (round > 1) ptx::barrier_cluster_wait();
    if (threadIdx.x % 32 == 0) {
      while (ptx::ld_acquire(arrived) < arrivals * round) {
      }
      ptx::fence_proxy_async_global();
      ptx::fence_proxy_async();  // the partial sums have been there
      for (int k_block = 0; k_block < plan.k_blocks; ++k_block) {
        ring.fill(&params.grad_z, (rank * plan.k_blocks + k_block) * kWarpgroupK,
                  row_tile * kBackwardRows, t);
      }
    }
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
    ptx::barrier_cluster_arrive();
  }
  ptx::barrier_cluster_wait();
}

// What a thread reads for a step of four units of a row.
template <typename Cell>
struct BackwardPart {
  Kept<Cell, uint2> values;
  uint8_t reset_next;
};

template <typename T>
__device__ __forceinline__ float element(uint2 four, int e) {
  const float2 pair = unpack<T>(e < 2 ? four.x : four.y);
  return e % 2 == 0 ? pair.x : pair.y;
}

template <typename Cell, int Split, typename T>
__device__ __forceinline__ void consume_grad_z(const WarpgroupBackwardParams<T>& params,
                                               const unsigned char* weights, BackwardRing& ring,
                                               int row_tile, int64_t first_unit, int rank) {
  constexpr int kColumns = kBackwardUnits, kCarried = Cell::kCarried;
  constexpr int kOwnRows = kBackwardRows / Split;
  constexpr int kOwnParts = (kOwnRows * kQuads + kBackwardWorkers - 1) / kBackwardWorkers;
  const RecurrentSequenceBackward<T>& seq = params.seq;
  const int64_t hidden = seq.hidden, batch = seq.batch;
  const bool zoned = seq.zoneout != nullptr;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  auto* const partial = reinterpret_cast<float*>(ring.stages_at);  // [kBackwardRows][kColumns]

  // A part is four units of a row of the block's share.
  const auto own_row = [&](int part) { return (thread + part * kBackwardWorkers) / kQuads; };
  const auto own_unit = [&](int part) { return (thread + part * kBackwardWorkers) % kQuads * 4; };
  const auto row_of = [&](int part) {
    return int64_t{row_tile} * kBackwardRows + rank * kOwnRows + own_row(part);
  };
  const auto unit_of = [&](int part) { return first_unit + own_unit(part); };
  const auto real = [&](int part) {
    return own_row(part) < kOwnRows && row_of(part) < batch && unit_of(part) < hidden;
  };
  const auto at = [&](int64_t t, int part, int values) {
    return (t * batch + row_of(part)) * values * hidden + unit_of(part);
  };

  BackwardPart<Cell> kept[kOwnParts] = {};
  Values<float, kStateValues<Cell>> state[kOwnParts][4] = {};
  const auto load_step = [&](int64_t t) {
#pragma unroll
    for (int part = 0; part < kOwnParts; ++part) {
      if (!real(part)) continue;
      BackwardPart<Cell>& to = kept[part];
      const auto of_part = [&](int64_t step, int values) { return at(step, part, values); };
      to.reset_next = to.values.reset;
      to.values.load(seq, t, t * batch + row_of(part), of_part);
    }
  };
  load_step(seq.steps - 1);
  float through[kOwnParts][4] = {};
#pragma unroll
  for (int part = 0; part < kOwnParts; ++part) {
    if (!real(part)) continue;
    if (seq.grad_h_n != nullptr) {
      const auto v = load_vector<4>(seq.grad_h_n + at(0, part, 1));
#pragma unroll
      for (int e = 0; e < 4; ++e) through[part][e] = v.at[e];
    }
    if (seq.grad_carried_n != nullptr) {
#pragma unroll
      for (int j = 0; j < kCarried; ++j) {
        const auto v = load_vector<4>(seq.grad_carried_n + at(0, part, kCarried) + j * hidden);
#pragma unroll
        for (int e = 0; e < 4; ++e) state[part][e].at[j] = v.at[e];
      }
    }
  }

  for (int64_t t = seq.steps - 1;; --t) {
    if (t + 1 < seq.steps) {
      float sum[kColumns / 2];
      multiply_k_blocks<T, kColumns>(ring, warpgroup * kWarpgroupStageBytes, weights,
                                     params.plan.k_blocks, sum);

      if (t + 2 < seq.steps) ptx::barrier_cluster_wait();  // ends the round before
      ptx::bar_sync(1, kBackwardWorkers);                  // the whole ring has been read
      const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<float2*>(partial + (row + half * 8) * kColumns + 8 * j +
                                     lane % 4 * 2) = {sum[4 * j + 2 * half],
                                                      sum[4 * j + 2 * half + 1]};
        }
      }
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
#pragma unroll
      for (int part = 0; part < kOwnParts; ++part) {
        if (!real(part)) continue;
        float4 v[Split];
#pragma unroll
        for (int peer = 0; peer < Split; ++peer) {
          const float* const from =
              partial + (rank * kOwnRows + own_row(part)) * kColumns + own_unit(part);
          v[peer] = ptx::ld_cluster(ptx::mapa(from, peer));
        }
        const auto grad_kept = zoned && !Cell::kReadsH
                                   ? load_vector<4>(seq.grad_kept + at(0, part, 1))
                                   : Vector<float, 4>{};
        const uint8_t reset_next = t >= 0 ? kept[part].reset_next : kept[part].values.reset;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float total = 0.0f;
#pragma unroll
          for (int peer = 0; peer < Split; ++peer) total += (&v[peer].x)[e];
          through[part][e] = Kept<Cell>::through(reset_next != 0 ? 0.0f : total, state[part][e],
                                                 zoned, grad_kept.at[e]);
        }
      }
      ptx::barrier_cluster_arrive();
    }
    if (t < 0) break;

    float grad_terms[kOwnParts][kTerms<Cell>][4];
#pragma unroll
    for (int part = 0; part < kOwnParts; ++part) {
      if (!real(part)) continue;
      const Kept<Cell, uint2>& from = kept[part].values;
      const auto zoneout =
          zoned ? load_vector<4>(seq.zoneout + at(t, part, 1)) : Vector<float, 4>{};
      float grad_kept[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const Kept<Cell> item = from.item([e](uint2 four) { return element<T>(four, e); });
        float of_unit[kTerms<Cell>], published[Cell::kGates];
        item.template backward<T>(through[part][e], true, zoned, zoneout.at[e], grad_kept[e],
                                  state[part][e], of_unit, published);
#pragma unroll
        for (int term = 0; term < kTerms<Cell>; ++term) grad_terms[part][term][e] = of_unit[term];
      }
#pragma unroll
      for (int term = 0; term < kTerms<Cell>; ++term) {
        store_vector(seq.grad_terms + at(t, part, kTerms<Cell>) + term * hidden,
                     rounded<T>(grad_terms[part][term]));
      }
      if (zoned && !Cell::kReadsH) {
        store_vector(seq.grad_kept + at(0, part, 1), rounded<float>(grad_kept));
      }
    }
    ptx::bar_sync(1, kBackwardWorkers);
    if (thread == 0) ptx::red_release_add(params.arrived + row_tile * kArrivedStride, 1);
    if (t > 0) load_step(t - 1);
  }
  ptx::barrier_cluster_wait();

#pragma unroll
  for (int part = 0; part < kOwnParts; ++part) {
    if (!real(part)) continue;
    store_vector(seq.grad_h0 + at(0, part, 1), rounded<T>(through[part]));
#pragma unroll
    for (int j = 0; j < kCarried; ++j) {
      float grad[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) grad[e] = state[part][e].at[j];
      store_vector(seq.grad_carried0 + at(0, part, kCarried) + j * hidden, rounded<T>(grad));
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
  unsigned char* const stages_at = bytes + plan.k_blocks * kBackwardUnits * 128;
  auto* const barriers = reinterpret_cast<uint64_t*>(stages_at + plan.stages * kBackwardStageBytes);
  BackwardRing ring{stages_at, barriers, barriers + plan.stages, plan.stages};

  if (threadIdx.x == 0) {
    ring.init(2);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&params.grad_z);
  }

  // The share of W_h, transposed, in the layout of the 128-byte swizzle. Threads next to each
  // other read units next to each other.
  const int64_t first_k = int64_t{rank} * plan.k_blocks * kWarpgroupK;
  for (int i = threadIdx.x; i < plan.k_blocks * 8 * kBackwardUnits; i += kWarpgroupThreads) {
    const int column = i % kBackwardUnits, chunk = i / kBackwardUnits;  // of 8 rows of W_h
    const int64_t k = first_k + chunk * 8, unit = first_unit + column;
    const uint4 v = gather(seq.w_h + k * seq.w_row + unit, seq.w_row,
                           unit < hidden ? Cell::kGates * hidden - k : 0);
    *reinterpret_cast<uint4*>(bytes + (chunk / 8 * kBackwardUnits + column) * 128 +
                              (chunk % 8 ^ column % 8) * 16) = v;
  }
  ptx::fence_proxy_async();  // wgmma reads W_h
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();

  const auto row_tiles = static_cast<int>((seq.batch + kBackwardRows - 1) / kBackwardRows);
  const int first_tile = cluster / plan.tiles;
  if (__shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0) == 2) {
    ptx::setmaxnreg_dec<kWarpgroupFewRegisters>();
    if (threadIdx.x % 128 / 32 != 0) return;
    for (int tile = first_tile; tile < row_tiles; tile += plan.groups) {
      produce_grad_z<Split>(params, ring, tile, rank);
    }
  } else {
    ptx::setmaxnreg_inc<kWarpgroupManyRegisters>();
    for (int tile = first_tile; tile < row_tiles; tile += plan.groups) {
      consume_grad_z<Cell, Split>(params, bytes, ring, tile, first_unit, rank);
    }
  }
#endif
}

// ---- host ----

inline int64_t warpgroup_backward_exchange_bytes(int64_t batch) {
  return ceil_div(batch, kBackwardRows) * kArrivedStride * int64_t{sizeof(uint32_t)};
}

template <typename Cell, typename T>
const void* warpgroup_backward_kernel_of(const WarpgroupBackwardPlan& plan) {
  if constexpr (sizeof(T) == 2) {
    return plan.split == 8 ? reinterpret_cast<const void*>(&warpgroup_backward_kernel<Cell, T, 8>)
                           : reinterpret_cast<const void*>(&warpgroup_backward_kernel<Cell, T, 4>);
  } else {
    return nullptr;
  }
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
  WarpgroupBackwardParams<T> params{
      .grad_z = {}, .seq = args, .arrived = static_cast<uint32_t*>(workspace), .plan = plan};
  const int64_t width = kTerms<Cell> * args.hidden;
  if (auto err = sm90::make_tensor_map(
          encoder, &params.grad_z, args.grad_terms + Cell::kApart * args.hidden, args.batch,
          Cell::kGates * args.hidden, width, kBackwardRows, args.steps, args.batch * width);
      err != cudaSuccess) {
    return err;
  }
  if (auto err = allow_all_shared_bytes(kernel); err != cudaSuccess) return err;
  if (auto err =
          cudaMemsetAsync(workspace, 0, warpgroup_backward_exchange_bytes(args.batch), stream);
      err != cudaSuccess) {
    return err;
  }
  const WarpgroupBackwardLaunch launch(plan, stream);
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&launch.config, kernel, arguments);
}

}  // namespace my_ops::cuda
