// GEMM for Hopper: float in, float out, formed from three fp16 (or six bf16) tensor-core products.
// Plan: split both operands into parts, one or two launches; split again into bf16 if the data call
// for it (large problems; small ones go to plain float arithmetic); one product kernel that reads
// the verdict on the device, and forms again in plain arithmetic what bf16 parts cannot hold; a
// reduction if k was split. Each launch overlaps the end of the last.
// Bound by tensor cores, 3 * 2*m*n*k fp16 flop (a third at TF32's precision), plus 8 bytes of
// traffic per operand element.
#include "gemm/fp32_sm90.h"

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "common/tensor_map.h"
#include "gemm/fp32_sm90_kernel.cuh"

namespace my_ops::cuda {
namespace {

using namespace fp32_sm90;
using LargeTile = Tile<128, 128, 2, 1>;
using WideTile = Tile<128, 96, 2, 1>;
using MediumTile = Tile<128, 64, 1, 2>;
using SmallTile = Tile<64, 64, 1, 1>;
using SingleTile = Tile<128, 256, 2, 1>;        // of one fp16 product per element
using SinglePiecesTile = Tile<128, 192, 2, 1>;  // of one, in pieces of k

// Below this many multiply-adds the bf16 split is not launched: an empty launch costs 2 us of a
// call that takes 20, and plain arithmetic is the fallback.
constexpr double kMinBf16Work = 5e8;

// Adds the pieces of a product split along k, in double and in their order.
constexpr int kReduceThreads = 256;

__global__ void __launch_bounds__(kReduceThreads)
    fp32_reduce_kernel(const __grid_constant__ Fp32Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_wait();
  const SplitPath path = product_path(p);
  if (path == SplitPath::kExact) return;
  const int shift = 2 * (path == SplitPath::kFp16 ? kFp16Shift : kBf16Shift);
  const int64_t plane = int64_t{p.m} * p.n, total = p.args.batch * plane;
  const float limit = path == SplitPath::kWide ? kSpoiltBelow * static_cast<float>(p.args.k) : 0.0f;
  const int64_t step = int64_t{gridDim.x} * kReduceThreads;
  for (int64_t first = int64_t{blockIdx.x} * kReduceThreads; first < total; first += step) {
    const bool inside = first + threadIdx.x < total;
    const int64_t i = inside ? first + threadIdx.x : 0;
    double sum = 0.0;
    for (int split = 0; split < p.splits; ++split) sum += p.partial[split * total + i];
    float x = static_cast<float>(sum);
    const int64_t z = i / plane;
    const int row = static_cast<int>(i % plane / p.n), col = static_cast<int>(i % p.n);
    const int a_exponent = p.a_exponent[(p.a_repeats ? 0 : z * p.m) + row];
    const int b_exponent = p.b_exponent[(p.b_repeats ? 0 : z * p.n) + col];
    const bool spoilt =
        fabsf(x) < limit && a_exponent != kZeroExponent && b_exponent != kZeroExponent;
    const Pow2Pair factor = pow2_pair(a_exponent + b_exponent - shift);
    x = x * factor.first * factor.second;
    x = formed_exactly(p.args, z, row, col, inside && spoilt, x);
    if (!inside) continue;
    float* out = p.args.out + z * p.args.out_batch + row * p.args.out_row + col;
    *out = finish_element(RuntimeActivate{p.args.activation}, x, column_terms(p.args.bias, col),
                          [&] { return residual_at(p.args, z, row, col); });
  }
#endif
}

enum class TileChoice { kLarge, kWide, kMedium, kSmall, kSingle, kSinglePieces };

// Everything that follows from the arguments and the device.
struct Plan {
  Args args;
  Split split;
  Fp32Product product;
  TileChoice tile;
  int sm_count;
  size_t workspace;
};

// Where a library's tiles leave processors idle, or k is long, it may cut k, as its errors show:
// its sums are then shorter, and the largest tiles', neither compensated nor in pieces, not always
// as accurate.
bool library_may_cut_k(const Args& args, int sm_count) {
  constexpr int64_t kTile = 128, kMaxWaves = 6, kLongK = 2048;
  constexpr double kIdle = 0.05;
  const int64_t tiles = args.batch * ceil_div(args.m, kTile) * ceil_div(args.n, kTile);
  const int64_t waves = ceil_div(tiles, int64_t{sm_count}), slots = waves * sm_count;
  const bool idle = static_cast<double>(slots - tiles) > kIdle * static_cast<double>(slots);
  return waves <= kMaxWaves && (idle || args.k > waves * kLongK);
}

// Clusters that run at once. Four blocks do not fit everywhere: they ran at half the rate.
template <typename Tile>
int cluster_slots(int sm_count) {
  static_assert(Tile::kCluster <= 2);
  return sm_count / Tile::kCluster;
}

// How a tile would cover the product: in how many pieces of k, where the output alone leaves most
// of the device idle, and in what time, by whole waves.
struct Cover {
  int splits;
  double cost;  // in elements of the output of a large tile times blocks of k; 15,000 take 1 us
};

// slowdown: of the tile against the large one, per unit of area, as measured from 640 to 2304.
template <typename Tile>
Cover cover(const Args& args, int k_blocks, int sm_count, double slowdown) {
  constexpr int64_t kMinBlocks = 8, kMaxSplits = 64;       // of k, per piece
  constexpr double kReduce = 60e3, kReduceElement = 0.04;  // another launch; a sum out and in again
  const int64_t slots = cluster_slots<Tile>(sm_count);
  const int64_t units =
      ceil_div(args.m, Tile::kUnitM) * ceil_div(args.n, Tile::kUnitN) * args.batch;
  const int64_t most = std::min({slots / units, k_blocks / kMinBlocks, kMaxSplits});
  const int64_t blocks = ceil_div(k_blocks, std::max<int64_t>(most, 1));
  const int64_t splits = ceil_div(k_blocks, blocks);
  double cost = slowdown * Tile::kM * Tile::kN *
                static_cast<double>(ceil_div(units * splits, slots) * blocks);
  if (splits > 1) {
    cost += kReduce + kReduceElement * static_cast<double>(args.batch * args.m * args.n * splits);
  }
  return {static_cast<int>(splits), cost};
}

// The area that a tile's whole waves cover.
template <typename Tile>
double wave_area(const Args& args, int sm_count) {
  const int64_t units =
      ceil_div(args.m, Tile::kUnitM) * ceil_div(args.n, Tile::kUnitN) * args.batch;
  return Tile::kM * Tile::kN * static_cast<double>(ceil_div(units, cluster_slots<Tile>(sm_count)));
}

// Whether one product per element is summed in pieces of k: for accuracy, or where tiles of that
// size leave fewer processors idle.
bool in_pieces(const Args& args, int sm_count) {
  constexpr double kSlowdown = 1.04;
  return library_may_cut_k(args, sm_count) || !whole_vectors(args) ||
         kSlowdown * wave_area<SinglePiecesTile>(args, sm_count) <
             wave_area<SingleTile>(args, sm_count);
}

template <typename Tile>
ProductGrid product_grid(const Args& args) {
  const int units_m = static_cast<int>(ceil_div(args.m, Tile::kUnitM));
  const int units_n = static_cast<int>(ceil_div(args.n, Tile::kUnitN));
  return {units_m, units_n, units_m * units_n * static_cast<int>(args.batch)};
}

template <typename Tile, typename FullTile>
void set_tile(Plan* plan, TileChoice choice, int splits) {
  Fp32Product& product = plan->product;
  plan->tile = choice;
  product.fast.grid = product_grid<Tile>(plan->args);
  product.full.grid = product_grid<FullTile>(plan->args);
  product.splits = splits;
  product.k_blocks_per_split = static_cast<int>(ceil_div(product.k_blocks, splits));
  product.fast.grid.units *= splits;
  product.full.grid.units *= splits;
}

// Hands out pieces of the workspace; with no base it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    constexpr size_t kAlign = 256;
    T* piece = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// A packed operand: what its fp16 split gives.
struct Packed {
  uint8_t* status;
  uint16_t* parts;
  int32_t* exponent;

