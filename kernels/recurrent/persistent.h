// The persistent kernels' launchers, for the router in persistent.cuh.
#pragma once

#include "recurrent.h"

#include "recurrent/cells/cell.h"
#include "recurrent/plan.h"

namespace my_ops::cuda {

constexpr int kExchangeSlots = 64;

// Bytes of the grid kernels' exchange: h0 and the h of every step, or the gates' gradients of every
// step.
template <typename Cell, typename T>
constexpr int64_t grid_exchange_bytes(Pass pass, int64_t steps, int64_t batch, int64_t hidden) {
  constexpr int64_t kChunkUnits = 64 / sizeof(T);
  const int64_t vectors = pass == Pass::kForward ? 1 : Cell::kGates;
  const int64_t rounds = pass == Pass::kForward ? steps + 1 : steps;
  return (rounds < kExchangeSlots ? rounds : kExchangeSlots) * vectors *
         ((hidden + kChunkUnits - 1) / kChunkUnits) * batch * 64;
}

template <typename Cell, typename T>
cudaError_t grid_forward(const RecurrentSequence<T>& args, const GridPlan& plan, void* workspace,
                         cudaStream_t stream);
template <typename Cell, typename T>
cudaError_t grid_backward(const RecurrentSequenceBackward<T>& args, const GridPlan& plan,
                          void* workspace, cudaStream_t stream);
template <typename Cell, typename T>
cudaError_t cluster_forward(const RecurrentSequence<T>& args, const ClusterPlan& plan,
                            cudaStream_t stream);
template <typename Cell, typename T>
cudaError_t cluster_backward(const RecurrentSequenceBackward<T>& args, const ClusterPlan& plan,
                             cudaStream_t stream);

// Clusters of this plan's kernel that the device holds; 0 if none.
template <typename Cell, typename T>
int cluster_forward_resident(const ClusterPlan& plan);
template <typename Cell, typename T>
int cluster_backward_resident(const ClusterPlan& plan);

}  // namespace my_ops::cuda
