// The real matrix of a complex one. Plan: a thread per element of b, or a few along the outer
// index, reads a pair and writes the block of four as two pairs. Bound by memory: each byte is
// moved once.
#include "complex_matrix.h"

#include <algorithm>

#include "common/ceil_div.h"
#include "common/launch.cuh"

namespace my_ops::cuda {
namespace {

constexpr int kInner = 32, kOuter = 8, kPerThread = 4;

// b as [batch, outer, inner]; the matrix has two lines of pairs for each outer index.
__global__ void __launch_bounds__(kInner* kOuter)
    complex_matrix_kernel(const float2* b, float2* matrix, int64_t batch, int64_t outer,
                          int64_t inner, int64_t batch_stride, int64_t outer_stride,
                          int64_t inner_stride, bool conjugate_a, bool conjugate_b,
                          bool rows_are_inner) {
  const int64_t i = int64_t{blockIdx.x} * kInner + threadIdx.x;
  if (i >= inner) return;
  for (int64_t z = blockIdx.z; z < batch; z += gridDim.z) {
    for (int64_t o = int64_t{blockIdx.y} * kOuter + threadIdx.y; o < outer;
         o += int64_t{gridDim.y} * kOuter) {
      float2 row = b[z * batch_stride + o * outer_stride + i * inner_stride];
      if (conjugate_b) row.y = -row.y;
      const float2 next = conjugate_a ? make_float2(row.y, -row.x) : make_float2(-row.y, row.x);
      float2* const line = matrix + (z * outer + o) * 2 * inner + i;
      line[0] = rows_are_inner ? make_float2(row.x, next.x) : row;
      line[inner] = rows_are_inner ? make_float2(row.y, next.y) : next;
    }
  }
}

}  // namespace

cudaError_t write_complex_matrix(const ComplexMatrixArgs& args, float* matrix,
                                 cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 65535;  // in the grid's y and z
  if (args.batch == 0 || args.k == 0 || args.n == 0) return cudaSuccess;
  const bool rows = args.rows_are_inner();
  const int64_t outer = rows ? args.n : args.k, inner = rows ? args.k : args.n;
  const dim3 blocks(
      static_cast<unsigned>(ceil_div(inner, int64_t{kInner})),
      static_cast<unsigned>(std::min(ceil_div(outer, int64_t{kOuter * kPerThread}), kMaxBlocks)),
      static_cast<unsigned>(std::min(args.batch, kMaxBlocks)));
  return launch(complex_matrix_kernel, blocks, dim3(kInner, kOuter), 0, stream,
                reinterpret_cast<const float2*>(args.b), reinterpret_cast<float2*>(matrix),
                args.batch, outer, inner, args.batch_stride,
                rows ? args.col_stride : args.row_stride, rows ? args.row_stride : args.col_stride,
                args.conjugate_a, args.conjugate_b, rows);
}

}  // namespace my_ops::cuda
