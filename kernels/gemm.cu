// gemm(): the only router of matrix products, from the problem to the kernel that runs it.
//   float on Hopper, few rows, small outputs    gemm_fp32_skinny: six bf16 products in one pass
//   float on Hopper, from about 600 cubed on    gemm_fp32_sm90: three fp16 products, split before
//   float on compute capability 8.0, large      gemm_fp32_sm80: six bf16 products
//   16 bits on Hopper, where it is faster       gemm_half_sm90: tensor cores, epilogue on the sums
//   small problems                              gemm_small
//   the rest                                    the caller's vendor library
// A vendor library that rounds floats to TF32 where more is asked for is no choice: then the same
// kernels take all.
#include "gemm.h"

#include <climits>
#include <type_traits>

#include "device.h"
#include "gemm_epilogue.cuh"
#include "gemm_fp32_skinny.h"
#include "gemm_fp32_sm80.h"
#include "gemm_half_sm90.h"
#include "gemm_sm90.h"
#include "gemm_small.cuh"

namespace my_ops::cuda {
namespace {

// Sizes at which gemm_small was timed to beat a library's product, or that and an epilogue behind
// it. Of many outputs a library's product alone is faster sooner. Where k is not short, it is fast
// at a matrix times a vector, and at 16 bits in whole 16-byte vectors; but there it may split a
// long k and add the pieces in 16 bits.
template <typename T, typename Out>
bool is_small(const GemmArgs<T, Out>& args) {
  constexpr int64_t kMaxOutputs = int64_t{1} << 17, kMaxLongKWork = int64_t{1} << 20;
  constexpr int64_t kMaxWork = int64_t{1} << (sizeof(T) == 8 ? 20 : sizeof(T) == 4 ? 22 : 21);
  constexpr int64_t kManyOutputs = int64_t{1} << 15, kMaxWorkOfMany = int64_t{1} << 21;
  constexpr int64_t kLongK = 256, kVector = 8;
  const int64_t outputs = args.batch * args.m * args.n;
  if (outputs > kMaxOutputs || outputs > kMaxWork / (args.k + 1)) return false;
  if (args.followed()) return true;
  if (outputs > kManyOutputs && outputs > kMaxWorkOfMany / (args.k + 1)) return false;
  if (sizeof(T) != 8 && args.k <= kShortK<T>) return true;
  if (sizeof(T) != 2) return args.m > 1 && args.n > 1;
  const bool whole_vectors = args.n % kVector == 0 && args.k % kVector == 0;
  return !whole_vectors || (args.k >= kLongK && outputs <= kMaxLongKWork / (args.k + 1));
}

template <typename T, typename Out>
constexpr bool kIsFp32 = std::is_same_v<T, float> && std::is_same_v<Out, float>;

// Whether no vendor library will do. Before compute capability 8.0 none knows TF32.
template <typename T, typename Out>
bool only_ours(const GemmArgs<T, Out>& args) {
  DeviceFacts device;
  return kIsFp32<T, Out> && args.library_falls_short() && current_device(&device) == cudaSuccess &&
         device.major >= 8;
}

// Then: whether tiles of the output serve better than gemm_small, which knows no k from 2^31 on.
template <typename T, typename Out>
bool fills_tiles(const GemmArgs<T, Out>& args) {
  constexpr int64_t kMinSide = 16, kMinK = 96;
  if (args.k > INT_MAX) return true;
  return args.m >= kMinSide && args.n >= kMinSide && args.k >= kMinK && !is_small(args);
}

template <typename T, typename Out>
constexpr bool kIsHalf = std::is_same_v<T, Out> && sizeof(T) == 2;

enum class Kernel { kFp32Skinny, kFp32Sm90, kFp32Sm80, kHalfSm90, kSmall, kLibrary };

template <typename T, typename Out>
Kernel choose(const GemmArgs<T, Out>& args) {
  const bool needed = only_ours(args);
  if constexpr (kIsFp32<T, Out>) {
    if (gemm_fp32_skinny_supported(args)) return Kernel::kFp32Skinny;
    if (needed && !fills_tiles(args)) return Kernel::kSmall;
    if (gemm_fp32_sm90_supported(args)) return Kernel::kFp32Sm90;
    if (gemm_fp32_sm80_supported(args)) return Kernel::kFp32Sm80;
  }
  if constexpr (kIsHalf<T, Out>) {
    if (!is_small(args) && gemm_half_sm90_supported(args)) return Kernel::kHalfSm90;
  }
  return needed || is_small(args) ? Kernel::kSmall : Kernel::kLibrary;
}

constexpr int kEpilogueThreads = 128;
constexpr int kEpilogueVector = 8;  // 16 bytes of the output a thread

// Bound by memory: one vector of each operand a thread.
template <Activation kActivation, int kSize, typename P, typename T>
__global__ void __launch_bounds__(kEpilogueThreads)
    linear_epilogue_kernel(const P* product, const T* bias, const T* residual, T* out,
                           int64_t vectors, int64_t n) {
  using Results = Vector<T, kSize>;
  const int64_t at = int64_t{blockIdx.x} * kEpilogueThreads + threadIdx.x;
  if (at >= vectors) return;
  const auto sums = reinterpret_cast<const Vector<P, kSize>*>(product)[at];
  Results added{}, result;
  if (residual) added = reinterpret_cast<const Results*>(residual)[at];
  float y[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) y[i] = load(sums.at[i]);
  if (bias) {
    const T* const biases = bias + at * kSize % n;
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] += load(biases[i]);
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) y[i] = FastActivate<kActivation>{}(y[i]);
  if (residual) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) y[i] += load(added.at[i]);
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) result.at[i] = store<T>(y[i]);
  reinterpret_cast<Results*>(out)[at] = result;
}

}  // namespace
}  // namespace my_ops::cuda

