// GEMM for Hopper: 16-bit operands, sums in float, epilogue on the sums.
// Plan: copy operands that TMA cannot read (unaligned rows, no contiguous index) into padded rows;
// then run one product kernel, with the tile that has the shortest estimated time.
// Bound by tensor cores; small products by the latency of a launch, or of two with a copy.
#include "gemm/half_sm90/half_sm90.h"

#include <algorithm>
#include <cstdint>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "common/tensor_map.h"
#include "gemm/half_sm90/kernel.cuh"

namespace my_ops::cuda {
namespace {

using namespace half_sm90;

struct PadArgs {
  Operand operand[2];
};

constexpr int kPadThreads = 256;

// Copies the operands that need it, 8 elements per thread, with zeros past the end of a row.
__global__ void __launch_bounds__(kPadThreads) pad_kernel(const __grid_constant__ PadArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
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

cudaError_t make_map(const sm90::TensorMapEncoder& encoder, CUtensorMap* map, const Operand& op,
                     int box_rows) {
  const bool copied = op.copy != nullptr;
  void* base = copied ? op.copy : const_cast<uint16_t*>(op.x);
  const int64_t ld = copied || op.rows == 1 ? op.ld : op.row_stride;
  const int64_t stride = copied || op.batch == 1 ? op.rows * ld : op.batch_stride;
  return sm90::make_tensor_map(encoder, map, base, op.rows, op.columns, ld, box_rows, op.batch,
                               stride);
}

template <typename T, bool kAlongM, bool kAlongN, typename Tile>
cudaError_t run_tile(HalfProduct<T>* p, const Operand (&operands)[2],
                     const sm90::TensorMapEncoder& encoder, int sm_count, cudaStream_t stream) {
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
                                         kSubtileRows, args.batch, stride);
        err != cudaSuccess) {
      return err;
    }
  }
  p->cluster_tiles_m = static_cast<int>(ceil_div(p->m, Tile::kClusterTileM));
  p->cluster_tiles_n = static_cast<int>(ceil_div(p->n, Tile::kClusterTileN));
  p->cluster_tiles = p->cluster_tiles_m * p->cluster_tiles_n * static_cast<int>(p->args.batch);
  constexpr auto kKernel = half_product_kernel<T, kAlongM, kAlongN, Tile>;
  constexpr size_t kSmem = Tile::kSharedBytes;
  if (auto err = allow_shared_bytes(kKernel, kSmem); err != cudaSuccess) return err;
  const int blocks = std::min(p->cluster_tiles, sm_count / Tile::kCluster) * Tile::kCluster;
  return sm90::launch_overlapped(kKernel, blocks, Tile::kThreads, kSmem, Tile::kCluster, stream,
                                 *p);
}

template <typename T, bool kAlongM, bool kAlongN>
cudaError_t run(HalfProduct<T>* p, const Operand (&operands)[2],
                const sm90::TensorMapEncoder& encoder, const GemmPlan& plan, cudaStream_t stream) {
  const auto with = [&]<typename Tile>() {
    return run_tile<T, kAlongM, kAlongN, Tile>(p, operands, encoder, plan.device.sm_count, stream);
  };
  switch (static_cast<TileChoice>(plan.tile)) {
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

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
cudaError_t my_ops::cuda::gemm_half_sm90(const GemmArgs<T, T>& args, const GemmPlan& plan,
                                         void* workspace, cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;  // if it fails, it fails before any launch
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  PadArgs pad{};
  Operand(&operands)[2] = pad.operand;
  make_operands(args, operands);
  operands[0].x = reinterpret_cast<const uint16_t*>(args.a);
  operands[1].x = reinterpret_cast<const uint16_t*>(args.b);
  if (place(operands, workspace)) {
    constexpr int kBlocksPerSm = 16;
    if (auto err = sm90::launch_overlapped(pad_kernel, kBlocksPerSm * plan.device.sm_count,
                                           kPadThreads, 0, 1, stream, pad);
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
  p.vector_out = tma_can_store(args);
  p.vector_residual = vector_residual(args);
  const auto with = [&]<bool kAlongM, bool kAlongN>() {
    return run<T, kAlongM, kAlongN>(&p, operands, encoder, plan, stream);
  };
  if (operands[0].swapped) {
    return operands[1].swapped ? with.template operator()<true, true>()
                               : with.template operator()<true, false>();
  }
  return operands[1].swapped ? with.template operator()<false, true>()
                             : with.template operator()<false, false>();
}

#define MY_OPS_GEMM_HALF_SM90(T)                                                                   \
  template cudaError_t my_ops::cuda::gemm_half_sm90(const GemmArgs<T, T>&, const GemmPlan&, void*, \
                                                    cudaStream_t);

MY_OPS_GEMM_HALF_SM90(__half)
MY_OPS_GEMM_HALF_SM90(__nv_bfloat16)
