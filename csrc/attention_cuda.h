// Attention on CUDA: tensors as the kernels take them.
#pragma once

#include <cmath>

#include "../include/attention.h"
#include "binding_cuda.h"

namespace my_ops {

// Rows that the kernels can read: of whole, aligned groups of four elements.
inline Tensor attention_operand(const Tensor& t) {
  bool fits = (t.stride(3) == 1 || t.size(3) == 1) &&
              reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < 3; ++d) fits = fits && (t.size(d) == 1 || t.stride(d) % 4 == 0);
  return fits ? t : copy(t, t.scalar_type());
}

// The stride of a dimension of size 1 may be anything.
inline int64_t step(const Tensor& t, int64_t d) { return t.size(d) == 1 ? 0 : t.stride(d); }

inline cuda::Heads<const float> heads_of(const Tensor& t) {
  return {in<float>(t), step(t, 0), step(t, 1), step(t, 2)};
}
inline cuda::Heads<float> out_heads(const Tensor& t) {
  return {out<float>(t), t.stride(0), t.stride(1), t.stride(2)};
}

// A new array [batch, heads, length, dim], stored by length first, as torch's op stores its results.
inline Tensor empty_heads(const Tensor& like) {
  const Sizes n = sizes_of(like);
  return empty_strided(like, n, {n[2] * n[1] * n[3], n[3], n[1] * n[3], 1}, ScalarType::Float);
}

// The stride of torch's log-sum-exp.
inline int64_t logsumexp_stride(int64_t queries) { return (queries + 31) / 32 * 32; }

// The sizes and options; pointers are set later, but for bias, which is broadcast by its strides.
// Nothing if a size is beyond the kernels'.
inline std::optional<cuda::AttentionArgs> attention_args(const Tensor& q, const Tensor& k,
                                                         const std::optional<Tensor>& bias,
                                                         bool causal, std::optional<double> scale) {
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;
  for (int64_t d = 0; d < 4; ++d) {
    if (q.size(d) > kMost || k.size(d) > kMost) return std::nullopt;
  }
  cuda::AttentionArgs args{};
  args.batch = static_cast<int>(q.size(0));
  args.heads = static_cast<int>(q.size(1));
  args.q_length = static_cast<int>(q.size(2));
  args.k_length = static_cast<int>(k.size(2));
  args.dim = static_cast<int>(q.size(3));
  args.causal = causal;
  args.scale = static_cast<float>(scale.value_or(1 / std::sqrt(static_cast<double>(args.dim))));
  if (bias) {
    args.bias = in<float>(*bias);
    args.bias_batch = step(*bias, 0);
    args.bias_head = step(*bias, 1);
    args.bias_row = step(*bias, 2);
    args.bias_column = step(*bias, 3);
  }
  return args;
}

struct Attended {
  Tensor out, logsumexp;  // the second [batch, heads, logsumexp_stride]
};

inline Attended attend(cuda::AttentionArgs args, const Tensor& q, const Tensor& k, const Tensor& v,
                       cudaStream_t stream) {
  const Tensor q_ = attention_operand(q), k_ = attention_operand(k), v_ = attention_operand(v);
  const Tensor result = empty_heads(q);
  const int64_t stride = logsumexp_stride(q.size(2));
  const Tensor logsumexp = empty(q, {q.size(0), q.size(1), stride});
  const Tensor workspace = empty(q, {cuda::attention_workspace(args)}, ScalarType::Byte);
  args.q = heads_of(q_), args.k = heads_of(k_), args.v = heads_of(v_);
  args.logsumexp = out<float>(logsumexp);
  args.logsumexp_stride = static_cast<int>(stride);
  check_launch(cuda::attention(args, out_heads(result), workspace.mutable_data_ptr(), stream),
               "attention");
  return {result, logsumexp};
}

struct AttentionGrads {
  Tensor q, k, v;
  std::optional<Tensor> bias;  // [batch, heads, queries, keys], whatever bias broadcast
};

inline AttentionGrads attend_backward(cuda::AttentionArgs args, const Tensor& grad, const Tensor& q,
                                      const Tensor& k, const Tensor& v, const Tensor& result,
                                      const Tensor& logsumexp, bool needs_bias,
                                      cudaStream_t stream) {
  const Tensor q_ = attention_operand(q), k_ = attention_operand(k), v_ = attention_operand(v);
  const Tensor grad_ = attention_operand(grad), result_ = attention_operand(result);
  AttentionGrads grads{empty_heads(q), empty_heads(k), empty_heads(v), std::nullopt};
  if (args.bias && needs_bias) {
    grads.bias = empty(q, {q.size(0), q.size(1), q.size(2), k.size(2)});
  }
  const Tensor workspace = empty(q, {cuda::attention_backward_workspace(args)}, ScalarType::Byte);
  args.q = heads_of(q_), args.k = heads_of(k_), args.v = heads_of(v_);
  args.logsumexp = const_cast<float*>(in<float>(logsumexp));
  args.logsumexp_stride = static_cast<int>(logsumexp.size(2));
  const cuda::AttentionGradients gradients{.grad = heads_of(grad_),
                                           .out = heads_of(result_),
                                           .q = out_heads(grads.q),
                                           .k = out_heads(grads.k),
                                           .v = out_heads(grads.v),
                                           .bias = out<float>(grads.bias)};
  check_launch(cuda::attention_backward(args, gradients, workspace.mutable_data_ptr(), stream),
               "attention_backward");
  return grads;
}

}  // namespace my_ops
