// The C interface over the launch interface. It has its own checks, because no torch is above it.
#include "../my_ops/include/my_ops/c_api.h"

#include <initializer_list>

#include "../include/elementwise.h"

#ifdef MY_OPS_WITH_CUDA
#define MY_OPS_CUDA(launch) static_cast<int>(launch)
#else
#define MY_OPS_CUDA(launch) MY_OPS_WITHOUT_CUDA
#endif
#define MY_OPS_EXPORT __attribute__((visibility("default")))

namespace {

bool valid(int64_t n, std::initializer_list<const float*> arrays) {
  if (n < 0) return false;
  for (const float* array : arrays) {
    if (n > 0 && array == nullptr) return false;
  }
  return true;
}

// The number of elements of a matrix, or -1 if the sizes are invalid.
int64_t area(int64_t height, int64_t width) {
  int64_t n;
  if (height < 0 || width < 0 || __builtin_mul_overflow(height, width, &n)) return -1;
  return n;
}

}  // namespace

extern "C" {

MY_OPS_EXPORT const char* my_ops_error_string(int error) {
  if (error == 0) return "no error";
  if (error == MY_OPS_INVALID_ARGUMENT) {
    return "a size is below 0, or an array is null where the size is not 0";
  }
  if (error == MY_OPS_WITHOUT_CUDA) return "this build of my_ops holds no CUDA kernels";
#ifdef MY_OPS_WITH_CUDA
  return cudaGetErrorString(static_cast<cudaError_t>(error));
#else
  return "unknown error";
#endif
}

#define MY_OPS_UNARY(op)                                                                \
  MY_OPS_EXPORT int my_ops_cpu_##op(const float* x, float* out, int64_t n) {            \
    if (!valid(n, {x, out})) return MY_OPS_INVALID_ARGUMENT;                            \
    my_ops::cpu::op(x, out, n);                                                         \
    return 0;                                                                           \
  }                                                                                     \
  MY_OPS_EXPORT int my_ops_cuda_##op(const float* x, float* out, int64_t n,             \
                                     [[maybe_unused]] void* stream) {                   \
    if (!valid(n, {x, out})) return MY_OPS_INVALID_ARGUMENT;                            \
    return MY_OPS_CUDA(my_ops::cuda::op(x, out, n, static_cast<cudaStream_t>(stream))); \
  }

MY_OPS_UNARY(add_one)
MY_OPS_UNARY(d_sigmoid)
MY_OPS_UNARY(round_ste)

MY_OPS_EXPORT int my_ops_cpu_custom_add(const float* a, const float* b, float* out, int64_t n) {
  if (!valid(n, {a, b, out})) return MY_OPS_INVALID_ARGUMENT;
  my_ops::cpu::custom_add(a, b, out, n);
  return 0;
}

MY_OPS_EXPORT int my_ops_cuda_custom_add(const float* a, const float* b, float* out, int64_t n,
                                         [[maybe_unused]] void* stream) {
  if (!valid(n, {a, b, out})) return MY_OPS_INVALID_ARGUMENT;
  return MY_OPS_CUDA(my_ops::cuda::custom_add(a, b, out, n, static_cast<cudaStream_t>(stream)));
}

MY_OPS_EXPORT int my_ops_cpu_fill_index(float* out, int64_t height, int64_t width) {
  if (!valid(area(height, width), {out})) return MY_OPS_INVALID_ARGUMENT;
  my_ops::cpu::fill_index(out, width, 0, height);
  return 0;
}

MY_OPS_EXPORT int my_ops_cuda_fill_index(float* out, int64_t height, int64_t width,
                                         [[maybe_unused]] void* stream) {
  if (!valid(area(height, width), {out})) return MY_OPS_INVALID_ARGUMENT;
  return MY_OPS_CUDA(
      my_ops::cuda::fill_index(out, height, width, static_cast<cudaStream_t>(stream)));
}

}  // extern "C"
