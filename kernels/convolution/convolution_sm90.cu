// Convolutions for Hopper, and their gradients: float in, float out, by the products of parts of
// fp32_sm90.
// Plan: one launch splits the weight and finds the largest input, a second splits the input into
// parts with the channels last, a third does it again for data that need bf16 parts. The product
// reads windows of the input by TMA in its im2col mode, so nothing is unfolded. The gradient of the
// input is a convolution of the output's with the weight turned around, or one for each class of
// points, in the same launch; that of the weight sums over windows in slices, which a last launch
// adds.
// Bound by tensor cores, 3 * 2 * m * n * k fp16 flop; with few channels by the split, 12 bytes an
// element.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/tensor_map.h"
#include "convolution.h"
#include "convolution/plan.h"
#include "convolution/product.cuh"
#include "convolution/split.cuh"

namespace my_ops::cuda {
namespace convolution_sm90 {
namespace {

static_assert(kParts == Bf16Scheme::kParts);

constexpr int kSplitBlocksPerSm = 4 * kSplitBlocks;

// What a plan's launches need.
struct Prepared {
  SplitArgs split;
  Product product;
};

// All but the tensor maps and the grid.
Prepared prepare(const ConvolutionArgs& args, const ConvolutionPlan& plan, void* workspace) {
  const bool grads_weight = args.pass == ConvolutionPass::kGradWeight;
  const bool grads_input = args.pass == ConvolutionPass::kGradInput;
  const Shape shape = shape_of(args);
  const Layout layout = lay_out(args, shape, plan, workspace);
  Prepared prepared{layout.split, {shape}};
  SplitArgs& split = prepared.split;
  Product& p = prepared.product;
  const Geometry& g = p.geometry;
  Points& x = split.points[0];
  x.x = grads_input ? args.grad : args.input;
  p.x = x.x;
  p.x_at = places(x.channels, x.points, x.last);
  p.a_exponent = x.exponent;
  if (grads_weight) {
    Points& y = split.points[1];
    y.x = args.grad;
    p.y = y.x;
    p.y_at = places(y.channels, y.points, y.last);
    p.b_exponent = y.exponent;
    p.out_at = places(args.channels, g.taps(), args.weight_last);
  } else {
    Weights& w = split.weights;
    w.x = args.weight + (grads_input ? (1 - g.taps()) * w.tap_stride : 0);  // its last tap
    p.y = w.x;
    p.y_at = {w.row_stride, w.channel_stride, w.tap_stride};
    p.b_exponent = w.exponent;
    p.out_at =
        places(p.n, g.result[0] * g.result[1], grads_input ? args.input_last : args.output_last);
  }
  p.slices = plan.slices;
  p.k_blocks_per_slice = k_blocks_per_slice(shape, plan.slices);
  p.path = split.path;
  p.bias = args.bias;
  p.out = args.result;
  p.partial = layout.partial;
  return prepared;
}

template <bool kTaps, typename Tile>
cudaError_t make_maps(const SplitArgs& split, Product* p) {
  sm90::TensorMapEncoder encoder;
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  const Geometry& g = p->geometry;
  sm90::Windows windows{};
  for (int d = 0; d < 2; ++d) {
    windows.image[d] = g.image[d];
    windows.stride[d] = g.stride[d];
    windows.before[d] = g.padding[d];
    windows.after[d] = g.after(d);
  }
  const Points& x = split.points[0];
  const int box = kTaps ? Tile::kK : Tile::kM;
  for (int part = 0; part < kParts; ++part) {
    if (auto err = sm90::make_im2col_map(encoder, &p->a[part], x.parts + part * x.part_stride(),
                                         x.batch, x.padded, windows, box);
        err != cudaSuccess) {
      return err;
    }
    if (!kTaps) continue;
    const Points& y = split.points[1];
    if (auto err = sm90::make_tensor_map(encoder, &p->b[part], y.parts + part * y.part_stride(),
                                         int64_t{y.batch} * y.points, y.padded, y.padded,
                                         Tile::kK / Tile::kClusterM);
        err != cudaSuccess) {
      return err;
    }
  }
  if (kTaps) return cudaSuccess;
  const Weights& w = split.weights;
  const int64_t k = int64_t{w.taps} * w.padded;
  return sm90::make_tensor_map(encoder, &p->b[0], w.parts, int64_t{kParts} * w.rows, k, k,
                               Tile::kN / Tile::kClusterM);
}

template <bool kTaps, typename Tile>
cudaError_t run(Prepared* prepared, int sm_count, cudaStream_t stream) {
  const SplitArgs& split = prepared->split;
  Product& p = prepared->product;
  if (auto err = make_maps<kTaps, Tile>(split, &p); err != cudaSuccess) return err;
  p.grid.cluster_tiles_m = static_cast<int>(ceil_div(p.m, Tile::kClusterTileM));
  p.grid.cluster_tiles_n = static_cast<int>(ceil_div(p.n, Tile::kClusterTileN));
  p.grid.cluster_tiles = cluster_tiles<Tile>(p) * p.slices;
  if (auto err = sm90::launch_overlapped(prepare_kernel,
                                         split.weights.rows + split.operands * split.max_blocks,
                                         kSplitThreads, 0, 1, stream, split);
      err != cudaSuccess) {
    return err;
  }
  const int64_t blocks = std::min<int64_t>(split.points[0].blocks(), kSplitBlocksPerSm * sm_count);
  if (auto err = sm90::launch_overlapped(split_kernel, blocks, kSplitThreads, 0, 1, stream, split);
      err != cudaSuccess) {
    return err;
  }
  if (auto err =
          sm90::launch_overlapped(split_bf16_kernel, blocks, kSplitThreads, 0, 1, stream, split);
      err != cudaSuccess) {
    return err;
  }
  constexpr auto kKernel = convolution_kernel<kTaps, Tile>;
  if (auto err = allow_shared_bytes(kKernel, sizeof(ProductSmem)); err != cudaSuccess) return err;
  const int clusters = std::min(p.grid.cluster_tiles, fp32_sm90::resident_clusters<Tile>(sm_count));
  if (auto err = sm90::launch_overlapped(kKernel, clusters * Tile::kCluster, Tile::kThreads,
                                         sizeof(ProductSmem), Tile::kCluster, stream, p);
      err != cudaSuccess || !kTaps) {
    return err;
  }
  return sm90::launch_overlapped(reduce_kernel, ceil_div(int64_t{p.m} * p.n, kReduceThreads),
                                 kReduceThreads, 0, 1, stream, p);
}

}  // namespace
}  // namespace convolution_sm90
}  // namespace my_ops::cuda

using namespace my_ops::cuda::convolution_sm90;

cudaError_t my_ops::cuda::plan_convolution(const ConvolutionArgs& args, ConvolutionPlan* plan) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  *plan = plan_for(args, device, kFittedConvolutionCosts);
  return cudaSuccess;
}

cudaError_t my_ops::cuda::convolution(const ConvolutionArgs& args, const ConvolutionPlan& plan,
                                      void* workspace, cudaStream_t stream) {
  Prepared prepared = prepare(args, plan, workspace);
  const int sm_count = plan.device.sm_count;
  return with_tile(prepared.product.n, [&]<typename Tile>(Tile) {
    return args.pass == ConvolutionPass::kGradWeight
               ? run<true, Tile>(&prepared, sm_count, stream)
               : run<false, Tile>(&prepared, sm_count, stream);
  });
}
