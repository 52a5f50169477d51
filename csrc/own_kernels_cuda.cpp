// What my_ops/recurrent/_own_kernels.py asks of the module, through ctypes, for cells that programs
// define: it has the same structs. Kernels run on the current device, which is the tensors'.
#include <cstring>
#include <string>

#include "../include/recurrent.h"
#include "explain.h"

#define MY_OPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace my_ops {

// All steps of a layer of a cell. The names are those of the cell and of the activations' type in
// the source of the kernels.
struct AskedKernel {
  const char* cell;
  const char* type;
  int gates, terms, state, width, backward;
  int64_t steps, batch, hidden;
  int heads;                  // which divide the hidden units
  const AskedDevice* device;  // null: the current one
};

constexpr int64_t kStepByStep = -1;
constexpr int64_t kPlanBytes = 256;
static_assert(sizeof(cuda::RecurrentPlan) <= kPlanBytes);

}  // namespace my_ops

// Plans a layer. Returns the bytes of its workspace, with the plan, of kPlanBytes, and the name of
// its kernel in C++; or kStepByStep.
MY_OPS_EXPORT int64_t my_ops_plan_own_kernel(const my_ops::AskedKernel* asked, void* planned,
                                             char* name, int64_t size) {
  using namespace my_ops;
  const Pass pass = asked->backward ? Pass::kBackward : Pass::kForward;
  const auto facts = (asked->device ? *asked->device : AskedDevice{}).facts();
  cuda::RecurrentPlan plan;
  cuda::KernelName kernel;
  const auto status = cuda::plan_recurrent_kernel(
      {asked->gates, asked->terms, asked->state, false}, pass, asked->width, asked->steps,
      asked->batch, asked->hidden, asked->heads, asked->device ? &facts : nullptr, &plan, &kernel);
  if (status != cudaSuccess || kernel.family == nullptr) return kStepByStep;
  std::string text = "my_ops::cuda::";
  text += kernel.family;
  text += asked->backward ? "_backward" : "_forward";
  text += "_kernel<";
  const std::string cell = std::string("my_ops::") + asked->cell;
  text += asked->heads > 1 ? "my_ops::cuda::Headed<" + cell + ">" : cell;
  text += std::string(", ") + asked->type;
  for (const int of : kernel.sizes) {
    if (of != 0) text += ", " + std::to_string(of);
  }
  text += ">";
  if (static_cast<int64_t>(text.size()) >= size) return kStepByStep;
  std::memcpy(name, text.c_str(), text.size() + 1);
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
