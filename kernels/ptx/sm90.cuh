// Hopper instructions, one function each, and the tensor map they need. Private to the kernels.
// PTX ISA 9.0: "mbarrier", "cp.async.bulk.tensor", "Asynchronous warpgroup level matrix
// instructions" (the products themselves are in sm90_wgmma.cuh), "setmaxnreg", "griddepcontrol".
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace my_ops::cuda::sm90 {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier ----

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)),
               "r"(arrivals));
}

// A place in a ring of stages, with the parity of its barriers.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Makes initialised barriers visible to the other blocks of the cluster and to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Address of the same shared memory location in another block of the cluster.
__device__ __forceinline__ uint32_t mapa(const void* p, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(p)), "r"(rank));
  return remote;
}

__device__ __forceinline__ void mbarrier_arrive_cluster(uint64_t* barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapa(barrier, rank))
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// ---- copies by the tensor engine ----

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (column, row) of the map to shared memory; its bytes count towards the barrier.
__device__ __forceinline__ void tma_load_2d(void* smem, const CUtensorMap* map, uint64_t* barrier,
                                            int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// The same box to the same place in every block of the cluster whose bit is set in `blocks`.
__device__ __forceinline__ void tma_load_2d_multicast(void* smem, const CUtensorMap* map,
                                                      uint64_t* barrier, int column, int row,
                                                      uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// Box at (x, y, z) of a map of three dimensions to shared memory.
__device__ __forceinline__ void tma_load_3d(void* smem, const CUtensorMap* map, uint64_t* barrier,
                                            int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_load_3d_multicast(void* smem, const CUtensorMap* map,
                                                      uint64_t* barrier, int x, int y, int z,
                                                      uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
      : "memory");
}

// Box at (x, y, z) of a map from shared memory. The writer of the shared memory fences first.
__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, const void* smem, int x, int y,
                                             int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(smem_address(smem)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ __forceinline__ void tma_store_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the newest kPending of the thread's groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders a thread's plain writes to shared memory before later ones of the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements, spread over a warp as mma results are. Lane l
// names row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(void* row, uint32_t x0, uint32_t x1, uint32_t x2,
                                         uint32_t x3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)),
      "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

// ---- warpgroup products ----

// Orders register and shared memory accesses before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups, the newest ones, are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: keeps the compiler from moving uses of r across the wait written before it.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Matrix descriptor of a tile with 64 16-bit elements of k per row, stored with the 128-byte
// swizzle (it repeats after 8 rows). `address` is wgmma_address of the tile's start; adding 2 to it
// moves the tile by 16 elements of k.
__device__ __forceinline__ uint32_t wgmma_address(const void* smem) {
  return (smem_address(smem) & 0x3FFFF) >> 4;
}

__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1, kRepeatBytes = 1024;
  return address | uint64_t{1} << 16 | (kRepeatBytes >> 4) << 32 | kSwizzle128 << 62;
}

// The same of a tile stored along its rows' index: boxes of 64 rows x kBox of k, one behind the
// other, a line of 64 rows for each k. Adding 128 moves the tile by 16 elements of k.
template <int kBox>
__device__ __forceinline__ uint64_t wgmma_descriptor_rows(uint32_t address) {
  constexpr uint64_t kSwizzle128 = 1, kRepeatBytes = 1024, kBoxBytes = kBox * 128;
  return address | (kBoxBytes >> 4) << 16 | (kRepeatBytes >> 4) << 32 | kSwizzle128 << 62;
}

// ---- blocks, warps, grids ----

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ int cluster_ctarank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits for the grids this one was allowed to overlap; their writes are visible afterwards.
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- host ----

// The driver's encoder, found at run time so that nothing links libcuda.
struct TensorMapEncoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  bool small_tensor_bug;  // drivers up to 13.1 mis-encode tensors under 128 KiB
};

inline cudaError_t find_tensor_map_encoder(TensorMapEncoder* encoder) {
  int version = 0;
  if (auto err = cudaDriverGetVersion(&version); err != cudaSuccess) return err;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (auto err = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                  cudaEnableDefault, &found);
      err != cudaSuccess) {
    return err;
  }
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encoder->encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  encoder->small_tensor_bug = version <= 13010;
  return cudaSuccess;
}

// The same in every call: looked up once.
inline cudaError_t tensor_map_encoder(TensorMapEncoder* encoder) {
  static TensorMapEncoder found;
  static const cudaError_t status = find_tensor_map_encoder(&found);
  *encoder = found;
  return status;
}

// Map of matrices of 16-bit elements, [batch, rows, columns]: `ld` elements from row to row,
// `stride` from matrix to matrix (multiples of 8), read in boxes of box_rows x 64 elements with the
// 128-byte swizzle; outside a matrix it reads as 0. A batch of 0: a single matrix, two dimensions.
inline cudaError_t make_tensor_map(const TensorMapEncoder& encoder, CUtensorMap* map, void* base,
                                   int64_t rows, int64_t columns, int64_t ld, int box_rows,
                                   int64_t batch = 0, int64_t stride = 0) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(ld) * 2,
                                 static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t step[3] = {1, 1, 1};
  const CUresult result =
      encoder.encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch ? 3 : 2, base, sizes, strides, box,
                     step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  constexpr cuuint64_t kBugBytes = 128 * 1024;
  const cuuint64_t bytes = batch ? sizes[2] * strides[1] : sizes[1] * strides[0];
  if (encoder.small_tensor_bug && bytes < kBugBytes) map->opaque[1] &= ~(cuuint64_t{1} << 21);
  return cudaSuccess;
}

// Launches a kernel in clusters; griddepcontrol lets it start before the one ahead has finished.
template <typename... P, typename... A>
cudaError_t launch_overlapped(void (*kernel)(P...), int64_t blocks, dim3 threads, size_t smem,
                              int cluster, cudaStream_t stream, const A&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = threads;
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace my_ops::cuda::sm90