template <typename T, typename Out>
int64_t my_ops::cuda::gemm_workspace(const GemmArgs<T, Out>& args) {
  const Kernel kernel = choose(args);
  size_t bytes = 0;
  if constexpr (kIsFp32<T, Out>) {
    if (kernel == Kernel::kFp32Skinny) bytes = gemm_fp32_skinny_workspace(args);
    if (kernel == Kernel::kFp32Sm90) bytes = gemm_fp32_sm90_workspace(args);
  }
  if constexpr (kIsHalf<T, Out>) {
    if (kernel == Kernel::kHalfSm90) bytes = gemm_half_sm90_workspace(args);
  }
  return static_cast<int64_t>(bytes);
}

template <typename T, typename Out>
cudaError_t my_ops::cuda::gemm(const GemmArgs<T, Out>& args, void* workspace, cudaStream_t stream) {
  if (args.batch == 0 || args.m == 0 || args.n == 0) return cudaSuccess;
  const Kernel kernel = choose(args);
  if constexpr (kIsFp32<T, Out>) {
    if (kernel == Kernel::kFp32Skinny) return gemm_fp32_skinny(args, workspace, stream);
    if (kernel == Kernel::kFp32Sm90) return gemm_fp32_sm90(args, workspace, stream);
    if (kernel == Kernel::kFp32Sm80) return gemm_fp32_sm80(args, stream);
  }
  if constexpr (kIsHalf<T, Out>) {
    if (kernel == Kernel::kHalfSm90) return gemm_half_sm90(args, workspace, stream);
  }
  return kernel == Kernel::kSmall ? gemm_small(args, stream) : cudaErrorNotSupported;
}

template <typename P, typename T>
cudaError_t my_ops::cuda::linear_epilogue(const P* product, const T* bias, const T* residual,
                                          T* out, int64_t outputs, int64_t n, Activation activation,
                                          cudaStream_t stream) {
  if (outputs == 0) return cudaSuccess;
  const auto aligned = [](const auto* p) {
    return reinterpret_cast<uintptr_t>(p) % (sizeof(*p) * kEpilogueVector) == 0;
  };
  const auto launch = [&]<Activation kActivation, int kSize>() {
    const int64_t vectors = outputs / kSize;
    linear_epilogue_kernel<kActivation, kSize>
        <<<static_cast<unsigned>(ceil_div(vectors, kEpilogueThreads)), kEpilogueThreads, 0,
           stream>>>(product, bias, residual, out, vectors, n);
    return cudaGetLastError();
  };
  const bool whole =
      n % kEpilogueVector == 0 && aligned(product) && aligned(residual) && aligned(out);
  return dispatch_activation(activation, [&]<Activation kActivation>() {
    return whole ? launch.template operator()<kActivation, kEpilogueVector>()
                 : launch.template operator()<kActivation, 1>();
  });
}

#define MY_OPS_LINEAR_EPILOGUE(P, T)                                                            \
  template cudaError_t my_ops::cuda::linear_epilogue(const P*, const T*, const T*, T*, int64_t, \
                                                     int64_t, Activation, cudaStream_t);
MY_OPS_LINEAR_EPILOGUE(float, __half)
MY_OPS_LINEAR_EPILOGUE(float, __nv_bfloat16)
MY_OPS_LINEAR_EPILOGUE(__half, __half)
MY_OPS_LINEAR_EPILOGUE(__nv_bfloat16, __nv_bfloat16)

#define MY_OPS_GEMM(T, Out)                                               \
  template int64_t my_ops::cuda::gemm_workspace(const GemmArgs<T, Out>&); \
  template cudaError_t my_ops::cuda::gemm(const GemmArgs<T, Out>&, void*, cudaStream_t);

MY_OPS_GEMM(double, double)
MY_OPS_GEMM(float, float)
MY_OPS_GEMM(__half, __half)
MY_OPS_GEMM(__half, float)
MY_OPS_GEMM(__nv_bfloat16, __nv_bfloat16)
MY_OPS_GEMM(__nv_bfloat16, float)
