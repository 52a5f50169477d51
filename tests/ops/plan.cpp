// Reads one question per line, and answers with what the package would launch: see test_plan.py.
//   gemm DEVICE WIDTH OUT_WIDTH BATCH M N K A_LAYOUT B_LAYOUT OUT_LAYOUT FOLLOWED HIGH TF32 PACKED
//     VARIANT
//   lltm, lstm or gru DEVICE BACKWARD WIDTH BATCH HIDDEN VARIANT
//   packs DEVICE N K            1 if products gain from a packed weight
//   convolution DEVICE PASS BATCH CHANNELS OUTPUTS LAST, and for both dimensions INPUT OUTPUT
//   KERNEL
//     STRIDE PADDING DILATION: the choice, k-slices, bytes of the workspace
//   depthwise DEVICE BATCH CHANNELS LAST, and the same for both dimensions, of a gradient of the
//   weight: the choice, layout, size and stride of the tile, slices, items of all slices, workers
//     of a block, terms of an item, bytes of the workspace, and the predicted ns, ours and torch's;
//     or "as_fast" alone, where no kernel fits
//   filter DEVICE PASS BATCH CHANNELS LAST, and the same for both dimensions, of a depthwise
//   convolution or the gradient of its input: the choice, layout, size and strides of the tile;
//     rows and columns that lanes have, groups, tiles and strips of them, rows of a strip, images
//     of a warp, items, slices; and the predicted ns, ours and torch's; or "as_fast" alone
//   given DEVICE MODEL OTHER    1 if it has the costs that a device of the other model was given
//   complex DEVICE BATCH M N K A_LAYOUT B_LAYOUT
//                               1 if a complex product gains from being a real one
//   windows DEVICE GRADS_INPUT, and for both dimensions INPUT OUTPUT KERNEL STRIDE PADDING
//   DILATION:
//     for both, where the first window begins, where the last one after the image's last point, and
//     the largest offset of a tap; then, of each window and class, the point of the result, -1 if
//     there is none, the number of taps, and of each the point of the image, -1 outside, and the
//     weight's tap
// DEVICE: major, minor, SMs, shared memory of a block, L2 cache, code, Hopper code. WIDTH: bytes of
// a type. Answers to the first two: kernel, code, shared memory, cluster, blocks that run at once;
// with VARIANT: a persistent kernel or half_sm90, and its three template arguments.
#include <cmath>
#include <iostream>
#include <sstream>
#include <string>
#include <type_traits>

#include "convolution/depthwise_filter_plan.h"
#include "convolution/depthwise_plan.h"
#include "convolution/geometry.h"
#include "convolution/plan.h"
#include "gemm/complex_matrix/plan.h"
#include "gemm/plan.h"
#include "recurrent/cells/gru.h"
#include "recurrent/cells/lltm.h"
#include "recurrent/cells/lstm.h"
#include "recurrent/plan.h"

using namespace my_ops;
using namespace my_ops::cuda;

