// The router of the persistent LLTM kernels: preconditions, then a plan, then its launcher.
#include "lltm_persistent.h"

#include "recurrent/lltm_persistent.cuh"

namespace my_ops::cuda {
namespace {

template <typename T>
cudaError_t plan_for_current_device(Pass pass, int64_t steps, int64_t batch, int64_t hidden,
                                    LltmPlan& plan) {
  if (steps <= 0 || batch < 0 || hidden < 0) return cudaErrorInvalidValue;
  DeviceFacts facts;
  if (auto err = current_device(&facts); err != cudaSuccess) return err;
  plan = make_lltm_plan(pass, sizeof(T), batch, hidden, facts);
  return plan.kind == LltmPlan::Kind::kNone ? cudaErrorNotSupported : cudaSuccess;
}

template <typename T>
bool supported(Pass pass, int64_t batch, int64_t hidden) {
  if (batch <= 0 || hidden <= 0) return batch >= 0 && hidden >= 0;
  DeviceFacts facts;
  if (current_device(&facts) != cudaSuccess) return false;  // the launch will meet it again
  const LltmPlan plan = make_lltm_plan(pass, sizeof(T), batch, hidden, facts);
  if (plan.kind != LltmPlan::Kind::kCluster) return plan.kind == LltmPlan::Kind::kGrid;
  return (pass == Pass::kForward ? lltm_cluster_resident<T>(plan.cluster)
                                 : lltm_cluster_backward_resident<T>(plan.cluster)) > 0;
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
bool my_ops::cuda::lltm_persistent_supported(int64_t batch, int64_t hidden) {
  return supported<T>(Pass::kForward, batch, hidden);
}

template <typename T>
bool my_ops::cuda::lltm_persistent_backward_supported(int64_t batch, int64_t hidden) {
  return supported<T>(Pass::kBackward, batch, hidden);
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
  LltmPlan plan;
  if (auto err =
          plan_for_current_device<T>(Pass::kForward, args.steps, args.batch, args.hidden, plan);
      err != cudaSuccess) {
    return err;
  }
  return plan.kind == LltmPlan::Kind::kCluster ? lltm_cluster<T>(args, plan.cluster, stream)
                                               : lltm_grid<T>(args, plan.grid, workspace, stream);
}

template <typename T>
cudaError_t my_ops::cuda::lltm_persistent_backward(const LltmSequenceBackward<T>& args,
                                                   void* workspace, cudaStream_t stream) {
  if (args.steps > 0 && (args.batch == 0 || args.hidden == 0)) return cudaSuccess;
  LltmPlan plan;
  if (auto err =
          plan_for_current_device<T>(Pass::kBackward, args.steps, args.batch, args.hidden, plan);
      err != cudaSuccess) {
    return err;
  }
  return plan.kind == LltmPlan::Kind::kCluster
             ? lltm_cluster_backward<T>(args, plan.cluster, stream)
             : lltm_grid_backward<T>(args, plan.grid, workspace, stream);
}

template bool my_ops::cuda::lltm_persistent_supported<float>(int64_t, int64_t);
template bool my_ops::cuda::lltm_persistent_backward_supported<float>(int64_t, int64_t);
template bool my_ops::cuda::lltm_persistent_supported<__half>(int64_t, int64_t);
template bool my_ops::cuda::lltm_persistent_backward_supported<__half>(int64_t, int64_t);
template bool my_ops::cuda::lltm_persistent_supported<__nv_bfloat16>(int64_t, int64_t);
template bool my_ops::cuda::lltm_persistent_backward_supported<__nv_bfloat16>(int64_t, int64_t);
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
