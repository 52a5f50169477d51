// Tensor maps, which tell TMA how a tensor lies in memory. They are made on the host.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace my_ops::cuda::sm90 {

// The driver's encoder, looked up at run time so that the module does not link to libcuda.
struct TensorMapEncoder {
  PFN_cuTensorMapEncodeTiled_v12000 encode;
  PFN_cuTensorMapEncodeIm2col_v12000 encode_im2col;
  bool small_tensor_bug;  // drivers up to 13.1 mis-encode tensors under 128 KiB
};

inline cudaError_t find_tensor_map_encoder(TensorMapEncoder* encoder) {
  int version = 0;
  if (auto err = cudaDriverGetVersion(&version); err != cudaSuccess) return err;
  const auto find = [](const char* name, auto* function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (auto err =
            cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
        err != cudaSuccess) {
      return err;
    }
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(found);
    return cudaSuccess;
  };
  if (auto err = find("cuTensorMapEncodeTiled", &encoder->encode); err != cudaSuccess) return err;
  if (auto err = find("cuTensorMapEncodeIm2col", &encoder->encode_im2col); err != cudaSuccess) {
    return err;
  }
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

// A map of a tensor of so many bytes, with what such a driver gets wrong put right.
inline void repair_tensor_map(const TensorMapEncoder& encoder, CUtensorMap* map, cuuint64_t bytes) {
  constexpr cuuint64_t kBugBytes = 128 * 1024;
  if (encoder.small_tensor_bug && bytes < kBugBytes) map->opaque[1] &= ~(cuuint64_t{1} << 21);
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
  repair_tensor_map(encoder, map, batch ? sizes[2] * strides[1] : sizes[1] * strides[0]);
  return cudaSuccess;
}

// How a convolution's windows lie over images: height and width first. Windows are so many points
// apart, and the first begins so many before an image, the last at most so many after its end.
struct Windows {
  int image[2], stride[2], before[2], after[2];
};

// A map of images of 16-bit elements, [images][height][width][channels], read in windows: boxes of
// so many windows' points x 64 channels with the 128-byte swizzle. Points outside an image read as
// 0, also those of further images.
inline cudaError_t make_im2col_map(const TensorMapEncoder& encoder, CUtensorMap* map, void* base,
                                   int images, int channels, const Windows& windows,
                                   int box_points) {
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const int height = windows.image[0], width = windows.image[1];
  const cuuint64_t sizes[4] = {size(channels), size(width), size(height), size(images)};
  const cuuint64_t strides[3] = {size(channels) * 2, size(channels) * size(width) * 2,
                                 size(channels) * size(width) * size(height) * 2};
  const int lower[2] = {-windows.before[1], -windows.before[0]};
  const int upper[2] = {windows.after[1], windows.after[0]};
  const cuuint32_t step[4] = {1, static_cast<cuuint32_t>(windows.stride[1]),
                              static_cast<cuuint32_t>(windows.stride[0]), 1};
  const CUresult result =
      encoder.encode_im2col(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, base, sizes, strides, lower,
                            upper, 64, static_cast<cuuint32_t>(box_points), step,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return cudaErrorInvalidValue;
  repair_tensor_map(encoder, map, sizes[3] * strides[2]);
  return cudaSuccess;
}

}  // namespace my_ops::cuda::sm90
