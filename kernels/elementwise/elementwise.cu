// The elementwise family on the GPU: one kernel per number of operands, one functor per op.
// Plan: one 16-byte vector of each operand per thread. Misaligned data go through the same kernel
// element by element. Bound by memory: each byte is moved once.
#include "elementwise.h"

#include <climits>
#include <type_traits>

#include "common/launch.cuh"
#include "common/numeric.cuh"

namespace my_ops::cuda {
namespace {

// One vector per thread in small blocks reaches copy_'s bandwidth. 2 or 4 vectors per thread lost 1
// to 5 %, blocks of 512 and cache hints up to 9 % (H200, 1 GiB of fp32, bf16 and int8).
constexpr int kThreads = 128;
constexpr int kFillThreads = 256;  // stores only: 128 lost 28 %
constexpr int kVectorBytes = 16;

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
// s(1 - s) = e / (1 + e)^2 with e = exp(-|x|), even in x.
struct DSigmoid {
  __device__ double operator()(double x) const {
    const double e = exp_minus_abs(x);
    return e / fma(e, 2.0 + e, 1.0);  // (1 + e)^2, rounded once
  }
  // The quotient is computed with the hardware's reciprocal and one correction: the denominator is
  // within [1, 4].
  __device__ float operator()(float x) const {
    const float e = exp_minus_abs(x);
    const float square = fmaf(e, 2.0f + e, 1.0f);
    const float inverse = __fdividef(1.0f, square);
    const float quotient = e * inverse;
    return fmaf(inverse, fmaf(-square, quotient, e), quotient);
  }
};
// grad s(1 - s)(1 - 2s), 1 - 2s = +-(e - 1) / (1 + e) without cancellation.
struct DSigmoidBackward {
  template <typename C>
  __device__ C operator()(C grad, C x) const {
    const C m = expm1_minus_abs(x);
    const C e = exp_minus_abs(x);
    const C slope = e / ((C(1) + e) * (C(1) + e)) * (m / (C(1) + e));
    return grad * (x < C(0) ? -slope : slope);
  }
};
// The same for 16-bit storage, with hardware exponential and division, accurate to 2^-20. There are
// twice as many elements, so exact arithmetic would be the bound.
struct DSigmoid16 {
  __device__ float operator()(float x) const {
    const float e = __expf(-fabsf(x));
    return __fdividef(e, (1.0f + e) * (1.0f + e));
  }
};
struct DSigmoidBackward16 {
  __device__ float operator()(float grad, float x) const {
    const float z = fabsf(x);
    const float e = __expf(-z);
    // e - 1 by its series where the subtraction would cancel: the next term is below 2^-19 of the
    // sum.
    const float m = z < 0.05f ? -z * (1.0f - z * (0.5f - z * (1.0f / 6))) : e - 1.0f;
    const float slope = __fdividef(e * m, (1.0f + e) * (1.0f + e) * (1.0f + e));
    return grad * copysignf(slope, -x);
  }
};
struct RoundSte {
  template <typename C>
  __device__ C operator()(C x) const {
    return x >= C(0.5) ? C(1) : x == x ? C(0) : x;
  }
};

// out[i] = Op(in[0][i], ...) for n elements, in vectors of kSize. out may be one of the inputs,
// because the thread that writes an element reads it first.
template <typename Op, int kSize, typename T, typename... In>
__global__ void __launch_bounds__(kThreads) map_kernel(T* out, int64_t n, const In*... in) {
  using V = Vector<T, kSize>;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // in vectors
  if ((at + 1) * kSize <= n) {
    const auto apply = [&](const auto&... loaded) {
      V result;
#pragma unroll
      for (int i = 0; i < kSize; ++i) result.at[i] = store<T>(Op{}(load(loaded.at[i])...));
      reinterpret_cast<V*>(out)[at] = result;
    };
    apply(V(reinterpret_cast<const V*>(in)[at])...);
  } else {  // the elements after the last whole vector
    for (int64_t i = at * kSize; i < n; ++i) out[i] = store<T>(Op{}(load(in[i])...));
  }
}

bool aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % kVectorBytes == 0; }

template <typename Op, int kSize, typename T, typename... In>
cudaError_t launch_map(T* out, int64_t n, cudaStream_t stream, const In*... in) {
  if (n == 0) return cudaSuccess;
  return launch(map_kernel<Op, kSize, T, In...>, ceil_div(n, int64_t{kThreads} * kSize), kThreads,
                0, stream, out, n, in...);
}

template <typename Op, typename T, typename... In>
cudaError_t map(T* out, int64_t n, cudaStream_t stream, const In*... in) {
  constexpr int kSize = kVectorBytes / sizeof(T);
  return (aligned(out) && ... && aligned(in)) ? launch_map<Op, kSize>(out, n, stream, in...)
                                              : launch_map<Op, 1>(out, n, stream, in...);
}

// The element, or the vector, of an operand whose innermost stride is `step`.
template <typename T, int kSize>
__device__ Vector<T, kSize> gather(const T* from, int64_t step) {
  Vector<T, kSize> v;
  if (kSize > 1 && step == 1) return *reinterpret_cast<const Vector<T, kSize>*>(from);
#pragma unroll
  for (int i = 0; i < kSize; ++i) v.at[i] = from[i * step];
  return v;
}

// Each thread computes vectors of kSize elements that are adjacent along the innermost dimension,
// so that one chain of divisions serves all of them. Index has 32 bits if they suffice, because its
// divisions are faster.
template <typename Op, int kSize, typename Index, typename T>
__global__ void __launch_bounds__(kThreads)
    broadcast_kernel(const T* a, const T* b, T* out, const __grid_constant__ Broadcast shape,
                     Index vectors) {
  const int inner = shape.dims - 1;
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;  // in vectors
  if (at >= vectors) return;
  auto rest = static_cast<Index>(at);
  for (int d = inner; d >= 0; --d) {
    const auto size = static_cast<Index>(d == inner ? shape.sizes[d] / kSize : shape.sizes[d]);
    const Index next = d > 0 ? rest / size : 0;
    const int64_t index = int64_t{rest - next * size} * (d == inner ? kSize : 1);
    rest = next;
    a += index * shape.a_strides[d];
    b += index * shape.b_strides[d];
  }
  const auto x = gather<T, kSize>(a, shape.a_strides[inner]);
  const auto y = gather<T, kSize>(b, shape.b_strides[inner]);
  Vector<T, kSize> result;
#pragma unroll
  for (int i = 0; i < kSize; ++i) result.at[i] = store<T>(Op{}(load(x.at[i]), load(y.at[i])));
  reinterpret_cast<Vector<T, kSize>*>(out)[at] = result;
}

template <typename Op, int kSize, typename T>
cudaError_t launch_broadcast(const T* a, const T* b, T* out, const Broadcast& shape,
                             cudaStream_t stream) {
  int64_t vectors = 1;
  for (int d = 0; d < shape.dims; ++d) vectors *= shape.sizes[d];
  vectors /= kSize;
  if (vectors == 0) return cudaSuccess;
  const auto run = [&]<typename Index>(Index count) {
    return launch(broadcast_kernel<Op, kSize, Index, T>, ceil_div(vectors, kThreads), kThreads, 0,
                  stream, a, b, out, shape, count);
  };
  return vectors <= INT_MAX ? run(static_cast<uint32_t>(vectors)) : run(vectors);
}

// Whether every vector of `size` adjacent elements lies within the innermost dimension and, in this
// operand, either is one aligned vector or repeats one element.
bool vectorizes(const void* p, const Broadcast& shape, const int64_t* strides, int size) {
  const int inner = shape.dims - 1;
  if (shape.sizes[inner] % size != 0) return false;
  if (strides[inner] == 0) return true;
  if (strides[inner] != 1 || !aligned(p)) return false;
  for (int d = 0; d < inner; ++d) {
    if (strides[d] % size != 0) return false;
  }
  return true;
}

// C counts exactly up to kExact, so that C(x + y) + i needs no conversion per element.
template <typename T, int kSize, bool kExact>
__global__ void __launch_bounds__(kFillThreads)
    fill_index_kernel(T* out, int64_t height, int64_t width) {
  using C = std::conditional_t<sizeof(T) < 4, float, T>;  // int64 to 16 bits goes through float
  const int64_t x = (int64_t{blockIdx.x} * kFillThreads + threadIdx.x) * kSize;
  if (x >= width) return;
  for (int64_t y = blockIdx.y; y < height; y += gridDim.y) {
    Vector<T, kSize> result;
    const C first = kExact ? static_cast<C>(static_cast<int>(x + y)) : C(0);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      result.at[i] = store<T>(kExact ? static_cast<C>(first + C(i)) : static_cast<C>(x + y + i));
    }
    reinterpret_cast<Vector<T, kSize>*>(out + y * width)[x / kSize] = result;
  }
}

