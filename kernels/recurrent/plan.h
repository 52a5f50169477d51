// Which persistent kernel runs a recurrent layer, and how it divides the work. Pure host code that
// depends only on the cell, the problem and the device.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "recurrent.h"

namespace my_ops::cuda {

constexpr int kRecurrentThreads = 256;
constexpr int kRecurrentWarps = kRecurrentThreads / 32;

// What a plan needs to know about a cell.
struct CellFacts {
  int gates, terms;
  int state;  // values of a unit that stay in its block from step to step, h included if it is read
  bool bounded;  // |h_t| <= max(1, |h_{t-1}|)
};

template <typename Cell>
constexpr CellFacts kCellFacts{Cell::kGates, Cell::kGates + Cell::kApart,
                               Cell::kCarried + Cell::kReadsH, Cell::kBounded};

// Groups of blocks that exchange through L2 (grid.cuh). A group holds all of W_h, and a block
// 16 * unit_tiles units of it. The groups divide the rows of the batch and never communicate.
struct GridPlan {
  int unit_tiles;  // 1 or 2
  int members;     // blocks of a group
  int groups;
  int rows;          // of the batch, per group
  int row_tiles;     // tiles of 8 rows that a block takes at a time: 1 or 2
  int chunks;        // of h, 64 bytes each, that a warp takes; the kernel's template argument
  int shared_bytes;  // of a block
};

// Clusters that exchange through distributed shared memory (cluster.cuh).
struct ClusterPlan {
  int blocks;        // of a cluster, which holds all of W_h
  int rows;          // of the batch, per cluster: 1, 2 or 4
  int chunks;        // of 64 units, which cover the hidden size: 1, 2 or 4
  int spread_bytes;  // shared memory that a block may ask for to have its SM to itself
};

// Warps that run rows on their own (warp.cuh).
struct WarpPlan {
  int units;    // up to which a kernel goes; its template argument: 32, 64 or 96
  int rows;     // of the batch, per block: 1, 2 or 4
  int threads;  // of a block
};

// Blocks that run rows on their own (block.cuh).
struct BlockPlan {
  int units;    // up to which a kernel goes; its template argument: 32, 64 or 128
  int threads;  // a warp per 16 units
  int rows;     // of the batch, per block: 4 or 8
};

// Groups of blocks for many rows (warpgroup/forward.cuh). They divide tiles of 64 rows and never
// communicate.
struct WarpgroupPlan {
  int units;    // of a block: 8 or 16 in float, 16 or 32 in 16 bits
  int members;  // blocks of a group, which holds all of W_h
  int groups;
  int turns;   // tiles that each of a block's two warpgroups runs at a time
  int stages;  // of a warpgroup's ring
  int shared_bytes;
};

// Clusters for many rows (warpgroup/backward.cuh). Those of a group divide the units, and the
// groups divide tiles of 64 rows.
struct WarpgroupBackwardPlan {
  int split;  // blocks of a cluster, which divide the sum over gates and units: 4 or 8
  int tiles;  // of units, a cluster each
  int groups;
  int k_blocks;  // of a block
  int turns;     // as above
  int stages;
  int shared_bytes;
};

struct RecurrentPlan {
  enum class Kind { kNone, kWarp, kBlock, kCluster, kGrid, kWarpgroup };
  Kind kind = Kind::kNone;
  WarpPlan warp{};
  BlockPlan block{};
  ClusterPlan cluster{};
  GridPlan grid{};
  WarpgroupPlan warpgroup{};
  WarpgroupBackwardPlan warpgroup_backward{};
};

// ---- warps ----

// The blocks for which an SM has registers, in kernels for up to this many units.
constexpr int warp_blocks_per_sm(int units) { return units == 32 ? 8 : units == 64 ? 2 : 1; }

// The lanes that share a unit.
constexpr int warp_lanes(int units) { return units == 32 ? 1 : units == 64 ? 2 : 4; }

constexpr Needs kWarpNeeds{.code = 75};

// Which instantiations there are, by a lane's registers for weights. No lane has two rows.
constexpr bool warp_exists(int gates, int units, int rows) {
  return rows <= warp_lanes(units) && gates * units / warp_lanes(units) <= (units == 96 ? 96 : 160);
}

inline bool plan_warp(const CellFacts& cell, int64_t batch, int64_t hidden,
                      const DeviceFacts& facts, WarpPlan& plan) {
  if (hidden > 96) return false;
  plan.units = hidden <= 32 ? 32 : hidden <= 64 ? 64 : 96;
  plan.threads = static_cast<int>(ceil_div(hidden * warp_lanes(plan.units), 32) * 32);
  // The fewest rows with which every block has an SM.
  plan.rows = 1;
  while (plan.rows < warp_lanes(plan.units) && ceil_div(batch, plan.rows) > facts.sm_count) {
    plan.rows *= 2;
  }
  return warp_exists(cell.gates, plan.units, plan.rows) && ceil_div(batch, plan.rows) <= INT_MAX &&
         facts.runs(kWarpNeeds);
}

// Whether the warp kernels are faster than the others that are possible. Timed on an H200 with LSTM
// and GRU of 32 to 96 units and 1 to 8192 rows; reasoned for other devices. cluster: the rows of a
// cluster, or 0 if there is no plan for clusters.
inline bool takes_warps(const CellFacts& cell, int width, int64_t batch, const WarpPlan& plan,
                        const DeviceFacts& facts, bool block, int cluster, bool warpgroup) {
  if (plan.units == 96) {
    if (warpgroup && batch > 16 * facts.sm_count) return false;
    return !block && (cluster == 0 || cluster == 4);
  }
  if (!block) return true;
  const bool few_units = plan.units == 32;
  if (width == 4) return batch <= int64_t{few_units ? 8 : 4} * facts.sm_count;
  return batch <= int64_t{few_units ? 4 : cell.gates > 3 ? 1 : 0} * facts.sm_count;
}

// ---- blocks ----

constexpr int kBlockRows = 8;  // mma's N

// The blocks for which an SM has registers, in the forward kernels for up to this many units; 0: as
// the compiler chooses. With eight, an H200 runs 8192 rows of 32 units at once.
constexpr int block_blocks_per_sm(int width, int units) {
  return width == 2 && units == 32 ? 8 : 0;
}

// A column of the vector in shared memory: an odd number of chunks, so that the columns that are
// read at a time are in different banks.
constexpr int block_row_bytes(int chunks) { return (chunks | 1) * 64; }

// Which instantiations there are: the weights of a warp's 16 units take up to 128 registers.
constexpr bool block_exists(int gates, int width, int units) {
  return gates * units * width <= 1024;
}

// Values are read and written in pairs of units.
inline bool plan_block(const CellFacts& cell, int width, int64_t batch, int64_t hidden,
                       const DeviceFacts& facts, BlockPlan& plan) {
  if (hidden % 2 != 0 || hidden > 128) return false;
  plan.units = hidden <= 32 ? 32 : hidden <= 64 ? 64 : 128;
  if (!block_exists(cell.gates, width, plan.units)) return false;
  const int64_t warps = ceil_div(hidden, 16);
  plan.threads = static_cast<int>(warps * 32);
  // While an SM's four schedulers have at most one warp each, half the rows take half the time.
  plan.rows = ceil_div(batch, kBlockRows / 2) * warps <= int64_t{4} * facts.sm_count
                  ? kBlockRows / 2
                  : kBlockRows;
  return facts.runs({.code = 80});
}

// ---- clusters ----

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

// For hidden sizes up to 256 whose rows all run at once.
inline bool plan_cluster(const CellFacts& cell, int64_t batch, int64_t hidden,
                         const DeviceFacts& facts, ClusterPlan& plan) {
  if (hidden > kMostClusterBlocks * kClusterBlockUnits) return false;
  plan.chunks = hidden <= 64 ? 1 : hidden <= 128 ? 2 : 4;
  // At least two: a block that writes to its own shared memory this way must have a peer.
  plan.blocks = static_cast<int>(std::max<int64_t>(2, ceil_div(hidden, kClusterBlockUnits)));
  if (!cluster_exists(cell.gates, plan.chunks) ||
      !facts.runs({.code = 90, .cluster = plan.blocks})) {
    return false;
  }
  const Needs spread{.shared_bytes = kSpreadBytes + kMaxClusterStatic};
  plan.spread_bytes = facts.runs(spread) ? kSpreadBytes : 0;
  // A cluster must be in one GPC, so some SMs stay idle: 31 clusters of 4 and 15 of 8 fit on 132.
  const int64_t resident = (facts.sm_count - facts.sm_count / 16) / plan.blocks;
  // The fewest rows with which all clusters run at once.
  plan.rows = 1;
  while (plan.rows < kMostClusterRows && ceil_div(batch, plan.rows) > resident) plan.rows *= 2;
  return ceil_div(batch, plan.rows) <= resident;
}

// ---- grids ----

// Chunks of a warp's weights that stay in registers, 8 for each of a slab's 16-row tiles. They take
// 96 to 144 of a thread's 255 registers, which also hold the sums.
constexpr int resident_chunks(int width, int tiles, int row_tiles, int chunks) {
  const int room = width == 4 ? 96 : row_tiles == 1 ? 144 : tiles == 4 ? 128 : 96;
  return std::min(chunks, room / (8 * tiles));
}

// Shared memory for the other weights, at least one chunk, and for two sets of partial sums.
constexpr int slab_shared_bytes(int width, int tiles, int row_tiles, int chunks) {
  const int spilled = std::max(chunks - resident_chunks(width, tiles, row_tiles, chunks), 1);
  return spilled * tiles * 2 * kRecurrentThreads * 16 +
         2 * kRecurrentWarps * tiles * row_tiles * 32 * 16;
}

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

// Whether plans take an instantiation and any GPU has the shared memory that it needs. The others
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

// The rows per group up to which one launch for all steps is faster than a product and a cell for
// each step, timed on an H200 with GRU for cells of three gates, and with LSTM for four.
constexpr int64_t max_rows(const CellFacts& cell, Pass pass, int width, int64_t hidden) {
  constexpr int64_t kRows[2][2][2][4] = {
      // width 2                              width 4
      {{{96, 64, 64, 40}, {96, 56, 48, 32}}, {{128, 104, 88}, {112, 96, 64}}},  // forward
      {{{56, 36, 40, 24}, {48, 28, 36, 16}}, {{88, 72, 44}, {72, 56, 26}}},     // backward
  };
  const int size = hidden <= 256 ? 0 : hidden <= 512 ? 1 : hidden <= 1024 ? 2 : 3;
  return kRows[pass == Pass::kBackward][width == 4][cell.gates > 3][size];
}

inline bool plan_grid(const CellFacts& cell, Pass pass, int width, int64_t batch, int64_t hidden,
                      const DeviceFacts& facts, GridPlan& plan) {
  const int64_t chunk_units = 64 / width;
  const int64_t chunks = ceil_div(ceil_div(hidden, chunk_units), kRecurrentWarps);
  if (chunks > 8) return false;
  plan.chunks = chunks <= 2 ? 2 : chunks <= 4 ? 4 : 8;
  // Blocks of 32 units halve what a group reads per step; with few rows, latency counts more.
  const bool two_tiles =
      width == 2 && plan.chunks == 4 && batch > 8 * (facts.sm_count / ceil_div(hidden, 16));
  for (const int unit_tiles : {two_tiles ? 2 : 1, 1}) {
    // The units are padded to a whole number of chunks; the padding is published as zeros.
    plan.unit_tiles = unit_tiles;
    plan.members =
        static_cast<int>(ceil_div(ceil_div(hidden, chunk_units) * chunk_units, 16 * unit_tiles));
    const int64_t groups = facts.sm_count / plan.members;
    if (groups == 0) continue;
    const int64_t rows = ceil_div(batch, groups);
    if (rows > max_rows(cell, pass, width, hidden)) continue;
    plan.rows = static_cast<int>(rows);
    plan.groups = static_cast<int>(ceil_div(batch, rows));
    for (const int row_tiles : {rows > 8 ? most_row_tiles(pass, unit_tiles) : 1, 1}) {
      plan.row_tiles = row_tiles;
      plan.shared_bytes = grid_shared_bytes(cell, pass, width, plan);
      if (facts.runs(needs(plan))) return true;
    }
  }
  return false;
}

// ---- warpgroups ----

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
bool place_turns(int64_t fixed, int64_t state, int64_t batch, const DeviceFacts& facts,
                 Plan& plan) {
  for (int64_t turns = std::min<int64_t>(waves(plan, batch), kWarpgroupMostTurns); turns > 0;
       --turns) {
    const int64_t room = facts.shared_bytes - fixed - turns * state;
    const int64_t stages = std::min<int64_t>(kWarpgroupMostStages, room / kWarpgroupPairBytes);
    if (room < 0 || stages < kWarpgroupFewestStages) continue;
    plan.turns = static_cast<int>(turns);
    plan.stages = static_cast<int>(stages);
    plan.shared_bytes = static_cast<int>(fixed + turns * state + stages * kWarpgroupPairBytes);
    return facts.runs(needs(plan));
  }
  return false;
}

// A plan for blocks of this many units, with as many groups as fit, and then turns and stages.
inline bool place_warpgroups(const CellFacts& cell, int width, int units, int64_t batch,
                             int64_t hidden, const DeviceFacts& facts, WarpgroupPlan& plan) {
  if (!warpgroup_takes(cell, width, units)) return false;
  const int64_t members = ceil_div(hidden, units);
  if (members > facts.sm_count) return false;
  const int64_t groups = std::min(facts.sm_count / members, ceil_div(batch, kWarpgroupRows));
  plan = {.units = units, .members = static_cast<int>(members), .groups = static_cast<int>(groups)};
  // W_h, the biases and, in float, the scales of W_h.
  const int64_t parts = warpgroup_parts(width);
  const int64_t fixed = ceil_div(hidden, kWarpgroupK) * parts * cell.gates * units * 128 +
                        units * (cell.terms + (width == 4 ? cell.gates : 0)) * 4;
  const int64_t state = 2 * kWarpgroupRows * units * std::max(cell.state, 1) * 4;
  return place_turns(fixed, state, batch, facts, plan);
}

// Timed on an H200 with LSTM and GRU at hidden sizes of 256, 512, 768 and 1024: it is faster than a
// product per step, for hidden sizes beyond 512 up to four waves in 16 bits and eight in float.
inline bool plan_warpgroup(const CellFacts& cell, int width, int64_t batch, int64_t hidden,
                           const DeviceFacts& facts, WarpgroupPlan& plan) {
  constexpr int64_t kFewestHidden = 72, kMostHidden = 1024;
  // TMA needs rows of whole 16-byte vectors.
  if (hidden < kFewestHidden || hidden > kMostHidden || hidden % 8 != 0 || !facts.hopper_code) {
    return false;
  }
  const int units = 32 / width;
  if (!place_warpgroups(cell, width, units, batch, hidden, facts, plan)) return false;
  // With twice the units, blocks read half as much of h, which helps if one wave is not enough.
  WarpgroupPlan wide;
  if (waves(plan, batch) > 1 &&
      place_warpgroups(cell, width, 2 * units, batch, hidden, facts, wide)) {
    plan = wide;
  }
  return hidden <= 512 || waves(plan, batch) <= 2 * width;
}

// ---- warpgroups, backward ----

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
inline bool place_backward(const CellFacts& cell, int width, int split, int64_t batch,
                           int64_t hidden, const DeviceFacts& facts, WarpgroupBackwardPlan& plan) {
  const int64_t tiles = ceil_div(hidden, kBackwardUnits);
  const int64_t k = width == 4 ? tiles * backward_tile_k(cell.gates) : cell.gates * hidden;
  const int64_t k_blocks = ceil_div(ceil_div(k, kWarpgroupK), split);
  // W_h, the barriers of the partial sums and, in float, the scales of W_h's columns and the
  // largest gradients of the block's rows.
  const int64_t fixed = k_blocks * kBackwardUnits * 128 * warpgroup_parts(width) + 4 * 8 +
                        (width == 4 ? (kBackwardUnits + 2 * kWarpgroupRows / split) * 4 : 0);
  const int64_t state = 2 * kWarpgroupRows / split * kBackwardUnits * std::max(cell.state, 1) * 4;
  // Of 132 SMs, 120 hold these clusters.
  const int64_t clusters = (facts.sm_count - facts.sm_count / 11) / split;
  if (tiles > clusters) return false;
  plan = {.split = split,
          .tiles = static_cast<int>(tiles),
          .groups = static_cast<int>(std::min(clusters / tiles, ceil_div(batch, kWarpgroupRows))),
          .k_blocks = static_cast<int>(k_blocks)};
  return place_turns(fixed, state, batch, facts, plan);
}

// Timed on an H200 and an H100 with the three cells at hidden sizes of 128 to 1536: it is faster
// than a product per step up to two waves in 16 bits, and up to five in float but for about 512
// units.
inline bool plan_warpgroup_backward(const CellFacts& cell, int width, int64_t batch, int64_t hidden,
                                    const DeviceFacts& facts, WarpgroupBackwardPlan& plan) {
  if (hidden % 8 != 0 || !facts.hopper_code) return false;
  const auto takes = [&](int split, int most_waves) {
    return place_backward(cell, width, split, batch, hidden, facts, plan) &&
           waves(plan, batch) <= most_waves;
  };
  if (takes(8, 1)) return true;
  if (width == 2) return takes(4, 2);
  if (hidden > 512) return takes(8, 5);  // clusters of four do not hold the parts of W_h
  return takes(4, hidden <= 256 ? 5 : cell.gates > 3 ? 2 : 3);
}

// Whether the block kernels are faster than the others that are possible. Timed on an H200 with
// LSTM and GRU at hidden sizes of 64, 96 and 128 and 1 to 8192 rows. Reasoned, not timed: on
// devices without clusters, few rows in float stay with the grid kernels.
inline bool takes_blocks(const CellFacts& cell, Pass pass, int width, int64_t batch, int64_t hidden,
                         const DeviceFacts& facts, bool cluster, bool warpgroup) {
  if (width == 4) {
    const bool has_clusters = facts.runs({.code = 90, .cluster = 2});
    return !cluster && (has_clusters || batch > 2 * facts.sm_count);
  }
  const bool short_steps = cell.gates * hidden <= 192;
  if (cluster && !short_steps && batch <= facts.sm_count / 2) return false;
  return !(pass == Pass::kForward && warpgroup && hidden > 64 && batch > 16 * facts.sm_count);
}

// Whether the warpgroup kernels are faster than the grid kernels. Timed on an H200 with the three
// cells at hidden sizes of 64 to 1024. In float it depends on the rows of a block of the grid
// kernels, which has 16 units.
inline bool many_rows(const CellFacts& cell, Pass pass, int width, int64_t batch, int64_t hidden,
                      const DeviceFacts& facts) {
  if (width == 4) {
    const bool few_units = pass == Pass::kBackward && hidden <= 512;
    const int rows = !few_units ? 16 : hidden > 256 ? 24 : hidden > 128 ? 40 : 80;
    return batch > rows * (facts.sm_count / ceil_div(hidden, 16));
  }
  const int64_t units_of_an_sm = pass == Pass::kForward && cell.gates <= 3 ? 500 : 310;
  return batch * hidden >= units_of_an_sm * facts.sm_count;
}

// Whether a product in TF32 and a kernel for each step are faster than the warpgroup kernels in
// float, which compute at full accuracy. Timed on an H200 with LSTM and GRU at hidden sizes of 128
// to 1024 and 128 to 8192 rows.
inline bool steps_faster_in_tf32(const CellFacts& cell, Pass pass, int64_t batch, int64_t hidden) {
  if (pass == Pass::kForward) return batch > 256 && cell.gates * hidden > 2560;
  return hidden > 384 ? batch > 256 : batch >= 1024;
}

// width: bytes of an activation, 4 or 2.
inline RecurrentPlan make_recurrent_plan(const CellFacts& cell, Pass pass, int width, int64_t batch,
                                         int64_t hidden, const DeviceFacts& facts) {
  using Kind = RecurrentPlan::Kind;
  RecurrentPlan plan;
  const bool forward = pass == Pass::kForward;
  const bool possible =
      forward ? plan_warpgroup(cell, width, batch, hidden, facts, plan.warpgroup)
              : plan_warpgroup_backward(cell, width, batch, hidden, facts, plan.warpgroup_backward);
  const bool cluster = plan_cluster(cell, batch, hidden, facts, plan.cluster);
  const bool block = plan_block(cell, width, batch, hidden, facts, plan.block);
  if (plan_warp(cell, batch, hidden, facts, plan.warp) &&
      takes_warps(cell, width, batch, plan.warp, facts, block, cluster ? plan.cluster.rows : 0,
                  forward && possible)) {
    plan.kind = Kind::kWarp;
  } else if (block && takes_blocks(cell, pass, width, batch, hidden, facts, cluster, possible)) {
    plan.kind = Kind::kBlock;
  } else if (cluster) {
    plan.kind = Kind::kCluster;
  } else if (possible && many_rows(cell, pass, width, batch, hidden, facts)) {
    plan.kind = Kind::kWarpgroup;
  } else if (plan_grid(cell, pass, width, batch, hidden, facts, plan.grid)) {
    plan.kind = Kind::kGrid;
  } else if (possible) {
    plan.kind = Kind::kWarpgroup;
  }
  return plan;
}

}  // namespace my_ops::cuda
