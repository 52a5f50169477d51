// Which kernel of depthwise.cuh computes a gradient of a weight, and in how many slices: pure host
// code.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/ceil_div.h"
#include "convolution.h"
#include "convolution/costs.h"

namespace my_ops::cuda::depthwise_fma {

// kLast: channels last. kPlanes: not so, in two dimensions. kRows: the same in one.
enum class Layout { kLast, kPlanes, kRows };

inline constexpr int kMostSegment = 31;  // outputs of a lane in kRows

// What a kernel of one layout, size and stride is made of. Smaller kernels than kSize count as it.
template <Layout layout, int kSizeGiven, int kStrideGiven>
struct Tile {
  static constexpr Layout kLayout = layout;
  static constexpr int kSize = kSizeGiven, kStride = kStrideGiven;
  static constexpr int kTaps = layout == Layout::kRows ? kSize : kSize * kSize;
  static constexpr bool kLast = layout == Layout::kLast, kPlanes = layout == Layout::kPlanes;
  // Rows of outputs that a thread takes at once, and steps that it loads ahead.
  static constexpr int kOutputs = kLast ? 2 : 1;
  static constexpr int kAhead = kLast ? (kStride == 1 ? 2 : 1) : kPlanes ? (kSize == 5 ? 1 : 2) : 1;
  static constexpr bool kWide = kLast ? kSize == 3 : kPlanes && (kSize == 5 || kStride == 2);
  static constexpr int kWarps = kWide && kSize < 7 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks =  // of an SM
      kLast     ? (kSize == 5 ? 4 : 3)
      : kPlanes ? (kSize == 7     ? 4
                   : kSize == 5   ? (kStride == 1 ? 3 : 2)
                   : kStride == 1 ? 8
                                  : 4)
                : 4;
};

inline Layout layout_of(const DepthwiseArgs& a) {
  if (a.last) return Layout::kLast;
  const bool row = a.input_size[0] == 1 && a.kernel[0] == 1 && a.padding[0] == 0;
  return row ? Layout::kRows : Layout::kPlanes;
}

inline int stride_of(const DepthwiseArgs& a) { return a.stride[1]; }

template <Layout layout, int kSize, typename F>
auto with_stride(int stride, F f) {
  return stride == 1 ? f(Tile<layout, kSize, 1>{}) : f(Tile<layout, kSize, 2>{});
}

// Calls f, a template, with the layout and the size of the kernels.
template <typename F>
auto with_size(const DepthwiseArgs& a, F f) {
  const int size = std::max(a.kernel[0], a.kernel[1]);
  switch (layout_of(a)) {
    case Layout::kRows:
      return size <= 7 ? f.template operator()<Layout::kRows, 7>()
                       : f.template operator()<Layout::kRows, 31>();
    case Layout::kLast:
      return size <= 3   ? f.template operator()<Layout::kLast, 3>()
             : size <= 5 ? f.template operator()<Layout::kLast, 5>()
                         : f.template operator()<Layout::kLast, 7>();
    default:
      return size <= 3   ? f.template operator()<Layout::kPlanes, 3>()
             : size <= 5 ? f.template operator()<Layout::kPlanes, 5>()
                         : f.template operator()<Layout::kPlanes, 7>();
  }
}

// Calls f with the tile.
template <typename F>
auto with_tile(const DepthwiseArgs& a, F f) {
  return with_size(
      a, [&]<Layout layout, int kSize>() { return with_stride<layout, kSize>(stride_of(a), f); });
}

// Whether there are kernels of this size and stride, and indices hold.
inline bool has_kernels(const DepthwiseArgs& a) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const Layout layout = layout_of(a);
  const bool rows = layout == Layout::kRows;
  if (std::max(a.kernel[0], a.kernel[1]) > (rows ? 31 : 7)) return false;
  if (stride_of(a) > 2 || (!rows && a.stride[0] != a.stride[1])) return false;
  if (a.channels > (a.last ? kMost : 65535)) return false;
  int64_t points = a.batch, windows = a.batch;
  for (int d = 0; d < 2; ++d) {
    if (a.padding[d] > 127) return false;
    points *= a.input_size[d], windows *= a.output_size[d];
  }
  return points < kMost && windows < kMost && int64_t{a.input_size[1]} * a.channels < kMost / 4 &&
         int64_t{a.output_size[1]} * a.channels < kMost / 4;
}

inline bool fits(const DepthwiseArgs& a) {
  return has_kernels(a) && a.dilation[0] == 1 && a.dilation[1] == 1;
}

// Outputs of a lane in kRows; odd, so that lanes read different banks.
inline int segment_of(const DepthwiseArgs& a) {
  const int64_t tiles = ceil_div(a.output_size[1], 32 * kMostSegment);
  return static_cast<int>(ceil_div(ceil_div(a.output_size[1], tiles), 32)) | 1;
}

