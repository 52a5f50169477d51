// What a launch of depthwise_filter.cuh is made of, and how it is split over the device: host code,
// and what the kernel asks of it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "convolution.h"
#include "convolution/costs.h"
#include "convolution/depthwise_plan.h"

namespace my_ops::cuda::depthwise_filter {

using depthwise_fma::Layout;

// What the kernel of one layout, size and stride is made of. kUp: the stride of a gradient of the
// input; kDown: that of a forward pass.
template <Layout layout, int kSize, int kUpGiven, int kDownGiven>
struct Tile {
  static constexpr Layout kLayout = layout;
  static constexpr bool kLast = layout == Layout::kLast, kRows = layout == Layout::kRows;
  static constexpr int kWide = kSize, kHigh = kRows ? 1 : kSize;
  static constexpr int kUp = kUpGiven, kDown = kDownGiven;
  static constexpr int kUpHigh = kRows ? 1 : kUp, kDownHigh = kRows ? 1 : kDown;
  static constexpr int kColumns = 4;                                              // of a lane
  static constexpr int kWindow = ((kColumns - 1) * kDown + kWide - 1) / kUp + 1;  // that it reads
  static constexpr int kSums = (kHigh - 1) / kDownHigh + 1;  // rows of sums that are not complete
  static_assert(kSize % 2 == 1 && (kUp == 1 || (kUp == 2 && kDown == 1)) && kDown <= 2);
  // Floats of a load from shared memory, as lanes' windows are aligned, and of all of its loads.
  static constexpr int kVector = kUp == 1 ? 4 : 2;
  static constexpr int kRead = kLast ? kWindow : (kWindow + kVector - 1) / kVector * kVector;
  static constexpr int kAhead = kLast || kDown == 2 ? 2 : 4;  // steps
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kSize == 3 ? 8 : kSize == 5 ? 5 : kRows && kSize == 7 ? 8 : 4;
};

// Images whose rows a warp has side by side, if a row has this many groups of columns.
template <typename Tile>
constexpr int images_of_warp(int groups) {
  return Tile::kLayout == Layout::kPlanes ? 32 / groups : 1;
}

// Of a row of an image in shared memory, what is copied, and the distance to the next image's.
template <typename Tile>
constexpr int width_of(int groups) {
  return (groups - 1) * Tile::kColumns * Tile::kDown / Tile::kUp + Tile::kWindow;
}
template <typename Tile>
constexpr int pitch_of(int groups) {
  return (width_of<Tile>(groups) + Tile::kRead - Tile::kWindow + 3) / 4 * 4;
}

// Floats of a row of all images of a warp, and of all that a warp has in shared memory.
template <typename Tile>
constexpr int row_floats(int groups) {
  return Tile::kLast ? 32 * Tile::kWindow : images_of_warp<Tile>(groups) * pitch_of<Tile>(groups);
}
template <typename Tile>
constexpr int warp_floats(int groups) {
  const int ring = (Tile::kAhead + 1) * Tile::kDownHigh * row_floats<Tile>(groups);
  return ring + (Tile::kLast ? 0 : 32 * Tile::kColumns * Tile::kUpHigh);
}

// The weight passes through the same memory if the channels are last.
inline constexpr int kWeightPitch = 33;
template <typename Tile>
constexpr int shared_bytes(int groups) {
  const int weight = Tile::kLast ? kWeightPitch * Tile::kHigh * Tile::kWide : 0;
  return static_cast<int>(sizeof(float)) *
         std::max(Tile::kWarps * warp_floats<Tile>(groups), weight);
}
template <typename Tile>
constexpr bool shared_bytes_suffice() {
  for (int groups = 2; groups <= 32; ++groups) {
    if (shared_bytes<Tile>(groups) > 48 * 1024) return false;
  }
  return true;
}

// Where points of the result and of what is read lie. Of kRows, images count as rows.
struct Geometry {
  int images, size[2], out_size[2], kernel[2], dilation[2];
  int first[2];  // index in what is read of the first tap of point 0
  int shift[2];  // point 0 is so many before the result's first
  bool turned;   // the weight

