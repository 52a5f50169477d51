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
#include "convolution/costs.h"
#include "convolution/geometry.h"
#include "convolution/plan.h"
#include "convolution/product.cuh"
#include "convolution/split.cuh"

namespace my_ops::cuda {
namespace convolution_sm90 {
namespace {

constexpr int kParts = Bf16Scheme::kParts, kMaxBlocksPerSm = 8,
              kSplitBlocksPerSm = 4 * kSplitBlocks;

int padded(int channels) { return static_cast<int>(ceil_div(channels, kChannels)) * kChannels; }

Places places(int channels, int points, bool last) {
  const int64_t all = int64_t{channels} * points;
  return last ? Places{all, 1, channels} : Places{all, points, 1};
}

// The slices of windows that a gradient of the weight takes: so many that waves of clusters are
// full, but not so many that adding them takes long. In microseconds, as timed on an H200.
int weight_slices(const Product& p, int tiles, int clusters) {
  constexpr double kBlock = 1.0, kTile = 2.0, kBytes = 3e6;
  constexpr int kMost = 128, kLeastBlocks = 4;
  const double bytes = 8.0 * p.m * p.n;
  int best = 1;
  double least = 0;
  for (int slices = 1; slices == 1 || (slices <= kMost && p.k_blocks / slices >= kLeastBlocks);
       ++slices) {
    const auto blocks = static_cast<double>(ceil_div(p.k_blocks, slices));
    const auto waves = static_cast<double>(ceil_div(tiles * slices, clusters));
    const double time = waves * (blocks * kBlock + kTile) + slices * bytes / kBytes;
    if (slices == 1 || time < least) best = slices, least = time;
  }
  return best;
}

struct Prepared {
  SplitArgs split;
  Product product;
  int64_t workspace;
};

// All but the tensor maps.
Prepared prepare(const ConvolutionArgs& args, int sm_count, void* workspace) {
  const bool grads_weight = args.pass == ConvolutionPass::kGradWeight;
  const bool grads_input = args.pass == ConvolutionPass::kGradInput;
  Prepared prepared{};
  Product& p = prepared.product;
  const Geometry& g = p.geometry = geometry_of(args);
  const int image_points = g.image[0] * g.image[1], taps = g.taps();
  p.windows = args.batch * g.window_count();
  p.channels = grads_input ? args.outputs : args.channels;
  p.padded = padded(p.channels);
  p.channel_blocks = p.padded / kChannels;
  p.n = grads_input ? args.channels : args.outputs;
  p.m = grads_weight ? taps * p.padded : p.windows;

  SplitArgs& split = prepared.split;
  split.operands = grads_weight ? 2 : 1;
  split.max_blocks = kMaxBlocksPerSm * sm_count;
  Points& x = split.points[0];
  x.x = grads_input ? args.grad : args.input;
  x.batch = args.batch;
  x.channels = p.channels;
  x.points = image_points;
  x.last = grads_input ? args.output_last : args.input_last;
  if (grads_weight) {
    Points& y = split.points[1];
    y.x = args.grad;
    y.batch = args.batch;
    y.channels = args.outputs;
    y.points = g.window_count();
    y.last = args.output_last;
  } else {
    Weights& w = split.weights;
    w.x = args.weight;
    const Places at = places(args.channels, taps, args.weight_last);
    w.rows = p.n;
    w.channels = p.channels;
    w.taps = taps;
    w.row_stride = grads_input ? at.channel : at.batch;
    w.channel_stride = grads_input ? at.batch : at.channel;
    w.tap_stride = at.point;
    if (grads_input) {
      w.x += (taps - 1) * at.point;
      w.tap_stride = -at.point;
    }
    w.padded = p.padded;
  }
  p.x = x.x;
  p.x_at = places(x.channels, x.points, x.last);
  if (grads_weight) {
    p.y = args.grad;
    p.y_at = places(args.outputs, g.window_count(), args.output_last);
    p.out_at = places(args.channels, taps, args.weight_last);
  } else {
    p.y = split.weights.x;
    p.y_at = {split.weights.row_stride, split.weights.channel_stride, split.weights.tap_stride};
    p.out_at =
        places(p.n, g.result[0] * g.result[1], grads_input ? args.input_last : args.output_last);
  }
  p.bias = args.bias;
  p.out = args.result;

  const auto plan_tiles = [&]<typename Tile>(Tile) {
    p.grid.cluster_tiles_m = static_cast<int>(ceil_div(p.m, Tile::kClusterTileM));
    p.grid.cluster_tiles_n = static_cast<int>(ceil_div(p.n, Tile::kClusterTileN));
    const int tiles = p.grid.cluster_tiles_m * p.grid.cluster_tiles_n;
    p.slices = 1;
    p.k_blocks = taps * p.channel_blocks;
    if (grads_weight) {
      p.k_blocks = static_cast<int>(ceil_div(p.windows, Tile::kK));
      p.slices = weight_slices(p, tiles, fp32_sm90::resident_clusters<Tile>(sm_count));
    }
    p.k_blocks_per_slice = static_cast<int>(ceil_div(p.k_blocks, p.slices));
    p.slices = static_cast<int>(ceil_div(p.k_blocks, p.k_blocks_per_slice));
    p.grid.cluster_tiles = tiles * p.slices;
  };
  p.n <= 64 ? plan_tiles(NarrowTile{}) : plan_tiles(LargeTile{});

  Arena arena(workspace);
  split.path = arena.take<uint32_t>(1);
  for (int i = 0; i < split.operands; ++i) {
    Points& points = split.points[i];
    points.padded = padded(points.channels);
    points.largest_count = split.max_blocks;
    points.largest = arena.take<uint32_t>(points.largest_count);
    points.exponent = arena.take<int32_t>(1);
    points.parts = arena.take<uint16_t>(kParts * points.part_stride());
  }
  Weights& w = split.weights;
  if (!grads_weight) {
    w.parts = arena.take<uint16_t>(kParts * w.part_stride());
    w.exponent = arena.take<int32_t>(w.rows);
    w.status = arena.take<uint8_t>(w.rows);
  } else {
    p.partial = arena.take<float>(int64_t{p.slices} * p.m * p.n);
  }
  prepared.workspace = arena.used();
  p.path = split.path;
  p.a_exponent = x.exponent;
  p.b_exponent = grads_weight ? split.points[1].exponent : w.exponent;
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

// Whether sizes are within what TMA and indices can hold.
bool can_run(const ConvolutionArgs& args) {
  constexpr int64_t kMost = int64_t{1} << 30;
  int64_t points = args.batch, windows = args.batch, taps = 1;
  for (int d = 0; d < 2; ++d) {
    const int64_t reach = int64_t{args.dilation[d]} * (args.kernel[d] - 1);
    // The last window begins up to reach + stride - 1 before the image's end: 8 bits hold that, and
    // where windows of classes begin and end.
    if (args.stride[d] > kMaxStride || args.padding[d] > 127) return false;
    if (reach + args.stride[d] > 128) return false;
    points *= args.input_size[d], windows *= args.output_size[d], taps *= args.kernel[d];
  }
  const int64_t channels = padded(args.channels), outputs = padded(args.outputs);
  return points < kMost && windows < kMost && taps * channels < kMost && taps * outputs < kMost &&
         points * channels < 16 * kMost && windows * outputs < 16 * kMost &&
         taps * channels * outputs < kMost;
}

double predicted_us(const ConvolutionArgs& args, const Prepared& prepared, int sm_count,
                    const ConvolutionCosts& c) {
  constexpr double kMillion = 1e6;
  const Product& p = prepared.product;
  const bool narrow = p.n <= NarrowTile::kN;
  const auto waves = static_cast<double>(ceil_div(p.grid.cluster_tiles, sm_count / 2));
  const Geometry& g = p.geometry;
  const double plane = static_cast<double>(p.m) * p.n * g.class_count();
  // A tile begins and ends once for each class, which may take as long as a block of k.
  const int blocks = p.k_blocks_per_slice + g.class_count() - 1;
  double time = c.launch + waves * blocks * (narrow ? c.narrow_block : c.block);
  for (int i = 0; i < prepared.split.operands; ++i) {
    const Points& x = prepared.split.points[i];
    const auto elements = static_cast<double>(x.elements());
    time += c.split * (8 * elements + 4 * static_cast<double>(x.part_stride())) / kMillion;
  }
  if (args.pass == ConvolutionPass::kGradWeight) {
    return time + c.slices * 8 * p.slices * plane / kMillion;
  }
  const double weights = static_cast<double>(g.taps()) * args.channels * args.outputs;
  const bool turned = args.pass == ConvolutionPass::kGradInput;
  // Each class along the width may write every sector of memory again.
  const int writes = p.out_at.channel == 1 ? 1 : g.classes[1];
  return time + (turned ? c.turned_weight : c.weight) * weights / kMillion +
         c.output * 4 * writes * plane / kMillion;
}

bool gains(const ConvolutionArgs& args, int sm_count, const ConvolutionCosts& costs) {
  const Prepared prepared = prepare(args, sm_count, nullptr);
  const double work = 2.0 * prepared.product.geometry.taps() * args.channels * args.outputs *
                      args.batch * args.output_size[0] * args.output_size[1];
  const double cudnn_us = work / cudnn_rate(args, costs) * 1e-6;
  return costs.margin * predicted_us(args, prepared, sm_count, costs) < cudnn_us;
}

}  // namespace
}  // namespace convolution_sm90
}  // namespace my_ops::cuda

using namespace my_ops::cuda::convolution_sm90;

cudaError_t my_ops::cuda::plan_convolution(const ConvolutionArgs& args, bool* ours) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  *ours = device.hopper_code && device.runs(fp32_sm90::kNeeds) && can_run(args) &&
          gains(args, device.sm_count, kFittedConvolutionCosts);
  return cudaSuccess;
}

int64_t my_ops::cuda::convolution_workspace(const ConvolutionArgs& args) {
  DeviceFacts device;
  if (current_device(&device) != cudaSuccess) return 0;
  return prepare(args, device.sm_count, nullptr).workspace;
}

cudaError_t my_ops::cuda::convolution(const ConvolutionArgs& args, void* workspace,
                                      cudaStream_t stream) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  Prepared prepared = prepare(args, device.sm_count, workspace);
  const bool narrow = prepared.product.n <= 64;
  if (args.pass == ConvolutionPass::kGradWeight) {
    return narrow ? run<true, NarrowTile>(&prepared, device.sm_count, stream)
                  : run<true, LargeTile>(&prepared, device.sm_count, stream);
  }
  return narrow ? run<false, NarrowTile>(&prepared, device.sm_count, stream)
                : run<false, LargeTile>(&prepared, device.sm_count, stream);
}
