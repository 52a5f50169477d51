// GEMM for Hopper: float in, float out, computed as three fp16 (or six bf16) tensor-core products.
// Plan: split both operands into fp16 parts, in one or two launches; split full-range data again,
// into bf16 parts (small problems fall back to fp32 FMAs instead); run one product kernel, which
// finds on the device which path the data need, and recomputes with fp32 FMAs what bf16 parts
// cannot hold; run a reduction if k is sliced. Each launch overlaps the end of the previous one.
// Bound by tensor cores, 3 * 2*m*n*k fp16 flop (two thirds if an operand has 16 bits, a third at
// TF32's precision), plus 8 bytes of traffic per operand element, or 4 if it has 16 bits.
#include "gemm/fp32_sm90/fp32_sm90.h"

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "common/tensor_map.h"
#include "gemm/fp32_sm90/kernel.cuh"
#include "gemm/plan.h"

namespace my_ops::cuda {
namespace {

using namespace fp32_sm90;

// Adds the partial sums of the k-slices, in double and in order.
constexpr int kReduceThreads = 256;

__global__ void __launch_bounds__(kReduceThreads)
    fp32_reduce_kernel(const __grid_constant__ Fp32Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_wait();
  const SplitPath path = product_path(p);
  if (path == SplitPath::kFma) return;
  const int shift = 2 * (path == SplitPath::kFp16 ? kFp16Shift : kBf16Shift);
  const int64_t plane = int64_t{p.m} * p.n, total = p.args.batch * plane;
  const float limit =
      path == SplitPath::kBf16Checked ? kSuspectBelow * static_cast<float>(p.args.k) : 0.0f;
  const int64_t step = int64_t{gridDim.x} * kReduceThreads;
  for (int64_t first = int64_t{blockIdx.x} * kReduceThreads; first < total; first += step) {
    const bool inside = first + threadIdx.x < total;
    const int64_t i = inside ? first + threadIdx.x : 0;
    double sum = 0.0;
    for (int slice = 0; slice < p.slices; ++slice) sum += p.partial[slice * total + i];
    float x = static_cast<float>(sum);
    const int64_t z = i / plane;
    const int row = static_cast<int>(i % plane / p.n), col = static_cast<int>(i % p.n);
    const int a_exponent = p.a_exponent[(p.a_repeats ? 0 : z * p.m) + row];
    const int b_exponent = p.b_exponent[(p.b_repeats ? 0 : z * p.n) + col];
    const bool suspect =
        fabsf(x) < limit && a_exponent != kZeroExponent && b_exponent != kZeroExponent;
    const Pow2Pair factor = pow2_pair(a_exponent + b_exponent - shift);
    x = x * factor.first * factor.second;
    x = recomputed(p.args, z, row, col, inside && suspect, x);
    if (!inside) continue;
    float* out = p.args.out + z * p.args.out_batch + row * p.args.out_row + col;
    *out = finish_element(RuntimeActivate{p.args.activation}, x, column_terms(p.args.bias, col),
                          [&] { return residual_at(p.args, z, row, col); });
  }
#endif
}

// What a plan's launches need.
struct Prepared {
  Split split;
  Fp32Product product;
  int sm_count;
};

using Args = GemmArgs<float, float>;

Prepared prepare(const Args& args, const GemmPlan& plan, void* workspace) {
  Layout layout = lay_out(args, plan, workspace, args.packed_b);
  layout.split.operand[0].x = args.half_a ? args.half_operand : args.a;
  layout.split.operand[1].x = args.half_b ? args.half_operand : args.b;
  const SplitOperand &a = layout.split.operand[0], &b = layout.split.operand[1];
  Prepared prepared{};
  prepared.split = layout.split;
  prepared.sm_count = plan.device.sm_count;
  Fp32Product& product = prepared.product;
  product.args = args;
  product.m = a.rows;
  product.n = b.rows;
  product.a_rows = a.batch * a.rows;
  product.b_rows = b.batch * b.rows;
  product.a_repeats = args.a_batch == 0;
  product.b_repeats = args.b_batch == 0;
  product.a_exponent = a.exponent;
  product.b_exponent = b.exponent;
  product.a_status = {a.status, a.status_count};
  product.b_status = {b.status, b.status_count};
  product.has_bf16 = plan.bf16_split;
  product.low_in_a = args.half_b;
  product.partial = layout.partial;
  product.ld = a.ld;
  product.k_blocks = a.ld / kSplitBlockK;
  product.slices = plan.slices;
  product.k_blocks_per_slice = static_cast<int>(ceil_div(product.k_blocks, plan.slices));
  return prepared;
}

template <typename Tile>
ProductGrid product_grid(const Fp32Product& product) {
  const int cluster_tiles_m = static_cast<int>(ceil_div(product.args.m, Tile::kClusterTileM));
  const int cluster_tiles_n = static_cast<int>(ceil_div(product.args.n, Tile::kClusterTileN));
  const int planes = static_cast<int>(product.args.batch) * product.slices;
  return {cluster_tiles_m, cluster_tiles_n, cluster_tiles_m * cluster_tiles_n * planes};
}

// Makes the tensor maps of so many parts, in rows of ld elements.
template <typename Tile>
cudaError_t make_source(const sm90::TensorMapEncoder& encoder, const Fp32Product& product,
                        int64_t ld, int a_count, uint16_t* a_parts, int b_count, uint16_t* b_parts,
                        ProductSource* source) {
  source->grid = product_grid<Tile>(product);
  if (auto err =
          sm90::make_tensor_map(encoder, &source->a, a_parts, int64_t{a_count} * product.a_rows, ld,
                                ld, Tile::kM / Tile::kClusterN);
      err != cudaSuccess) {
    return err;
  }
  return sm90::make_tensor_map(encoder, &source->b, b_parts, int64_t{b_count} * product.b_rows, ld,
                               ld, Tile::kN / Tile::kClusterM);
}

// The same for parts that are stored along the rows.
template <typename Tile>
cudaError_t make_source_along_rows(const sm90::TensorMapEncoder& encoder,
                                   const Fp32Product& product, const SplitOperand& a,
                                   const SplitOperand& b, ProductSource* source) {
  source->grid = product_grid<Tile>(product);
  const auto make = [&](CUtensorMap* map, const SplitOperand& op, int box_k) {
    return sm90::make_tensor_map(encoder, map, op.parts, int64_t{op.fp16_parts} * op.batch * op.ld,
                                 op.rows, op.row_ld, box_k);
  };
  if (auto err = make(&source->a, a, Tile::kK / Tile::kClusterN); err != cudaSuccess) {
    return err;
  }
  return make(&source->b, b, Tile::kK / Tile::kClusterM);
}

template <typename Scheme, typename Tile, typename FullTile = Tile>
cudaError_t run(Prepared* prepared, cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;  // if it fails, it fails before any launch
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  const Split& split = prepared->split;
  const int sm_count = prepared->sm_count;
  Fp32Product& product = prepared->product;
  // The device starts while the host prepares the rest.
  if (auto err = split_fp16(split, stream); err != cudaSuccess) return err;
  if (product.has_bf16) {
    if (auto err = split_bf16(split, sm_count, stream); err != cudaSuccess) return err;
  }
  constexpr auto kKernel = fp32_product_kernel<Scheme, Tile, FullTile>;
  const SplitOperand &a = split.operand[0], &b = split.operand[1];
  if constexpr (Scheme::kAlongRows) {
    if (auto err = make_source_along_rows<Tile>(encoder, product, a, b, &product.fast);
        err != cudaSuccess) {
      return err;
    }
  } else if (auto err = make_source<Tile>(encoder, product, a.ld, a.fp16_parts, a.parts,
                                          b.fp16_parts, b.parts, &product.fast);
             err != cudaSuccess) {
    return err;
  }
  product.full.grid = product_grid<FullTile>(product);
  if (product.has_bf16) {
    constexpr int kParts = Bf16Scheme::kParts;
    if (auto err = make_source<FullTile>(encoder, product, a.ld, kParts, a.bf16_parts, kParts,
                                         b.bf16_parts, &product.full);
        err != cudaSuccess) {
      return err;
    }
  }
  if (auto err = allow_shared_bytes(kKernel, sizeof(ProductSmem)); err != cudaSuccess) return err;
  const int cluster_tiles =
      std::max(product.fast.grid.cluster_tiles, product.full.grid.cluster_tiles);
  const int blocks = std::min(cluster_tiles, resident_clusters<Tile>(sm_count)) * Tile::kCluster;
  if (auto err = sm90::launch_overlapped(kKernel, blocks, Tile::kThreads, sizeof(ProductSmem),
                                         Tile::kCluster, stream, product);
      err != cudaSuccess) {
    return err;
  }
  if (product.slices == 1) return cudaSuccess;
  const int64_t outputs = product.args.batch * product.args.m * product.args.n;
  const int64_t reducers = std::min<int64_t>(ceil_div(outputs, kReduceThreads), 8 * sm_count);
  return sm90::launch_overlapped(fp32_reduce_kernel, reducers, kReduceThreads, 0, 1, stream,
                                 product);
}

template <typename Tile>
cudaError_t run_parts(Prepared* prepared, cudaStream_t stream) {
  if (prepared->split.along_rows) {
    // The sums of six products in slices of k need compensation.
    using FullTile = std::conditional_t<std::is_same_v<Tile, LargeTile>, WideTile, Tile>;
    return run<Fp16AlongRowsScheme, Tile, FullTile>(prepared, stream);
  }
  return prepared->product.args.mixed() ? run<MixedScheme, Tile>(prepared, stream)
                                        : run<Fp16Scheme, Tile>(prepared, stream);
}

// The split of b only.
struct PackPlan {
  Split split{};
  Packed packed;
  int64_t workspace;
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
  if (current_device(&device) != cudaSuccess) return false;
  return packs(args, device, costs_of(device).fp32_sm90);
}

int64_t my_ops::cuda::gemm_packed_bytes(const PackArgs& args) {
  Arena arena(nullptr);
  Packed(&arena, args.batch * args.n, ceil_div(args.k, kSplitBlockK) * kSplitBlockK);
  return arena.used();
}

int64_t my_ops::cuda::gemm_pack_workspace(const PackArgs& args) {
  DeviceFacts device;
  if (current_device(&device) != cudaSuccess) return 0;
  return make_pack_plan(args, device.sm_count, nullptr, nullptr).workspace;
}

cudaError_t my_ops::cuda::gemm_pack(const PackArgs& args, void* packed, void* workspace,
                                    cudaStream_t stream) {
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  const PackPlan plan = make_pack_plan(args, device.sm_count, packed, workspace);
  if (auto err = split_fp16(plan.split, stream); err != cudaSuccess) return err;
  return combine_status(plan.split, 1, plan.packed.status, stream);
}

cudaError_t my_ops::cuda::gemm_fp32_sm90(const GemmArgs<float, float>& args, const GemmPlan& plan,
                                         void* workspace, cudaStream_t stream) {
  Prepared prepared = prepare(args, plan, workspace);
  switch (static_cast<TileChoice>(plan.tile)) {
    case TileChoice::kLarge:
      return run_parts<LargeTile>(&prepared, stream);
    case TileChoice::kWide:
      return run_parts<WideTile>(&prepared, stream);
    case TileChoice::kMedium:
      return run_parts<MediumTile>(&prepared, stream);
    case TileChoice::kSmall:
      return run_parts<SmallTile>(&prepared, stream);
    case TileChoice::kSingle:
      return run<SingleScheme, SingleTile, LargeTile>(&prepared, stream);
    case TileChoice::kSinglePromoted:
      return run<SingleScheme, SinglePromotedTile, LargeTile>(&prepared, stream);
  }
  return cudaErrorInvalidValue;
}
