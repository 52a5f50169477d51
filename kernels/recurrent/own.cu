// Plans, loads and launches the kernels of cells that programs define, which NVRTC compiles.
#include "recurrent/block/block.cuh"
#include "recurrent/cluster/cluster.cuh"
#include "recurrent/grid/grid.cuh"
#include "recurrent/plan.h"
#include "recurrent/warp/warp.cuh"

namespace my_ops::cuda {

namespace {
constexpr int kMostHeads = 65535;  // of a grid's second dimension
}

cudaError_t plan_recurrent_kernel(const CellFacts& cell, Pass pass, int width, int64_t steps,
                                  int64_t batch, int64_t hidden, int heads,
                                  const DeviceFacts* given, RecurrentPlan* plan, KernelName* name) {
  if (heads < 1 || heads > kMostHeads || hidden % heads != 0) return cudaErrorInvalidValue;
  DeviceFacts device;
  if (given) {
    device = *given;
  } else if (auto err = current_device(&device); err != cudaSuccess) {
    return err;
  }
  device.hopper_code = false;  // no warpgroups
  device.sm_count /= heads;    // a head is planned as a layer of its own on its share of the GPU
  *plan = plan_recurrent({cell, pass, width, steps, batch, hidden / heads}, device);
  plan->heads = heads;
  plan->workspace *= heads;
  switch (plan->kernel) {
    case RecurrentKernel::kWarp:
      *name = {"warp", {plan->warp.units, plan->warp.rows}};
      break;
    case RecurrentKernel::kBlock:
      *name = {"block", {plan->block.units}};
      break;
    case RecurrentKernel::kCluster:
      *name = {"cluster", {plan->cluster.rows, plan->cluster.chunks}};
      break;
    case RecurrentKernel::kGrid:
      *name = {"grid", {plan->grid.unit_tiles, plan->grid.row_tiles, plan->grid.chunks}};
      break;
    case RecurrentKernel::kWarpgroup:
    case RecurrentKernel::kSteps:
      *name = {};
      break;
  }
  return cudaSuccess;
}

cudaError_t load_recurrent_kernel(const void* code, const char* name, const RecurrentPlan& plan,
                                  const void** kernel) {
#if CUDART_VERSION >= 12080
  cudaLibrary_t library;
  cudaKernel_t loaded;
  auto err = cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0);
  if (err == cudaSuccess) err = cudaLibraryGetKernel(&loaded, library, name);
  if (err != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // the error is returned; clear it
    return err;
  }
  *kernel = loaded;
  if (plan.kernel == RecurrentKernel::kCluster && count_resident(loaded, plan.cluster) == 0) {
    return cudaErrorNotSupported;
  }
  return cudaSuccess;
#else
  return cudaErrorNotSupported;
#endif
}

template <typename Sequence>
cudaError_t launch_recurrent_kernel(const void* kernel, const Sequence& args,
                                    const RecurrentPlan& plan, void* workspace,
                                    cudaStream_t stream) {
  switch (plan.kernel) {
    case RecurrentKernel::kWarp:
      return launch_warp(reinterpret_cast<void (*)(Sequence)>(const_cast<void*>(kernel)), plan.warp,
                         plan.heads, args, stream);
    case RecurrentKernel::kBlock:
      return launch_block(
          reinterpret_cast<void (*)(BlockParams<Sequence>)>(const_cast<void*>(kernel)), plan.block,
          plan.heads, args, stream);
    case RecurrentKernel::kCluster:
      return launch_cluster(kernel, plan.cluster, plan.heads, args, stream);
    case RecurrentKernel::kGrid:
      return launch_grid(kernel, plan.grid, plan.heads, plan.workspace, args, workspace, stream);
    case RecurrentKernel::kWarpgroup:
    case RecurrentKernel::kSteps:
      break;
  }
  return cudaErrorNotSupported;
}

template cudaError_t launch_recurrent_kernel(const void*, const RecurrentSequence<void>&,
                                             const RecurrentPlan&, void*, cudaStream_t);
template cudaError_t launch_recurrent_kernel(const void*, const RecurrentSequenceBackward<void>&,
                                             const RecurrentPlan&, void*, cudaStream_t);

}  // namespace my_ops::cuda
