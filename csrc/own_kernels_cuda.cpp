// What my_ops/recurrent/_own_kernels.py asks of the module, through ctypes, for cells that programs
// define: it has the same structs. The current device is the tensors'.
#include <cstdio>
#include <cstring>

#include "recurrent/plan.h"

#define MY_OPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace my_ops {

// All steps of a layer of a cell. The names are those of the cell and of the activations' type in
// the source of the kernels.
struct AskedKernel {
  const char* cell;
  const char* type;
  int gates, terms, state, width, backward;
  int64_t steps, batch, hidden;
};

constexpr int64_t kStepByStep = -1;
constexpr int64_t kPlanBytes = 256;  // enough for a plan
static_assert(sizeof(cuda::RecurrentPlan) <= kPlanBytes);

template <typename... Sizes>
void name_kernel(const AskedKernel& asked, const char* family, char* name, int64_t size,
                 Sizes... sizes) {
  int used = std::snprintf(name, size, "my_ops::cuda::%s_%s_kernel<my_ops::%s, %s", family,
                           asked.backward ? "backward" : "forward", asked.cell, asked.type);
  const auto add = [&](const char* format, int value) {
    if (used >= 0 && used < size) used += std::snprintf(name + used, size - used, format, value);
  };
  (add(", %d", sizes), ...);
  add(">", 0);
}

}  // namespace my_ops

// Plans a layer. Returns the bytes of its workspace, with the plan, of kPlanBytes, and the name of
// its kernel in C++; or kStepByStep. Kernels of warpgroups are not among those that it plans.
MY_OPS_EXPORT int64_t my_ops_plan_own_kernel(const my_ops::AskedKernel* asked, void* planned,
                                             char* name, int64_t size) {
  using namespace my_ops;
  cuda::DeviceFacts device;
  if (cuda::current_device(&device) != cudaSuccess) return kStepByStep;
  device.hopper_code = false;
  const Pass pass = asked->backward ? Pass::kBackward : Pass::kForward;
  const cuda::CellFacts cell{asked->gates, asked->terms, asked->state, false};
  const cuda::RecurrentPlan plan = cuda::plan_recurrent(
      {cell, pass, asked->width, asked->steps, asked->batch, asked->hidden}, device);
  switch (plan.kernel) {
    case cuda::RecurrentKernel::kWarp:
      name_kernel(*asked, "warp", name, size, plan.warp.units, plan.warp.rows);
      break;
    case cuda::RecurrentKernel::kBlock:
      name_kernel(*asked, "block", name, size, plan.block.units);
      break;
    case cuda::RecurrentKernel::kCluster:
      name_kernel(*asked, "cluster", name, size, plan.cluster.rows, plan.cluster.chunks);
      break;
    case cuda::RecurrentKernel::kGrid:
      name_kernel(*asked, "grid", name, size, plan.grid.unit_tiles, plan.grid.row_tiles,
                  plan.grid.chunks);
      break;
    case cuda::RecurrentKernel::kWarpgroup:
    case cuda::RecurrentKernel::kSteps:
      return kStepByStep;
  }
  std::memcpy(planned, &plan, sizeof plan);
  return plan.workspace;
}

// These return 0 or an error of CUDA.

// name: as in the machine code.
MY_OPS_EXPORT int my_ops_load_own_kernel(const void* code, const char* name, const void* plan,
                                         const void** kernel) {
  return my_ops::cuda::load_recurrent_kernel(
      code, name, *static_cast<const my_ops::cuda::RecurrentPlan*>(plan), kernel);
}

// args: RecurrentSequence or RecurrentSequenceBackward.
MY_OPS_EXPORT int my_ops_launch_own_kernel(const void* kernel, const void* plan, int backward,
                                           const void* args, void* workspace, void* stream) {
  using namespace my_ops;
  const auto launch = [&](const auto* sequence) {
    return cuda::launch_recurrent_kernel(kernel, *sequence,
                                         *static_cast<const cuda::RecurrentPlan*>(plan), workspace,
                                         static_cast<cudaStream_t>(stream));
  };
  return backward ? launch(static_cast<const cuda::RecurrentSequenceBackward<void>*>(args))
                  : launch(static_cast<const cuda::RecurrentSequence<void>*>(args));
}
