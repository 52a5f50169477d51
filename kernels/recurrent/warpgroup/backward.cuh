// Backward over all steps for many rows, on Hopper.
// Plan: dh_t = grad_output_t + dz_{t+1} W_h, where dz has kGates * hidden columns. A cluster of
// four or eight blocks, Split, computes tiles of 64 rows and 72 units. Each block has its share of
// the rows of W_h for these units in shared memory, as the B operand of wgmma. Each of its two
// warpgroups runs tiles of its own, with a ring of its own: while one waits, adds or applies the
// cell, the other multiplies. A warpgroup multiplies the block's share of dz's columns. Then it
// adds the partial sums of its share of the tile's rows, which it reads from the shared memory of
// the cluster's blocks, and applies the cell's derivative. dz_t is stored to grad_terms, in float
// also as fp16 parts (warpgroup/parts.cuh). From there TMA loads it in the next round, once the
// counter of the rows shows that all of it is there.
#pragma once

#include "ptx/cluster.cuh"
#include "recurrent/warpgroup/backward_consumer.cuh"
#include "recurrent/warpgroup/backward_shared.cuh"

namespace my_ops::cuda {

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
        partial.wait_until_read();
        while (ptx::ld_acquire(counter_of(params.arrived, tile)) < arrivals * step) {
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
                               int64_t workspace_bytes, cudaStream_t stream) {
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
    auto* const parts =
        reinterpret_cast<__half*>(static_cast<char*>(workspace) + warpgroup_counter_bytes(batch));
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
  if (auto err = cudaMemsetAsync(workspace, 0, workspace_bytes, stream); err != cudaSuccess) {
    return err;
  }
  const WarpgroupBackwardLaunch launch(plan, stream);
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&launch.config, kernel, arguments);
}

}  // namespace my_ops::cuda
