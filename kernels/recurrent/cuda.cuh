// The engine on CUDA for a cell: one step, and all steps in one launch with the plan's kernel.
#pragma once

#include "recurrent/block/backward.cuh"
#include "recurrent/block/forward.cuh"
#include "recurrent/grid/backward.cuh"
#include "recurrent/grid/forward.cuh"
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
cudaError_t plan_for_current_device(Pass pass, int64_t steps, int64_t batch, int64_t hidden,
                                    RecurrentPlan& plan) {
  if (steps <= 0 || batch < 0 || hidden < 0) return cudaErrorInvalidValue;
  DeviceFacts facts;
  if (auto err = current_device(&facts); err != cudaSuccess) return err;
  plan = make_recurrent_plan(kCellFacts<Cell>, pass, sizeof(T), batch, hidden, facts);
  return plan.kind == RecurrentPlan::Kind::kNone ? cudaErrorNotSupported : cudaSuccess;
}

template <typename Cell, typename T>
bool recurrent_sequence_supported(Pass pass, int64_t batch, int64_t hidden) {
  if (batch <= 0 || hidden <= 0) return batch >= 0 && hidden >= 0;
  DeviceFacts facts;
  if (current_device(&facts) != cudaSuccess) return false;  // the launch will report the error
  const RecurrentPlan plan =
      make_recurrent_plan(kCellFacts<Cell>, pass, sizeof(T), batch, hidden, facts);
  if (plan.kind == RecurrentPlan::Kind::kCluster || plan.kind == RecurrentPlan::Kind::kWarpgroup) {
    return pass == Pass::kForward ? Sm90<Pass::kForward, Cell, T>::fits(plan)
                                  : Sm90<Pass::kBackward, Cell, T>::fits(plan);
  }
  return plan.kind != RecurrentPlan::Kind::kNone;
}

template <typename Cell>
bool recurrent_steps_faster_in_tf32(Pass pass, int64_t batch, int64_t hidden) {
  RecurrentPlan plan;
  return steps_faster_in_tf32(kCellFacts<Cell>, pass, batch, hidden) &&
         plan_for_current_device<Cell, float>(pass, 1, batch, hidden, plan) == cudaSuccess &&
         plan.kind == RecurrentPlan::Kind::kWarpgroup;
}

template <typename Cell, typename T>
size_t recurrent_sequence_workspace(Pass pass, int64_t steps, int64_t batch, int64_t hidden) {
  if (steps <= 0 || batch <= 0 || hidden <= 0) return 0;
  RecurrentPlan plan;
  if (plan_for_current_device<Cell, T>(pass, steps, batch, hidden, plan) != cudaSuccess) return 0;
  switch (plan.kind) {
    case RecurrentPlan::Kind::kGrid:
      return static_cast<size_t>(grid_exchange_bytes<Cell, T>(pass, steps, batch, hidden));
    case RecurrentPlan::Kind::kWarpgroup:
      return static_cast<size_t>(
          pass == Pass::kForward
              ? Sm90<Pass::kForward, Cell, T>::warpgroup_workspace(batch, hidden)
              : Sm90<Pass::kBackward, Cell, T>::warpgroup_workspace(batch, hidden));
    default:
      return 0;
  }
}

template <Pass kPass, typename Cell, typename T, typename Sequence>
cudaError_t launch_sequence(const Sequence& args, void* workspace, cudaStream_t stream) {
  if (args.steps > 0 && (args.batch == 0 || args.hidden == 0)) return cudaSuccess;
  RecurrentPlan plan;
  if (auto err = plan_for_current_device<Cell, T>(kPass, args.steps, args.batch, args.hidden, plan);
      err != cudaSuccess) {
    return err;
  }
  if (plan.kind == RecurrentPlan::Kind::kWarp) {
    return launch_warp(warp_kernel_of<Cell, Sequence>(plan.warp), plan.warp, args, stream);
  }
  if (plan.kind == RecurrentPlan::Kind::kBlock) {
    return launch_block(block_kernel_of<Cell, T, Sequence>(plan.block), plan.block, args, stream);
  }
  if (plan.kind == RecurrentPlan::Kind::kCluster || plan.kind == RecurrentPlan::Kind::kWarpgroup) {
    return Sm90<kPass, Cell, T>::launch(args, plan, workspace, stream);
  }
  const int64_t bytes = grid_exchange_bytes<Cell, T>(kPass, args.steps, args.batch, args.hidden);
  return launch_grid(grid_kernel_of<kPass, Cell, T, Sequence>(plan.grid), plan.grid, bytes, args,
                     workspace, stream);
}

template <typename Cell, typename T>
cudaError_t recurrent_sequence(const RecurrentSequence<T>& args, void* workspace,
                               cudaStream_t stream) {
  return launch_sequence<Pass::kForward, Cell, T>(args, workspace, stream);
}

template <typename Cell, typename T>
cudaError_t recurrent_sequence_backward(const RecurrentSequenceBackward<T>& args, void* workspace,
                                        cudaStream_t stream) {
  return launch_sequence<Pass::kBackward, Cell, T>(args, workspace, stream);
}

}  // namespace my_ops::cuda

#define MY_OPS_RECURRENT_STEP(Cell, T, Acc)                                             \
  template cudaError_t my_ops::cuda::recurrent_step<Cell>(const RecurrentStep<T, Acc>&, \
                                                          cudaStream_t);                \
  template cudaError_t my_ops::cuda::recurrent_step_backward<Cell>(                     \
      const RecurrentStepBackward<T, Acc>&, cudaStream_t);

#define MY_OPS_RECURRENT_SEQUENCE(Cell, T)                                                        \
  template bool my_ops::cuda::recurrent_sequence_supported<Cell, T>(Pass, int64_t, int64_t);      \
  template size_t my_ops::cuda::recurrent_sequence_workspace<Cell, T>(Pass, int64_t, int64_t,     \
                                                                      int64_t);                   \
  template cudaError_t my_ops::cuda::recurrent_sequence<Cell>(const RecurrentSequence<T>&, void*, \
                                                              cudaStream_t);                      \
  template cudaError_t my_ops::cuda::recurrent_sequence_backward<Cell>(                           \
      const RecurrentSequenceBackward<T>&, void*, cudaStream_t);

#define MY_OPS_RECURRENT_CUDA(Cell)                                                         \
  template bool my_ops::cuda::recurrent_steps_faster_in_tf32<Cell>(Pass, int64_t, int64_t); \
  MY_OPS_RECURRENT_STEP(Cell, double, double)                                               \
  MY_OPS_RECURRENT_STEP(Cell, float, float)                                                 \
  MY_OPS_RECURRENT_STEP(Cell, __half, float)                                                \
  MY_OPS_RECURRENT_STEP(Cell, __nv_bfloat16, float)                                         \
  MY_OPS_RECURRENT_SEQUENCE(Cell, float)                                                    \
  MY_OPS_RECURRENT_SEQUENCE(Cell, __half)                                                   \
  MY_OPS_RECURRENT_SEQUENCE(Cell, __nv_bfloat16)
