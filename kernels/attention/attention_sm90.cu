// fp32 attention for Hopper.
// Plan: split q, k and v (and the gradient of the output) into fp16 parts, in a pass of its own
// over each, then one kernel for the output, or two or three for the gradients: q's, and those of
// k and v, together if all their sums fit in registers.
// Bound by tensor cores; short sequences by the split.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention.h"
#include "attention/backward.cuh"
#include "attention/costs.h"
#include "attention/forward.cuh"
#include "attention/plan.h"
#include "attention/split.cuh"
#include "common/launch.cuh"
#include "common/tensor_map.h"

namespace my_ops::cuda {
namespace attention_sm90 {
namespace {

template <typename C>
__global__ void __launch_bounds__(384, 1) attention_kernel(const __grid_constant__ MainArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<C>& smem = *reinterpret_cast<Smem<C>*>(raw);
  const int head = blockIdx.y;
  // The longest first.
  const int row0 = (C::kColumns ? blockIdx.x : gridDim.x - 1 - blockIdx.x) * kRows;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&smem.a_full, 1);
    for (int i = 0; i < C::kSlots; ++i) {
      ptx::mbarrier_init(&smem.full[i], 1);
      ptx::mbarrier_init(&smem.empty[i], 8);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<24>();
    if (threadIdx.x == 0) produce<C>(p, smem, row0, head);
  } else {
    ptx::setmaxnreg_inc<240>();
    const int group = threadIdx.x / 128 - 1;
    if constexpr (C::kBoth) {
      consume_both<C>(p, smem, row0, head, group);
    } else if constexpr (C::kBackward) {
      consume_backward<C>(p, smem, row0, head, group);
    } else {
      consume_forward<C>(p, smem, row0, head, group);
    }
  }
#endif
}

struct Parts {
  __half* parts;
  float* inverse;
};

struct Cursor {
  char* at;
  template <typename T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(at);
    at += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return p;
  }
  Parts parts(int64_t heads, int64_t rows, int width, bool by_column = false) {
    Parts p;
    p.parts = take<__half>(2 * heads * rows * width);
    p.inverse = take<float>(heads * (rows / kRows) * (by_column ? width : 1));
    return p;
  }
};

struct Workspace {
  Parts q, k, v, grad;
  float *lse2, *delta;
  int64_t bytes;
};

Workspace place(const AttentionArgs& args, void* base, bool backward) {
  Cursor c{static_cast<char*>(base)};
  const int d = width(args.dim);
  const int64_t heads = int64_t{args.batch} * args.heads;
  const int64_t queries = padded(args.q_length), keys = padded(args.k_length);
  Workspace w{};
  w.q = c.parts(heads, queries, d);
  w.k = c.parts(heads, keys, d);
  w.v = c.parts(heads, keys, d, !backward);
  if (backward) {
    w.grad = c.parts(heads, queries, d);
    w.lse2 = c.take<float>(heads * queries);
    w.delta = c.take<float>(heads * queries);
  }
  w.bytes = c.at - static_cast<char*>(base);
  return w;
}

SplitArgs split_args(const AttentionArgs& args, const Heads<const float>& x, const Parts& to,
                     int length) {
  SplitArgs a{};
  a.x = x;
  a.parts = to.parts;
  a.inverse = to.inverse;
  a.heads = args.batch * args.heads;
  a.head_count = args.heads;
  a.length = length;
  a.padded = static_cast<int>(padded(length));
  a.dim = args.dim;
  return a;
}

template <int kD, SplitKind kKind>
cudaError_t split(const SplitArgs& a, cudaStream_t stream) {
  return launch(split_kernel<kD, kKind>, dim3(a.padded / kRows, a.heads), 256, 0, stream, a);
}

template <int kD, SplitKind kV>
cudaError_t split_inputs(const AttentionArgs& args, const Workspace& w, cudaStream_t stream) {
  if (auto err = split<kD, kByBlock>(split_args(args, args.q, w.q, args.q_length), stream);
      err != cudaSuccess) {
    return err;
  }
  if (auto err = split<kD, kByBlock>(split_args(args, args.k, w.k, args.k_length), stream);
      err != cudaSuccess) {
    return err;
  }
  return split<kD, kV>(split_args(args, args.v, w.v, args.k_length), stream);
}

MainArgs main_args(const AttentionArgs& args) {
  MainArgs p{};
  p.heads = args.batch * args.heads;
  p.head_count = args.heads;
  p.dim = args.dim;
  p.causal = args.causal;
  p.scale = args.scale;
  p.bias = args.bias;
  p.bias_batch = args.bias_batch;
  p.bias_head = args.bias_head;
  p.bias_row = args.bias_row;
  p.bias_column = args.bias_column;
  return p;
}

// One pass: a stays, b is streamed.
template <typename C>
cudaError_t run(MainArgs p, const Parts (&a)[2], int a_length, const Parts (&b)[2], int b_length,
                cudaStream_t stream) {
  sm90::TensorMapEncoder encoder;
  if (auto err = sm90::tensor_map_encoder(&encoder); err != cudaSuccess) return err;
  p.a_length = a_length;
  p.a_padded = static_cast<int>(padded(a_length));
  p.b_length = b_length;
  p.b_padded = static_cast<int>(padded(b_length));
  const auto map = [&](CUtensorMap* to, const Parts& parts, int64_t rows, int box) {
    return sm90::make_tensor_map(encoder, to, parts.parts, 2 * p.heads * rows, C::kD, C::kD, box);
  };
  for (int i = 0; i < 2; ++i) {
    if (i < C::kA) {
      if (auto err = map(&p.a[i], a[i], p.a_padded, kRows); err != cudaSuccess) return err;
      p.a_inverse[i] = a[i].inverse;
    }
    if (auto err = map(&p.b[i], b[i], p.b_padded, C::kN); err != cudaSuccess) return err;
    p.b_inverse[i] = b[i].inverse;
  }
  constexpr size_t kBytes = sizeof(Smem<C>);
  static_assert(kBytes <= 227 * 1024);
  if (auto err = allow_shared_bytes(attention_kernel<C>, kBytes); err != cudaSuccess) return err;
  return launch(attention_kernel<C>, dim3(p.a_padded / kRows, p.heads), 384, kBytes, stream, p);
}

template <int kD, bool kBias>
cudaError_t forward(const AttentionArgs& args, const Heads<float>& out, const Workspace& w,
                    cudaStream_t stream) {
  if (auto err = split_inputs<kD, kByColumn>(args, w, stream); err != cudaSuccess) return err;
  MainArgs p = main_args(args);
  p.out[0] = out;
  p.lse = args.logsumexp;
  p.lse_stride = args.logsumexp_stride;
  return run<Config<kD, kForward, kBias>>(p, {w.q, {}}, args.q_length, {w.k, w.v}, args.k_length,
                                          stream);
}

template <int kD, bool kBias>
cudaError_t backward(const AttentionArgs& args, const AttentionGradients& g, const Workspace& w,
                     cudaStream_t stream) {
  if (auto err = split_inputs<kD, kByBlock>(args, w, stream); err != cudaSuccess) return err;
  SplitArgs a = split_args(args, g.grad, w.grad, args.q_length);
  a.o = g.out;
  a.lse = args.logsumexp;
  a.lse_stride = args.logsumexp_stride;
  a.lse2 = w.lse2;
  a.delta = w.delta;
  if (auto err = split<kD, kGradient>(a, stream); err != cudaSuccess) return err;
  MainArgs p = main_args(args);
  p.lse2 = w.lse2;
  p.delta = w.delta;
  p.grad_bias = g.bias;
  if (g.bias && args.causal) {  // what the causal pass leaves out
    const int64_t count = int64_t{p.heads} * args.q_length * args.k_length;
    if (auto err = cudaMemsetAsync(g.bias, 0, count * sizeof(float), stream); err != cudaSuccess) {
      return err;
    }
  }
  const Parts queries[2] = {w.q, w.grad}, keys[2] = {w.k, w.v};
  p.out[0] = g.q;
  if (auto err =
          run<Config<kD, kGradQ, kBias>>(p, queries, args.q_length, keys, args.k_length, stream);
      err != cudaSuccess) {
    return err;
  }
  const auto over_queries = [&]<Mode kMode>(const Heads<float>& out) {
    p.out[0] = out;
    return run<Config<kD, kMode, kBias>>(p, keys, args.k_length, queries, args.q_length, stream);
  };
  if constexpr (kD == 64) {
    p.out[1] = g.v;
    return over_queries.template operator()<kGradKV>(g.k);
  } else {
    if (auto err = over_queries.template operator()<kGradK>(g.k); err != cudaSuccess) return err;
    return over_queries.template operator()<kGradV>(g.v);
  }
}

// Without the keys that causality hides from all rows.
AttentionArgs seen(AttentionArgs args) {
  if (args.causal) args.k_length = std::min(args.k_length, args.q_length);
  return args;
}

template <typename F>
cudaError_t with_config(const AttentionArgs& args, const F& f) {
  if (width(args.dim) == 64) {
    return args.bias ? f.template operator()<64, true>() : f.template operator()<64, false>();
  }
  return args.bias ? f.template operator()<128, true>() : f.template operator()<128, false>();
}

bool runs(const AttentionArgs& args) {
  const int64_t heads = int64_t{args.batch} * args.heads;
  const int64_t rows = std::max(padded(args.q_length), padded(args.k_length));
  return args.batch > 0 && args.heads > 0 && args.q_length > 0 && args.k_length > 0 &&
         args.dim > 0 && args.dim <= kMaxDim && args.dim % 4 == 0 && args.scale > 0.0f &&
         heads <= kMaxHeads && 2 * heads * rows <= INT_MAX;
}

bool pays(const AttentionArgs& args, const DeviceFacts& device, bool backward) {
  const AttentionCosts& costs = kFittedAttentionCosts;
  if (backward && std::min(args.q_length, args.k_length) < costs.backward_min_rows) return false;
  return attention_gain(args, device.sm_count, backward) >= costs.margin;
}

}  // namespace
}  // namespace attention_sm90

