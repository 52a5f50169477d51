// The gradients of the input and of the parameters of a recurrent layer with few rows, in one
// launch.
// Plan: a warp computes a tile of 32 x 32 outputs, by the tensor cores in 16 bits and otherwise by
// FMAs, from a slice of k that passes through the warp's own shared memory, while registers hold
// the next loads. Warps of a block share a tile's slices and add them in a fixed order. Other
// blocks sum the columns of the terms' gradients for the biases. Bound by latency; on the host it
// takes the place of seven launches.
#include <type_traits>

#include "common/launch.cuh"
#include "common/numeric.cuh"
#include "ptx/mma.cuh"
#include "recurrent.h"
#include "recurrent/costs.h"

namespace my_ops::cuda {
namespace {

constexpr int kLanes = 32, kTile = 32;

template <typename T>
struct Shape {
  using C = compute_t<T>;
  static constexpr int kWarps = sizeof(C) == 8 ? 4 : 8;
  static constexpr int kThreads = kWarps * kLanes;
  static constexpr int kDepth = sizeof(C) == 8 ? 8 : 16;  // of k at a time
  static constexpr int kMinSlice = 4 * kDepth;            // of k, for a warp
};

// A lane's part of a tile: 4 x 8 sums, by FMAs.
template <typename T>
struct FmaTile {
  using Staged = compute_t<T>;
  static constexpr int kDepth = Shape<T>::kDepth, kPitch = kTile + 4;  // rows start at vectors
  static constexpr int kRows = 4, kColumns = 8, kColumnLanes = kTile / kColumns;
  using Operand = Staged[kDepth][kPitch];

  Staged sum[kRows][kColumns] = {};

  static __device__ Staged staged(T x) { return cuda::load(x); }
  __device__ void add(const Operand& a, const Operand& b, int lane) {
    const int row0 = lane / kColumnLanes * kRows, column0 = lane % kColumnLanes * kColumns;
#pragma unroll 4  // as fast as all of them, which take longer to compile
    for (int l = 0; l < kDepth; ++l) {
      Staged x[kRows], y[kColumns];
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i] = a[l][row0 + i];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) y[j] = b[l][column0 + j];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sum[i][j] += x[i] * y[j];
      }
    }
  }
  template <typename F>
  __device__ void each(int lane, const F& f) const {
    const int row0 = lane / kColumnLanes * kRows, column0 = lane % kColumnLanes * kColumns;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) f(row0 + i, column0 + j, sum[i][j]);
    }
  }
};

// The same by the tensor cores, for 16-bit types: 2 x 4 fragments of 16 x 8.
template <typename T>
struct MmaTile {
  using Staged = T;
  static constexpr int kDepth = Shape<T>::kDepth, kPitch = kTile + 8;  // no bank conflicts
  static constexpr int kRows = kTile / 16, kColumns = kTile / 8;       // fragments
  using Operand = Staged[kDepth][kPitch];

  float sum[kRows][kColumns][4] = {};

  static __device__ Staged staged(T x) { return x; }
  __device__ void add(const Operand& a, const Operand& b, int lane) {
    const int row = lane % 8, matrix = lane / 8, even = matrix % 2 * 8, high = matrix / 2 * 8;
    uint32_t x[kRows][4], y[kColumns / 2][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) ptx::ldmatrix_trans(x[i], &a[high + row][16 * i + even]);
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      ptx::ldmatrix_trans(y[j], &b[even + row][16 * j + high]);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        ptx::mma<T>(sum[i][j], x[i][0], x[i][1], x[i][2], x[i][3], y[j / 2][j % 2 * 2],
                    y[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
  template <typename F>
  __device__ void each(int lane, const F& f) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          f(16 * i + lane / 4 + e / 2 * 8, 8 * j + lane % 4 * 2 + e % 2, sum[i][j][e]);
        }
      }
    }
  }
};

#if __CUDA_ARCH__ >= 800
template <typename T>
using Tile = std::conditional_t<sizeof(T) == 2, MmaTile<T>, FmaTile<T>>;
#else
template <typename T>
using Tile = FmaTile<T>;
#endif

