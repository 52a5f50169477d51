// The split of operands whose rows are contiguous and whose k is long. A row's largest element
// would be known only after a pass over k. So its exponent is guessed from a sample of k, with
// some headroom, and one pass splits with that. It also finds for which rows the guess does not
// suit; the second kernel splits the tiles of those again, with their own exponents. Parts keep the
// layout of the floats, so nothing is transposed. Only split_sm90.cu includes this.
#pragma once

#include "fp32/split_device.cuh"
#include "ptx/griddepcontrol.cuh"

namespace my_ops::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kSample = 64;   // of k
constexpr int kHeadroom = 5;  // bits between the exponent of the sample and the guess

// A sampled k. One is taken from each of kSample equal ranges, not at a constant distance, which
// might be a period of the data.
__device__ __forceinline__ int sampled_k(int i, int k) {
  const uint32_t begin = int64_t{i} * k / kSample, end = int64_t{i + 1} * k / kSample;
  return begin + (i * 2654435761u >> 16) % max(end - begin, 1u);
}

// What a slice of a row holds, relative to the guess.
struct SampledStats {
  uint32_t largest = 0, nonzero = 0, tiny = 0;

  __device__ __forceinline__ void add(float x, uint32_t tiny_below) {
    const uint32_t bits = magnitude(x);
    largest = max(largest, bits);
    nonzero += bits != 0;
    tiny += bits - 1 < tiny_below;
  }
  __device__ __forceinline__ void add(const SampledStats& other) {
    largest = max(largest, other.largest);
    nonzero += other.nonzero;
    tiny += other.tiny;
  }
};

// What follows from a guessed exponent. The absolute error of the few elements that too_many
// tolerates is up to 2^-45 of the row's maximum, not 2^-50.
struct Guess {
  int exponent;
  uint32_t limit;  // larger elements would overflow

  __device__ __forceinline__ explicit Guess(int e) : exponent(e), limit(pow2_bits(e + 1)) {}
  static __device__ __forceinline__ Guess of_sample(uint32_t largest) {
    return Guess(largest == 0 ? kZeroExponent : min(exponent_of(largest) + kHeadroom, 127));
  }
  // For SampledStats::add: one less than the bits below which accuracy is lost.
  __device__ __forceinline__ uint32_t tiny_below() const {
    return max(pow2_bits(exponent - kFp16Range), 1u) - 1;
  }
  __device__ __forceinline__ bool suits(const SampledStats& row) const {
    return row.largest < limit && !too_many(row.tiny, row.nonzero);
  }
  // Whether a slice of so many elements needs no other look, whatever the row's other slices hold.
  __device__ __forceinline__ bool clean(const SampledStats& slice, int length) const {
    if (slice.largest == 0 && exponent == kZeroExponent) return true;
    return slice.largest < limit && slice.tiny * 256 <= slice.nonzero &&
           (slice.nonzero >= kDenseRow || slice.nonzero == length);
  }
};

// A block's rows and slice of k, and the four adjacent rows that a thread takes at every kLines-th
// k.
template <int kRows>
struct SampledTile {
  static constexpr int kVectors = kRows / 4, kLines = kThreads / kVectors;
  int z, row, slice, row_block, begin, end;
  int inside;  // of the thread's rows
  bool vectorized;
  const float* x;
  uint16_t* out;

  __device__ __forceinline__ SampledTile(const SplitOperand& op, int block) {
    const int of_matrix = (op.rows + kRows - 1) / kRows, row_blocks = of_matrix * op.batch;
    slice = block / row_blocks;
    row_block = block % row_blocks;
    z = row_block / of_matrix;
    row = row_block % of_matrix * kRows;
    begin = slice * op.slice_k;
    end = min(begin + op.slice_k, op.ld);
    const int mine = row + column();
    inside = op.rows - mine;
    x = static_cast<const float*>(op.x) + z * op.batch_stride + mine;
    out = op.parts + int64_t{z} * op.ld * op.row_ld + mine;
    vectorized = inside >= 4 && op.k_stride % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  }
  static __device__ __forceinline__ int column() { return threadIdx.x % kVectors * 4; }
  static __device__ __forceinline__ int line() { return threadIdx.x / kVectors; }