template <typename T, int kSize>
cudaError_t launch_fill_index(T* out, int64_t height, int64_t width, cudaStream_t stream) {
  constexpr int64_t kExact = int64_t{1} << 24;  // float's; the other types count further
  constexpr int64_t kMaxRows = 65535;           // gridDim.y
  Blocks blocks = ceil_div(width, int64_t{kFillThreads} * kSize);
  blocks.y = static_cast<unsigned>(height < kMaxRows ? height : kMaxRows);
  const auto kernel = height + width <= kExact ? fill_index_kernel<T, kSize, true>
                                               : fill_index_kernel<T, kSize, false>;
  return launch(kernel, blocks, kFillThreads, 0, stream, out, height, width);
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
  constexpr int kSize = kVectorBytes / sizeof(T);
  return aligned(out) && vectorizes(a, shape, shape.a_strides, kSize) &&
                 vectorizes(b, shape, shape.b_strides, kSize)
             ? launch_broadcast<CustomAdd, kSize>(a, b, out, shape, stream)
             : launch_broadcast<CustomAdd, 1>(a, b, out, shape, stream);
}

template <typename T>
cudaError_t my_ops::cuda::d_sigmoid(const T* x, T* out, int64_t n, cudaStream_t stream) {
  return map<std::conditional_t<sizeof(T) == 2, DSigmoid16, DSigmoid>>(out, n, stream, x);
}

template <typename T>
cudaError_t my_ops::cuda::d_sigmoid_backward(const T* grad, const T* x, T* out, int64_t n,
                                             cudaStream_t stream) {
  using Op = std::conditional_t<sizeof(T) == 2, DSigmoidBackward16, DSigmoidBackward>;
  return map<Op>(out, n, stream, grad, x);
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
