// Float GEMM for many rows of a and a short k: three fp16 products, split on the way.
// Plan: a small kernel splits b into two fp16 parts per element; the product kernel reads a once,
// splits it in place, and writes each output once. It overlaps the end of the small one.
#include "gemm/fp32_short/fp32_short.h"

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "gemm/fp32_short/kernel.cuh"

namespace my_ops::cuda {
namespace {

template <int kColumns>
cudaError_t run(const Short& p, int sm_count, cudaStream_t stream) {
  constexpr auto kKernel = fp32_short_kernel<kColumns>;
  if (auto err = allow_shared_bytes(kKernel, sizeof(ShortSmem)); err != cudaSuccess) return err;
  return sm90::launch_overlapped(kKernel, std::min(p.tiles, sm_count), kShortThreads,
                                 sizeof(ShortSmem), 1, stream, p);
}

}  // namespace
}  // namespace my_ops::cuda

cudaError_t my_ops::cuda::gemm_fp32_short(const GemmArgs<float, float>& args, const GemmPlan& plan,
                                          void* workspace, cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  const Division division = divide(args.n, args.k, kTileColumns[plan.tile]);
  const Layout at = lay_out(division);
  auto* const base = static_cast<unsigned char*>(workspace);
  auto* const columns = reinterpret_cast<int32_t*>(base + at.columns);
  const int padded_columns = static_cast<int>(at.padded_columns);
  const ShortSplit split{.b = args.b,
                         .k_stride = args.b_row,
                         .column_stride = args.b_col,
                         .n = static_cast<int>(args.n),
                         .k = static_cast<int>(args.k),
                         .ld = static_cast<int>(at.ld),
                         .padded_columns = padded_columns,
                         .parts = reinterpret_cast<uint16_t*>(base),
                         .columns = columns};
  Short p{.args = args,
          .columns = columns,
          .division = division,
          .padded_columns = padded_columns,
          .tiles = static_cast<int>(ceil_div(args.m, int64_t{kM})),
          .tma_out = args.out_aligned && args.out_row % 4 == 0};
  if (auto err = sm90::make_tensor_map<4>(encoder, &p.a, const_cast<float*>(args.a), args.m, args.k,
                                          args.a_row, kRows);
      err != cudaSuccess) {
    return err;
  }
  if (auto err = sm90::make_tensor_map(encoder, &p.parts, base, 2 * at.padded_columns, at.ld, at.ld,
                                       division.columns);
      err != cudaSuccess) {
    return err;
  }
  if (p.tma_out) {
    if (auto err = sm90::make_tensor_map<4>(encoder, &p.out, args.out, args.m, args.n, args.out_row,
                                            OutputBox::kBoxRows, 1, args.m * args.out_row);
        err != cudaSuccess) {
      return err;
    }
  }
  if (auto err = sm90::launch_overlapped(fp32_short_split_kernel,
                                         ceil_div(at.padded_columns, int64_t{kSplitWarps}),
                                         kSplitWarps * 32, 0, 1, stream, split);
      err != cudaSuccess) {
    return err;
  }
  switch (static_cast<Tile>(plan.tile)) {
    case Tile::k64:
      return run<64>(p, plan.device.sm_count, stream);
    case Tile::k96:
      return run<96>(p, plan.device.sm_count, stream);
    case Tile::k128:
      return run<128>(p, plan.device.sm_count, stream);
  }
  return cudaErrorInvalidValue;
}
