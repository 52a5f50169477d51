// Which layers the warp kernels support: pure host code.
#pragma once

#include <climits>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "recurrent.h"

namespace my_ops::cuda {

// The blocks for which an SM has registers, in kernels for up to this many units.
constexpr int warp_blocks_per_sm(int units) { return units == 32 ? 8 : units == 64 ? 2 : 1; }

// The lanes that share a unit.
constexpr int warp_lanes(int units) { return units == 32 ? 1 : units == 64 ? 2 : 4; }

constexpr Needs kWarpNeeds{.code = 75};

// Which instantiations there are, by a lane's registers for weights. No lane has two rows.
constexpr bool warp_exists(int gates, int units, int rows) {
  return rows <= warp_lanes(units) && gates * units / warp_lanes(units) <= (units == 96 ? 96 : 160);
}

// These functions of every family return why its kernels do not support a layer, or null.
inline const char* plan_warp(const RecurrentProblem& p, const DeviceFacts& device, WarpPlan& plan) {
  if (p.hidden > 96) return "supports up to 96 units";
  plan.units = p.hidden <= 32 ? 32 : p.hidden <= 64 ? 64 : 96;
  plan.threads = static_cast<int>(ceil_div(p.hidden * warp_lanes(plan.units), 32) * 32);
  // The fewest rows with which every block has an SM.
  plan.rows = 1;
  while (plan.rows < warp_lanes(plan.units) && ceil_div(p.batch, plan.rows) > device.sm_count) {
    plan.rows *= 2;
  }
  if (!warp_exists(p.cell.gates, plan.units, plan.rows)) return "too many gates for so many units";
  if (ceil_div(p.batch, plan.rows) > INT_MAX) return "too many rows";
  return device.runs(kWarpNeeds) ? nullptr : "no code for this device";
}

}  // namespace my_ops::cuda
