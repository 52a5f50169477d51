// PReLU as an old layer has it: out = x where x > 0, else x times the slope of its channel.
#include <cstdio>
#include <cstdlib>

#define CUDA_KERNEL_LOOP(i, n) \
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += blockDim.x * gridDim.x)

#define CUDA_POST_KERNEL_CHECK                            \
  do {                                                    \
    cudaError_t error = cudaGetLastError();               \
    if (error != cudaSuccess) {                           \
      fprintf(stderr, "%s\n", cudaGetErrorString(error)); \
      exit(EXIT_FAILURE);                                 \
    }                                                     \
  } while (0)

const int NUM_THREADS = 512;

inline int GET_BLOCKS(const int n) { return (n + NUM_THREADS - 1) / NUM_THREADS; }

template <typename Dtype>
__global__ void PReLUForward(const int n, const int channels, const int dim, const Dtype* in,
                             const Dtype* slope, Dtype* out) {
  CUDA_KERNEL_LOOP(index, n) {
    const int c = (index / dim) % channels;
    out[index] = in[index] > 0 ? in[index] : in[index] * slope[c];
  }
}

extern "C" void prelu_forward_gpu(const float* in, const float* slope, float* out, int num,
                                  int channels, int dim) {
  const int count = num * channels * dim;
  PReLUForward<float><<<GET_BLOCKS(count), NUM_THREADS>>>(count, channels, dim, in, slope, out);
  CUDA_POST_KERNEL_CHECK;
}
