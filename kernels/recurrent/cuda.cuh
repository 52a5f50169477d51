// The engine on CUDA for a cell: one step, and all steps in one launch with the plan's kernel.
#pragma once

#include "recurrent/block/backward.cuh"
#include "recurrent/block/forward.cuh"
#include "recurrent/grid/backward.cuh"
#include "recurrent/grid/forward.cuh"
#include "recurrent/plan.h"
#include "recurrent/sm90.h"
#include "recurrent/step/step.cuh"
#include "recurrent/warp/backward.cuh"
#include "recurrent/warp/forward.cuh"

namespace my_ops::cuda {

// The kernel of the plan's instantiation, or null if there is none. Sequence, the type of the
// kernel's arguments, determines the pass: RecurrentSequence or RecurrentSequenceBackward. Kernels
// that launch() starts have their type.
template <typename Cell, typename Sequence>
auto warp_kernel_of(const WarpPlan& plan) {
  using Kernel = void (*)(Sequence);
  return visit_warp_plan(plan, [&]<int Units, int Rows>() -> Kernel {
    if constexpr (warp_exists(Cell::kGates, Units, Rows)) {
      return warp_kernel<Cell, Units, Rows>(static_cast<const Sequence*>(nullptr));
    } else {
      return nullptr;
    }
  });
}

template <typename Cell, typename T, typename Sequence>
auto block_kernel_of(const BlockPlan& plan) {
  using Kernel = void (*)(BlockParams<Sequence>);
  return visit_block_plan(plan, [&]<int Units>() -> Kernel {
    if constexpr (block_exists(Cell::kGates, sizeof(T), Units)) {
      return block_kernel<Cell, Units>(static_cast<const Sequence*>(nullptr));
    } else {
      return nullptr;
    }
  });
}

template <Pass kPass, typename Cell, typename T, typename Sequence>
const void* grid_kernel_of(const GridPlan& plan) {
  return visit_grid_plan<T>(plan, [&]<int UnitTiles, int RowTiles, int Chunks>() -> const void* {
    if constexpr (grid_exists(kCellFacts<Cell>, kPass, sizeof(T), UnitTiles, RowTiles, Chunks)) {
      return grid_kernel<Cell, UnitTiles, RowTiles, Chunks>(static_cast<const Sequence*>(nullptr));
    } else {
      return nullptr;
    }
  });
}

template <typename Cell, typename T>
cudaError_t plan_recurrent(Pass pass, int64_t steps, int64_t batch, int64_t hidden,
                           RecurrentPlan* plan) {
  if (steps < 0 || batch < 0 || hidden < 0) return cudaErrorInvalidValue;
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  *plan = plan_recurrent({kCellFacts<Cell>, pass, sizeof(T), steps, batch, hidden}, device);
  if (plan->kernel == RecurrentKernel::kCluster || plan->kernel == RecurrentKernel::kWarpgroup) {
    const bool fits = pass == Pass::kForward ? Sm90<Pass::kForward, Cell, T>::fits(*plan)
                                             : Sm90<Pass::kBackward, Cell, T>::fits(*plan);
    if (!fits) *plan = {};
  }
  return cudaSuccess;
}

template <Pass kPass, typename Cell, typename T, typename Sequence>
cudaError_t launch_sequence(const Sequence& args, const RecurrentPlan& plan, void* workspace,
                            cudaStream_t stream) {
  switch (plan.kernel) {
    case RecurrentKernel::kWarp:
      return launch_warp(warp_kernel_of<Cell, Sequence>(plan.warp), plan.warp, 1, args, stream);
    case RecurrentKernel::kBlock:
      return launch_block(block_kernel_of<Cell, T, Sequence>(plan.block), plan.block, 1, args,
                          stream);
    case RecurrentKernel::kGrid:
      return launch_grid(grid_kernel_of<kPass, Cell, T, Sequence>(plan.grid), plan.grid, 1,
                         plan.workspace, args, workspace, stream);
    case RecurrentKernel::kCluster:
    case RecurrentKernel::kWarpgroup:
      return Sm90<kPass, Cell, T>::launch(args, plan, workspace, stream);
    case RecurrentKernel::kSteps:
      break;
  }
  return cudaErrorNotSupported;
}

template <typename Cell, typename T>
cudaError_t recurrent_sequence(const RecurrentSequence<T>& args, const RecurrentPlan& plan,
                               void* workspace, cudaStream_t stream) {
  return launch_sequence<Pass::kForward, Cell, T>(args, plan, workspace, stream);
}

template <typename Cell, typename T>
cudaError_t recurrent_sequence_backward(const RecurrentSequenceBackward<T>& args,
                                        const RecurrentPlan& plan, void* workspace,
                                        cudaStream_t stream) {
  return launch_sequence<Pass::kBackward, Cell, T>(args, plan, workspace, stream);
}

}  // namespace my_ops::cuda

#define MY_OPS_RECURRENT_STEP(Cell, T, Acc)                                             \
  template cudaError_t my_ops::cuda::recurrent_step<Cell>(const RecurrentStep<T, Acc>&, \
                                                          cudaStream_t);                \
  template cudaError_t my_ops::cuda::recurrent_step_backward<Cell>(                     \
      const RecurrentStepBackward<T, Acc>&, cudaStream_t);

#define MY_OPS_RECURRENT_SEQUENCE(Cell, T)                                                    \
  template cudaError_t my_ops::cuda::plan_recurrent<Cell, T>(Pass, int64_t, int64_t, int64_t, \
                                                             RecurrentPlan*);                 \
  template cudaError_t my_ops::cuda::recurrent_sequence<Cell>(                                \
      const RecurrentSequence<T>&, const RecurrentPlan&, void*, cudaStream_t);                \
  template cudaError_t my_ops::cuda::recurrent_sequence_backward<Cell>(                       \
      const RecurrentSequenceBackward<T>&, const RecurrentPlan&, void*, cudaStream_t);

#define MY_OPS_RECURRENT_CUDA(Cell)                 \
  MY_OPS_RECURRENT_STEP(Cell, double, double)       \
  MY_OPS_RECURRENT_STEP(Cell, float, float)         \
  MY_OPS_RECURRENT_STEP(Cell, __half, float)        \
  MY_OPS_RECURRENT_STEP(Cell, __nv_bfloat16, float) \
  MY_OPS_RECURRENT_SEQUENCE(Cell, float)            \
  MY_OPS_RECURRENT_SEQUENCE(Cell, __half)           \
  MY_OPS_RECURRENT_SEQUENCE(Cell, __nv_bfloat16)