  Packed(Arena* arena, int64_t rows, int64_t ld)
      : status(arena->take<uint8_t>(1)),
        parts(arena->take<uint16_t>(2 * rows * ld)),
        exponent(arena->take<int32_t>(rows)) {}
};

// What the fp16 split of an operand needs besides its parts.
void place_scratch(Arena* arena, SplitOperand* op) {
  const int64_t rows = int64_t{op->batch} * op->rows;
  op->status = arena->take<uint8_t>(op->status_count);
  if (op->mode == SplitMode::kChunks) {
    op->stats = arena->take<uint32_t>(3 * op->chunks * rows);
    op->tiny = arena->take<uint32_t>(2 * rows);
  }
}

void place(Plan* plan, void* workspace) {
  Arena arena(workspace);
  Fp32Product& product = plan->product;
  for (SplitOperand& op : plan->split.operand) {
    const int64_t rows = int64_t{op.batch} * op.rows;
    if (&op == &plan->split.operand[1] && plan->args.packed_b) {
      Arena given(const_cast<void*>(plan->args.packed_b));
      const Packed packed(&given, rows, op.ld);
      op.parts = packed.parts;
      op.exponent = packed.exponent;
      op.status = packed.status;
      op.wide = product.has_bf16 ? arena.take<uint16_t>(3 * rows * op.ld) : nullptr;
    } else {
      op.parts = op.wide = arena.take<uint16_t>((product.has_bf16 ? 3 : 2) * rows * op.ld);
      op.exponent = arena.take<int32_t>(rows);
      place_scratch(&arena, &op);
    }
  }
  const int64_t elements = plan->args.batch * plan->args.m * plan->args.n;
  product.partial = product.splits > 1 ? arena.take<float>(product.splits * elements) : nullptr;
  const SplitOperand &a = plan->split.operand[0], &b = plan->split.operand[1];
  product.a_exponent = a.exponent;
  product.b_exponent = b.exponent;
  product.a_status = {a.status, a.status_count};
  product.b_status = {b.status, b.status_count};
  plan->workspace = arena.used();
}

Plan make_plan(const Args& given, const DeviceFacts& device, void* workspace) {
  Plan plan{};
  plan.args = merge_batch(given);
  plan.sm_count = device.sm_count;
  const Args& args = plan.args;
  const int m = static_cast<int>(args.m), n = static_cast<int>(args.n);
  const int k = static_cast<int>(args.k);
  const auto batches = [&](int64_t stride) {
    return stride == 0 ? 1 : static_cast<int>(args.batch);
  };
  plan.split.operand[0] = {.x = args.a,
                           .batch_stride = args.a_batch,
                           .row_stride = args.a_row,
                           .k_stride = args.a_col,
                           .batch = batches(args.a_batch),
                           .rows = m,
                           .k = k};
  plan.split.operand[1] = {.x = args.b,
                           .batch_stride = args.b_batch,
                           .row_stride = args.b_col,
                           .k_stride = args.b_row,
                           .batch = batches(args.b_batch),
                           .rows = n,
                           .k = k};
  const bool single = use_single(args);
  plan.split.fp16_parts = single ? 1 : 2;
  plan_split(&plan.split, device.sm_count);
  if (args.packed_b) skip_operand(&plan.split, 1);

  Fp32Product& product = plan.product;
  product.args = args;
  product.m = m;
  product.n = n;
  product.a_rows = plan.split.operand[0].batch * m;
  product.b_rows = plan.split.operand[1].batch * n;
  product.a_repeats = args.a_batch == 0;
  product.b_repeats = args.b_batch == 0;
  product.k_blocks = plan.split.operand[0].ld / kSplitBlockK;
  const auto large = cover<LargeTile>(args, product.k_blocks, device.sm_count, 1.0);
  const auto wide = cover<WideTile>(args, product.k_blocks, device.sm_count, 1.38);
  const auto medium = cover<MediumTile>(args, product.k_blocks, device.sm_count, 1.55);
  const auto small = cover<SmallTile>(args, product.k_blocks, device.sm_count, 2.05);
  const double compensated = std::min({wide.cost, medium.cost, small.cost});
  const bool compensate =
      args.precision == Precision::kHighest && library_may_cut_k(args, device.sm_count);
  if (single && in_pieces(args, device.sm_count)) {
    set_tile<SinglePiecesTile, LargeTile>(&plan, TileChoice::kSinglePieces, 1);
  } else if (single) {
    set_tile<SingleTile, LargeTile>(&plan, TileChoice::kSingle, 1);
  } else if (large.cost <= compensated && !compensate) {
    set_tile<LargeTile, LargeTile>(&plan, TileChoice::kLarge, large.splits);
  } else if (wide.cost == compensated) {
    set_tile<WideTile, WideTile>(&plan, TileChoice::kWide, wide.splits);
  } else if (medium.cost == compensated) {
    set_tile<MediumTile, MediumTile>(&plan, TileChoice::kMedium, medium.splits);
  } else {
    set_tile<SmallTile, SmallTile>(&plan, TileChoice::kSmall, small.splits);
  }
  const double work = static_cast<double>(args.batch) * args.m * args.n * args.k;
  product.has_bf16 = work >= kMinBf16Work || product.splits > 1;
  place(&plan, workspace);
  return plan;
}

template <typename Tile>
cudaError_t encode_maps(const sm90::TensorMapEncoder& encoder, const Plan& plan, int parts,
                        uint16_t* a_parts, uint16_t* b_parts, ProductSource* source) {
  const SplitOperand &a = plan.split.operand[0], &b = plan.split.operand[1];
  if (auto err =
          sm90::make_tensor_map(encoder, &source->a, a_parts, int64_t{parts} * plan.product.a_rows,
                                a.ld, a.ld, Tile::kM / Tile::kClusterN);
      err != cudaSuccess) {
    return err;
  }
  return sm90::make_tensor_map(encoder, &source->b, b_parts, int64_t{parts} * plan.product.b_rows,
                               b.ld, b.ld, Tile::kN / Tile::kClusterM);
}

template <typename Scheme, typename Tile, typename FullTile = Tile>
cudaError_t run(Plan* plan, cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;  // refused, if at all, before any launch
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  // The device starts while the host prepares the rest.
  Fp32Product& product = plan->product;
  if (auto err = split_fp16(plan->split, stream); err != cudaSuccess) return err;
  if (product.has_bf16) {
    if (auto err = split_bf16(plan->split, plan->sm_count, stream); err != cudaSuccess) return err;
  }
  constexpr auto kKernel = fp32_product_kernel<Scheme, Tile, FullTile>;
  const SplitOperand &a = plan->split.operand[0], &b = plan->split.operand[1];
  if (auto err = encode_maps<Tile>(encoder, *plan, Scheme::kParts, a.parts, b.parts, &product.fast);
      err != cudaSuccess) {
    return err;
  }
  if (product.has_bf16) {
    if (auto err = encode_maps<FullTile>(encoder, *plan, Bf16Scheme::kParts, a.wide, b.wide,
                                         &product.full);
        err != cudaSuccess) {
      return err;
    }
  }
  if (auto err = allow_shared_bytes(kKernel, sizeof(ProductSmem)); err != cudaSuccess) return err;
  const int units = std::max(product.fast.grid.units, product.full.grid.units);
  const int blocks = std::min(units, cluster_slots<Tile>(plan->sm_count)) * Tile::kCluster;
  if (auto err = sm90::launch_overlapped(kKernel, blocks, Tile::kThreads, sizeof(ProductSmem),
                                         Tile::kCluster, stream, product);
      err != cudaSuccess) {
    return err;
  }
  if (product.splits == 1) return cudaSuccess;
  const int64_t elements = plan->args.batch * plan->args.m * plan->args.n;
  const int64_t reducers =
      std::min<int64_t>(ceil_div(elements, kReduceThreads), 8 * plan->sm_count);
  return sm90::launch_overlapped(fp32_reduce_kernel, reducers, kReduceThreads, 0, 1, stream,
                                 product);
}

// The split of b alone.
struct PackPlan {
  Split split{};
  Packed packed;
  size_t workspace;
};

PackPlan make_pack_plan(const PackArgs& args, int sm_count, void* kept, void* workspace) {
  Split split{};
  SplitOperand& b = split.operand[1];
  b = {.x = args.b,
       .batch_stride = args.batch_stride,
       .row_stride = args.col_stride,
       .k_stride = args.row_stride,
       .batch = static_cast<int>(args.batch),
       .rows = static_cast<int>(args.n),
       .k = static_cast<int>(args.k)};
  split.operand[0] = b;
  split.fp16_parts = 2;
  plan_split(&split, sm_count);
  skip_operand(&split, 0);
  Arena keeps(kept), arena(workspace);
  const Packed packed(&keeps, int64_t{b.batch} * b.rows, b.ld);
  b.parts = packed.parts;
  b.exponent = packed.exponent;
  place_scratch(&arena, &b);
  return {split, packed, arena.used()};
}

}  // namespace
}  // namespace my_ops::cuda

