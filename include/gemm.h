// Launch interface of GEMM and the fused linear layer. No torch here: raw pointers, sizes, a
// stream.
#pragma once

#include <cstdint>

#include "device.h"

namespace my_ops {

// The activations, applied after the bias, and their names in Python. kGelu is the erf form,
// kGeluTanh its tanh approximation. The formulas are in kernels/gemm/activation.cuh. If ATen's op
// has another name, add it to aten_activate in csrc/gemm_checks.h.
#define MY_OPS_ACTIVATIONS(F) \
  F(kNone, "none")            \
  F(kRelu, "relu")            \
  F(kGelu, "gelu")            \
  F(kGeluTanh, "gelu_tanh")   \
  F(kSilu, "silu")            \
  F(kSigmoid, "sigmoid")

#define MY_OPS_ENUMERATOR(activation, name) activation,
enum class Activation { MY_OPS_ACTIVATIONS(MY_OPS_ENUMERATOR) };
#undef MY_OPS_ENUMERATOR

// Accuracy requested for a float product. kHighest: float's; kHigh: TF32's, 11 bits of each factor.
// This is a hint: where lower precision is not faster, kHigh computes as kHighest.
enum class Precision { kHighest, kHigh };

namespace cuda {

// out[z][i][j] = activation(sum_l a[z][i][l] * b[z][l][j] + bias[j]) + residual[z][i][j]
//
// All that the plan of a product depends on, besides the types and the device: plain numbers.
// Strides are in elements. A transposed operand has its two strides swapped; a batch stride of 0
// repeats the matrix.
struct GemmProblem {
  int64_t batch, m, n, k;
  int64_t a_batch, a_row, a_col;                       // a [batch, m, k]
  int64_t b_batch, b_row, b_col;                       // b [batch, k, n]
  int64_t out_batch, out_row, out_col;                 // out [batch, m, n]
  int64_t residual_batch, residual_row, residual_col;  // residual [batch, m, n]
  Activation activation = Activation::kNone;
  Precision precision = Precision::kHighest;
  bool has_bias = false;
  bool has_residual = false;
  bool packed = false;             // GemmBuffers::packed_b is there
  bool linear = false;             // bias and the rest are added before a single rounding, by a
                                   // library too
  bool library_tf32 = false;       // the vendor library's float products have TF32's accuracy
  bool library_gelu = false;       // it has kGeluTanh in the epilogue of a bfloat16 product
  bool library_tf32_call = false;  // it can be asked for TF32: LibraryCall::kTf32
  // Of a float product: which operand has 16 bits, at most one.
  bool half_a = false;
  bool half_b = false;
  bool half_is_bfloat16 = false;
  // What the caller spends before a kernel on tensor cores, but not before the library, in
  // multiply-adds of the library.
  double preparation = 0;
  // Which buffers start at multiples of 16 bytes.
  bool a_aligned = true;
  bool b_aligned = true;
  bool out_aligned = true;
  bool residual_aligned = true;

  bool mixed() const { return half_a || half_b; }
  bool has_activation_or_residual() const {
    return activation != Activation::kNone || has_residual;
  }
  // Whether the library computes this product in TF32 although its settings say otherwise.
  bool asks_for_tf32() const {
    return library_tf32_call && precision == Precision::kHigh && !library_tf32 &&
           !has_activation_or_residual() && k > 0 && out_col == 1;
  }
  // Less accurate than requested.
  bool library_too_inaccurate() const { return library_tf32 && precision == Precision::kHighest; }
  // As accurate as requested, at tensor core speed.
  bool library_has_fast_tf32() const {
    return precision == Precision::kHigh && (library_tf32 || asks_for_tf32());
  }
};

// Where a product's matrices are. out may not overlap an input. An operand of 16 bits in a float
// product is in half_operand, and the pointer of its own name is null. So are those of what the
// problem does not have; empty matrices may have null pointers too.
template <typename T, typename Out>
struct GemmBuffers {
  const T* a = nullptr;
  const T* b = nullptr;
  const T* bias = nullptr;  // [n]
  Out* out = nullptr;
  const Out* residual = nullptr;
  const void* packed_b = nullptr;  // b packed by gemm_pack; b itself is needed too
  const void* half_operand = nullptr;
};

// A product that can run.
template <typename T, typename Out>
struct GemmArgs : GemmProblem, GemmBuffers<T, Out> {};

enum class GemmKernel {
  kNone,        // an empty output
  kFp32Skinny,  // float on Hopper, few rows or a small output: six bf16 products in one pass
  kFp32Narrow,  // float on Hopper, one operand narrow: the other is split on the way
  kFp32Short,   // float on Hopper, many rows and a short k: a is split on the way
  kFp32Sm90,    // float on Hopper: operands split first, then three fp16 products
  kFp32Sm80,    // float on compute capability 8.0, large: six bf16 products
  kHalfSm90,    // 16 bits on Hopper: tensor cores, epilogue on the sums
  kSmall,       // small problems of any type
  kLibrary,     // the vendor's library: see LibraryCall
};

// So few that the vendor's library may slice k.
constexpr bool few_outputs(int64_t m, int64_t n, int64_t k) { return 4 * m * n <= (m + n) * k; }

// How the caller computes a product with the vendor's library, and what remains to be done.
enum class LibraryCall {
  kProduct,         // a @ b alone; with GemmProblem::linear also bias, activation and residual
  kGelu,            // bias and kGeluTanh in the product's epilogue
  kProductAndBias,  // with the bias; then linear_epilogue
  kSums,            // a @ b in float; then linear_epilogue
  kTf32,            // a @ b in TF32, whatever its settings, with the bias
  kConverted,       // convert the 16-bit operand to float, and plan that product
};

// How a product is computed, as decided by plan_gemm. tile is one of the kernel's own tiles; slices
// is the number of k-slices, which a second kernel adds.
struct GemmPlan {
  DeviceFacts device;
  GemmKernel kernel = GemmKernel::kNone;
  LibraryCall library = LibraryCall::kProduct;
  int tile = 0;
  int slices = 1;
  bool bf16_split = false;  // kFp32Sm90: data of a wide range are split, too
  int64_t workspace = 0;    // bytes