// What a block's threads share: strips of rows, columns or, in kRows, parts of rows.
template <typename Tile>
int64_t items(const DepthwiseArgs& a) {
  switch (Tile::kLayout) {
    case Layout::kLast:
      return a.batch * ceil_div(a.output_size[0], Tile::kOutputs);
    case Layout::kPlanes:
      return int64_t{a.batch} * a.output_size[1];
    default:
      return a.batch * ceil_div(a.output_size[1], 32 * segment_of(a));
  }
}

// Of an item, what one thread sums.
template <typename Tile>
int64_t terms_of_item(const DepthwiseArgs& a) {
  switch (Tile::kLayout) {
    case Layout::kLast:
      return int64_t{Tile::kOutputs} * a.output_size[1];
    case Layout::kPlanes:
      return a.output_size[0];
    default:
      return segment_of(a);
  }
}

// Of a block, those that share its items.
template <typename Tile>
inline constexpr int kWorkers = Tile::kPlanes ? Tile::kThreads : Tile::kWarps;

inline constexpr int64_t kMostTerms = 2048;    // of a thread's sum, unless one item has more
inline constexpr int64_t kMostSlices = 65535;  // by the grid

// So many that the device is full, and no block is without work.
inline int choose_slices(const DepthwiseArgs& a, int sm_count) {
  return with_tile(a, [&]<typename Tile>(Tile) {
    const int64_t groups = Tile::kLayout == Layout::kLast ? ceil_div(a.channels, 32) : a.channels;
    const int waves = Tile::kPlanes ? 2 : 1;  // many channels fill no whole waves
    const int64_t wanted = waves * Tile::kBlocks * sm_count / groups;
    const int64_t in_all = ceil_div(items<Tile>(a), kWorkers<Tile>);  // of a worker, in one slice
    const int64_t of_sum = std::max<int64_t>(1, kMostTerms / terms_of_item<Tile>(a));
    const int64_t slices = std::max({wanted, ceil_div(in_all, of_sum), int64_t{1}});
    return static_cast<int>(std::min({slices, in_all, kMostSlices}));
  });
}

inline double predicted_us(const DepthwiseCosts::Terms& c, double bytes, double fmas) {
  return c.launch + c.bytes * bytes + c.fmas * fmas;
}

struct Predicted {
  double ours_us, torch_us;
};

// Of a tile that computes so many taps.
inline Predicted predicted(const DepthwiseArgs& a, int sm_count, const DepthwiseCosts& costs,
                           int computed, const DepthwiseCosts::Terms& ours,
                           const DepthwiseCosts::Terms& torchs) {
  constexpr double kMillion = 1e6;
  const double share = static_cast<double>(costs.sm_count) / sm_count / kMillion;
  const double planes = share * a.batch * a.channels;
  const double taps = static_cast<double>(a.kernel[0]) * a.kernel[1];
  const double outputs = planes * a.output_size[0] * a.output_size[1];
  const double bytes = 4 * (outputs + planes * a.input_size[0] * a.input_size[1]);
  return {predicted_us(ours, bytes, computed * outputs),
          predicted_us(torchs, bytes, taps * outputs)};
}

inline Predicted predict(const DepthwiseArgs& a, int sm_count, const DepthwiseCosts& costs) {
  const int computed = with_tile(a, []<typename Tile>(Tile) { return Tile::kTaps; });
  const int size = std::min(a.kernel[0], a.kernel[1]);
  const Layout layout = layout_of(a);
  const auto& ours = layout == Layout::kLast   ? costs.last
                     : layout == Layout::kRows ? costs.rows
                                               : costs.planes;
  const auto& torchs = layout != Layout::kLast ? costs.torch_planes
                       : size <= 3             ? costs.torch_last_3
                       : size < 7              ? costs.torch_last_5
                                               : costs.torch_last_7;
  return predicted(a, sm_count, costs, computed, ours, torchs);
}

// Whether ours gain enough.
inline ConvolutionChoice choice_of(const Predicted& predicted, const DeviceFacts& device,
                                   const DepthwiseCosts& costs) {
  const bool timed =
      device.is(9, 0) && device.sm_count == costs.sm_count && device.l2_bytes == costs.l2_bytes;
  const double margin = timed ? costs.margin : costs.margin_elsewhere;
  return margin * predicted.ours_us < predicted.torch_us ? ConvolutionChoice::kOurs
                                                         : ConvolutionChoice::kAsFast;
}

inline DepthwisePlan plan_for(const DepthwiseArgs& a, const DeviceFacts& device,
                              const DepthwiseCosts& costs) {
  DepthwisePlan plan;
  if (device.code == 0 || !fits(a)) return plan;
  plan.slices = choose_slices(a, device.sm_count);
  const int64_t taps = int64_t{a.kernel[0]} * a.kernel[1];
  plan.workspace = plan.slices * taps * a.channels * static_cast<int64_t>(sizeof(float));
  plan.choice = choice_of(predict(a, device.sm_count, costs), device, costs);
  return plan;
}

}  // namespace my_ops::cuda::depthwise_fma
