// Which kernel takes a matrix product: pure host code, from the problem and the device alone.
//   float on Hopper, few rows, small outputs    gemm_fp32_skinny: six bf16 products in one pass
//   float on Hopper, from about 600 cubed on    gemm_fp32_sm90: three fp16 products, split before
//   float on compute capability 8.0, large      gemm_fp32_sm80: six bf16 products
//   16 bits on Hopper, where it is faster       gemm_half_sm90: tensor cores, epilogue on the sums
//   small problems                              gemm_small
//   the rest                                    the caller's vendor library
// A vendor library that rounds floats to TF32 where more is asked for is no choice: then the same
// kernels take all.
#pragma once

#include <climits>
#include <cstdint>
#include <type_traits>

#include "common/ceil_div.h"
#include "common/device.h"
#include "gemm.h"
#include "gemm/fp32_sm90_plan.h"
#include "gemm/half_sm90_plan.h"

namespace my_ops::cuda {

namespace fp32_skinny {

using Args = GemmArgs<float, float>;

inline constexpr Needs kNeeds{.code = 90, .shared_bytes = 54 * 1024};  // of few rows, the larger
inline constexpr int kFewRows = 16, kSmallOutputRows = 32;             // of a tile

inline bool whole_vectors(const float* x, int64_t unit_stride, int64_t other_stride) {
  return unit_stride == 1 && other_stride % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
}
inline bool b_wide(const Args& args) {
  return whole_vectors(args.b, args.b_row, args.b_col) ||
         whole_vectors(args.b, args.b_col, args.b_row);
}

// Shapes at which the measured times beat a library's float GEMM and the split one.
inline bool pays(const Args& args) {
  constexpr int64_t kMinColumns = 256, kMinK = 1024, kMinWeight = int64_t{1} << 21;  // few rows
  constexpr int64_t kMaxSide = 128, kMaxColumns = 8192, kMinLongK = 4096;            // otherwise
  if (args.batch != 1 || args.m < 2 || args.m > 64 || args.k >= (1 << 28) || !b_wide(args)) {
    return false;
  }
  if (args.m <= kFewRows) {
    return args.n >= kMinColumns && args.n < (1 << 24) && args.k >= kMinK &&
           args.n * args.k >= kMinWeight;
  }
  if (args.packed_b || args.n < kSmallOutputRows || args.k < kMinLongK) return false;
  // With more rows, and b the other way round, the library is as fast but for the smallest outputs.
  const bool k_fast = args.b_row == 1;
  return args.n <= (args.m <= kSmallOutputRows || k_fast ? kMaxColumns : kMaxSide);
}

inline bool supported(const Args& args, const DeviceFacts& device) {
  return device.is(9, 0) && device.runs(kNeeds) && !args.library_keeps_up() && pays(args);
}

}  // namespace fp32_skinny

namespace fp32_sm80 {

using Args = GemmArgs<float, float>;

inline constexpr int kTile = 128, kK = 16;
inline constexpr int64_t kMinK = 96;  // from here on as accurate as a chain of float FMAs

// A ring of stages, and the tile's sums.
constexpr Needs needs(int stages) {
  return {.code = 80, .shared_bytes = (stages * 2 * kTile * kK + kTile * kTile) * 4};
}

// As many stages, a power of two, as the device has room for; 0 where it cannot run the kernel.
inline int stages(const DeviceFacts& device) {
  return device.runs(needs(4)) ? 4 : device.runs(needs(2)) ? 2 : 0;
}

// Six bf16 products must cost less than one of floats, which holds for 8.0 (16 times the rate) and
// not for 8.6 and 8.9 (two to four times). Or, from 8.0 on, the kernel has to serve because the
// vendor library falls short.
inline bool supported(const Args& args, const DeviceFacts& device) {
  if (args.k < kMinK || stages(device) == 0) return false;
  const double blocks =
      static_cast<double>(args.batch) * ceil_div(args.m, kTile) * ceil_div(args.n, kTile);
  if (blocks >= INT_MAX) return false;
  // A tile for every multiprocessor at least, as k is not split.
  const bool pays = device.is(8, 0) && !args.library_keeps_up() && blocks >= device.sm_count;
  return pays || args.library_falls_short();
}

}  // namespace fp32_sm80

// How long a k is short; read in one round of loads.
template <typename T>
constexpr int kShortK = sizeof(T) == 8 ? 8 : 16;

// Sizes at which gemm_small was timed to beat a library's product, or that and an epilogue behind
// it. Of many outputs a library's product alone is faster sooner. Where k is not short, it is fast
// at a matrix times a vector, and at 16 bits in whole 16-byte vectors; but there it may split a
// long k and add the pieces in 16 bits.
template <typename T, typename Out>
bool is_small(const GemmArgs<T, Out>& args) {
  constexpr int64_t kMaxOutputs = int64_t{1} << 17, kMaxLongKWork = int64_t{1} << 20;
  constexpr int64_t kMaxWork = int64_t{1} << (sizeof(T) == 8 ? 20 : sizeof(T) == 4 ? 22 : 21);
  constexpr int64_t kManyOutputs = int64_t{1} << 15, kMaxWorkOfMany = int64_t{1} << 21;
  constexpr int64_t kLongK = 256, kVector = 8;
  const int64_t outputs = args.batch * args.m * args.n;
  if (outputs > kMaxOutputs || outputs > kMaxWork / (args.k + 1)) return false;
  if (args.followed()) return true;
  if (outputs > kManyOutputs && outputs > kMaxWorkOfMany / (args.k + 1)) return false;
  if (sizeof(T) != 8 && args.k <= kShortK<T>) return true;
  if (sizeof(T) != 2) return args.m > 1 && args.n > 1;
  const bool whole_vectors = args.n % kVector == 0 && args.k % kVector == 0;
  return !whole_vectors || (args.k >= kLongK && outputs <= kMaxLongKWork / (args.k + 1));
}

template <typename T, typename Out>
constexpr bool kIsFp32 = std::is_same_v<T, float> && std::is_same_v<Out, float>;

template <typename T, typename Out>
constexpr bool kIsHalf = std::is_same_v<T, Out> && sizeof(T) == 2;

// Whether tiles of the output serve better than gemm_small, which knows no k from 2^31 on.
template <typename T, typename Out>
bool fills_tiles(const GemmArgs<T, Out>& args) {
  constexpr int64_t kMinSide = 16, kMinK = 96;
  if (args.k > INT_MAX) return true;
  return args.m >= kMinSide && args.n >= kMinSide && args.k >= kMinK && !is_small(args);
}

enum class GemmKernel { kFp32Skinny, kFp32Sm90, kFp32Sm80, kHalfSm90, kSmall, kLibrary };

template <typename T, typename Out>
GemmKernel choose_gemm(const GemmArgs<T, Out>& args, const DeviceFacts& device) {
  // Whether no vendor library will do. Before compute capability 8.0 none knows TF32.
  const bool needed = kIsFp32<T, Out> && args.library_falls_short() && device.major >= 8;
  if constexpr (kIsFp32<T, Out>) {
    if (fp32_skinny::supported(args, device)) return GemmKernel::kFp32Skinny;
    if (needed && !fills_tiles(args)) return GemmKernel::kSmall;
    if (fp32_sm90::supported(args, device)) return GemmKernel::kFp32Sm90;
    if (fp32_sm80::supported(args, device)) return GemmKernel::kFp32Sm80;
  }
  if constexpr (kIsHalf<T, Out>) {
    if (!is_small(args) && half_sm90::supported(args, device)) return GemmKernel::kHalfSm90;
  }
  const bool small = is_small(args) || (needed && args.k <= INT_MAX);
  return small ? GemmKernel::kSmall : GemmKernel::kLibrary;
}

}  // namespace my_ops::cuda