template <typename T>
union alignas(16) Smem {
  struct {
    typename Tile<T>::Operand a, b;
  } staged[Shape<T>::kWarps];
  compute_t<T> partial[Shape<T>::kWarps][kTile * kTile];
};

struct TiledProduct {
  int64_t m, n, k;
  int64_t tiles_n, tiles;
  int64_t slice;  // of k, for a warp
  int slices;     // of a tile: a power of two, at most the warps of a block
};

// The blocks of a launch, in this order; the last ones sum columns.
struct WeightsBackwardPlan {
  TiledProduct grad_input, grad_w_x, grad_w_h;
  int64_t grad_input_end, grad_w_x_end, grad_w_h_end;
};

// Loads kDepth lines of 32 elements of an operand at a time: a lane has one element of every line.
// lines.next() gives one line of k after the other, or null for zeros.
template <typename T, typename Lines>
struct Loader {
  using C = typename Shape<T>::C;
  static constexpr int kDepth = Shape<T>::kDepth;

  Lines lines;
  int64_t offset;  // in a line
  bool real;
  T held[kDepth];

  __device__ void load(int count) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      held[i] = store<T>(C(0));
      if (i >= count) continue;
      const T* const line = lines.next();
      if (line != nullptr && real) held[i] = line[offset];
    }
  }
  __device__ void stage(typename Tile<T>::Operand& to, int lane) const {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) to[i][lane] = Tile<T>::staged(held[i]);
  }
};

// Lines at equal distances.
template <typename T>
struct EvenLines {
  const T* at;
  int64_t distance;

  __device__ const T* next() {
    const T* const line = at;
    at += distance;
    return line;
  }
};

// The input's rows.
template <typename T>
struct InputLines {
  const T* at;
  int64_t row, batch, distance, wrap;

  // There is a row, and so a batch, unless no line is read.
  __device__ InputLines(const RecurrentWeightsBackward<T>& args, int64_t first)
      : at(args.input + first / max(args.batch, int64_t{1}) * args.input_step),
        row(first % max(args.batch, int64_t{1})),
        batch(args.batch),
        distance(args.input_row),
        wrap(args.input_step - args.batch * args.input_row) {
    at += row * distance;
  }
  __device__ const T* next() {
    const T* const line = at;
    at += distance;
    if (++row == batch) {
      row = 0;
      at += wrap;
    }
    return line;
  }
};

// h before every step.
template <typename T>
struct HLines {
  const T *at, *output;
  const bool* reset;
  int64_t row, batch, hidden;

  __device__ HLines(const RecurrentWeightsBackward<T>& args, int64_t first)
      : at(first < args.batch ? args.h0 + first * args.hidden
                              : args.output + (first - args.batch) * args.hidden),
        output(args.output),
        reset(args.reset),
        row(first),
        batch(args.batch),
        hidden(args.hidden) {}
  __device__ const T* next() {
    const T* const line = reset != nullptr && reset[row] ? nullptr : at;
    at = ++row == batch ? output : at + hidden;
    return line;
  }
};

// The shares of the input among the terms' gradients, as the first operand of grad_input: lanes run
// along k.
template <typename T>
struct ShareLoader {
  using C = typename Shape<T>::C;
  static constexpr int kDepth = Shape<T>::kDepth, kLines = kLanes / kDepth;

  const T* rows;  // from the lane's first row on
  int64_t real_rows, columns, alone, both, gate;
  T held[kDepth];

  __device__ void load(int count) {
    const int64_t column = gate < both ? gate + alone : gate - both;
    const bool real = static_cast<int>(threadIdx.x) % kDepth < count;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const bool loads = real && i * kLines < real_rows;
      held[i] = loads ? rows[i * kLines * columns + column] : store<T>(C(0));
    }
    gate += kDepth;
  }
  __device__ void stage(typename Tile<T>::Operand& to, int lane) const {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      to[lane % kDepth][i * kLines + lane / kDepth] = Tile<T>::staged(held[i]);
    }
  }
};

// Where a warp is in a product.
template <typename T>
struct Place {
  int lane, warp, slice;
  int64_t tile, m0, n0, begin, end;  // begin and end of k

