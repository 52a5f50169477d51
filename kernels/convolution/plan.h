// Which convolutions convolution_sm90.cu takes, in which tiles and slices, and where its workspace
// is: pure host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/ceil_div.h"
#include "convolution.h"
#include "convolution/costs.h"
#include "convolution/geometry.h"
#include "gemm/fp32_sm90/plan.h"

namespace my_ops::cuda::convolution_sm90 {

// ---- the product ----

// Sums of few columns leave room for compensation, which takes more time than it is worth here.
struct NarrowTile : fp32_sm90::Tile<128, 64, 2, 1> {
  static constexpr bool kCompensated = false;
};
using LargeTile = fp32_sm90::LargeTile;

// Calls f with the tile for a product of n columns.
template <typename F>
auto with_tile(int n, F f) {
  return n <= NarrowTile::kN ? f(NarrowTile{}) : f(LargeTile{});
}

inline constexpr int kChannels = 64, kPoints = 64;  // of a block of the split
inline constexpr int kParts = 3;                    // of bf16, which any data may need

inline int padded(int channels) {
  return static_cast<int>(ceil_div(channels, kChannels)) * kChannels;
}

// What a pass multiplies. Rows are windows or, of a gradient of the weight, taps and channels;
// columns are the result's channels or, of that gradient, the output's.
struct Shape {
  Geometry geometry;
  int windows;                           // of all images
  int channels, padded, channel_blocks;  // of what the windows read
  int m, n, k_blocks;
};

inline Shape shape_of(const ConvolutionArgs& args) {
  const bool grads_weight = args.pass == ConvolutionPass::kGradWeight;
  const bool grads_input = args.pass == ConvolutionPass::kGradInput;
  Shape s{.geometry = geometry_of(args)};
  const int taps = s.geometry.taps();
  s.windows = args.batch * s.geometry.window_count();
  s.channels = grads_input ? args.outputs : args.channels;
  s.padded = padded(s.channels);
  s.channel_blocks = s.padded / kChannels;
  s.m = grads_weight ? taps * s.padded : s.windows;
  s.n = grads_input ? args.channels : args.outputs;
  s.k_blocks =
      grads_weight ? static_cast<int>(ceil_div(s.windows, kSplitBlockK)) : taps * s.channel_blocks;
  return s;
}

inline int k_blocks_per_slice(const Shape& s, int slices) {
  return static_cast<int>(ceil_div(s.k_blocks, slices));
}

template <typename Tile>
int cluster_tiles(const Shape& s) {
  return static_cast<int>(ceil_div(s.m, Tile::kClusterTileM) * ceil_div(s.n, Tile::kClusterTileN));
}

// ---- the workspace ----

// [batch][channels][points], either of the last two contiguous.
struct Points {
  const float* x;
  int batch, channels, points;
  bool last;          // channels are contiguous
  int padded;         // channels, to whole blocks
  uint16_t* parts;    // [part][batch][points][padded]
  uint32_t* largest;  // [largest_count] magnitudes, as bits
  int largest_count;
  int32_t* exponent;  // one, of all

  constexpr int64_t elements() const { return int64_t{batch} * channels * points; }
  constexpr int64_t part_stride() const { return int64_t{batch} * points * padded; }
  constexpr int64_t blocks() const {
    return int64_t{batch} * ((points + kPoints - 1) / kPoints) * (padded / kChannels);
  }
};

// Rows of a product's other operand: weight[row][channel][tap] with these strides.
struct Weights {
  const float* x;
  int rows, channels, taps;
  int64_t row_stride, channel_stride, tap_stride;
  int padded;         // channels, to whole blocks
  uint16_t* parts;    // [part][rows][taps][padded]
  int32_t* exponent;  // [rows]
  uint8_t* status;    // [rows] SplitPath

