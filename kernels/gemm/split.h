// Splitting of float matrices into 16-bit parts whose products a tensor core can add up to float
// accuracy. Used by fp32_sm90.cu alone.
//
// Row r of an operand (a row of a, a column of b) with 2^e <= max|x| < 2^(e+1) becomes
//   fp16: x * 2^(14-e) = p0 + p1 * 2^-11          23 bits, for |x| >= 2^(e-27)
//   bf16: x * 2^(30-e) = p0 + p1 + p2             24 bits, for |x| >= 2^(e-90); of smaller ones
//                                                 products with others as small may be lost
// Parts are always stored k-major, whatever the strides of x, and padded with zeros to whole blocks
// of k, so the product that follows has one layout and no edge in k.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace my_ops::cuda {

inline constexpr int kSplitBlockK = 64;
inline constexpr int kZeroExponent = -150;  // below that of every float

// How the data may be multiplied. The largest of all blocks' findings holds.
enum class SplitPath : uint8_t {
  kFp16 = 0,
  kBf16 = 1,
  kWide = 2,   // bf16; outputs that smaller elements may have spoilt are formed again
  kExact = 4,  // plain arithmetic: Inf or NaN
};

enum class SplitMode : uint8_t {
  kRows,     // one pass, k is the fast index: a group of threads takes a whole row
  kColumns,  // one pass, rows are the fast index: a block takes eight rows
  kChunks,   // two passes: blocks take 32 rows x chunk_k
};

struct SplitOperand {
  const float* x;  // element (z, r, l) at z * batch_stride + r * row_stride + l * k_stride
  int64_t batch_stride, row_stride, k_stride;
  int batch, rows, k;
  bool by_rows;  // l is the fast index
  SplitMode mode;
  int ld;             // k rounded up to kSplitBlockK
  int chunk_k;        // a multiple of kSplitBlockK
  int chunks;         // ceil(k / chunk_k)
  uint16_t* parts;    // [fp16_parts][batch * rows][ld]
  uint16_t* wide;     // [3][batch * rows][ld] bf16 parts; may be the same memory
  int32_t* exponent;  // [batch * rows]  e, kZeroExponent for a row of zeros
  uint8_t* status;    // [status_count] SplitPath found by each block of both passes
  int status_count;
  uint32_t* stats;  // [3][chunks][batch * rows], kChunks only; else null
  uint32_t* tiny;   // [2][batch * rows], kChunks only; else null
};

struct Split {
  SplitOperand operand[2];
  int blocks[2];       // of the first pass, per operand
  int tile_blocks[2];  // of the second pass; 0 unless kChunks
  int fp16_parts;      // 1: the leading part alone, for TF32's accuracy; else 2
};

// Fills in everything that follows from x, strides, sizes and fp16_parts; pointers stay null.
void plan_split(Split* split, int sm_count);

// Takes operand i out of the fp16 split: its parts, exponents and a status of one byte exist.
void skip_operand(Split* split, int i);

// fp16 parts, exponents and status of both operands: one launch, two if an operand is kChunks.
cudaError_t split_fp16(const Split& split, cudaStream_t stream);

// bf16 parts of both operands, if the status says kBf16; else nothing.
cudaError_t split_bf16(const Split& split, int sm_count, cudaStream_t stream);

// The status of operand i in one byte.
cudaError_t combine_status(const Split& split, int i, uint8_t* status, cudaStream_t stream);

}  // namespace my_ops::cuda