  __device__ Place(const TiledProduct& product, int64_t block)
      : lane(threadIdx.x % kLanes),
        warp(threadIdx.x / kLanes),
        slice(warp % product.slices),
        tile(block * (Shape<T>::kWarps / product.slices) + warp / product.slices),
        m0(tile / product.tiles_n * kTile),
        n0(tile % product.tiles_n * kTile),
        begin(min(slice * product.slice, product.k)),
        end(tile < product.tiles ? min(begin + product.slice, product.k) : begin) {}
};

// Adds the products of a and b along the place's part of k, and stores the tile in out, (m, n).
template <typename T, typename A, typename B>
__device__ void multiply(Smem<T>& smem, const TiledProduct& product, const Place<T>& place, A a,
                         B b, T* out) {
  using C = typename Shape<T>::C;
  constexpr int kDepth = Shape<T>::kDepth;
  const int lane = place.lane, warp = place.warp, slices = product.slices;
  auto& staged = smem.staged[warp];
  Tile<T> tile;
  int64_t left = place.end - place.begin;
  const auto load_both = [&] {
    const int count = static_cast<int>(min(left, int64_t{kDepth}));
    a.load(count);
    b.load(count);
  };
  if (left > 0) load_both();
  while (left > 0) {
    __syncwarp();
    a.stage(staged.a, lane);
    b.stage(staged.b, lane);
    __syncwarp();
    left -= kDepth;
    if (left > 0) load_both();
    tile.add(staged.a, staged.b, lane);
  }

  __syncthreads();
  tile.each(lane,
            [&](int row, int column, C sum) { smem.partial[warp][row * kTile + column] = sum; });
  __syncthreads();
  if (place.tile >= product.tiles || place.n0 + lane >= product.n) return;
  const int first_warp = warp - place.slice, rows = kTile / slices;
  for (int row = place.slice * rows; row < (place.slice + 1) * rows; ++row) {
    if (place.m0 + row >= product.m) break;
    C total = smem.partial[first_warp][row * kTile + lane];
    for (int s = 1; s < slices; ++s) total += smem.partial[first_warp + s][row * kTile + lane];
    out[(place.m0 + row) * product.n + place.n0 + lane] = store<T>(total);
  }
}

template <typename T>
__global__ void __launch_bounds__(Shape<T>::kThreads, 2)
    weights_backward_kernel(const __grid_constant__ RecurrentWeightsBackward<T> args,
                            const __grid_constant__ WeightsBackwardPlan plan) {
  using C = typename Shape<T>::C;
  __shared__ Smem<T> smem;
  const int64_t columns = args.terms * args.hidden, gates = args.gates * args.hidden;
  // The terms' gradients start with the shares of the input that have terms of their own: those of
  // the last gates. The other terms belong to both.
  const int64_t alone = columns - gates, both = gates - alone;
  const int64_t block = blockIdx.x;
  // The terms' gradients as the first operand of a weight's gradient: the lane's column.
  const auto grad_lines = [&](const Place<T>& place, int64_t column) {
    const EvenLines<T> lines{args.grad_terms + place.begin * columns, columns};
    return Loader<T, EvenLines<T>>{lines, column, place.m0 + place.lane < gates};
  };
  if (block < plan.grad_input_end) {
    const Place<T> place(plan.grad_input, block);
    constexpr int kDepth = Shape<T>::kDepth;
    const int64_t row = place.m0 + place.lane / kDepth, column = place.n0 + place.lane;
    const ShareLoader<T> a{
        args.grad_terms + row * columns,  plan.grad_input.m - row, columns, alone, both,
        place.begin + place.lane % kDepth};
    const EvenLines<T> lines{args.w_x + place.begin * args.w_row, args.w_row};
    const Loader<T, EvenLines<T>> b{lines, column * args.w_col, column < args.inputs};
    multiply(smem, plan.grad_input, place, a, b, args.grad_input);
  } else if (block < plan.grad_w_x_end) {
    const Place<T> place(plan.grad_w_x, block - plan.grad_input_end);
    const int64_t gate = place.m0 + place.lane, column = place.n0 + place.lane;
    const Loader<T, InputLines<T>> b{InputLines<T>(args, place.begin), column * args.input_col,
                                     column < args.inputs};
    multiply(smem, plan.grad_w_x, place,
             grad_lines(place, gate < both ? gate + alone : gate - both), b, args.grad_w_x);
  } else if (block < plan.grad_w_h_end) {
    const Place<T> place(plan.grad_w_h, block - plan.grad_w_x_end);
    const int64_t unit = place.n0 + place.lane;
    const Loader<T, HLines<T>> b{HLines<T>(args, place.begin), unit, unit < args.hidden};
    multiply(smem, plan.grad_w_h, place, grad_lines(place, alone + place.m0 + place.lane), b,
             args.grad_w_h);
  } else {
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int64_t column = (block - plan.grad_w_h_end) * kLanes + lane;
    const int64_t rows = args.steps * args.batch;
    C sum = C(0);
    if (column < columns) {
#pragma unroll 8
      for (int64_t row = warp; row < rows; row += Shape<T>::kWarps) {
        sum += load(args.grad_terms[row * columns + column]);
      }
    }
    smem.partial[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int w = 1; w < Shape<T>::kWarps; ++w) sum += smem.partial[w][lane];
    const T total = store<T>(sum);
    if (column >= alone) args.grad_bias_h[column - alone] = total;
    if (column < alone) {
      args.grad_bias_x[both + column] = total;
    } else if (column < alone + both) {
      args.grad_bias_x[column - alone] = total;
    }
  }
}

