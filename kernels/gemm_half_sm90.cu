// GEMM for Hopper: 16-bit operands, sums in float, epilogue on the sums.
// Plan: copy what the copy engine cannot read (rows that are not whole 16-byte vectors, no
// contiguous index) into padded rows; then one product kernel in the tile that finishes first.
// Bound by tensor cores; small products by the latency of a launch, or two with a copy.
#include "gemm_half_sm90.h"

#include <algorithm>
#include <cstdint>

#include "common.cuh"
#include "device.h"
#include "gemm_half_sm90_kernel.cuh"

namespace my_ops::cuda {
namespace {

using LargeTile = HalfTile<256, 2>;
using DeferredTile = HalfTile<256, 2, 3>;  // as large, with finishers
using WideTile = HalfTile<192, 2>;
using MediumTile = HalfTile<128, 2>;
using SmallTile = HalfTile<64, 1>;

// An operand [batch, rows, columns], columns the contiguous index where there is one.
struct Operand {
  const uint16_t* x;
  int64_t batch, rows, columns;
  int64_t batch_stride, row_stride, column_stride;
  int64_t ld;      // of the padded copy
  uint16_t* copy;  // [batch, rows, ld], or null: read in place
  bool repeats;    // the same matrix for every batch
  bool swapped;    // rows are k
};

struct PadArgs {
  Operand operand[2];
};

constexpr int kPadThreads = 256;

// Copies the operands that need it, 8 elements per thread, zeros behind the end of a row.
__global__ void __launch_bounds__(kPadThreads) pad_kernel(const __grid_constant__ PadArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  sm90::griddepcontrol_launch_dependents();
  sm90::griddepcontrol_wait();
  const Operand& op = args.operand[blockIdx.x % 2];
  if (!op.copy) return;
  const int64_t vectors = op.ld / 8, total = op.batch * op.rows * vectors;
  for (int64_t i = int64_t{blockIdx.x / 2} * kPadThreads + threadIdx.x; i < total;
       i += int64_t{gridDim.x / 2} * kPadThreads) {
    const int64_t line = i / vectors, column = i % vectors * 8;
    const int64_t z = line / op.rows, row = line % op.rows;
    const uint16_t* from =
        op.x + z * op.batch_stride + row * op.row_stride + column * op.column_stride;
    uint32_t x[8];
    if (op.column_stride == 1 && column + 8 <= op.columns) {
      if (reinterpret_cast<uintptr_t>(from) % 4 == 0) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t pair = reinterpret_cast<const uint32_t*>(from)[j];
          x[2 * j] = pair & 0xFFFF, x[2 * j + 1] = pair >> 16;
        }
      } else {
        x[0] = from[0], x[7] = from[7];
#pragma unroll
        for (int j = 0; j < 3; ++j) {
          const uint32_t pair = reinterpret_cast<const uint32_t*>(from + 1)[j];
          x[2 * j + 1] = pair & 0xFFFF, x[2 * j + 2] = pair >> 16;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = column + j < op.columns ? from[j * op.column_stride] : uint16_t{0};
      }
    }
    *reinterpret_cast<uint4*>(op.copy + line * op.ld + column) = {
        x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16};
  }
#endif
}

template <typename T>
bool fits(const GemmArgs<T, T>& args) {
  constexpr int64_t kLimit = int64_t{1} << 30;
  const auto small = [](int64_t x) { return x > 0 && x < kLimit; };
  return small(args.batch) && small(args.m) && small(args.n) && small(args.k) &&
         args.out_col == 1 &&
         static_cast<double>(args.batch) * ceil_div(args.m, 128) * ceil_div(args.n, 64) < kLimit;
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Whether the copy engine can read it: 16-byte pitches below 2^40 bytes.
bool in_place(const Operand& op) {
  constexpr int64_t kMaxPitch = int64_t{1} << 39;
  const auto pitch = [](int64_t stride) {
    return stride > 0 && stride % 8 == 0 && stride < kMaxPitch;
  };
  return op.column_stride == 1 && aligned(op.x) && (op.rows == 1 || pitch(op.row_stride)) &&
         (op.batch == 1 || pitch(op.batch_stride));
}

// Whether the copy engine can write the output: also whole vectors in n, for it writes 16 bytes
// even where a row ends within them.
template <typename T>
bool whole_vectors(const GemmArgs<T, T>& args) {
  return args.n % 8 == 0 && aligned(args.out) && args.out_row % 8 == 0 &&
         (args.batch == 1 || args.out_batch % 8 == 0);
}

// Whether the residual, if any, can be read in whole vectors.
template <typename T>
bool vector_residual(const GemmArgs<T, T>& args) {
  return !args.residual ||
         (aligned(args.residual) && args.residual_col == 1 && args.residual_row % 8 == 0 &&
          (args.batch == 1 || args.residual_batch % 8 == 0));
}

// x: [batch][outer][k], turned so that the contiguous index comes last.
Operand make_operand(const void* x, int64_t batch, int64_t outer, int64_t k, int64_t batch_stride,
                     int64_t outer_stride, int64_t k_stride) {
  Operand op{};
  op.x = static_cast<const uint16_t*>(x);
  op.repeats = batch_stride == 0;
  op.batch = op.repeats ? 1 : batch;
  op.batch_stride = batch_stride;
  op.swapped = k_stride != 1 && outer_stride == 1;
  op.rows = op.swapped ? k : outer;
  op.columns = op.swapped ? outer : k;
  op.row_stride = op.swapped ? k_stride : outer_stride;
  op.column_stride = op.swapped ? outer_stride : k_stride;
  op.ld = ceil_div(op.columns, 8) * 8;
  return op;
}

// Bytes of the padded copies; places them if there is a workspace.
size_t place(Operand (&operands)[2], void* workspace) {
  size_t used = 0;
  for (Operand& op : operands) {
    if (in_place(op)) continue;
    if (workspace) op.copy = reinterpret_cast<uint16_t*>(static_cast<char*>(workspace) + used);
    used += static_cast<size_t>(ceil_div(op.batch * op.rows * op.ld * 2, 256)) * 256;
  }
  return used;
}

template <typename T>
void make_operands(const GemmArgs<T, T>& args, Operand (&operands)[2]) {
  operands[0] =
      make_operand(args.a, args.batch, args.m, args.k, args.a_batch, args.a_row, args.a_col);
  operands[1] =
      make_operand(args.b, args.batch, args.n, args.k, args.b_batch, args.b_col, args.b_row);
}

cudaError_t make_map(const sm90::TensorMapEncoder& encoder, CUtensorMap* map, const Operand& op,
                     int box_rows) {
  const bool copied = op.copy != nullptr;
  void* base = copied ? op.copy : const_cast<uint16_t*>(op.x);
  const int64_t ld = copied || op.rows == 1 ? op.ld : op.row_stride;
  const int64_t stride = copied || op.batch == 1 ? op.rows * ld : op.batch_stride;
  return sm90::make_tensor_map(encoder, map, base, op.rows, op.columns, ld, box_rows, op.batch,
                               stride);
}

// Time by whole waves of tiles, in us: block_us is that of a tile's 64 of k, as measured on an H200
// from 640 to 4096.
template <typename Tile, typename T>
double tile_cost(const GemmArgs<T, T>& args, int sm_count, double block_us) {
  constexpr double kTileUs = 1.5;
  const int64_t units =
      ceil_div(args.m, Tile::kUnitM) * ceil_div(args.n, Tile::kUnitN) * args.batch;
  const double waves = static_cast<double>(ceil_div(units, sm_count / Tile::kCluster));
  return waves * (static_cast<double>(ceil_div(args.k, 64)) * block_us + kTileUs);
}

enum class TileChoice { kLarge, kDeferred, kWide, kMedium, kSmall };

// The tile that finishes first.
template <typename T>
TileChoice choose_tile(const GemmArgs<T, T>& args, int sm_count) {
  const double large = tile_cost<LargeTile>(args, sm_count, 0.70);
  const double wide = tile_cost<WideTile>(args, sm_count, 0.53);
  const double medium = tile_cost<MediumTile>(args, sm_count, 0.37);
  const double small = tile_cost<SmallTile>(args, sm_count, 0.26);
  const double best = std::min({large, wide, medium, small});
  if (best == large) {
    // A block with a single tile has no products to finish it beside.
    const bool single =
        ceil_div(args.m, LargeTile::kM) * ceil_div(args.n, LargeTile::kN) * args.batch <= sm_count;
    const bool vectors = whole_vectors(args) && vector_residual(args);
    return args.followed() && vectors && !single ? TileChoice::kDeferred : TileChoice::kLarge;
  }
  if (best == wide) return TileChoice::kWide;
  return best == medium ? TileChoice::kMedium : TileChoice::kSmall;
}

template <typename T, bool kAlongM, bool kAlongN, typename Tile>
cudaError_t run_tile(HalfProduct<T>* p, const Operand (&operands)[2], int sm_count,
                     cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  if (auto err = make_map(encoder, &p->a, operands[0], kAlongM ? 64 : Tile::kM);
      err != cudaSuccess) {
    return err;
  }
  const int box_rows = (kAlongN ? Tile::kK : Tile::kN) / Tile::kCluster;
  if (auto err = make_map(encoder, &p->b, operands[1], box_rows); err != cudaSuccess) return err;
  if (p->vector_out) {
    const GemmArgs<T, T>& args = p->args;
    const int64_t stride = args.batch == 1 ? args.m * args.out_row : args.out_batch;
    if (auto err = sm90::make_tensor_map(encoder, &p->out, args.out, args.m, args.n, args.out_row,
                                         kPieceRows, args.batch, stride);
        err != cudaSuccess) {
      return err;
    }
  }
  p->units_m = static_cast<int>(ceil_div(p->m, Tile::kUnitM));
  p->units_n = static_cast<int>(ceil_div(p->n, Tile::kUnitN));
  p->units = p->units_m * p->units_n * static_cast<int>(p->args.batch);
  constexpr auto kKernel = half_product_kernel<T, kAlongM, kAlongN, Tile>;
  constexpr size_t kSmem = sizeof(HalfSmem<Tile>);
  if (auto err = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
      err != cudaSuccess) {
    return err;
  }
  const int blocks = std::min(p->units, sm_count / Tile::kCluster) * Tile::kCluster;
  return sm90::launch_overlapped(kKernel, blocks, Tile::kThreads, kSmem, Tile::kCluster, stream,
                                 *p);
}

template <typename T, bool kAlongM, bool kAlongN>
cudaError_t run(HalfProduct<T>* p, const Operand (&operands)[2], int sm_count,
                cudaStream_t stream) {
  const auto with = [&]<typename Tile>() {
    return run_tile<T, kAlongM, kAlongN, Tile>(p, operands, sm_count, stream);
  };
  switch (choose_tile(p->args, sm_count)) {
    case TileChoice::kLarge:
      return with.template operator()<LargeTile>();
    case TileChoice::kDeferred:
      return with.template operator()<DeferredTile>();
    case TileChoice::kWide:
      return with.template operator()<WideTile>();
    case TileChoice::kMedium:
      return with.template operator()<MediumTile>();
    case TileChoice::kSmall:
      return with.template operator()<SmallTile>();
  }
  return cudaErrorInvalidValue;
}

// Where the finishers keep up with the products, and few multiprocessors are idle at the end.
template <typename T>
bool defers_well(const GemmArgs<T, T>& args) {
  constexpr double kMinShare = 0.92;
  const bool slow = args.activation == Activation::kGelu ||
                    (args.activation != Activation::kNone && args.residual);
  if (args.k < (slow ? 2048 : 1024)) return false;
  DeviceFacts device;
  if (current_device(&device) != cudaSuccess) return false;
  if (choose_tile(args, device.sm_count) != TileChoice::kDeferred) return false;
  const int64_t clusters = device.sm_count / DeferredTile::kCluster;
  const int64_t units =
      ceil_div(args.m, DeferredTile::kUnitM) * ceil_div(args.n, DeferredTile::kUnitN);
  const int64_t room =
      ceil_div(units, clusters) * clusters * DeferredTile::kUnitM * DeferredTile::kUnitN;
  return static_cast<double>(args.m * args.n) >= kMinShare * static_cast<double>(room);
}

// Sizes at which a product whose rows are not whole 16-byte vectors was timed to beat a library's,
// which leaves the Hopper instructions for it, but cuts a long k into pieces. Copies of operands
// cost a launch and their bytes.
struct OddSizes {
  int64_t least;  // m, n and k
  int64_t min_tiles, max_k_per_tile;
};

constexpr OddSizes kCopied{128, 32, 64};
constexpr OddSizes kInPlace{64, 16, 128};

// Where the measured times are below a library's: rows that are not whole vectors; and products
// with an epilogue for which a library needs a second launch, if so small that the launch costs
// more than their better tiles gain, or so large that the epilogue is hidden.
template <typename T>
bool pays(const GemmArgs<T, T>& args) {
  const bool copied = gemm_half_sm90_workspace(args) > 0;
  if (copied || !whole_vectors(args)) {
    const OddSizes sizes = copied ? kCopied : kInPlace;
    const int64_t tiles =
        ceil_div(args.m, SmallTile::kM) * ceil_div(args.n, SmallTile::kN) * args.batch;
    return std::min({args.m, args.n, args.k}) >= sizes.least && tiles >= sizes.min_tiles &&
           args.k <= sizes.max_k_per_tile * tiles;
  }
  if (args.batch != 1 || !args.followed() || args.library_fuses) return false;
  constexpr int64_t kMinSide = 16, kMaxK = 1024, kMaxOutputs = int64_t{1} << 20;
  if (args.m * args.n >= kMaxOutputs) return defers_well(args);
  return args.m >= kMinSide && args.n >= kMinSide && args.k <= kMaxK;
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
bool my_ops::cuda::gemm_half_sm90_supported(const GemmArgs<T, T>& args) {
  if (!fits(args) || !pays(args)) return false;
  DeviceFacts device;
  if (current_device(&device) != cudaSuccess || !device.is(9, 0)) return false;
  constexpr auto kKernel = half_product_kernel<T, false, false, LargeTile>;
  static const bool built = sm90::has_body(reinterpret_cast<const void*>(kKernel));
  return built;
}

template <typename T>
size_t my_ops::cuda::gemm_half_sm90_workspace(const GemmArgs<T, T>& args) {
  Operand operands[2];
  make_operands(args, operands);
  return place(operands, nullptr);
}

template <typename T>
cudaError_t my_ops::cuda::gemm_half_sm90(const GemmArgs<T, T>& args, void* workspace,
                                         cudaStream_t stream) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  if (!device.is(9, 0) || !fits(args)) return cudaErrorNotSupported;
  PadArgs pad{};
  Operand(&operands)[2] = pad.operand;
  make_operands(args, operands);
  if (place(operands, workspace)) {
    constexpr int kBlocksPerSm = 16;
    if (auto err = sm90::launch_overlapped(pad_kernel, kBlocksPerSm * device.sm_count, kPadThreads,
                                           0, 1, stream, pad);
        err != cudaSuccess) {
      return err;
    }
  }
  HalfProduct<T> p{};
  p.args = args;
  p.m = static_cast<int>(args.m);
  p.n = static_cast<int>(args.n);
  p.k_blocks = static_cast<int>(ceil_div(args.k, 64));
  p.a_repeats = operands[0].repeats;
  p.b_repeats = operands[1].repeats;
  p.vector_out = whole_vectors(args);
  p.vector_residual = vector_residual(args);
  if (operands[0].swapped) {
    return operands[1].swapped ? run<T, true, true>(&p, operands, device.sm_count, stream)
                               : run<T, true, false>(&p, operands, device.sm_count, stream);
  }
  return operands[1].swapped ? run<T, false, true>(&p, operands, device.sm_count, stream)
                             : run<T, false, false>(&p, operands, device.sm_count, stream);
}

#define MY_OPS_GEMM_HALF_SM90(T)                                                 \
  template bool my_ops::cuda::gemm_half_sm90_supported(const GemmArgs<T, T>&);   \
  template size_t my_ops::cuda::gemm_half_sm90_workspace(const GemmArgs<T, T>&); \
  template cudaError_t my_ops::cuda::gemm_half_sm90(const GemmArgs<T, T>&, void*, cudaStream_t);

MY_OPS_GEMM_HALF_SM90(__half)
MY_OPS_GEMM_HALF_SM90(__nv_bfloat16)
