// Launch interface of the elementwise family. No torch here: raw pointers, sizes, a stream.
//
// T is the storage type. Floating types compute in float (double in double). Integers compute
// modulo 2^bits, so one unsigned type serves both signs.
#pragma once

#include <cstdint>

#ifdef MY_OPS_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace my_ops {

// Index space of custom_add if its operands do not share one dense layout. out is contiguous over
// sizes; strides are in elements, 0 where an operand is broadcast.
struct Broadcast {
  static constexpr int kMaxDims = 8;
  int dims;  // at least 1
  int64_t sizes[kMaxDims];
  int64_t a_strides[kMaxDims];
  int64_t b_strides[kMaxDims];
};

// x, a, b, grad and out have n elements. out may be one of the inputs, but may not overlap one at
// another offset.
namespace cpu {

// Single-threaded: the caller divides the range. T: uint8_t, uint16_t, uint32_t, uint64_t, float,
// double, Half, BFloat16 (numeric_cpu.h) for the first two; floating types for the others.
template <typename T>
void add_one(const T* x, T* out, int64_t n);  // x + 1
template <typename T>
void custom_add(const T* a, const T* b, T* out, int64_t n);  // a + b + 1
template <typename T>
void custom_add(const T* a, const T* b, T* out, const Broadcast& shape, int64_t begin, int64_t end);
template <typename T>
void d_sigmoid(const T* x, T* out, int64_t n);  // s(1 - s), s = sigmoid(x)
template <typename T>
void d_sigmoid_backward(const T* grad, const T* x, T* out, int64_t n);  // grad s(1 - s)(1 - 2s)
template <typename T>
void round_ste(const T* x, T* out, int64_t n);  // 1 where x >= 0.5, else 0; NaN stays NaN

// Rows [begin, end) of out[y][x] = x + y, width elements each. T also int32_t, int64_t.
template <typename T>
void fill_index(T* out, int64_t width, int64_t begin, int64_t end);

}  // namespace cpu

#ifdef MY_OPS_WITH_CUDA
namespace cuda {

// The same, on the GPU; 16-bit types are __half and __nv_bfloat16.
template <typename T>
cudaError_t add_one(const T* x, T* out, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t custom_add(const T* a, const T* b, T* out, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t custom_add(const T* a, const T* b, T* out, const Broadcast& shape, cudaStream_t stream);
template <typename T>
cudaError_t d_sigmoid(const T* x, T* out, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t d_sigmoid_backward(const T* grad, const T* x, T* out, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t round_ste(const T* x, T* out, int64_t n, cudaStream_t stream);
template <typename T>
cudaError_t fill_index(T* out, int64_t height, int64_t width, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace my_ops