cudaError_t plan_attention(const AttentionArgs& args, bool backward, AttentionPlan* plan) {
  using namespace attention_sm90;
  DeviceFacts device;
  if (auto err = current_device(&device); err != cudaSuccess) return err;
  *plan = !device.hopper_code || !pays(args, device, backward) ? AttentionPlan::kTorchs
          : !runs(args)                                        ? AttentionPlan::kOtherSizes
                                                               : AttentionPlan::kOurs;
  return cudaSuccess;
}

int64_t attention_workspace(const AttentionArgs& args) {
  return attention_sm90::place(attention_sm90::seen(args), nullptr, false).bytes;
}

int64_t attention_backward_workspace(const AttentionArgs& args) {
  return attention_sm90::place(args, nullptr, true).bytes;
}

cudaError_t attention(const AttentionArgs& all, const Heads<float>& out, void* workspace,
                      cudaStream_t stream) {
  const AttentionArgs args = attention_sm90::seen(all);
  const auto w = attention_sm90::place(args, workspace, false);
  return attention_sm90::with_config(args, [&]<int kD, bool kBias>() {
    return attention_sm90::forward<kD, kBias>(args, out, w, stream);
  });
}

cudaError_t attention_backward(const AttentionArgs& args, const AttentionGradients& gradients,
                               void* workspace, cudaStream_t stream) {
  const auto w = attention_sm90::place(args, workspace, true);
  return attention_sm90::with_config(args, [&]<int kD, bool kBias>() {
    return attention_sm90::backward<kD, kBias>(args, gradients, w, stream);
  });
}

}  // namespace my_ops::cuda