  __device__ __forceinline__ float4 load(const SplitOperand& op, int l) const {
    const float* from = x + l * op.k_stride;
    if (l >= op.k) return {};
    if (vectorized) return *reinterpret_cast<const float4*>(from);
    return {inside > 0 ? from[0] : 0.0f, inside > 1 ? from[1] : 0.0f, inside > 2 ? from[2] : 0.0f,
            inside > 3 ? from[3] : 0.0f};
  }
  __device__ __forceinline__ void store(const SplitOperand& op, int l, const float4& v,
                                        const Pow2Pair (&factor)[4]) const {
    uint32_t front[2], back[2];
    Fp16Parts::split(v.x * factor[0].first * factor[0].second,
                     v.y * factor[1].first * factor[1].second, front);
    Fp16Parts::split(v.z * factor[2].first * factor[2].second,
                     v.w * factor[3].first * factor[3].second, back);
    if (inside <= 0) return;
    uint16_t* to = out + int64_t{l} * op.row_ld;
    const int64_t part = int64_t{op.batch} * op.ld * op.row_ld;
    *reinterpret_cast<uint2*>(to) = {front[0], back[0]};
    *reinterpret_cast<uint2*>(to + part) = {front[1], back[1]};
  }
};

template <int kRows>
struct SampledSmem {
  SampledStats stats[kWarps][kRows];
  int exponent[kRows];
};

__device__ __forceinline__ const float& element(const float4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <int kRows>
__device__ __forceinline__ void split_sampled(const SplitOperand& op, int block,
                                              SampledSmem<kRows>& smem) {
  using Tile = SampledTile<kRows>;
  constexpr int kLines = Tile::kLines, kVectors = Tile::kVectors;
  constexpr int kUnroll = 8;  // vectors in flight
  const Tile tile(op, block);
  const int line = tile.line(), column = tile.column();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float4 v[kUnroll];
  const auto load = [&](float4(&to)[kUnroll], int l0) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int l = l0 + i * kLines + line;
      to[i] = l < tile.end ? tile.load(op, l) : float4{};
    }
  };
  load(v, tile.begin);

  uint32_t sample[4]{};
#pragma unroll
  for (int i = 0; i < kSample; i += kLines) {
    const float4 e = tile.load(op, sampled_k(i + line, op.k));
#pragma unroll
    for (int c = 0; c < 4; ++c) sample[c] = max(sample[c], magnitude(element(e, c)));
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int lanes = kVectors; lanes < 32; lanes *= 2) {
      sample[c] = max(sample[c], __shfl_xor_sync(~0u, sample[c], lanes));
    }
    if (lane < kVectors) smem.stats[warp][column + c].largest = sample[c];
  }
  __syncthreads();
  if (threadIdx.x < kRows) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) largest = max(largest, smem.stats[i][threadIdx.x].largest);
    smem.exponent[threadIdx.x] = Guess::of_sample(largest).exponent;
  }
  __syncthreads();
  Pow2Pair factor[4];
  uint32_t tiny_below[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const Guess guess(smem.exponent[column + c]);
    factor[c] = pow2_pair(Fp16Parts::kShift - guess.exponent);
    tiny_below[c] = guess.tiny_below();
  }

  SampledStats stats[4];
  for (int l0 = tile.begin; l0 < tile.end; l0 += kUnroll * kLines) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int l = l0 + i * kLines + line;
#pragma unroll
      for (int c = 0; c < 4; ++c) stats[c].add(element(v[i], c), tiny_below[c]);
      if (l < tile.end) tile.store(op, l, v[i], factor);
    }
    if (l0 + kUnroll * kLines < tile.end) load(v, l0 + kUnroll * kLines);
  }

#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int lanes = kVectors; lanes < 32; lanes *= 2) {
      stats[c].add({__shfl_xor_sync(~0u, stats[c].largest, lanes),
                    __shfl_xor_sync(~0u, stats[c].nonzero, lanes),
                    __shfl_xor_sync(~0u, stats[c].tiny, lanes)});
    }
    if (lane < kVectors) smem.stats[warp][column + c] = stats[c];
  }
  __syncthreads();
  bool clean = true;
  const int r = threadIdx.x;
  if (r < kRows && tile.row + r < op.rows) {
    SampledStats row;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) row.add(smem.stats[i][r]);
    const Guess guess(smem.exponent[r]);
    clean = guess.clean(row, min(tile.end, op.k) - tile.begin);
    const int64_t rows = int64_t{op.batch} * op.rows,
                  index = int64_t{tile.z} * op.rows + tile.row + r;
    uint32_t* out = op.stats + tile.slice * rows + index;
    out[0] = row.largest;
    out[op.slices * rows] = row.nonzero;
    out[2 * op.slices * rows] = row.tiny;
    if (tile.slice == 0) {
      op.exponent[index] = op.guess[index] = guess.exponent;
      op.tiny[index] = op.tiny[rows + index] = 0;
    }
  }
  const bool unclean = __syncthreads_or(!clean);
  if (threadIdx.x == 0) op.unclean[tile.row_block * op.slices + tile.slice] = unclean;
}

