// What <cell>_sm90.cu instantiates: the choice among the kernels of clusters and of warpgroups.
#pragma once

#include "recurrent/cluster/backward.cuh"
#include "recurrent/cluster/forward.cuh"
#include "recurrent/sm90.h"
#include "recurrent/warpgroup/backward.cuh"
#include "recurrent/warpgroup/forward.cuh"

namespace my_ops::cuda {

// The kernel of the plan's instantiation, or null if there is none.
template <typename Cell, typename Sequence>
const void* cluster_kernel_of(const ClusterPlan& plan) {
  return visit_cluster_plan(plan, [&]<int Rows, int Chunks>() -> const void* {
    if constexpr (cluster_exists(Cell::kGates, Chunks)) {
      return cluster_kernel<Cell, Rows, Chunks>(static_cast<const Sequence*>(nullptr));
    } else {
      return nullptr;
    }
  });
}

template <Pass kPass, typename Cell, typename T>
bool Sm90<kPass, Cell, T>::fits(const RecurrentPlan& plan) {
  if (plan.kernel == RecurrentKernel::kCluster) {
    const void* const kernel = cluster_kernel_of<Cell, SequenceOf<kPass, T>>(plan.cluster);
    return count_resident(kernel, plan.cluster) > 0;
  }
  if constexpr (kPass == Pass::kForward) {
    return true;
  } else {
    return warpgroup_backward_fits<Cell, T>(plan.warpgroup_backward);
  }
}

template <Pass kPass, typename Cell, typename T>
cudaError_t Sm90<kPass, Cell, T>::launch(const SequenceOf<kPass, T>& args,
                                         const RecurrentPlan& plan, void* workspace,
                                         cudaStream_t stream) {
  if (plan.kernel == RecurrentKernel::kCluster) {
    const void* const kernel = cluster_kernel_of<Cell, SequenceOf<kPass, T>>(plan.cluster);
    return launch_cluster(kernel, plan.cluster, 1, args, stream);
  }
  if constexpr (kPass == Pass::kForward) {
    return warpgroup_forward<Cell, T>(args, plan.warpgroup, workspace, stream);
  } else {
    return warpgroup_backward<Cell, T>(args, plan.warpgroup_backward, workspace, plan.workspace,
                                       stream);
  }
}

}  // namespace my_ops::cuda

#define MY_OPS_RECURRENT_SM90_OF(Cell, T)                              \
  template struct my_ops::cuda::Sm90<my_ops::Pass::kForward, Cell, T>; \
  template struct my_ops::cuda::Sm90<my_ops::Pass::kBackward, Cell, T>;

#define MY_OPS_RECURRENT_SM90(Cell)      \
  MY_OPS_RECURRENT_SM90_OF(Cell, float)  \
  MY_OPS_RECURRENT_SM90_OF(Cell, __half) \
  MY_OPS_RECURRENT_SM90_OF(Cell, __nv_bfloat16)