  // A float product so large that the kernel's gain outweighs any host time.
  bool on_tensor_cores() const {
    return kernel == GemmKernel::kFp32Skinny || kernel == GemmKernel::kFp32Narrow ||
           kernel == GemmKernel::kFp32Short || kernel == GemmKernel::kFp32Sm90 ||
           kernel == GemmKernel::kFp32Sm80;
  }
  bool reads_packed() const { return kernel == GemmKernel::kFp32Sm90; }
};

// A float product with a smaller batch * m * n * k is never planned on tensor cores
// (tests/integration/test_fast_fp32.py).
inline constexpr int64_t kTensorCoresMinWork = int64_t{1} << 22;

// A float b to be packed: split into its parts once for many products, where that makes them
// faster. Element (z, l, j) lies at z * batch_stride + l * row_stride + j * col_stride.
struct PackArgs {
  const float* b;  // [batch, k, n]
  int64_t batch, k, n;
  int64_t batch_stride, row_stride, col_stride;
};

#ifdef MY_OPS_WITH_CUDA

// T: double, float, __half, __nv_bfloat16; Out: T, or float for the 16-bit types. Products are
// accumulated in float (double for double). Float products on Hopper are computed as several 16-bit
// ones with float's accuracy (kernels/gemm/fp32_sm90/fp32_sm90.h). Any size may be 0; k = 0 gives
// activation(bias) + residual.
//
// Returns the plan for the current device.
template <typename T, typename Out>
cudaError_t plan_gemm(const GemmProblem& problem, GemmPlan* plan);

// Runs a plan for these arguments, on the device it was made for; its kernel must not be kLibrary.
// workspace: plan.workspace bytes, 256-byte aligned, null if that is 0. Its contents do not matter
// before and after. It must not be shared with work on other streams.
template <typename T, typename Out>
cudaError_t gemm(const GemmArgs<T, Out>& args, const GemmPlan& plan, void* workspace,
                 cudaStream_t stream);

// Whether a packed b makes products faster on the current device.
bool gemm_packs(const PackArgs& args);

// Bytes of a packed b, the same on every device.
int64_t gemm_packed_bytes(const PackArgs& args);

// packed: gemm_packed_bytes() bytes, 256-byte aligned. The result is valid as
// GemmArgs<float, float>::packed_b for a b of these sizes and values and any strides, on every
// device, until b changes. workspace: gemm_pack_workspace() bytes, with the rules of gemm's.
int64_t gemm_pack_workspace(const PackArgs& args);
cudaError_t gemm_pack(const PackArgs& args, void* packed, void* workspace, cudaStream_t stream);

// out[i][j] = activation(product[i][j] + bias[j]) + residual[i][j]: the epilogue of linear after a
// vendor library's product. All arrays are contiguous, with rows of n; outputs is the number of
// elements. T: __half, __nv_bfloat16. P: float, or T, and then product may be out. bias and
// residual may be null.
template <typename P, typename T>
cudaError_t linear_epilogue(const P* product, const T* bias, const T* residual, T* out,
                            int64_t outputs, int64_t n, Activation activation, cudaStream_t stream);

#endif

}  // namespace cuda
}  // namespace my_ops