// Plans a product of sizes m, n and k; returns its blocks.
template <typename T>
int64_t plan_product(TiledProduct* product) {
  using Shape = Shape<T>;
  product->tiles_n = ceil_div(product->n, kTile);
  product->tiles = ceil_div(product->m, kTile) * product->tiles_n;
  product->slices = 1;
  while (product->slices < Shape::kWarps && product->k > product->slices * Shape::kMinSlice) {
    product->slices *= 2;
  }
  const int64_t slice = ceil_div(product->k, product->slices);
  product->slice = ceil_div(slice, Shape::kDepth) * Shape::kDepth;
  return ceil_div(product->tiles, Shape::kWarps / product->slices);
}

}  // namespace
}  // namespace my_ops::cuda

bool my_ops::cuda::recurrent_weights_backward_faster(int64_t rows, int64_t columns, int64_t inputs,
                                                     int64_t hidden) {
  constexpr RecurrentCosts::WeightsBackward kCosts = kRecurrentCosts.weights_backward;
  return rows <= kCosts.rows && rows * columns * (2 * inputs + hidden) <= kCosts.work;
}

template <typename T>
cudaError_t my_ops::cuda::recurrent_weights_backward(const RecurrentWeightsBackward<T>& args,
                                                     cudaStream_t stream) {
  const int64_t rows = args.steps * args.batch, gates = args.gates * args.hidden;
  const int64_t inputs = args.inputs, columns = args.terms * args.hidden;
  WeightsBackwardPlan plan{};
  plan.grad_input = {.m = rows, .n = args.grad_input == nullptr ? 0 : inputs, .k = gates};
  plan.grad_w_x = {.m = gates, .n = inputs, .k = rows};
  plan.grad_w_h = {.m = gates, .n = args.hidden, .k = rows};
  plan.grad_input_end = plan_product<T>(&plan.grad_input);
  plan.grad_w_x_end = plan.grad_input_end + plan_product<T>(&plan.grad_w_x);
  plan.grad_w_h_end = plan.grad_w_x_end + plan_product<T>(&plan.grad_w_h);
  const int64_t blocks = plan.grad_w_h_end + ceil_div(columns, kLanes);
  if (blocks == 0) return cudaSuccess;
  return launch(weights_backward_kernel<T>, blocks, Shape<T>::kThreads, 0, stream, args, plan);
}

#define MY_OPS_WEIGHTS_BACKWARD(T)                               \
  template cudaError_t my_ops::cuda::recurrent_weights_backward( \
      const RecurrentWeightsBackward<T>&, cudaStream_t);
MY_OPS_WEIGHTS_BACKWARD(double)
MY_OPS_WEIGHTS_BACKWARD(float)
MY_OPS_WEIGHTS_BACKWARD(__half)
MY_OPS_WEIGHTS_BACKWARD(__nv_bfloat16)
