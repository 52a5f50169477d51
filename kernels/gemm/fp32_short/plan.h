// Which float products fp32_short_sm90.cu accepts, how it divides its shared memory, and where its
// workspace is: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "device.h"
#include "gemm.h"
#include "gemm/costs.h"
#include "gemm/fp32_narrow/plan.h"
#include "gemm/fp32_sm90/plan.h"

namespace my_ops::cuda::fp32_short {

// A block takes kM rows at a time, 64 for each of its two warpgroups, over all of k and of n.
inline constexpr int kM = 128, kRows = 64, kK = 64;
inline constexpr int kMaxBlocks = 4;               // of k
inline constexpr int kMinK = fp32_sm90::kMinK;     // the same parts, and the same sums
inline constexpr int kMinN = 32;                   // libraries add few columns in other orders
inline constexpr int kMaxK = kMaxBlocks * kK;      // a warpgroup holds whole rows in registers
inline constexpr int kSlotBytes = kRows * kK * 4;  // 64 of k of a warpgroup's rows
inline constexpr int kRingBytes = 192 * 1024;      // for slots and stages
inline constexpr int kMaxSlots = kRingBytes / kSlotBytes;
inline constexpr int kMaxStages = kRingBytes / (64 * kK * 4);

inline constexpr Needs kNeeds{.code = 90, .shared_bytes = 227 * 1024};

// Columns are multiplied in chunks; a stage holds 64 of k of both parts of a chunk.
enum class Tile { k64, k96, k128 };
inline constexpr int kTileColumns[] = {64, 96, 128};

struct Division {
  int columns, chunks, k_blocks;
  int slots, stages;
  bool resident;  // all chunks have a stage each, and stay
};

inline Division divide(int64_t n, int64_t k, int columns) {
  const int64_t k_blocks = ceil_div(k, int64_t{kK}), chunks = ceil_div(n, int64_t{columns});
  const int64_t stage_bytes = int64_t{columns} * kK * 4;
  const int64_t rows_of_slots = 3;  // of kRows: two are multiplied, one is loaded
  // Where parts stay, each warpgroup has slots of its own: a parity does not tell its rows in a
  // slot from the other's. Elsewhere no warpgroup is a tile ahead, as it waits for stages that both
  // use.
  const int64_t own_slots = 4;
  const int64_t all = chunks * k_blocks * stage_bytes;
  Division d{.columns = columns,
             .chunks = static_cast<int>(chunks),
             .k_blocks = static_cast<int>(k_blocks)};
  d.resident = all + own_slots * k_blocks * kSlotBytes <= kRingBytes;
  const int64_t slots =
      d.resident ? own_slots * k_blocks
                 : std::min((kRingBytes - 2 * stage_bytes) / kSlotBytes, rows_of_slots * k_blocks);
  d.slots = static_cast<int>(slots);
  d.stages = static_cast<int>(
      std::min(chunks * k_blocks, (kRingBytes - d.slots * kSlotBytes) / stage_bytes));
  return d;
}

inline Tile choose_tile(const GemmProblem& p) {
  constexpr int64_t kEnd = 32;  // what a chunk's end costs, in columns
  const auto cost = [&](Tile tile) {
    const int64_t columns = kTileColumns[static_cast<int>(tile)];
    return ceil_div(p.n, columns) * (columns + kEnd);
  };
  const Tile best = cost(Tile::k96) <= cost(Tile::k64) ? Tile::k96 : Tile::k64;
  return cost(Tile::k128) <= cost(best) ? Tile::k128 : best;
}

// The parts of b [2][padded_columns][ld] in fp16, and what each column holds.
struct Layout {
  int64_t ld, padded_columns;
  int64_t columns, bytes;  // offsets
};

inline Layout lay_out(const Division& d) {
  constexpr int64_t kAlign = 256;
  Layout at{.ld = int64_t{d.k_blocks} * kK, .padded_columns = int64_t{d.chunks} * d.columns};
  at.columns = ceil_div(2 * at.padded_columns * at.ld * 2, kAlign) * kAlign;
  at.bytes = at.columns + at.padded_columns * 4;
  return at;
}

// In multiply-adds of a library: launches, the bytes that whole waves of tiles move, and their
// products.
inline double cost(const GemmProblem& p, const Division& d, int sm_count,
                   const GemmCosts::Fp32Short& costs) {
  const int64_t wave = int64_t{sm_count} * kM;
  const auto rows = static_cast<double>(ceil_div(p.m, wave) * wave);
  const double columns = static_cast<double>(d.chunks) * d.columns;
  const double bytes = rows * 4 * static_cast<double>(p.k + p.n * (p.has_residual ? 2 : 1));
  return costs.launches + costs.byte * bytes +
         costs.product * rows * columns * static_cast<double>(ceil_div(p.k, 16) * 16);
}

// Plans the product if this kernel accepts it; otherwise returns why it does not. sm90_accepts:
// whether fp32_sm90 would.
inline const char* plan(const GemmProblem& p, const GemmCosts& costs, bool sm90_accepts,
                        GemmPlan* plan) {
  constexpr int64_t kMaxRows = int64_t{1} << 29, kMaxColumns = int64_t{1} << 20;
  const DeviceFacts& device = plan->device;
  if (!device.hopper_code || !device.runs(kNeeds)) return "needs Hopper and code for 9.0a";
  if (p.k < kMinK) return "k is too short for its accuracy";
  if (p.k > kMaxK) return "k is too long";
  if (p.n < kMinN) return "has too few columns for its accuracy";
  if (p.batch != 1 || p.mixed()) return "supports no batch, and float32 only";
  if (p.a_col != 1 || p.a_row % 4 != 0 || p.a_row < p.k || !p.a_aligned) {
    return "needs rows of a that are contiguous and aligned";
  }
  if (p.out_col != 1) return "needs rows of the output that are contiguous";
  if (p.m >= kMaxRows || p.n >= kMaxColumns || p.a_row >= int64_t{1} << 36) {
    return "sizes are beyond what it can index";
  }
  if (p.library_has_fast_tf32()) return "the library's TF32 is as fast";
  const Tile tile = choose_tile(p);
  const Division d = divide(p.n, p.k, kTileColumns[static_cast<int>(tile)]);
  const double own = cost(p, d, device.sm_count, costs.fp32_short);
  if (!p.library_too_inaccurate() && own + p.preparation > fp32_sm90::size_of(p).work) {
    return "too small to pay for its launches";
  }
  const GemmCosts::Fp32Narrow& narrow = costs.fp32_narrow;
  if (sm90_accepts && own > fp32_narrow::cost_of_split(p, narrow.floats.split, narrow)) {
    return "so wide that a split beforehand pays";
  }
  plan->kernel = GemmKernel::kFp32Short;
  plan->tile = static_cast<int>(tile);
  plan->slices = 1;
  plan->workspace = lay_out(d).bytes;
  return nullptr;
}

}  // namespace my_ops::cuda::fp32_short
