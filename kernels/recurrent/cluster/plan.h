// Which layers the cluster kernels support: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "recurrent.h"
#include "recurrent/warp/plan.h"

namespace my_ops::cuda {

constexpr int kSpreadBytes = 120 * 1024;
constexpr int kMaxClusterStatic = 48 * 1024;  // of the kernels' own shared memory
constexpr int kClusterBlockUnits = 32;        // of a block: two for each sixteen lanes
constexpr int kMostClusterBlocks = 8;         // of a cluster
constexpr int kMostClusterRows = 4;           // of the batch, per cluster

// Which instantiations there are. Up to 64 units, they are for the cells of which there are no warp
// kernels.
constexpr bool cluster_exists(int gates, int chunks) {
  return chunks > 1 || !warp_exists(gates, 64, 1);
}

constexpr Needs needs(const ClusterPlan& plan) {
  return {
      .code = 90, .shared_bytes = plan.spread_bytes + kMaxClusterStatic, .cluster = plan.blocks};
}

// For hidden sizes up to 256 whose rows all run at once.
inline const char* plan_cluster(const RecurrentProblem& p, const DeviceFacts& device,
                                ClusterPlan& plan) {
  if (p.hidden > kMostClusterBlocks * kClusterBlockUnits) return "supports up to 256 units";
  plan.chunks = p.hidden <= 64 ? 1 : p.hidden <= 128 ? 2 : 4;
  // At least two: a block that writes to its own shared memory this way must have a peer.
  plan.blocks = static_cast<int>(std::max<int64_t>(2, ceil_div(p.hidden, kClusterBlockUnits)));
  if (!cluster_exists(p.cell.gates, plan.chunks)) return "so few units that a warp holds them";
  if (!device.runs({.code = 90, .cluster = plan.blocks})) return "needs clusters";
  const Needs spread{.shared_bytes = kSpreadBytes + kMaxClusterStatic};
  plan.spread_bytes = device.runs(spread) ? kSpreadBytes : 0;
  // A cluster must be in one GPC, so some SMs stay idle: 31 clusters of 4 and 15 of 8 fit on 132.
  const int64_t resident = (device.sm_count - device.sm_count / 16) / plan.blocks;
  // The fewest rows with which all clusters run at once.
  plan.rows = 1;
  while (plan.rows < kMostClusterRows && ceil_div(p.batch, plan.rows) > resident) plan.rows *= 2;
  return ceil_div(p.batch, plan.rows) <= resident ? nullptr : "too many rows to run at once";
}

}  // namespace my_ops::cuda
