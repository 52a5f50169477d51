// Which float products gemm_fp32_sm90 takes: pure host code.
#pragma once

#include <cstdint>

#include "common/ceil_div.h"
#include "common/device.h"
#include "gemm.h"

namespace my_ops::cuda::fp32_sm90 {

using Args = GemmArgs<float, float>;

// Of ProductSmem, the largest block's; clusters are of up to two blocks.
inline constexpr Needs kNeeds{.code = 90, .shared_bytes = 211 * 1024, .cluster = 2};

// A batch of rows that share b is one tall matrix.
inline Args merge_batch(Args args) {
  const bool mergeable = args.b_batch == 0 && args.a_batch == args.m * args.a_row &&
                         args.out_batch == args.m * args.out_row &&
                         (!args.residual || args.residual_batch == args.m * args.residual_row);
  if (args.batch > 1 && mergeable) {
    args.m *= args.batch;
    args.batch = 1;
  }
  return args;
}

inline bool fits(const Args& args) {
  constexpr int64_t kLimit = int64_t{1} << 29;  // row indices of three parts stay within int
  const bool sizes = args.batch > 0 && args.m > 0 && args.n > 0 && args.k > 0 &&
                     args.k < (1 << 24) && args.m < kLimit && args.n < kLimit &&
                     args.batch < kLimit && args.batch * args.m < kLimit &&
                     args.batch * args.n < kLimit;
  return sizes && args.out_col == 1 &&
         args.batch * ceil_div(args.m, 64) * ceil_div(args.n, 64) < kLimit;
}

// What a product costs and saves, of the elements that are split for it and of multiply-adds.
struct Size {
  double work, a, b;
  bool a_strided, b_strided;  // k is not contiguous
};

inline Size size_of(const Args& args) {
  const auto batch = static_cast<double>(args.batch), k = static_cast<double>(args.k);
  return {.work = batch * args.m * args.n * k,
          .a = (args.a_batch == 0 ? 1 : batch) * args.m * k,
          .b = args.packed_b ? 0 : (args.b_batch == 0 ? 1 : batch) * args.n * k,
          .a_strided = args.a_col != 1,
          .b_strided = args.b_row != 1 && !args.packed_b};
}

inline constexpr int64_t kMinSide = 96, kMinK = 192;

// Sizes at which the measured times beat a library's float GEMM: what the products save, in
// multiply-adds of the library, has to pay for the launches and for the split of each element,
// which is dearer where k is not contiguous, and takes two launches where it is long besides.
inline bool pays(const Args& args) {
  constexpr int64_t kMinRows = 9, kMinWeight = 2048;  // of a packed b: few rows, a large weight
  if (args.packed_b && args.batch == 1 && args.m >= kMinRows && args.n >= kMinWeight &&
      args.k >= kMinWeight) {
    return true;
  }
  constexpr int64_t kLongK = 2048;
  constexpr double kLaunches = 1.5e8, kSecondPass = 1.2e8, kContiguous = 100, kStrided = 150;
  if (args.m < kMinSide || args.n < kMinSide || args.k < kMinK) return false;
  const Size size = size_of(args);
  const bool two_passes = (size.a_strided || size.b_strided) && args.k > kLongK;
  return size.work >= kLaunches + (two_passes ? kSecondPass : 0) +
                          size.a * (size.a_strided ? kStrided : kContiguous) +
                          size.b * (size.b_strided ? kStrided : kContiguous);
}

// Sizes at which one product per element beats three.
inline bool use_single(const Args& args) {
  constexpr double kMinWork = 4e9;
  return args.precision == Precision::kHigh && size_of(args).work >= kMinWork;
}

// Whether all rows, or columns where these are contiguous, are whole 16-byte vectors.
inline bool whole_vectors(const Args& args) {
  const auto whole = [](const float* x, int64_t batch, int64_t row, int64_t col) {
    return reinterpret_cast<uintptr_t>(x) % 16 == 0 && batch % 4 == 0 &&
           (row == 1 ? col : row) % 4 == 0;
  };
  return whole(args.a, args.a_batch, args.a_row, args.a_col) &&
         whole(args.b, args.b_batch, args.b_row, args.b_col) &&
         whole(args.out, args.out_batch, args.out_row, args.out_col);
}

// Sizes at which one product beats a library's of TF32. That needs no split, but whole vectors, and
// is half as fast where k is contiguous in neither operand.
inline bool pays_beside_tf32(const Args& args) {
  constexpr double kLaunches = 8e9, kElement = 1100, kStrided = 2.3;
  if (args.m < kMinSide || args.n < kMinSide || args.k < kMinK || !use_single(args)) return false;
  if (!whole_vectors(args)) return true;
  const Size size = size_of(args);
  const bool strided = args.a_col != 1 && args.b_row != 1;
  return size.work * (strided ? kStrided : 1) >= kLaunches + kElement * (size.a + size.b);
}

inline bool takes(const Args& args) {
  if (args.library_falls_short()) return true;
  if (args.library_keeps_up()) return pays_beside_tf32(args);
  return pays(args);
}

// Whether the kernel takes this product on the device, and has been measured to beat the vendor
// library at such sizes, or has to serve because that falls short.
inline bool supported(const Args& args, const DeviceFacts& device) {
  return device.hopper_code && device.runs(kNeeds) && fits(args) && takes(merge_batch(args));
}

// Whether products gain by a packed b: one of many rows, the case that gains most. Small ones leave
// it aside.
inline bool packs(const PackArgs& args, const DeviceFacts& device) {
  Args product{};
  product.batch = args.batch, product.n = args.n, product.k = args.k;
  product.m = args.n > args.k ? args.n : args.k;
  product.a_row = args.k, product.a_col = 1;
  product.out_row = args.n, product.out_col = 1;
  product.packed_b = args.b;
  return supported(product, device);
}

}  // namespace my_ops::cuda::fp32_sm90
