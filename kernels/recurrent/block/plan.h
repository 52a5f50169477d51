// Which layers the block kernels support: pure host code.
#pragma once

#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "recurrent.h"

namespace my_ops::cuda {

constexpr Needs kBlockNeeds{.code = 80};

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
inline const char* plan_block(const RecurrentProblem& p, const DeviceFacts& device,
                              BlockPlan& plan) {
  if (p.hidden % 2 != 0 || p.hidden > 128) return "supports even numbers of up to 128 units";
  plan.units = p.hidden <= 32 ? 32 : p.hidden <= 64 ? 64 : 128;
  if (!block_exists(p.cell.gates, p.width, plan.units)) return "too many gates for so many units";
  const int64_t warps = ceil_div(p.hidden, 16);
  plan.threads = static_cast<int>(warps * 32);
  // While an SM's four schedulers have at most one warp each, half the rows take half the time.
  plan.rows = ceil_div(p.batch, kBlockRows / 2) * warps <= int64_t{4} * device.sm_count
                  ? kBlockRows / 2
                  : kBlockRows;
  return device.runs(kBlockNeeds) ? nullptr : "needs compute capability 8.0";
}

}  // namespace my_ops::cuda
