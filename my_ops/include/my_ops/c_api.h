/* The float32 elementwise kernels for programs in any language: raw pointers, sizes, a stream.
 * The functions are in my_ops/_C.so, which needs torch's libraries to load.
 *
 * Arrays are dense. out may be one of the inputs, but may not overlap one at another offset. Every
 * function returns 0, or an error code before any work. my_ops_error_string() puts the code into
 * words. Negative codes are defined below, positive ones are cudaError_t. */
#ifndef MY_OPS_C_API_H_
#define MY_OPS_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MY_OPS_INVALID_ARGUMENT (-1) /* a size below 0, or no array where the size is not 0 */
#define MY_OPS_WITHOUT_CUDA (-2)     /* this build has no CUDA kernels */

const char* my_ops_error_string(int error);

/* These run on the calling thread. */
int my_ops_cpu_add_one(const float* x, float* out, int64_t n);                    /* x + 1 */
int my_ops_cpu_custom_add(const float* a, const float* b, float* out, int64_t n); /* a + b + 1 */
int my_ops_cpu_d_sigmoid(const float* z, float* out, int64_t n);                  /* s(1 - s) */
int my_ops_cpu_round_ste(const float* x, float* out, int64_t n);                  /* x >= 0.5 */
int my_ops_cpu_fill_index(float* out, int64_t height, int64_t width); /* out[y][x] = x + y */

/* These run on the current device of the calling thread, and are queued on stream, a cudaStream_t,
 * or null for the default stream. Arrays are in memory that the device can access. */
int my_ops_cuda_add_one(const float* x, float* out, int64_t n, void* stream);
int my_ops_cuda_custom_add(const float* a, const float* b, float* out, int64_t n, void* stream);
int my_ops_cuda_d_sigmoid(const float* z, float* out, int64_t n, void* stream);
int my_ops_cuda_round_ste(const float* x, float* out, int64_t n, void* stream);
int my_ops_cuda_fill_index(float* out, int64_t height, int64_t width, void* stream);

/* A matrix product on a GPU, for my_ops_explain_gemm(): dense operands, no data. */
typedef struct {
  struct {
    int major, minor; /* compute capability */
    int sm_count;     /* streaming multiprocessors */
    int shared_bytes; /* the most shared memory that a block may have */
    int l2_bytes;     /* of the L2 cache */
    int code;         /* compute capability of the code it runs, 90 for 9.0 */
    int hopper_code;  /* not 0: code for 9.0a */
  } device;
  const char* dtype;      /* float64, float32, float16 or bfloat16 */
  const char* activation; /* none, relu, gelu, gelu_tanh, silu or sigmoid */
  int64_t batch, m, n, k;
  int a_transposed, b_transposed; /* not 0: the other index is the contiguous one */
  int linear;                     /* not 0: of my_ops.linear, b_transposed */
  int bias, residual, packed;     /* not 0: there is one */
  int high;                       /* not 0: precision "high" */
  int library_tf32;               /* not 0: torch allows TF32 in float32 products */
} my_ops_gemm_problem;

/* Writes into text, of size bytes, which kernels the plan tried and which one computes the product,
 * in lines of English that end with the plan. Works without a GPU, and in builds without CUDA.
 * Returns the length of the whole text, without the terminating byte, or MY_OPS_INVALID_ARGUMENT
 * for a size below 0 or above 2^20, or a null or unknown dtype or activation. */
int64_t my_ops_explain_gemm(const my_ops_gemm_problem* problem, char* text, int64_t size);

#ifdef __cplusplus
}
#endif

#endif