bool my_ops::cuda::gemm_packs(const PackArgs& args) {
  DeviceFacts device;
  return current_device(&device) == cudaSuccess && packs(args, device);
}

int64_t my_ops::cuda::gemm_packed_bytes(const PackArgs& args) {
  Arena arena(nullptr);
  Packed(&arena, args.batch * args.n, ceil_div(args.k, kSplitBlockK) * kSplitBlockK);
  return static_cast<int64_t>(arena.used());
}

int64_t my_ops::cuda::gemm_pack_workspace(const PackArgs& args) {
  DeviceFacts device;
  if (current_device(&device) != cudaSuccess) return 0;
  return static_cast<int64_t>(make_pack_plan(args, device.sm_count, nullptr, nullptr).workspace);
}

cudaError_t my_ops::cuda::gemm_pack(const PackArgs& args, void* packed, void* workspace,
                                    cudaStream_t stream) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  const PackPlan plan = make_pack_plan(args, device.sm_count, packed, workspace);
  if (auto err = split_fp16(plan.split, stream); err != cudaSuccess) return err;
  return combine_status(plan.split, 1, plan.packed.status, stream);
}

size_t my_ops::cuda::gemm_fp32_sm90_workspace(const GemmArgs<float, float>& args,
                                              const DeviceFacts& device) {
  return make_plan(args, device, nullptr).workspace;
}

cudaError_t my_ops::cuda::gemm_fp32_sm90(const GemmArgs<float, float>& args,
                                         const DeviceFacts& device, void* workspace,
                                         cudaStream_t stream) {
  Plan plan = make_plan(args, device, workspace);
  switch (plan.tile) {
    case TileChoice::kLarge:
      return run<Fp16Scheme, LargeTile>(&plan, stream);
    case TileChoice::kWide:
      return run<Fp16Scheme, WideTile>(&plan, stream);
    case TileChoice::kMedium:
      return run<Fp16Scheme, MediumTile>(&plan, stream);
    case TileChoice::kSmall:
      return run<Fp16Scheme, SmallTile>(&plan, stream);
    case TileChoice::kSingle:
      return run<SingleScheme, SingleTile, LargeTile>(&plan, stream);
    case TileChoice::kSinglePieces:
      return run<SingleScheme, SinglePiecesTile, LargeTile>(&plan, stream);
  }
  return cudaErrorInvalidValue;
}
