// The plan of a recurrent layer: pure host code that depends only on the problem and the device.
// Each family of kernels says whether it supports the layer; then they are tried in order, and the
// first that is the fastest by what was timed (costs.h) plans it. The rest runs step by step.
#pragma once

#include <cstdint>

#include "device.h"
#include "recurrent.h"
#include "recurrent/block/plan.h"
#include "recurrent/cluster/plan.h"
#include "recurrent/costs.h"
#include "recurrent/grid/plan.h"
#include "recurrent/warp/plan.h"
#include "recurrent/warpgroup/plan.h"

namespace my_ops::cuda {

// Which families support a layer.
struct Possible {
  bool block, cluster, warpgroup;
};

inline bool warps_faster(const RecurrentProblem& p, const RecurrentPlan& plan,
                         const RecurrentCosts::Warp& costs, const DeviceFacts& device,
                         const Possible& possible) {
  if (plan.warp.units > 64) {
    if (p.pass == Pass::kForward && possible.warpgroup &&
        p.batch > costs.rows_beside_warpgroups * device.sm_count) {
      return false;
    }
    return !possible.block && (!possible.cluster || plan.cluster.rows >= costs.rows_of_clusters);
  }
  return !possible.block ||
         p.batch <= costs.rows_beside_blocks[p.width == 4][p.cell.gates > 3][plan.warp.units > 32] *
                        device.sm_count;
}

inline bool blocks_faster(const RecurrentProblem& p, const RecurrentCosts::Block& costs,
                          const DeviceFacts& device, const Possible& possible) {
  if (p.width == 4) {
    const bool has_clusters = device.runs({.code = 90, .cluster = 2});
    return !possible.cluster &&
           (has_clusters || p.batch > costs.rows_beside_grids * device.sm_count);
  }
  const bool short_steps = p.cell.gates * p.hidden <= costs.short_step;
  if (possible.cluster && !short_steps &&
      p.batch <= static_cast<int64_t>(costs.rows_beside_clusters * device.sm_count)) {
    return false;
  }
  return !(p.pass == Pass::kForward && possible.warpgroup &&
           p.hidden > costs.units_beside_warpgroups &&
           p.batch > costs.rows_beside_warpgroups * device.sm_count);
}

// In float it depends on the rows of a block of the grid kernels, which has 16 units.
inline bool warpgroups_faster(const RecurrentProblem& p, const RecurrentCosts::Warpgroup& costs,
                              const DeviceFacts& device) {
  const bool forward = p.pass == Pass::kForward;
  if (p.width == 4) {
    const int size = p.hidden <= 128 ? 0 : p.hidden <= 256 ? 1 : 2;
    const int64_t rows = !forward && p.hidden <= 512 ? costs.backward_rows_beside_grids[size]
                                                     : costs.rows_beside_grids;
    return p.batch > rows * (device.sm_count / ceil_div(p.hidden, 16));
  }
  return p.batch * p.hidden >=
         costs.units_beside_grids[!(forward && p.cell.gates <= 3)] * device.sm_count;
}

// Warpgroups compute float products at full accuracy.
inline bool steps_faster_in_tf32(const RecurrentProblem& p, const RecurrentCosts::Tf32& costs) {
  if (p.pass == Pass::kForward) {
    return p.batch > costs.rows && p.cell.gates * p.hidden > costs.gate_units;
  }
  return p.batch >
         (p.hidden > costs.backward_units ? costs.rows : costs.backward_rows_of_few_units);
}

// Calls asked(kernel, why) for each family tried: why it does not support the layer, or null for
// the last.
template <typename Asked>
RecurrentPlan plan_recurrent(const RecurrentProblem& p, const DeviceFacts& device,
                             const RecurrentCosts& costs, Asked asked) {
  using Kernel = RecurrentKernel;
  RecurrentPlan plan;
  if (p.steps <= 0 || p.batch <= 0 || p.hidden <= 0 || p.width > 4) return plan;
  const bool forward = p.pass == Pass::kForward;
  const char* const no_warpgroup =
      forward ? plan_warpgroup(p, costs.warpgroup, device, plan.warpgroup)
              : plan_warpgroup_backward(p, costs.warpgroup, device, plan.warpgroup_backward);
  const char* const no_cluster = plan_cluster(p, device, plan.cluster);
  const char* const no_block = plan_block(p, device, plan.block);
  const char* const no_warp = plan_warp(p, device, plan.warp);
  const Possible possible{!no_block, !no_cluster, !no_warpgroup};
  const auto accepts = [&](Kernel kernel, const char* why, bool faster) {
    constexpr const char* kSlower = "another kernel is faster";
    why = why ? why : faster ? nullptr : kSlower;
    asked(kernel, why);
    if (!why) plan.kernel = kernel;
    return !why;
  };
  if (accepts(Kernel::kWarp, no_warp,
              no_warp || warps_faster(p, plan, costs.warp, device, possible)) ||
      accepts(Kernel::kBlock, no_block, blocks_faster(p, costs.block, device, possible)) ||
      accepts(Kernel::kCluster, no_cluster, true)) {
    return plan;
  }
  const char* const no_grid = plan_grid(p, costs.grid, device, plan.grid);
  const bool warpgroup = no_grid || warpgroups_faster(p, costs.warpgroup, device);
  if (accepts(Kernel::kWarpgroup, no_warpgroup, warpgroup)) {
    plan.workspace = forward ? warpgroup_exchange_bytes(p) : warpgroup_backward_exchange_bytes(p);
    plan.steps_faster_in_tf32 = p.width == 4 && steps_faster_in_tf32(p, costs.tf32);
  } else if (accepts(Kernel::kGrid, no_grid, true)) {
    plan.workspace = grid_exchange_bytes(p);
  }
  return plan;
}

inline RecurrentPlan plan_recurrent(const RecurrentProblem& p, const DeviceFacts& device) {
  return plan_recurrent(p, device, kRecurrentCosts, [](RecurrentKernel, const char*) {});
}

}  // namespace my_ops::cuda
