// The elementwise family on the GPU: one kernel per number of operands, one functor per op.
// Plan: every thread has kUnroll independent 16-byte accesses in flight; misaligned or short data
// go element by element through the same kernel. Bound by memory: each byte is moved once.
#include "elementwise.h"

#include <type_traits>

#include "common.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kVectorBytes = 16;

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  T at[kSize];
};

struct AddOne {
  template <typename C>
  __device__ C operator()(C x) const {
    return static_cast<C>(x + C(1));
  }
};
struct CustomAdd {
  template <typename C>
  __device__ C operator()(C a, C b) const {
    return static_cast<C>(a + b + C(1));
  }
};
struct DSigmoid {
  template <typename C>
  __device__ C operator()(C x) const {
    const C e = exp_minus_abs(x);  // s(1 - s) = e / (1 + e)^2, even in x
    return e / ((C(1) + e) * (C(1) + e));
  }
};
struct DSigmoidBackward {
  template <typename C>
  __device__ C operator()(C grad, C x) const {
    const C m = expm1_minus_abs(x);  // e - 1; 1 - 2s = +-m / (1 + e) without cancellation
    const C e = exp_minus_abs(x);
    const C slope = e / ((C(1) + e) * (C(1) + e)) * (m / (C(1) + e));
    return grad * (x < C(0) ? -slope : slope);
  }
};
struct RoundSte {
  template <typename C>
  __device__ C operator()(C x) const {
    return x >= C(0.5) ? C(1) : x == x ? C(0) : x;
  }
};

// out[i] = Op(in[0][i], ...) for n elements, in vectors of kSize. out may be one of the inputs:
// every element is read by the thread that writes it, before it writes.
template <typename Op, int kSize, typename T, typename... In>
__global__ void __launch_bounds__(kThreads) map_kernel(T* out, int64_t n, const In*... in) {
  using V = Vector<T, kSize>;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;  // in vectors
  if ((first + (kUnroll - 1) * kThreads + 1) * kSize <= n) {
    struct Loaded {
      V v[kUnroll];
      __device__ explicit Loaded(const V* from) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) v[u] = from[u * kThreads];
      }
    };
    auto store_all = [&](const auto&... loaded) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        V result;
#pragma unroll
        for (int i = 0; i < kSize; ++i) result.at[i] = store<T>(Op{}(load(loaded.v[u].at[i])...));
        reinterpret_cast<V*>(out)[first + u * kThreads] = result;
      }
    };
    store_all(Loaded(reinterpret_cast<const V*>(in) + first)...);
  } else {  // the last block: element by element up to n
    for (int64_t i = first * kSize; i < n; i += kThreads * kSize) {
      for (int64_t j = i; j < n && j < i + kSize; ++j) out[j] = store<T>(Op{}(load(in[j])...));
    }
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; }

template <typename Op, int kSize, typename T, typename... In>
cudaError_t launch_map(T* out, int64_t n, cudaStream_t stream, const In*... in) {
  if (n == 0) return cudaSuccess;
  const int64_t blocks = ceil_div(n, int64_t{kThreads} * kUnroll * kSize);
  map_kernel<Op, kSize><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(out, n, in...);
  return cudaGetLastError();
}

template <typename Op, typename T, typename... In>
cudaError_t map(T* out, int64_t n, cudaStream_t stream, const In*... in) {
  constexpr int kSize = kVectorBytes / sizeof(T);
  return (aligned(out) && ... && aligned(in)) ? launch_map<Op, kSize>(out, n, stream, in...)
                                              : launch_map<Op, 1>(out, n, stream, in...);
}

// Each thread takes kUnroll neighbours of the output: one division chain for all of them.
template <typename Op, typename T>
__global__ void __launch_bounds__(kThreads)
    broadcast_kernel(const T* a, const T* b, T* out, const __grid_constant__ Broadcast shape,
                     int64_t n) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kUnroll;
  if (first >= n) return;
  const int inner = shape.dims - 1;
  int64_t index[Broadcast::kMaxDims];
  int64_t a_offset = 0, b_offset = 0, rest = first;
#pragma unroll
  for (int d = Broadcast::kMaxDims - 1; d >= 0; --d) {
    if (d > inner) continue;
    index[d] = rest % shape.sizes[d];
    rest /= shape.sizes[d];
    a_offset += index[d] * shape.a_strides[d];
    b_offset += index[d] * shape.b_strides[d];
  }
  for (int u = 0; u < kUnroll && first + u < n; ++u) {
    out[first + u] = store<T>(Op{}(load(a[a_offset]), load(b[b_offset])));
    bool carry = true;
#pragma unroll
    for (int d = Broadcast::kMaxDims - 1; d >= 0; --d) {
      if (d > inner || !carry) continue;
      a_offset += shape.a_strides[d];
      b_offset += shape.b_strides[d];
      carry = ++index[d] == shape.sizes[d];
      if (!carry) continue;
      index[d] = 0;
      a_offset -= shape.sizes[d] * shape.a_strides[d];
      b_offset -= shape.sizes[d] * shape.b_strides[d];
    }
  }
}