  // Rows or columns that share taps, from point 0 on.
  int count(int d) const { return static_cast<int>(ceil_div(out_size[d] + shift[d], dilation[d])); }
};

inline Geometry geometry_of(const DepthwiseArgs& a) {
  const bool backward = a.pass == ConvolutionPass::kGradInput;
  Geometry g{.images = a.batch, .turned = backward};
  for (int d = 0; d < 2; ++d) {
    g.kernel[d] = a.kernel[d], g.dilation[d] = a.kernel[d] == 1 ? 1 : a.dilation[d];
    g.size[d] = backward ? a.output_size[d] : a.input_size[d];
    g.out_size[d] = backward ? a.input_size[d] : a.output_size[d];
    g.first[d] = -a.padding[d];
    if (!backward) continue;
    const int before = (a.kernel[d] - 1) * g.dilation[d] - a.padding[d], stride = a.stride[1];
    g.shift[d] = before % stride == 0 ? 0 : 1;
    g.first[d] = -(before + g.shift[d]) / stride;
  }
  if (depthwise_fma::layout_of(a) == Layout::kRows) {
    g.images = 1, g.size[0] = g.out_size[0] = a.batch;
    g.first[0] = g.shift[0] = 0;
  }
  return g;
}

// How the work of a channel, or of 32 if these are last, is split. An item is a strip of rows of
// one tile of columns, of as many images as a warp has; with dilation, of points with one
// remainder.
struct Split {
  int groups;  // of kColumns columns, of a warp's tile of an image
  int tiles, strips;
  int rows;  // of a strip
  int items, slices;
};

template <typename Tile>
Split split_of(const Geometry& g, int channels, int sm_count) {
  constexpr int kMostStrips = 8, kMostWaves = 3, kMostSlices = 65535;
  constexpr int kStepsOfStart = 6;  // that an item's first copies take, about
  constexpr int64_t kRowsAtOnce = Tile::kUpHigh, kHalo = (Tile::kSums - 1) / kRowsAtOnce;
  Split best{};
  const int64_t groups = ceil_div(g.count(1), Tile::kColumns);
  best.tiles = static_cast<int>(Tile::kLast ? groups : ceil_div(groups, 32));
  best.groups = Tile::kLast ? 1 : std::max<int>(2, ceil_div(groups, best.tiles));
  const int64_t images = ceil_div(g.images, images_of_warp<Tile>(best.groups));
  const int64_t tiles = images * g.dilation[0] * g.dilation[1] * best.tiles;
  const int64_t lanes = Tile::kLast ? ceil_div(channels, 32) : channels;
  const int64_t resident = int64_t{Tile::kBlocks} * sm_count;
  int64_t least = INT64_MAX;
  for (int wanted = 1; wanted <= kMostStrips; ++wanted) {
    const int64_t rows = ceil_div(ceil_div(g.count(0), wanted), kRowsAtOnce) * kRowsAtOnce;
    const int64_t strips = ceil_div(g.count(0), rows), items = tiles * strips;
    const int64_t steps = rows / kRowsAtOnce + kHalo + kStepsOfStart;
    for (int waves = 1; waves <= kMostWaves; ++waves) {
      const int64_t slices =
          std::clamp<int64_t>(waves * resident / lanes, 1,
                              std::min<int64_t>(kMostSlices, ceil_div(items, Tile::kWarps)));
      const int64_t of_warp = ceil_div(ceil_div(items, slices), Tile::kWarps);
      const int64_t time = ceil_div(slices * lanes, resident) * (of_warp * steps + kStepsOfStart);
      if (time >= least) continue;
      least = time;
      best.rows = static_cast<int>(rows), best.strips = static_cast<int>(strips);
      best.items = static_cast<int>(items), best.slices = static_cast<int>(slices);
    }
  }
  return best;
}

template <Layout layout, int kSize, typename F>
auto with_stride(const DepthwiseArgs& a, F f) {
  if (a.stride[1] == 1) return f(Tile<layout, kSize, 1, 1>{});
  if (a.pass == ConvolutionPass::kForward) return f(Tile<layout, kSize, 1, 2>{});
  return f(Tile<layout, kSize, 2, 1>{});
}

// Calls f with the tile.
template <typename F>
auto with_tile(const DepthwiseArgs& a, F f) {
  return depthwise_fma::with_size(
      a, [&]<Layout layout, int kSize>() { return with_stride<layout, kSize>(a, f); });
}

// Whether there is a kernel, and indices hold.
inline bool fits(const DepthwiseArgs& a) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (!depthwise_fma::has_kernels(a)) return false;
  double items = a.batch;
  for (int d = 0; d < 2; ++d) {
    if (a.kernel[d] == 1) continue;
    const int64_t dilation = a.dilation[d];
    if (dilation > 1 && a.stride[1] > 1) return false;
    if (dilation * std::max(a.channels, a.kernel[d]) >= kMost) return false;
    items *= static_cast<double>(dilation) + std::max(a.input_size[d], a.output_size[d]);
  }
  return items < kMost;
}

inline depthwise_fma::Predicted predict(const DepthwiseArgs& a, int sm_count,
                                        const DepthwiseCosts& costs) {
  const int computed = with_tile(a, []<typename Tile>(Tile) { return Tile::kHigh * Tile::kWide; });
  const Layout layout = depthwise_fma::layout_of(a);
  const bool last = layout == Layout::kLast, has_stride = a.stride[1] > 1;
  const bool strided = has_stride && a.pass == ConvolutionPass::kGradInput;
  const auto& ours = layout == Layout::kRows  ? costs.filter_rows
                     : !last                  ? costs.filter_planes
                     : has_stride && !strided ? costs.filter_strided_last
                                              : costs.filter_last;
  const bool small = std::min(a.kernel[0], a.kernel[1]) <= 3;
  const auto& torchs = strided ? (last ? costs.torch_strided_last : costs.torch_strided_planes)
                       : !last ? costs.torch_filter_planes
                       : small ? costs.torch_filter_last_3
                               : costs.torch_filter_last;
  return depthwise_fma::predicted(a, sm_count, costs, computed, ours, torchs);
}

inline DepthwisePlan plan_for(const DepthwiseArgs& a, const DeviceFacts& device,
                              const DepthwiseCosts& costs) {
  DepthwisePlan plan;
  if (device.code == 0 || !fits(a)) return plan;
  plan.choice = depthwise_fma::choice_of(predict(a, device.sm_count, costs), device, costs);
  return plan;
}

}  // namespace my_ops::cuda::depthwise_filter
