// Tensor maps, which tell TMA how a tensor lies in memory. They are made on the host.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace my_ops::cuda::sm90 {

// The driver's encoder, looked up at run time so that the module does not link to libcuda.
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

// Looked up once, as it never changes.
inline cudaError_t tensor_map_encoder(TensorMapEncoder* encoder) {
  static TensorMapEncoder found;
  static const cudaError_t status = find_tensor_map_encoder(&found);
  *encoder = found;
  return status;
}

// A map of matrices of 16-bit elements (kBytes 2) or floats (4), [batch, rows, columns], with `ld`
// elements from row to row and `stride` from matrix to matrix (multiples of 16 bytes). It is read
// in boxes of box_rows x 128 bytes with the 128-byte swizzle; elements outside a matrix read as 0.
// A batch of 0 means a single matrix and a map of two dimensions.
template <int kBytes = 2>
cudaError_t make_tensor_map(const TensorMapEncoder& encoder, CUtensorMap* map, void* base,
                            int64_t rows, int64_t columns, int64_t ld, int box_rows,
                            int64_t batch = 0, int64_t stride = 0) {
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(ld) * kBytes,
                                 static_cast<cuuint64_t>(stride) * kBytes};
  const cuuint32_t box[3] = {128 / kBytes, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t step[3] = {1, 1, 1};
  constexpr auto kType =
      kBytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const CUresult result =
      encoder.encode(map, kType, batch ? 3 : 2, base, sizes, strides, box, step,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  constexpr cuuint64_t kBugBytes = 128 * 1024;
  const cuuint64_t bytes = batch ? sizes[2] * strides[1] : sizes[1] * strides[0];
  if (encoder.small_tensor_bug && bytes < kBugBytes) map->opaque[1] &= ~(cuuint64_t{1} << 21);
  return cudaSuccess;
}

}  // namespace my_ops::cuda::sm90
