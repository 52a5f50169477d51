// Attention for the switch, on CUDA: what the kernels that replace torch's own ask.
#include "../include/attention.h"

#include "binding_cuda.h"
#include "fast_fp32.h"

namespace my_ops {
namespace {

// Smaller ones stay torch's: multiply-adds of one product.
constexpr int64_t kLeastWork = int64_t{1} << 27;

bool is_float_array(const Tensor& t, const Tensor& like) {
  int32_t layout = -1;
  return t.is_cuda() && t.get_device_index() == like.get_device_index() &&
         t.scalar_type() == ScalarType::Float && t.dim() == 4 &&
         aoti_torch_get_layout(t.get(), &layout) == TORCH_SUCCESS &&
         layout == aoti_torch_layout_strided();
}

// Rows that the kernels can read: of whole, aligned groups of four elements.
Tensor readable(const Tensor& t) {
  bool fits = t.stride(3) == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < 3; ++d) fits = fits && (t.size(d) == 1 || t.stride(d) % 4 == 0);
  return fits ? t : copy(t, t.scalar_type());
}

// A stride is not used where the size is 1.
int64_t step(const Tensor& t, int64_t d) { return t.size(d) == 1 ? 0 : t.stride(d); }

cuda::Heads<const float> read(const Tensor& t) {
  return {in<float>(t), step(t, 0), step(t, 1), step(t, 2)};
}
cuda::Heads<float> written(const Tensor& t) {
  return {out<float>(t), t.stride(0), t.stride(1), t.stride(2)};
}

// A new array [batch, heads, rows, dim], stored by rows, as torch's op stores its results.
Tensor by_rows(const Tensor& like, const Tensor& sizes_like) {
  const Sizes n = sizes_of(sizes_like);
  return empty_strided(like, n, {n[2] * n[1] * n[3], n[3], n[1] * n[3], 1}, ScalarType::Float);
}

int64_t padded_length(int64_t queries) { return (queries + 31) / 32 * 32; }

// The problem, or nothing if it stays torch's. It holds no pointers.
std::optional<cuda::AttentionArgs> problem(const Tensor& q, const Tensor& k, const Tensor& v,
                                           const std::optional<Tensor>& bias, bool causal,
                                           double scale) {
  if (!is_float_array(q, q) || !is_float_array(k, q) || !is_float_array(v, q)) return std::nullopt;
  const Sizes n = sizes_of(q), keys = sizes_of(k);
  if (keys != sizes_of(v) || keys[0] != n[0] || keys[1] != n[1] || keys[3] != n[3]) {
    return std::nullopt;
  }
  if (bias && (!is_float_array(*bias, q) || sizes_of(*bias) != Sizes{n[0], n[1], n[2], keys[2]})) {
    return std::nullopt;
  }
  for (const int64_t size : {n[0], n[1], n[2], keys[2], n[3]}) {
    if (size > std::numeric_limits<int>::max() / 2) return std::nullopt;
  }
  const int64_t heads = n[0] * n[1];
  if (heads > 1 << 16 || heads * n[2] * n[3] < kLeastWork / std::max<int64_t>(keys[2], 1)) {
    return std::nullopt;
  }
  cuda::AttentionArgs args{};
  args.batch = static_cast<int>(n[0]);
  args.heads = static_cast<int>(n[1]);
  args.q_length = static_cast<int>(n[2]);
  args.k_length = static_cast<int>(keys[2]);
  args.dim = static_cast<int>(n[3]);
  args.causal = causal;
  args.scale = static_cast<float>(scale);
  if (bias) {
    args.bias = in<float>(*bias);
    args.bias_batch = bias->stride(0);
    args.bias_head = bias->stride(1);
    args.bias_row = bias->stride(2);
    args.bias_column = bias->stride(3);
  }
  cuda::DeviceFacts device;
  check_launch(cuda::current_device(&device), "attention");
  return cuda::attention_runs(args, device) ? std::optional(args) : std::nullopt;
}

void count(const char* op, const Tensor& q, const Tensor& k) {
  fast_fp32::count(
      fast_fp32::Shape(op, q.size(0) * q.size(1), q.size(2), k.size(2), q.size(3)));
}

using Result = std::tuple<std::optional<Tensor>, std::optional<Tensor>>;

// The output and its log-sum-exp, as torch's _scaled_dot_product_efficient_attention gives them, or
// nothing.
Result attention(const Tensor& q, const Tensor& k, const Tensor& v,
                 const std::optional<Tensor>& bias, bool causal, double scale) {
  if (!q.is_cuda()) return {};
  const Device device(q);
  auto args = problem(q, k, v, bias, causal, scale);
  if (!args) return {};
  const Tensor q_ = readable(q), k_ = readable(k), v_ = readable(v), result = by_rows(q, q);
  args->q = read(q_), args->k = read(k_), args->v = read(v_);
  const int64_t stride = padded_length(q.size(2));
  const Tensor logsumexp = empty(q, {q.size(0), q.size(1), stride});
  args->logsumexp = out<float>(logsumexp);
  args->logsumexp_stride = static_cast<int>(stride);
  const Tensor workspace = empty(q, {cuda::attention_workspace(*args)}, ScalarType::Byte);
  check_launch(cuda::attention(*args, written(result), workspace.mutable_data_ptr(),
                               device.stream()),
               "attention");
  count("attention", q, k);
  return {result, logsumexp};
}

using Gradients = std::tuple<std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
                             std::optional<Tensor>>;

// The gradients of q, k, v and, if it is asked for, of bias, or nothing.
Gradients attention_backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                             const std::optional<Tensor>& bias, const Tensor& result,
                             const Tensor& logsumexp, bool causal, double scale,
                             bool needs_bias) {
  if (!q.is_cuda()) return {};
  const Device device(q);
  auto args = problem(q, k, v, bias, causal, scale);
  if (!args || !is_float_array(grad, q) || !is_float_array(result, q) ||
      sizes_of(grad) != sizes_of(q) || sizes_of(result) != sizes_of(q) ||
      logsumexp.scalar_type() != ScalarType::Float || !logsumexp.is_contiguous() ||
      sizes_of(logsumexp) != Sizes{q.size(0), q.size(1), padded_length(q.size(2))}) {
    return {};
  }
  const Tensor q_ = readable(q), k_ = readable(k), v_ = readable(v);
  const Tensor grad_ = readable(grad), result_ = readable(result);
  const Tensor grad_q = by_rows(q, q), grad_k = by_rows(q, k), grad_v = by_rows(q, v);
  std::optional<Tensor> grad_bias;
  if (bias && needs_bias) grad_bias = empty(q, {q.size(0), q.size(1), q.size(2), k.size(2)});
  args->q = read(q_), args->k = read(k_), args->v = read(v_);
  args->logsumexp = const_cast<float*>(in<float>(logsumexp));
  args->logsumexp_stride = static_cast<int>(logsumexp.size(2));
  const Tensor workspace = empty(q, {cuda::attention_backward_workspace(*args)}, ScalarType::Byte);
  const cuda::AttentionGradients gradients{.grad = read(grad_),
                                           .out = read(result_),
                                           .q = written(grad_q),
                                           .k = written(grad_k),
                                           .v = written(grad_v),
                                           .bias = out<float>(grad_bias)};
  check_launch(cuda::attention_backward(*args, gradients, workspace.mutable_data_ptr(),
                                        device.stream()),
               "attention");
  count("attention_backward", q, k);
  return {grad_q, grad_k, grad_v, grad_bias};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(my_ops, m) {
  m.def(
      "fast_fp32_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool is_causal, float scale)"
      " -> (Tensor?, Tensor?)");
  m.def(
      "fast_fp32_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor "
      "out, Tensor logsumexp, bool is_causal, float scale, bool needs_bias)"
      " -> (Tensor?, Tensor?, Tensor?, Tensor?)");
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CUDA, m) {
  m.impl("fast_fp32_attention", TORCH_BOX(&attention));
  m.impl("fast_fp32_attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace my_ops
