// The engine's kernels for Hopper and newer, which <cell>_sm90.cu instantiates.
#pragma once

#include <type_traits>

#include "recurrent.h"

namespace my_ops::cuda {

template <Pass kPass, typename T>
using SequenceOf =
    std::conditional_t<kPass == Pass::kForward, RecurrentSequence<T>, RecurrentSequenceBackward<T>>;

// For plans of clusters and of warpgroups.
template <Pass kPass, typename Cell, typename T>
struct Sm90 {
  // Whether the device holds the plan's clusters, which depends on how its SMs are distributed
  // among GPCs.
  static bool fits(const RecurrentPlan& plan);
  static cudaError_t launch(const SequenceOf<kPass, T>& args, const RecurrentPlan& plan,
                            void* workspace, cudaStream_t stream);
};

}  // namespace my_ops::cuda
