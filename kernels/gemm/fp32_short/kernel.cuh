// The kernels of fp32_short_sm90.cu.
// Plan: persistent blocks. One producer thread fills a ring of slots by TMA with rows of a as they
// are in memory, another fills stages with the parts of b, which stay if they fit. Each of two
// consumer warpgroups takes 64 rows at a time: it reads them whole into registers, scales each row
// by its own exponent, and writes the two fp16 parts back in place, from where it multiplies them
// with one chunk of columns after another. Outputs leave by TMA through a warp's own buffers. While
// one warpgroup splits or finishes, the other multiplies. Leading products are promoted every 16 of
// k.
// Bound by memory, 4 bytes per element of a and of the output, or by tensor cores at 3 * 2*m*n*k.
#pragma once

#include "fp32/promotion.cuh"
#include "gemm/fp32_short/finish.cuh"
#include "gemm/fp32_short/shared.cuh"
#include "gemm/fp32_short/split.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_mma_async.cuh"

namespace my_ops::cuda {
namespace {

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- producers ----

__device__ __forceinline__ void load_rows(const Short& p, ShortSmem& smem) {
  constexpr int kBox = 32, kBoxBytes = kRows * 128;
  const int k = static_cast<int>(p.args.k);
  RingAt slot{p.division.slots};
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      const int row = tile * kM + consumer * kRows;
      for (int l = 0; l < k; l += kK, slot.advance()) {
        uint64_t* const full = &smem.slot_full[slot.at];
        unsigned char* const to = smem.slot(slot.at);
        const bool both = l + kBox < k;
        ptx::mbarrier_wait(&smem.slot_empty[slot.at], slot.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, both ? kSlotBytes : kBoxBytes);
        ptx::tma_load_2d(to, &p.a, full, l, row);
        if (both) ptx::tma_load_2d(to + kBoxBytes, &p.a, full, l + kBox, row);
      }
    }
  }
}

__device__ __forceinline__ void load_parts(const Short& p, ShortSmem& smem) {
  const Division& d = p.division;
  const int part_bytes = d.columns * kK * 2;
  RingAt stage{d.stages};
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    for (int chunk = 0; chunk < d.chunks; ++chunk) {
      for (int k_block = 0; k_block < d.k_blocks; ++k_block, stage.advance()) {
        uint64_t* const full = &smem.stage_full[stage.at];
        unsigned char* const to = smem.stage(d, stage.at);
        ptx::mbarrier_wait(&smem.stage_empty[stage.at], stage.phase ^ 1);
        ptx::mbarrier_arrive_expect_tx(full, 2 * part_bytes);
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          ptx::tma_load_2d(to + part * part_bytes, &p.parts, full, k_block * kK,
                           part * p.padded_columns + chunk * d.columns);
        }
      }
    }
    if (d.resident) break;
  }
}

// ---- consumers ----

// The sums of a warpgroup's rows and a chunk. last: of the tile's chunks, so that slots are free.
template <int kColumns>
__device__ __forceinline__ void sum_chunk(const Short& p, ShortSmem& smem, RingAt slot,
                                          RingAt& stage, bool last, float (&sum)[kColumns / 2]) {
  using Mma = ptx::Wgmma<__half, kColumns>;
  constexpr int kCount = kColumns / 2, kPartA = kRows * 128, kPartB = kColumns * 128;
  constexpr int kSteps = kK / 16;  // of a block
  const int steps = static_cast<int>((p.args.k + 15) / 16);
  const bool signals = threadIdx.x % 128 == 0;
  float lead[kCount], cross[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] = 0.0f;
  int read_slot = 0, read_stage = 0;  // those of the block before
  uint32_t a = 0, b = 0;
  const auto release = [&] {
    if (!signals) return;
    if (last) ptx::mbarrier_arrive(&smem.slot_empty[read_slot]);
    if (!p.division.resident) ptx::mbarrier_arrive(&smem.stage_empty[read_stage]);
  };
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int in_block = step % kSteps;
    if (in_block == 0) {
      ptx::mbarrier_wait(&smem.stage_full[stage.at], p.division.resident ? 0 : stage.phase);
      a = ptx::wgmma_address(smem.slot(slot.at));
      b = ptx::wgmma_address(smem.stage(p.division, stage.at));
    }
    const auto part_a = [&](int part) {
      return ptx::wgmma_descriptor(a + part * (kPartA / 16) + in_block * 2);
    };
    const auto part_b = [&](int part) {
      return ptx::wgmma_descriptor(b + part * (kPartB / 16) + in_block * 2);
    };
    ptx::wgmma_fence();
    Mma::run(lead, part_a(0), part_b(0), false);
    ptx::wgmma_commit_group();
    Mma::run(cross, part_a(0), part_b(1), step != 0);
    Mma::run(cross, part_a(1), part_b(0), true);
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<1>();  // lead is complete, cross may still run
    ptx::wgmma_fence_operand(lead);
    if (in_block == 0) {
      if (step != 0) release();
      read_slot = slot.at, read_stage = stage.at;
      slot.advance();
      stage.advance();
    }
    promote(sum, lead);
  }
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_fence_operand(cross);
  release();
  add_cross<kFp16LowBits>(sum, cross);
}