namespace {

DeviceFacts device_of(std::istream& in) {
  DeviceFacts device;
  in >> device.major >> device.minor >> device.sm_count >> device.shared_bytes >> device.l2_bytes >>
      device.code >> device.hopper_code;
  return device;
}

void answer(const char* kernel, int first, int second, int third) {
  std::cout << kernel << ' ' << first << ' ' << second << ' ' << third << '\n';
}

void answer(const char* kernel, const Needs& needs = {}) {
  std::cout << kernel << ' ' << needs.code << ' ' << needs.shared_bytes << ' ' << needs.cluster
            << ' ' << needs.resident << '\n';
}

template <typename T, typename Out>
void gemm(std::istream& in, const DeviceFacts& device) {
  bool a_layout, b_layout, out_layout, followed, high;
  int variant;  // of a float product: 1 if a has 16 bits, 2 if b has
  GemmProblem p{};
  in >> p.batch >> p.m >> p.n >> p.k >> a_layout >> b_layout >> out_layout >> followed >> high >>
      p.library_tf32 >> p.packed >> variant;
  const auto lay = [](bool transposed, int64_t rows, int64_t columns, int64_t& batch, int64_t& row,
                      int64_t& column) {
    batch = rows * columns, row = transposed ? 1 : columns, column = transposed ? rows : 1;
  };
  lay(a_layout, p.m, p.k, p.a_batch, p.a_row, p.a_col);
  lay(b_layout, p.k, p.n, p.b_batch, p.b_row, p.b_col);
  lay(out_layout, p.m, p.n, p.out_batch, p.out_row, p.out_col);
  p.activation = followed ? Activation::kSilu : Activation::kNone;
  p.precision = high ? Precision::kHigh : Precision::kHighest;
  if (sizeof(T) == 4) p.half_a = variant == 1, p.half_b = variant == 2;
  const GemmPlan plan = plan_gemm<T, Out>(p, device);
  switch (plan.kernel) {
    case GemmKernel::kNone:
      return answer("none");
    case GemmKernel::kFp32Skinny:
      return answer("fp32_skinny", fp32_skinny::kNeeds);
    case GemmKernel::kFp32Narrow:
      return answer("fp32_narrow", fp32_narrow::kNeeds);
    case GemmKernel::kFp32Short:
      return answer("fp32_short", fp32_short::kNeeds);
    case GemmKernel::kFp32Sm90:
      return answer("fp32_sm90", fp32_sm90::kNeeds);
    case GemmKernel::kFp32Sm80:
      return answer("fp32_sm80", fp32_sm80::needs(plan.tile));
    case GemmKernel::kHalfSm90:
      if (variant) return answer("half_sm90", plan.tile, a_layout, b_layout);
      return answer("half_sm90", half_sm90::kNeeds);
    case GemmKernel::kSmall:
      return answer("small");
    case GemmKernel::kLibrary:
      return answer(plan.library == LibraryCall::kConverted ? "converted" : "library");
  }
}

// A transposed a is copied.
bool complex_gains(std::istream& in, const DeviceFacts& device) {
  int64_t batch, m, n, k;
  bool a_layout, b_layout;
  in >> batch >> m >> n >> k >> a_layout >> b_layout;
  const ComplexMatrixArgs matrix{.batch = batch,
                                 .k = k,
                                 .n = n,
                                 .batch_stride = k * n,
                                 .row_stride = b_layout ? 1 : n,
                                 .col_stride = b_layout ? k : 1};
  const int64_t copied = a_layout ? batch * m * k : 0;
  GemmProblem p{.batch = batch, .m = m, .n = 2 * n, .k = 2 * k};
  p.a_batch = p.m * p.k, p.a_row = p.k, p.a_col = 1;
  p.b_batch = p.k * p.n, p.b_row = matrix.matrix_row(), p.b_col = matrix.matrix_col();
  p.out_batch = p.m * p.n, p.out_row = p.n, p.out_col = 1;
  p.preparation = complex_matrix::preparation(matrix, copied, kComplexCosts);
  return plan_gemm<float, float>(p, device).on_tensor_cores();
}

template <typename Cell>
void layer(std::istream& in, const DeviceFacts& device) {
  bool backward, variant;
  int width;
  int64_t batch, hidden;
  in >> backward >> width >> batch >> hidden >> variant;
  const Pass pass = backward ? Pass::kBackward : Pass::kForward;
  const RecurrentPlan plan =
      plan_recurrent({kCellFacts<Cell>, pass, width, 1, batch, hidden}, device);
  const ClusterPlan& cluster = plan.cluster;
  const GridPlan& grid = plan.grid;
  switch (plan.kernel) {
    case RecurrentKernel::kWarp:
      if (variant) return answer("warp", plan.warp.units, plan.warp.rows, 0);
      return answer("warp", kWarpNeeds);
    case RecurrentKernel::kBlock:
      if (variant) return answer("block", plan.block.units, plan.block.rows, 0);
      return answer("block", kBlockNeeds);
    case RecurrentKernel::kCluster:
      if (variant) return answer("cluster", cluster.rows, cluster.chunks, 0);
      return answer("cluster", needs(cluster));
    case RecurrentKernel::kGrid:
      if (variant) return answer("grid", grid.unit_tiles, grid.row_tiles, grid.chunks);
      return answer("grid", needs(grid));
    case RecurrentKernel::kWarpgroup:
      return answer("warpgroup", backward ? needs(plan.warpgroup_backward) : needs(plan.warpgroup));
    case RecurrentKernel::kSteps:
      return answer("steps");
  }
}

template <typename Args>
void read_dimensions(std::istream& in, Args* args) {
  for (int d = 0; d < 2; ++d) {
    in >> args->input_size[d] >> args->output_size[d] >> args->kernel[d] >> args->stride[d] >>
        args->padding[d] >> args->dilation[d];
  }
}

const char* name_of(ConvolutionChoice choice) {
  constexpr const char* kNames[] = {"ours", "as_fast", "memory"};
  return kNames[static_cast<int>(choice)];
}

void convolution(std::istream& in, const DeviceFacts& device) {
  int pass;
  ConvolutionArgs args{};
  in >> pass >> args.batch >> args.channels >> args.outputs >> args.input_last;
  args.pass = static_cast<ConvolutionPass>(pass);
  args.weight_last = args.output_last = args.input_last;
  read_dimensions(in, &args);
  const ConvolutionPlan plan = convolution_sm90::plan_for(args, device, kFittedConvolutionCosts);
  std::cout << name_of(plan.choice) << ' ' << plan.slices << ' ' << plan.workspace << '\n';
}

DepthwiseArgs depthwise_args(std::istream& in, ConvolutionPass pass) {
  DepthwiseArgs args{.pass = pass};
  in >> args.batch >> args.channels >> args.last;
  read_dimensions(in, &args);
  return args;
}

void depthwise(std::istream& in, const DeviceFacts& device) {
  const DepthwiseArgs args = depthwise_args(in, ConvolutionPass::kGradWeight);
  const DepthwiseCosts& costs = kFittedDepthwiseCosts;
  const DepthwisePlan plan = depthwise_fma::plan_for(args, device, costs);
  std::cout << name_of(plan.choice);
  if (depthwise_fma::fits(args)) {
    const auto predicted = depthwise_fma::predict(args, device.sm_count, costs);
    depthwise_fma::with_tile(args, [&]<typename Tile>(Tile) {
      std::cout << ' ' << static_cast<int>(Tile::kLayout) << ' ' << Tile::kSize << ' '
                << Tile::kStride << ' ' << plan.slices << ' ' << depthwise_fma::items<Tile>(args)
                << ' ' << depthwise_fma::kWorkers<Tile> << ' '
                << depthwise_fma::terms_of_item<Tile>(args);
    });
    std::cout << ' ' << plan.workspace << ' ' << std::llround(predicted.ours_us * 1e3) << ' '
              << std::llround(predicted.torch_us * 1e3);
  }
  std::cout << '\n';
}

void filter(std::istream& in, const DeviceFacts& device) {
  int pass;
  in >> pass;
  const DepthwiseArgs args = depthwise_args(in, static_cast<ConvolutionPass>(pass));
  const DepthwiseCosts& costs = kFittedDepthwiseCosts;
  std::cout << name_of(depthwise_filter::plan_for(args, device, costs).choice);
  if (depthwise_filter::fits(args)) {
    const auto g = depthwise_filter::geometry_of(args);
    depthwise_filter::with_tile(args, [&]<typename Tile>(Tile) {
      const auto split = depthwise_filter::split_of<Tile>(g, args.channels, device.sm_count);
      const int images = depthwise_filter::images_of_warp<Tile>(split.groups);
      std::cout << ' ' << static_cast<int>(Tile::kLayout) << ' ' << Tile::kWide << ' ' << Tile::kUp
                << ' ' << Tile::kDown << ' ' << g.count(0) << ' ' << g.count(1) << ' '
                << split.groups << ' ' << split.tiles << ' ' << split.strips << ' ' << split.rows
                << ' ' << images << ' ' << split.items << ' ' << split.slices;
    });
    const auto predicted = depthwise_filter::predict(args, device.sm_count, costs);
    std::cout << ' ' << std::llround(predicted.ours_us * 1e3) << ' '
              << std::llround(predicted.torch_us * 1e3);
  }
  std::cout << '\n';
}

// Of one image.
void windows(std::istream& in) {
  bool grads_input;
  in >> grads_input;
  ConvolutionArgs args{};
  args.pass = grads_input ? ConvolutionPass::kGradInput : ConvolutionPass::kForward;
  read_dimensions(in, &args);
  using convolution_sm90::PointClass, convolution_sm90::Window;
  const auto g = convolution_sm90::geometry_of(args);
  const auto index = [](const int (&sizes)[2], int y, int x) {
    const bool inside = y >= 0 && y < sizes[0] && x >= 0 && x < sizes[1];
    return inside ? y * sizes[1] + x : -1;
  };
  std::cout << "windows";
  for (int d = 0; d < 2; ++d) {
    int largest = 0;
    for (int i = 0; i < g.class_count(); ++i) {
      const PointClass points(g, i);
      if (points.taps[d].count > 0) {
        largest = std::max(largest, points.offset(g, d, points.taps[d].count - 1));
      }
    }
    std::cout << ' ' << -g.padding[d] << ' ' << g.after(d) << ' ' << largest;
  }
  for (int m = 0; m < g.window_count(); ++m) {
    const Window window(g, m);
    for (int i = 0; i < g.class_count(); ++i) {
      const PointClass points(g, i);
      std::cout << ' ' << index(g.result, window.point(g, points, 0), window.point(g, points, 1))
                << ' ' << points.count();
      for (int down = 0; down < points.taps[0].count; ++down) {
        for (int right = 0; right < points.taps[1].count; ++right) {
          std::cout << ' '
                    << index(g.image, window.first(g, 0) + points.offset(g, 0, down),
                             window.first(g, 1) + points.offset(g, 1, right))
                    << ' ' << points.weight_tap(g, down, right);
        }
      }
    }
  }
  std::cout << '\n';
}

struct UnboundedCell : GruCell {
  static constexpr bool kBounded = false;
};

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string question;
    in >> question;
    const DeviceFacts device = device_of(in);
    if (question == "packs") {
      PackArgs args{.batch = 1};
      in >> args.n >> args.k;
      args.row_stride = 1, args.col_stride = args.k;
      std::cout << fp32_sm90::packs(args, device, costs_of(device).fp32_sm90) << '\n';
    } else if (question == "convolution") {
      convolution(in, device);
    } else if (question == "depthwise") {
      depthwise(in, device);
    } else if (question == "filter") {
      filter(in, device);
    } else if (question == "given") {
      DeviceFacts asked = device, other = device;
      in >> asked.model >> other.model;
      const GivenCosts given{other, "given", {}, nullptr};
      given_costs = &given;
      std::cout << (&costs_of(asked) == &given.costs) << '\n';
      given_costs = nullptr;
    } else if (question == "complex") {
      std::cout << complex_gains(in, device) << '\n';
    } else if (question == "windows") {
      windows(in);
    } else if (question == "lltm") {
      layer<LltmCell>(in, device);
    } else if (question == "lstm") {
      layer<LstmCell>(in, device);
    } else if (question == "gru") {
      layer<GruCell>(in, device);
    } else if (question == "unbounded") {
      layer<UnboundedCell>(in, device);
    } else {
      int width, out_width;
      in >> width >> out_width;
      if (width == 8) gemm<double, double>(in, device);
      if (width == 4) gemm<float, float>(in, device);
      if (width == 2 && out_width == 2) gemm<uint16_t, uint16_t>(in, device);
      if (width == 2 && out_width == 4) gemm<uint16_t, float>(in, device);
    }
  }
}
