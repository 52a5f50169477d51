// Which layers the grid kernels support: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "recurrent.h"
#include "recurrent/costs.h"
#include "recurrent/shared/sizes.h"

namespace my_ops::cuda {

// The units and rows of a tile that a thread works on.
constexpr int items_per_thread(int unit_tiles, int row_tiles) {
  return static_cast<int>(ceil_div(unit_tiles * row_tiles * 128, kRecurrentThreads));
}

// Shared memory for the slab, for the state or its gradient in every tile of a group's rows, and
// for the biases in forward.
constexpr int grid_shared_bytes(const CellFacts& cell, Pass pass, int width, const GridPlan& plan) {
  const bool forward = pass == Pass::kForward;
  const int tiles = plan.unit_tiles * (forward ? cell.gates : 1);
  const int chunks = plan.chunks * (forward ? 1 : cell.gates);
  const auto row_tiles = static_cast<int>(ceil_div(plan.rows, plan.row_tiles * 8));
  return slab_shared_bytes(width, tiles, plan.row_tiles, chunks) +
         row_tiles * items_per_thread(plan.unit_tiles, plan.row_tiles) * cell.state *
             kRecurrentThreads * 4 +
         (forward ? 16 * plan.unit_tiles * cell.terms * 4 : 0);
}

// Backward with 32 units per block takes one tile of rows at a time, which is as fast as two.
constexpr int most_row_tiles(Pass pass, int unit_tiles) {
  return pass == Pass::kBackward && unit_tiles == 2 ? 1 : 2;
}

// Whether plans use an instantiation and any GPU has the shared memory that it needs. The others
// are not compiled.
constexpr bool grid_exists(const CellFacts& cell, Pass pass, int width, int unit_tiles,
                           int row_tiles, int chunks) {
  if (row_tiles > most_row_tiles(pass, unit_tiles)) return false;
  constexpr int kMostSharedBytes = 227 * 1024;  // Hopper's and Blackwell's
  const GridPlan least{
      .unit_tiles = unit_tiles, .rows = 1, .row_tiles = row_tiles, .chunks = chunks};
  return grid_shared_bytes(cell, pass, width, least) <= kMostSharedBytes;
}

// Blocks wait for each other, so all of the grid must run at once.
constexpr Needs needs(const GridPlan& plan) {
  return {.code = 80, .shared_bytes = plan.shared_bytes, .resident = plan.members * plan.groups};
}

// Bytes of the exchange: for h0 and the h of every step, or for the gates' gradients of every step.
constexpr int64_t grid_exchange_bytes(const RecurrentProblem& p) {
  const bool forward = p.pass == Pass::kForward;
  const int64_t vectors = forward ? 1 : p.cell.gates, rounds = forward ? p.steps + 1 : p.steps;
  return std::min<int64_t>(rounds, kSlots) * vectors * ceil_div(p.hidden, kChunkBytes / p.width) *
         p.batch * kChunkBytes;
}

// The rows per group up to which one launch for all steps is faster than a product and a cell for
// each step.
constexpr int64_t max_rows(const RecurrentProblem& p, const RecurrentCosts::Grid& costs) {
  const int size = p.hidden <= 256 ? 0 : p.hidden <= 512 ? 1 : p.hidden <= 1024 ? 2 : 3;
  return costs.rows[p.pass == Pass::kBackward][p.width == 4][p.cell.gates > 3][size];
}

inline const char* plan_grid(const RecurrentProblem& p, const RecurrentCosts::Grid& costs,
                             const DeviceFacts& device, GridPlan& plan) {
  const int64_t chunk_units = kChunkBytes / p.width;
  const int64_t chunks = ceil_div(ceil_div(p.hidden, chunk_units), kRecurrentWarps);
  if (chunks > 8) return "too many units";
  plan.chunks = chunks <= 2 ? 2 : chunks <= 4 ? 4 : 8;
  // Blocks of 32 units halve what a group reads per step; with few rows, latency counts more.
  const bool two_tiles =
      p.width == 2 && plan.chunks == 4 &&
      p.batch > costs.rows_of_wide_blocks * (device.sm_count / ceil_div(p.hidden, 16));
  const char* why = "too few SMs for so many units";
  for (const int unit_tiles : {two_tiles ? 2 : 1, 1}) {
    // The units are padded to a whole number of chunks; the padding is published as zeros.
    plan.unit_tiles = unit_tiles;
    plan.members =
        static_cast<int>(ceil_div(ceil_div(p.hidden, chunk_units) * chunk_units, 16 * unit_tiles));
    const int64_t groups = device.sm_count / plan.members;
    if (groups == 0) continue;
    const int64_t rows = ceil_div(p.batch, groups);
    why = "so many rows that a product for each step is faster";
    if (rows > max_rows(p, costs)) continue;
    why = "needs compute capability 8.0, and more shared memory or SMs";
    plan.rows = static_cast<int>(rows);
    plan.groups = static_cast<int>(ceil_div(p.batch, rows));
    for (const int row_tiles : {rows > 8 ? most_row_tiles(p.pass, unit_tiles) : 1, 1}) {
      plan.row_tiles = row_tiles;
      plan.shared_bytes = grid_shared_bytes(p.cell, p.pass, p.width, plan);
      if (device.runs(needs(plan))) return nullptr;
    }
  }
  return why;
}

}  // namespace my_ops::cuda
