// Which layers the warpgroup kernels support: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "recurrent.h"
#include "recurrent/costs.h"

namespace my_ops::cuda {

constexpr int kWarpgroupThreads = 3 * 128;  // of two tiles, and those that load
constexpr int kWarpgroupFewRegisters = 40, kWarpgroupManyRegisters = 232;
constexpr int kWarpgroupRows = 64;  // of a tile: wgmma's M
constexpr int kWarpgroupK = 64;     // a k-block of h: 128 bytes of a row
constexpr int kWarpgroupStageBytes = kWarpgroupRows * kWarpgroupK * 2;
constexpr int kWarpgroupPairBytes = 2 * (kWarpgroupStageBytes + 16);  // of two rings, with barriers
constexpr int kWarpgroupFewestStages = 3, kWarpgroupMostStages = 8, kWarpgroupMostTurns = 2;

// The 16-bit parts of a value. In float they need bounds of h that are known before the first step.
constexpr int warpgroup_parts(int width) { return width / 2; }

// Which instantiations there are.
constexpr bool warpgroup_takes(const CellFacts& cell, int width, int units) {
  const int columns = cell.gates * units * warpgroup_parts(width);
  return (columns == 48 || columns == 64 || columns == 96 || columns == 128) &&
         (width == 2 || cell.bounded);
}

constexpr Needs needs(const WarpgroupPlan& plan) {
  return {.code = 90, .shared_bytes = plan.shared_bytes, .resident = plan.members * plan.groups};
}

// How many pairs of tiles a group takes. Plan is WarpgroupPlan or WarpgroupBackwardPlan.
template <typename Plan>
constexpr int64_t waves(const Plan& plan, int64_t batch) {
  return ceil_div(ceil_div(batch, kWarpgroupRows), int64_t{2} * plan.groups);
}

// As many turns as there are waves and as fit, and then stages. Bytes: `fixed` of all, `state` of a
// turn.
template <typename Plan>
bool place_turns(int64_t fixed, int64_t state, int64_t batch, const DeviceFacts& device,
                 Plan& plan) {
  for (int64_t turns = std::min<int64_t>(waves(plan, batch), kWarpgroupMostTurns); turns > 0;
       --turns) {
    const int64_t room = device.shared_bytes - fixed - turns * state;
    const int64_t stages = std::min<int64_t>(kWarpgroupMostStages, room / kWarpgroupPairBytes);
    if (room < 0 || stages < kWarpgroupFewestStages) continue;
    plan.turns = static_cast<int>(turns);
    plan.stages = static_cast<int>(stages);
    plan.shared_bytes = static_cast<int>(fixed + turns * state + stages * kWarpgroupPairBytes);
    return device.runs(needs(plan));
  }
  return false;
}

// A plan for blocks of this many units, with as many groups as fit, and then turns and stages.
inline bool place_warpgroups(const RecurrentProblem& p, int units, const DeviceFacts& device,
                             WarpgroupPlan& plan) {
  const auto& [cell, pass, width, steps, batch, hidden] = p;
  if (!warpgroup_takes(cell, width, units)) return false;
  const int64_t members = ceil_div(hidden, units);
  if (members > device.sm_count) return false;
  const int64_t groups = std::min(device.sm_count / members, ceil_div(batch, kWarpgroupRows));
  plan = {.units = units, .members = static_cast<int>(members), .groups = static_cast<int>(groups)};
  // W_h, the biases and, in float, the scales of W_h.
  const int64_t parts = warpgroup_parts(width);
  const int64_t fixed = ceil_div(hidden, kWarpgroupK) * parts * cell.gates * units * 128 +
                        units * (cell.terms + (width == 4 ? cell.gates : 0)) * 4;
  const int64_t state = 2 * kWarpgroupRows * units * std::max(cell.state, 1) * 4;
  return place_turns(fixed, state, batch, device, plan);
}

// TMA needs rows of whole 16-byte vectors.
inline const char* warpgroup_refusal(const RecurrentProblem& p, const DeviceFacts& device) {
  if (!device.hopper_code) return "needs code for 9.0a";
  return p.hidden % 8 != 0 ? "supports multiples of 8 units" : nullptr;
}

inline const char* plan_warpgroup(const RecurrentProblem& p, const RecurrentCosts::Warpgroup& costs,
                                  const DeviceFacts& device, WarpgroupPlan& plan) {
  if (const char* why = warpgroup_refusal(p, device)) return why;
  if (p.hidden < costs.fewest_units) return "too few units";
  if (p.hidden > costs.most_units) return "too many units";
  const int units = 32 / p.width;
  if (!place_warpgroups(p, units, device, plan)) return "its blocks do not fit";
  // With twice the units, blocks read half as much of h, which helps if one wave is not enough.
  WarpgroupPlan wide;
  if (waves(plan, p.batch) > 1 && place_warpgroups(p, 2 * units, device, wide)) plan = wide;
  const bool faster =
      p.hidden <= costs.units_of_any_wave || waves(plan, p.batch) <= costs.waves[p.width == 4];
  return faster ? nullptr : "so many rows that a product for each step is faster";
}

// Each tile of rows has a counter, which shows how far its group is.
constexpr int kArrivedStride = 32;  // words, so that each counter has its own 128 bytes

constexpr int64_t warpgroup_counter_bytes(int64_t batch) {
  return ceil_div(batch, kWarpgroupRows) * kArrivedStride * 4;
}

// Of the workspace: the counters and, in float, the 16-bit parts of two steps and the rows'
// exponents.
inline int64_t warpgroup_exchange_bytes(const RecurrentProblem& p) {
  const int64_t parts = p.width == 4 ? 4 * p.batch * p.hidden * 2 + p.batch * 4 : 0;
  return warpgroup_counter_bytes(p.batch) + parts;
}

// ---- backward ----

constexpr int kBackwardUnits = 72;  // of a tile: as many as W_h leaves room for, wgmma's N
// In float, k is ordered by tiles, which are padded to whole pairs of wgmma's k.
constexpr int kBackwardK = 32;
constexpr int backward_tile_k(int gates) {
  return static_cast<int>(ceil_div(gates * kBackwardUnits, kBackwardK)) * kBackwardK;
}
// A ring also has to hold its tile's partial sums.
static_assert(kWarpgroupRows * kBackwardUnits * 4 <= kWarpgroupFewestStages * kWarpgroupStageBytes);

constexpr Needs needs(const WarpgroupBackwardPlan& plan) {
  return {.code = 90,
          .shared_bytes = plan.shared_bytes,
          .cluster = plan.split,
          .resident = plan.tiles * plan.groups * plan.split};
}

// A plan for clusters of this many blocks, with as many groups as fit, and then turns and stages.
inline bool place_backward(const RecurrentProblem& p, int split, const DeviceFacts& device,
                           WarpgroupBackwardPlan& plan) {
  const auto& [cell, pass, width, steps, batch, hidden] = p;
  const int64_t tiles = ceil_div(hidden, kBackwardUnits);
  const int64_t k = width == 4 ? tiles * backward_tile_k(cell.gates) : cell.gates * hidden;
  const int64_t k_blocks = ceil_div(ceil_div(k, kWarpgroupK), split);
  // W_h, the barriers of the partial sums and, in float, the scales of W_h's columns and the
  // largest gradients of the block's rows.
  const int64_t fixed = k_blocks * kBackwardUnits * 128 * warpgroup_parts(width) + 4 * 8 +
                        (width == 4 ? (kBackwardUnits + 2 * kWarpgroupRows / split) * 4 : 0);
  const int64_t state = 2 * kWarpgroupRows / split * kBackwardUnits * std::max(cell.state, 1) * 4;
  // Of 132 SMs, 120 hold these clusters.
  const int64_t clusters = (device.sm_count - device.sm_count / 11) / split;
  if (tiles > clusters) return false;
  plan = {.split = split,
          .tiles = static_cast<int>(tiles),
          .groups = static_cast<int>(std::min(clusters / tiles, ceil_div(batch, kWarpgroupRows))),
          .k_blocks = static_cast<int>(k_blocks)};
  return place_turns(fixed, state, batch, device, plan);
}

inline const char* plan_warpgroup_backward(const RecurrentProblem& p,
                                           const RecurrentCosts::Warpgroup& costs,
                                           const DeviceFacts& device, WarpgroupBackwardPlan& plan) {
  if (const char* why = warpgroup_refusal(p, device)) return why;
  const auto pays = [&](int split, int64_t most_waves) {
    return place_backward(p, split, device, plan) && waves(plan, p.batch) <= most_waves;
  };
  bool faster = pays(8, costs.backward_waves_of_eight);
  if (!faster && p.width == 2) {
    faster = pays(4, costs.backward_waves_of_four);
  } else if (!faster && p.hidden > 512) {  // clusters of four do not hold the parts of W_h
    faster = pays(8, costs.backward_waves_float);
  } else if (!faster) {
    faster = pays(4, p.hidden <= 256 ? costs.backward_waves_float
                                     : costs.backward_waves_middle[p.cell.gates > 3]);
  }
  return faster ? nullptr : "its clusters do not fit, or a product for each step is faster";
}

// Of the workspace: the counters and, in float, the parts of two steps and the rows' scales.
inline int64_t warpgroup_backward_exchange_bytes(const RecurrentProblem& p) {
  const int64_t tiles = ceil_div(p.hidden, kBackwardUnits);
  const int64_t columns = tiles * backward_tile_k(p.cell.gates);
  const int64_t parts = p.width == 4 ? 4 * p.batch * columns * 2 + 2 * tiles * p.batch * 4 : 0;
  return warpgroup_counter_bytes(p.batch) + parts;
}

}  // namespace my_ops::cuda