// Computes the block's tiles in which many outputs are suspect by fp32 FMAs. Both warpgroups take
// part.
__device__ __forceinline__ void redo_tiles(const Short& p, ShortSmem& smem) {
  const int thread = threadIdx.x - 128;
  if (p.tma_out) ptx::tma_store_wait_group<0>();
  FmaSmem& fma_smem = reinterpret_cast<FmaSmem&>(smem.ring);
  fma_barrier();  // all outputs are stored, and the ring is free
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const int turn = tile / gridDim.x % (32 * ShortSmem::kRedoWords);
    if (!(smem.redo[turn / 32] >> turn % 32 & 1)) continue;
    for (int row = tile * kM; row < min((tile + 1) * kM, static_cast<int>(p.args.m));
         row += kFmaTile) {
      for (int column = 0; column < p.args.n; column += kFmaTile) {
        multiply_tile_by_fma<FmaSums::kChain>(p.args, fma_smem, thread, 0, row, column,
                                              column + kFmaTile);
      }
    }
  }
}

template <int kColumns>
__device__ __forceinline__ void consume(const Short& p, ShortSmem& smem) {
  const Division& d = p.division;
  const int consumer = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x % 128 / 32 * 16;
  int32_t* const lines = smem.rows[consumer];
  RingAt slot{d.slots}, stage{d.stages};
  const auto skip = [&] {
    for (int i = 0; i < d.k_blocks; ++i) slot.advance();
  };
  if (consumer == 1) skip();
  int box = 0;  // the next of the warp's two
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    split_rows_in_place(p, smem, slot, lines);
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + consumer, 128);  // the parts of all rows are there
    const Line row[2] = {Line(lines[warp_row + lane / 4]), Line(lines[warp_row + lane / 4 + 8])};
    for (int chunk = 0; chunk < d.chunks; ++chunk) {
      float sum[kColumns / 2];
      sum_chunk<kColumns>(p, smem, slot, stage, chunk == d.chunks - 1, sum);
      finish_chunk(p, smem, tile, tile * kM + consumer * kRows + warp_row, chunk * kColumns, row,
                   box, sum);
    }
    skip();
    skip();
  }
  redo_tiles(p, smem);
}

#endif

template <int kColumns>
__global__ void __launch_bounds__(kShortThreads, 1)
    fp32_short_kernel(const __grid_constant__ Short p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char raw_smem[];
  ShortSmem& smem = *reinterpret_cast<ShortSmem*>(raw_smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMaxSlots; ++i) {
      ptx::mbarrier_init(&smem.slot_full[i], 1);
      ptx::mbarrier_init(&smem.slot_empty[i], 1);  // of one warpgroup's rows
    }
    for (int i = 0; i < kMaxStages; ++i) {
      ptx::mbarrier_init(&smem.stage_full[i], 1);
      ptx::mbarrier_init(&smem.stage_empty[i], kConsumers);
    }
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.a);
    ptx::prefetch_tensormap(&p.parts);
    if (p.tma_out) ptx::prefetch_tensormap(&p.out);
  }
  if (threadIdx.x < ShortSmem::kRedoWords) smem.redo[threadIdx.x] = 0;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) load_rows(p, smem);
    if (threadIdx.x == 32) load_parts(p, smem);
    __syncwarp();
  } else {
    ptx::setmaxnreg_inc<232>();
    consume<kColumns>(p, smem);
  }
#endif
}

}  // namespace
}  // namespace my_ops::cuda
