// The plan of a recurrent layer in words, for `python -m my_ops explain` and MY_OPS_LOG=plan.
#pragma once

#include <map>
#include <sstream>
#include <string>

#include "../include/recurrent.h"

namespace my_ops {

// The cells of the layers' ops, by the op's name. The ops' registration fills it.
std::map<std::string, cuda::CellFacts>& cells_of_ops();

inline const char* show(cuda::RecurrentKernel kernel) {
  switch (kernel) {
    case cuda::RecurrentKernel::kSteps:
      return "steps";
    case cuda::RecurrentKernel::kWarp:
      return "warp";
    case cuda::RecurrentKernel::kBlock:
      return "block";
    case cuda::RecurrentKernel::kCluster:
      return "cluster";
    case cuda::RecurrentKernel::kGrid:
      return "grid";
    case cuda::RecurrentKernel::kWarpgroup:
      return "warpgroup";
  }
  return "";
}

// "grid, 2 groups of 64 blocks, 3.1 MiB of workspace"
inline std::string show(const cuda::RecurrentPlan& plan, Pass pass) {
  std::ostringstream text;
  text.precision(1);
  text << std::fixed << show(plan.kernel);
  switch (plan.kernel) {
    case cuda::RecurrentKernel::kSteps:
      text << ": a product and a kernel for each step";
      break;
    case cuda::RecurrentKernel::kWarp:
      text << ", batch rows of a block: " << plan.warp.rows;
      break;
    case cuda::RecurrentKernel::kBlock:
      text << ", batch rows of a block: " << plan.block.rows;
      break;
    case cuda::RecurrentKernel::kCluster:
      text << " of " << plan.cluster.blocks << " blocks, batch rows: " << plan.cluster.rows;
      break;
    case cuda::RecurrentKernel::kGrid:
      text << ", groups of " << plan.grid.members << " blocks: " << plan.grid.groups;
      break;
    case cuda::RecurrentKernel::kWarpgroup:
      if (pass == Pass::kForward) {
        text << ", groups of " << plan.warpgroup.members << " blocks: " << plan.warpgroup.groups;
      } else {
        const cuda::WarpgroupBackwardPlan& of = plan.warpgroup_backward;
        text << ", groups of " << of.tiles << " clusters of " << of.split
             << " blocks: " << of.groups;
      }
      break;
  }
  if (plan.workspace) text << ", " << plan.workspace / 1048576.0 << " MiB of workspace";
  return text.str();
}

}  // namespace my_ops
