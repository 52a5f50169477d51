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

#ifdef __cplusplus
}
#endif

#endif
