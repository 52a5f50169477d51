// The router of the persistent LLTM kernels: preconditions, then a plan, then its launcher.
#include "lltm_persistent.h"

#include <algorithm>

#include "common.cuh"
#include "device.h"
#include "lltm_persistent.cuh"

namespace my_ops::cuda {
namespace {

struct Plan {
  enum class Kind { kNone, kCluster, kGrid };
  Kind kind = Kind::kNone;
  ClusterPlan cluster{};
  GridPlan grid{};
};

// Hidden sizes up to 256 whose rows all run at once: the cheapest step by far.
bool plan_cluster(int64_t batch, int64_t hidden, const DeviceFacts& facts, ClusterPlan& plan) {
  if (facts.major < 9 || hidden > 256) return false;
  const int pieces = hidden <= 64 ? 1 : hidden <= 128 ? 2 : 4;
  const int max_blocks = facts.major == 9 ? 16 : 8;  // 16 is not portable
  int64_t best = 0;
  for (int units : {1, 2}) {
    // At least two: a block that writes to its own shared memory this way must have a peer.
    const auto blocks = static_cast<int>(std::max<int64_t>(2, ceil_div(hidden, 16 * units)));
    if (blocks > max_blocks) continue;
    // A cluster lives in one GPC, so some SMs are left over: 31 clusters of 4, 15 of 8 and 7 of 16
    // fit on 132 SMs.
    const int64_t usable = facts.sm_count - facts.sm_count / (blocks > 8 ? 8 : 16);
    const int64_t resident = usable / blocks;
    for (int rows : {1, 2, 4}) {
      if (ceil_div(batch, rows) > resident) continue;
      // Cycles beyond the latency that all plans share: two for each multiply-add of a thread, and
      // some for each block that has to be written to.
      const int64_t cost = int64_t{24} * units * pieces * rows + 20 * blocks;
      if (best == 0 || cost < best) {
        best = cost;
        plan = {blocks, units, rows, pieces};
      }
    }
  }
  return best != 0;
}

enum class Pass { kForward, kBackward };

// Rows of a group up to which all steps in one launch beat a product and a cell for each, as timed
// for hidden sizes from 128 to 2048.
template <typename T>
constexpr int64_t max_rows(Pass pass, int64_t hidden) {
  if (sizeof(T) == 4) return hidden <= 512 ? 112 : pass == Pass::kForward ? 88 : 52;
  if (hidden > 512) return pass == Pass::kForward ? 40 : 28;
  return pass == Pass::kForward ? 64 : 48;
}

template <typename T>
bool plan_grid(Pass pass, int64_t batch, int64_t hidden, const DeviceFacts& facts, GridPlan& plan) {
  if (facts.major < 8) return false;
  constexpr int64_t kChunk = 64 / sizeof(T);
  const int64_t slots = ceil_div(ceil_div(hidden, kChunk), kRecurrentWarps);
  if (slots > 8) return false;
  plan.chunks = slots <= 2 ? 2 : slots <= 4 ? 4 : 8;
  // Blocks of 32 units halve what a group reads per step; with few rows, latency counts more.
  plan.unit_tiles = 1;
  if (sizeof(T) == 2 && plan.chunks == 4 && batch > 8 * (facts.sm_count / ceil_div(hidden, 16))) {
    plan.unit_tiles = 2;
  }
  // Units up to a whole number of chunks: the padding is published as zeros.
  plan.members =
      static_cast<int>(ceil_div(ceil_div(hidden, kChunk) * kChunk, 16 * plan.unit_tiles));
  const int64_t groups = facts.sm_count / plan.members;
  if (groups == 0) return false;
  const int64_t rows = ceil_div(batch, groups);
  if (rows > max_rows<T>(pass, hidden)) return false;
  plan.rows = static_cast<int>(rows);
  plan.groups = static_cast<int>(ceil_div(batch, rows));
  plan.row_tiles = rows > 8 ? 2 : 1;
  return true;
}

template <typename T>
Plan make_plan(Pass pass, int64_t batch, int64_t hidden, const DeviceFacts& facts) {
  Plan plan;
  if (plan_cluster(batch, hidden, facts, plan.cluster)) {
    plan.kind = Plan::Kind::kCluster;
  } else if (plan_grid<T>(pass, batch, hidden, facts, plan.grid)) {
    plan.kind = Plan::Kind::kGrid;
  }
  return plan;
}

template <typename T>
cudaError_t plan_for_current_device(Pass pass, int64_t steps, int64_t batch, int64_t hidden,
                                    Plan& plan) {
  if (steps <= 0 || batch < 0 || hidden < 0) return cudaErrorInvalidValue;
  DeviceFacts facts;
  if (auto err = current_device(&facts); err != cudaSuccess) return err;
  plan = make_plan<T>(pass, batch, hidden, facts);
  return plan.kind == Plan::Kind::kNone ? cudaErrorNotSupported : cudaSuccess;
}

template <typename T>
bool supported(Pass pass, int64_t batch, int64_t hidden, int device) {
  if (batch <= 0 || hidden <= 0) return batch >= 0 && hidden >= 0;
  DeviceFacts facts;
  if (query_device(device, &facts) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  const Plan plan = make_plan<T>(pass, batch, hidden, facts);
  const bool forward = pass == Pass::kForward;
  switch (plan.kind) {
    case Plan::Kind::kCluster:
      return (forward ? lltm_cluster_resident<T>(plan.cluster)
                      : lltm_cluster_backward_resident<T>(plan.cluster)) > 0;
    case Plan::Kind::kGrid: {
      const int64_t resident =
          forward ? lltm_grid_resident<T>(plan.grid) : lltm_grid_backward_resident<T>(plan.grid);
      return int64_t{plan.grid.members} * plan.grid.groups <= facts.sm_count * resident;
    }
    default:
      return false;
  }
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
bool my_ops::cuda::lltm_persistent_supported(int64_t batch, int64_t hidden, int device) {
  return supported<T>(Pass::kForward, batch, hidden, device);
}

template <typename T>
bool my_ops::cuda::lltm_persistent_backward_supported(int64_t batch, int64_t hidden, int device) {
  return supported<T>(Pass::kBackward, batch, hidden, device);
}

template <typename T>
size_t my_ops::cuda::lltm_persistent_workspace(int64_t steps, int64_t batch, int64_t hidden) {
  // The exchange of lltm_grid.cu: h0 and the h of every step.
  return steps <= 0 ? 0 : static_cast<size_t>(grid_exchange_bytes<T>(1, steps + 1, batch, hidden));
}

template <typename T>
size_t my_ops::cuda::lltm_persistent_backward_workspace(int64_t steps, int64_t batch,
                                                        int64_t hidden) {
  // The exchange of lltm_grid_backward.cu: three gate gradients of every step.
  return steps <= 0 ? 0 : static_cast<size_t>(grid_exchange_bytes<T>(3, steps, batch, hidden));
}

template <typename T>
cudaError_t my_ops::cuda::lltm_persistent(const LltmSequence<T>& args, void* workspace,
                                          cudaStream_t stream) {
  if (args.steps > 0 && (args.batch == 0 || args.hidden == 0)) return cudaSuccess;
  Plan plan;
  if (auto err =
          plan_for_current_device<T>(Pass::kForward, args.steps, args.batch, args.hidden, plan);
      err != cudaSuccess) {
    return err;
  }
  return plan.kind == Plan::Kind::kCluster ? lltm_cluster<T>(args, plan.cluster, stream)
                                           : lltm_grid<T>(args, plan.grid, workspace, stream);
}

template <typename T>
cudaError_t my_ops::cuda::lltm_persistent_backward(const LltmSequenceBackward<T>& args,
                                                   void* workspace, cudaStream_t stream) {
  if (args.steps > 0 && (args.batch == 0 || args.hidden == 0)) return cudaSuccess;
  Plan plan;
  if (auto err =
          plan_for_current_device<T>(Pass::kBackward, args.steps, args.batch, args.hidden, plan);
      err != cudaSuccess) {
    return err;
  }
  return plan.kind == Plan::Kind::kCluster
             ? lltm_cluster_backward<T>(args, plan.cluster, stream)
             : lltm_grid_backward<T>(args, plan.grid, workspace, stream);
}

template bool my_ops::cuda::lltm_persistent_supported<float>(int64_t, int64_t, int);
template bool my_ops::cuda::lltm_persistent_backward_supported<float>(int64_t, int64_t, int);
template bool my_ops::cuda::lltm_persistent_supported<__half>(int64_t, int64_t, int);
template bool my_ops::cuda::lltm_persistent_backward_supported<__half>(int64_t, int64_t, int);
template bool my_ops::cuda::lltm_persistent_supported<__nv_bfloat16>(int64_t, int64_t, int);
template bool my_ops::cuda::lltm_persistent_backward_supported<__nv_bfloat16>(int64_t, int64_t,
                                                                              int);
template size_t my_ops::cuda::lltm_persistent_workspace<float>(int64_t, int64_t, int64_t);
template size_t my_ops::cuda::lltm_persistent_workspace<__half>(int64_t, int64_t, int64_t);
template size_t my_ops::cuda::lltm_persistent_workspace<__nv_bfloat16>(int64_t, int64_t, int64_t);
template size_t my_ops::cuda::lltm_persistent_backward_workspace<float>(int64_t, int64_t, int64_t);
template size_t my_ops::cuda::lltm_persistent_backward_workspace<__half>(int64_t, int64_t, int64_t);
template size_t my_ops::cuda::lltm_persistent_backward_workspace<__nv_bfloat16>(int64_t, int64_t,
                                                                                int64_t);
template cudaError_t my_ops::cuda::lltm_persistent<float>(const LltmSequence<float>&, void*,
                                                          cudaStream_t);
template cudaError_t my_ops::cuda::lltm_persistent<__half>(const LltmSequence<__half>&, void*,
                                                           cudaStream_t);
template cudaError_t my_ops::cuda::lltm_persistent<__nv_bfloat16>(
    const LltmSequence<__nv_bfloat16>&, void*, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_persistent_backward<float>(
    const LltmSequenceBackward<float>&, void*, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_persistent_backward<__half>(
    const LltmSequenceBackward<__half>&, void*, cudaStream_t);
template cudaError_t my_ops::cuda::lltm_persistent_backward<__nv_bfloat16>(
    const LltmSequenceBackward<__nv_bfloat16>&, void*, cudaStream_t);