  constexpr int64_t part_stride() const { return int64_t{rows} * taps * padded; }
};

struct SplitArgs {
  Points points[2];  // the second of gradients of the weight only, which have no Weights
  int operands;      // how many of these
  Weights weights;
  uint32_t* path;  // the SplitPath of all, as bits
  int max_blocks;  // that look for the largest, for each Points
};

// Where a tensor's elements are: [n][channel][point].
struct Places {
  int64_t batch, channel, point;
};

inline Places places(int channels, int points, bool last) {
  const int64_t all = int64_t{channels} * points;
  return last ? Places{all, 1, channels} : Places{all, points, 1};
}

struct Layout {
  SplitArgs split;
  float* partial;  // [slices][m][n] of a gradient of the weight; else null
  int64_t bytes;
};

// Pointers are null without a workspace, and those of the operands always.
inline Layout lay_out(const ConvolutionArgs& args, const Shape& shape, const ConvolutionPlan& plan,
                      void* workspace) {
  constexpr int kMaxBlocksPerSm = 8;
  const bool grads_weight = args.pass == ConvolutionPass::kGradWeight;
  const bool grads_input = args.pass == ConvolutionPass::kGradInput;
  const Geometry& g = shape.geometry;
  Layout layout{};
  SplitArgs& split = layout.split;
  split.operands = grads_weight ? 2 : 1;
  split.max_blocks = kMaxBlocksPerSm * plan.device.sm_count;
  split.points[0] = {.batch = args.batch,
                     .channels = shape.channels,
                     .points = g.image[0] * g.image[1],
                     .last = grads_input ? args.output_last : args.input_last};
  if (grads_weight) {
    split.points[1] = {.batch = args.batch,
                       .channels = args.outputs,
                       .points = g.window_count(),
                       .last = args.output_last};
  }
  fp32_sm90::Arena arena(workspace);
  split.path = arena.take<uint32_t>(1);
  for (int i = 0; i < split.operands; ++i) {
    Points& points = split.points[i];
    points.padded = padded(points.channels);
    points.largest_count = split.max_blocks;
    points.largest = arena.take<uint32_t>(points.largest_count);
    points.exponent = arena.take<int32_t>(1);
    points.parts = arena.take<uint16_t>(kParts * points.part_stride());
  }
  if (grads_weight) {
    layout.partial = arena.take<float>(int64_t{plan.slices} * shape.m * shape.n);
  } else {
    Weights& w = split.weights;
    const Places at = places(args.channels, g.taps(), args.weight_last);
    w = {.rows = shape.n,
         .channels = shape.channels,
         .taps = g.taps(),
         .row_stride = grads_input ? at.channel : at.batch,
         .channel_stride = grads_input ? at.batch : at.channel,
         .tap_stride = grads_input ? -at.point : at.point,  // turned around
         .padded = shape.padded};
    w.parts = arena.take<uint16_t>(kParts * w.part_stride());
    w.exponent = arena.take<int32_t>(w.rows);
    w.status = arena.take<uint8_t>(w.rows);
  }
  layout.bytes = arena.used();
  return layout;
}

// ---- which convolutions, in how many slices ----

// Whether sizes are within what TMA and indices can hold.
inline bool fits(const ConvolutionArgs& args) {
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

// So many that waves of clusters are full, but not so many that adding them takes long.
inline int choose_slices(const Shape& s, int sm_count, const ConvolutionCosts& costs) {
  constexpr int kMost = 128, kLeastBlocks = 4;
  return with_tile(s.n, [&]<typename Tile>(Tile) {
    const int tiles = cluster_tiles<Tile>(s),
              clusters = fp32_sm90::resident_clusters<Tile>(sm_count);
    int best = 1;
    double least = 0;
    for (int slices = 1; slices == 1 || (slices <= kMost && s.k_blocks / slices >= kLeastBlocks);
         ++slices) {
      const auto waves = static_cast<double>(ceil_div(tiles * slices, clusters));
      const double time =
          waves * (k_blocks_per_slice(s, slices) * costs.slice_block + costs.slice_tile) +
          costs.slice_sums * slices * 8 * s.m * s.n / 1e6;
      if (slices == 1 || time < least) best = slices, least = time;
    }
    return static_cast<int>(ceil_div(s.k_blocks, k_blocks_per_slice(s, best)));
  });
}

inline double predicted_us(const ConvolutionArgs& args, const Shape& s, const ConvolutionPlan& plan,
                           const SplitArgs& split, const ConvolutionCosts& c) {
  constexpr double kMillion = 1e6;
  const Geometry& g = s.geometry;
  const auto [tiles, block] = with_tile(s.n, [&]<typename Tile>(Tile) {
    return std::pair(cluster_tiles<Tile>(s),
                     std::is_same_v<Tile, NarrowTile> ? c.narrow_block : c.block);
  });
  const auto waves = static_cast<double>(ceil_div(tiles * plan.slices, plan.device.sm_count / 2));
  const double plane = static_cast<double>(s.m) * s.n * g.class_count();
  // A tile begins and ends once for each class, which may take as long as a block of k.
  const int blocks = k_blocks_per_slice(s, plan.slices) + g.class_count() - 1;
  double time = c.launch + waves * blocks * block;
  for (int i = 0; i < split.operands; ++i) {
    const Points& x = split.points[i];
    const auto elements = static_cast<double>(x.elements());
    time += c.split * (8 * elements + 4 * static_cast<double>(x.part_stride())) / kMillion;
  }
  if (args.pass == ConvolutionPass::kGradWeight) {
    return time + c.slices * 8 * plan.slices * plane / kMillion;
  }
  const double weights = static_cast<double>(g.taps()) * args.channels * args.outputs;
  const bool turned = args.pass == ConvolutionPass::kGradInput;
  // Each class along the width may write every sector of memory again.
  const int writes = (turned ? args.input_last : args.output_last) ? 1 : g.classes[1];
  return time + (turned ? c.turned_weight : c.weight) * weights / kMillion +
         c.output * 4 * writes * plane / kMillion;
}

// Of input, weight and output.
inline int64_t tensor_bytes(const ConvolutionArgs& args) {
  int64_t input = int64_t{args.batch} * args.channels, output = int64_t{args.batch} * args.outputs;
  int64_t weight = int64_t{args.channels} * args.outputs;
  for (int d = 0; d < 2; ++d) {
    input *= args.input_size[d], output *= args.output_size[d], weight *= args.kernel[d];
  }
  return 4 * (input + output + weight);
}

inline ConvolutionPlan plan_for(const ConvolutionArgs& args, const DeviceFacts& device,
                                const ConvolutionCosts& costs) {
  constexpr int kMostMemory = 3;  // of the workspace, in bytes of the tensors
  ConvolutionPlan plan{.device = device};
  if (!device.hopper_code || !device.runs(fp32_sm90::kNeeds) || !fits(args)) return plan;
  const Shape shape = shape_of(args);
  if (args.pass == ConvolutionPass::kGradWeight) {
    plan.slices = choose_slices(shape, device.sm_count, costs);
  }
  const Layout layout = lay_out(args, shape, plan, nullptr);
  plan.workspace = layout.bytes;
  const double work = 2.0 * shape.geometry.taps() * args.channels * args.outputs * args.batch *
                      args.output_size[0] * args.output_size[1];
  const double cudnn_us = work / cudnn_rate(args, costs) * 1e-6;
  if (costs.margin * predicted_us(args, shape, plan, layout.split, costs) >= cudnn_us) return plan;
  const bool fits_memory = plan.workspace <= kMostMemory * tensor_bytes(args);
  plan.choice = fits_memory ? ConvolutionChoice::kOurs : ConvolutionChoice::kMemory;
  return plan;
}

}  // namespace my_ops::cuda::convolution_sm90