// Looks at the rows of a block again if a slice of theirs was not clean, and splits its slice again
// if its guesses do not suit.
template <int kRows>
__device__ __forceinline__ SplitPath check_sampled(const SplitOperand& op, int block,
                                                   SampledSmem<kRows>& smem) {
  using Tile = SampledTile<kRows>;
  constexpr int kShare = kThreads / kRows;
  static_assert(kShare <= kWarps && kMaxSlices <= kThreads);
  const Tile tile(op, block);
  ptx::griddepcontrol_wait();
  const bool unclean =
      threadIdx.x < op.slices && op.unclean[tile.row_block * op.slices + threadIdx.x];
  if (!__syncthreads_or(unclean)) return SplitPath::kFp16;

  const int64_t rows = int64_t{op.batch} * op.rows, first = int64_t{tile.z} * op.rows + tile.row;
  const int r = threadIdx.x % kRows;
  SampledStats row;
  if (tile.row + r < op.rows) {
    for (int slice = threadIdx.x / kRows; slice < op.slices; slice += kShare) {
      const uint32_t* in = op.stats + slice * rows + first + r;
      row.add({in[0], in[op.slices * rows], in[2 * op.slices * rows]});
    }
  }
  smem.stats[threadIdx.x / kRows][r] = row;
  __syncthreads();
  row = {};
#pragma unroll
  for (int i = 0; i < kShare; ++i) row.add(smem.stats[i][r]);
  __syncthreads();
  SplitPath path = SplitPath::kFp16;
  bool again = false;
  if (threadIdx.x < kRows && tile.row + r < op.rows) {
    const Guess guess(op.guess[first + r]);
    again = !guess.suits(row);
    if (!is_finite(row.largest)) {
      path = SplitPath::kFma;
    } else if (!again) {
      path = row_path(0, 0, row.nonzero, kDenseRow);
    }
    smem.exponent[r] = again ? exponent_of(row.largest) : guess.exponent;
    if (again && tile.slice == 0) op.exponent[first + r] = smem.exponent[r];
    row.tiny = again;
    smem.stats[0][r] = row;
  } else if (threadIdx.x < kRows) {
    smem.exponent[r] = kZeroExponent;
    smem.stats[0][r] = {};
  }
  if (!__syncthreads_or(again)) return path;
  if (__syncthreads_or(path == SplitPath::kFma)) return path;

  const int column = tile.column();
  Pow2Pair factor[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) factor[c] = pow2_pair(Fp16Parts::kShift - smem.exponent[column + c]);
  Counts counts[4];
  constexpr int kUnroll = 4;
  for (int l0 = tile.begin + tile.line(); l0 < tile.end; l0 += kUnroll * Tile::kLines) {
    float4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) v[i] = tile.load(op, l0 + i * Tile::kLines);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int l = l0 + i * Tile::kLines;
      if (l >= tile.end) break;
      tile.store(op, l, v[i], factor);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const SampledStats& whole = smem.stats[0][column + c];
        if (whole.tiny) counts[c].add(element(v[i], c), RowScale(whole.largest));
      }
    }
  }
  // The last thread that adds to a row's counters sees their final values. The path can only grow
  // with them.
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const SampledStats& whole = smem.stats[0][column + c];
    if (!whole.tiny) continue;
    uint32_t* tiny = op.tiny + first + column + c;
    if (counts[c].tiny_fp16 != 0) counts[c].tiny_fp16 += atomicAdd(tiny, counts[c].tiny_fp16);
    if (counts[c].tiny_bf16 != 0) {
      counts[c].tiny_bf16 += atomicAdd(tiny + rows, counts[c].tiny_bf16);
    }
    const SplitPath found =
        row_path(counts[c].tiny_fp16, counts[c].tiny_bf16, whole.nonzero, kDenseRow);
    if (found > path) path = found;
  }
  return path;
}

#endif

}  // namespace
}  // namespace my_ops::cuda