// A block owns one stretch of kUnroll vectors a thread within one row.
template <typename T, int kSize>
__global__ void __launch_bounds__(kThreads)
    fill_index_kernel(T* out, int64_t height, int64_t width, int64_t blocks_per_row) {
  using C = std::conditional_t<sizeof(T) < 4, float, T>;  // int64 to 16 bits goes through float
  for (int64_t block = blockIdx.x; block < height * blocks_per_row; block += gridDim.x) {
    const int64_t y = block / blocks_per_row;
    const int64_t first = block % blocks_per_row * (kThreads * kUnroll) + threadIdx.x;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t x = (first + u * kThreads) * kSize;
      if (x >= width) return;
      Vector<T, kSize> result;
#pragma unroll
      for (int i = 0; i < kSize; ++i) result.at[i] = store<T>(static_cast<C>(x + i + y));
      reinterpret_cast<Vector<T, kSize>*>(out + y * width)[x / kSize] = result;
    }
  }
}

template <typename T, int kSize>
cudaError_t launch_fill_index(T* out, int64_t height, int64_t width, cudaStream_t stream) {
  const int64_t blocks_per_row = ceil_div(width, int64_t{kThreads} * kUnroll * kSize);
  constexpr int64_t kMaxBlocks = 0x7fffffff;
  const int64_t blocks = height * blocks_per_row;
  fill_index_kernel<T, kSize>
      <<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(
          out, height, width, blocks_per_row);
  return cudaGetLastError();
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T>
cudaError_t my_ops::cuda::add_one(const T* x, T* out, int64_t n, cudaStream_t stream) {
  return map<AddOne>(out, n, stream, x);
}

template <typename T>
cudaError_t my_ops::cuda::custom_add(const T* a, const T* b, T* out, int64_t n,
                                     cudaStream_t stream) {
  return map<CustomAdd>(out, n, stream, a, b);
}

template <typename T>
cudaError_t my_ops::cuda::custom_add(const T* a, const T* b, T* out, const Broadcast& shape,
                                     cudaStream_t stream) {
  int64_t n = 1;
  for (int d = 0; d < shape.dims; ++d) n *= shape.sizes[d];
  if (n == 0) return cudaSuccess;
  const int64_t blocks = ceil_div(n, kThreads * kUnroll);
  broadcast_kernel<CustomAdd>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a, b, out, shape, n);
  return cudaGetLastError();
}

template <typename T>
cudaError_t my_ops::cuda::d_sigmoid(const T* x, T* out, int64_t n, cudaStream_t stream) {
  return map<DSigmoid>(out, n, stream, x);
}

template <typename T>
cudaError_t my_ops::cuda::d_sigmoid_backward(const T* grad, const T* x, T* out, int64_t n,
                                             cudaStream_t stream) {
  return map<DSigmoidBackward>(out, n, stream, grad, x);
}

template <typename T>
cudaError_t my_ops::cuda::round_ste(const T* x, T* out, int64_t n, cudaStream_t stream) {
  return map<RoundSte>(out, n, stream, x);
}

template <typename T>
cudaError_t my_ops::cuda::fill_index(T* out, int64_t height, int64_t width, cudaStream_t stream) {
  if (height == 0 || width == 0) return cudaSuccess;
  constexpr int kSize = kVectorBytes / sizeof(T);
  return width % kSize == 0 && aligned(out)
             ? launch_fill_index<T, kSize>(out, height, width, stream)
             : launch_fill_index<T, 1>(out, height, width, stream);
}

#define MY_OPS_REAL(T)                                                                          \
  template cudaError_t my_ops::cuda::add_one(const T*, T*, int64_t, cudaStream_t);              \
  template cudaError_t my_ops::cuda::custom_add(const T*, const T*, T*, int64_t, cudaStream_t); \
  template cudaError_t my_ops::cuda::custom_add(const T*, const T*, T*, const Broadcast&,       \
                                                cudaStream_t);
#define MY_OPS_FLOATING(T)                                                               \
  MY_OPS_REAL(T)                                                                         \
  template cudaError_t my_ops::cuda::d_sigmoid(const T*, T*, int64_t, cudaStream_t);     \
  template cudaError_t my_ops::cuda::d_sigmoid_backward(const T*, const T*, T*, int64_t, \
                                                        cudaStream_t);                   \
  template cudaError_t my_ops::cuda::round_ste(const T*, T*, int64_t, cudaStream_t);     \
  template cudaError_t my_ops::cuda::fill_index(T*, int64_t, int64_t, cudaStream_t);

MY_OPS_REAL(uint8_t)
MY_OPS_REAL(uint16_t)
MY_OPS_REAL(uint32_t)
MY_OPS_REAL(uint64_t)
MY_OPS_FLOATING(float)
MY_OPS_FLOATING(double)
MY_OPS_FLOATING(__half)
MY_OPS_FLOATING(__nv_bfloat16)
template cudaError_t my_ops::cuda::fill_index(int32_t*, int64_t, int64_t, cudaStream_t);
template cudaError_t my_ops::cuda::fill_index(int64_t*, int64_t, int64_t, cudaStream_t);
