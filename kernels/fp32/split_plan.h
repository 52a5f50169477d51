// How operands are split into 16-bit parts, and by how many blocks: pure host code. Row r of
// an operand (a row of a, a column of b) with 2^e <= max|x| < 2^(e+1) becomes
//   fp16: x * 2^(14-e) = p0 + p1 * 2^-11          23 bits, for |x| >= 2^(e-27)
//   bf16: x * 2^(30-e) = p0 + p1 + p2             24 bits, for |x| >= 2^(e-90); of smaller ones
//                                                 products with others as small may be lost
// Parts are stored k-major, whatever the strides of x, except kSampled's fp16 parts, which are
// stored along the rows as x is. They are padded with zeros to whole blocks of k, so the product
// that follows has no edge in k.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"

namespace my_ops::cuda {

inline constexpr int kSplitBlockK = 64;
inline constexpr int kZeroExponent = -150;  // below the exponent of every float

// The path that the data need: the largest that any block found.
enum class SplitPath : uint8_t {
  kFp16 = 0,
  kBf16 = 1,
  kBf16Checked = 2,  // bf16, with suspect outputs recomputed: elements span more than that
  kFma = 4,          // fp32 FMAs: Inf or NaN
};

enum class SplitMode : uint8_t {
  kRows,     // one pass, k is contiguous: a few threads share a row
  kColumns,  // one pass, rows of floats are contiguous: a block takes eight
  kSlices,   // two passes: a block takes 32 rows of one k-slice
  kSampled,  // one pass, rows of floats are contiguous: exponents are guessed from a sample of k,
             // so e may be up to 5 more; rows for which they do not suit are split again
};

// What x holds. 16-bit elements become one fp16 part, which is exact for |x| >= 2^(e-27).
enum class Elements : uint8_t { kFloat, kHalf, kBFloat16 };

struct SplitOperand {
  const void* x;  // element (z, r, l) at z * batch_stride + r * row_stride + l * k_stride
  Elements elements;
  int64_t batch_stride, row_stride, k_stride;
  int batch, rows, k;
  bool by_rows;  // k is the contiguous index
  SplitMode mode;
  int ld;                // k rounded up to kSplitBlockK
  int row_ld;            // kSampled: rows, rounded up to whole vectors of parts
  int slice_k;           // a multiple of kSplitBlockK
  int slices;            // ceil(k / slice_k)
  int fp16_parts;        // at most Split's
  uint16_t* parts;       // [fp16_parts][batch * rows][ld]; kSampled: [2][batch * ld][row_ld]
  uint16_t* bf16_parts;  // [3][batch * rows][ld] bf16 parts; may be the same memory
  int32_t* exponent;     // [batch * rows]  e, kZeroExponent for a row of zeros
  uint8_t* status;       // [status_count] SplitPath found by each block of both passes
  int status_count;
  uint32_t* stats;   // [3][slices][batch * rows], kSlices and kSampled only; else null
  uint32_t* tiny;    // [2][batch * rows], kSlices and kSampled only; else null
  int32_t* guess;    // [batch * rows] exponents from the sample, kSampled only; else null
  uint8_t* unclean;  // [row_blocks][slices] whether rows may need another look, kSampled only
};

struct Split {
  SplitOperand operand[2];
  int blocks[2];       // of the first pass, per operand
  int tile_blocks[2];  // of the second pass; 0 unless kSlices or kSampled
  int fp16_parts;      // 1: only the leading part, for TF32's accuracy; else 2
  bool along_rows;     // both operands are kSampled
};

// How many threads share a row of kRows, and how many 16-byte vectors each holds. The fewest
// threads that can hold the row are used, so that each has several loads in flight.
struct RowShape {
  int threads, vectors;
};

constexpr RowShape row_shape(int k) {
  if (k <= 512) return {32, 4};
  if (k <= 1024) return {64, 4};
  if (k <= 2048) return {128, 4};
  return {256, k <= 4096 ? 4 : 8};
}

namespace fp32_split {

inline constexpr int kThreads = 256;
inline constexpr int kColumnRows = 8;     // rows of a kColumns block: a 32-byte sector per k
inline constexpr int kMaxColumnK = 2048;  // with longer columns, too few blocks fit on an SM
inline constexpr int kTileRows = 32, kTileK = kSplitBlockK;
inline constexpr int kRowBlocksPerSm = 3;   // for each operand; each block loads one row ahead
inline constexpr int kTileBlocksPerSm = 4;  // long slices: 16 cost 15 us more at 2048
inline constexpr int kMaxSlices = 256;
inline constexpr int kSampledRows = 64;        // rows of a kSampled block
inline constexpr int kSampledBlocksPerSm = 6;  // for both operands together, in two waves

// Slices that fill whole waves of so many blocks, as few as reach nine tenths: each block reads the
// sample again.
constexpr int sampled_slices(int64_t row_blocks, int64_t wave) {
  constexpr int kMaxWaves = 4;
  int64_t slices = 0;
  for (int waves = 1; waves <= kMaxWaves; ++waves) {
    slices = waves * wave / row_blocks;
    if (10 * slices * row_blocks >= 9 * waves * wave) break;
  }
  return static_cast<int>(slices);
}

}  // namespace fp32_split

// Computes everything that follows from x, strides, sizes and Split::fp16_parts; pointers stay
// null.
inline void plan_split(Split* plan, int sm_count) {
  using namespace fp32_split;
  for (int i = 0; i < 2; ++i) {
    SplitOperand& op = plan->operand[i];
    const RowShape shape = row_shape(op.k);
    const int64_t rows = int64_t{op.batch} * op.rows;
    // A few rows that are too long to hold would leave most of the device idle.
    const bool holds = op.k <= shape.threads * shape.vectors * 4 || rows >= 4 * sm_count;
    op.ld = (op.k + kTileK - 1) / kTileK * kTileK;
    op.by_rows = op.k_stride == 1 || op.row_stride != 1;
    const bool is_float = op.elements == Elements::kFloat;
    op.fp16_parts = is_float ? plan->fp16_parts : 1;
    if (plan->along_rows) {
      op.mode = SplitMode::kSampled;
    } else if (op.by_rows) {
      op.mode = holds ? SplitMode::kRows : SplitMode::kSlices;
    } else {
      op.mode = is_float && op.ld <= kMaxColumnK ? SplitMode::kColumns : SplitMode::kSlices;
    }
    op.row_ld = (op.rows + 7) / 8 * 8;
    op.slice_k = op.ld;
    op.slices = 1;
    plan->tile_blocks[i] = 0;
    if (op.mode == SplitMode::kRows) {
      const int64_t blocks = ceil_div(rows, kThreads / shape.threads);
      plan->blocks[i] = static_cast<int>(std::min<int64_t>(blocks, kRowBlocksPerSm * sm_count));
    } else if (op.mode == SplitMode::kColumns) {
      plan->blocks[i] = (op.rows + kColumnRows - 1) / kColumnRows * op.batch;
    } else {
      const bool sampled = op.mode == SplitMode::kSampled;
      const int block_rows = sampled ? kSampledRows : kTileRows;
      const int row_blocks = (op.rows + block_rows - 1) / block_rows * op.batch;
      const int k_tiles = op.ld / kTileK;
      const SplitOperand& beside = plan->operand[1 - i];
      const int other = (beside.rows + block_rows - 1) / block_rows * beside.batch;
      const int wanted =
          std::clamp(sampled ? sampled_slices(row_blocks + other, kSampledBlocksPerSm * sm_count)
                             : kTileBlocksPerSm * sm_count / row_blocks,
                     1, kMaxSlices);
      op.slice_k = (k_tiles + wanted - 1) / wanted * kTileK;
      op.slices = (op.ld + op.slice_k - 1) / op.slice_k;
      plan->blocks[i] = plan->tile_blocks[i] = row_blocks * op.slices;
    }
    op.status_count = plan->blocks[i] + plan->tile_blocks[i];
  }
}

// Leaves operand i out of the fp16 split, because its parts, exponents and a status of one byte
// exist already.
inline void skip_operand(Split* plan, int i) {
  plan->blocks[i] = plan->tile_blocks[i] = 0;
  plan->operand[i].status_count = 1;
}

}  // namespace my_ops::cuda
