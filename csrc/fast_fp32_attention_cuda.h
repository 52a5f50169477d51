// fast_fp32 on CUDA: the two ops in which torch's float32 attention ends. What it does not take
// goes to torch's own; either may serve the backward of the other's forward.
#pragma once

#include "attention_cuda.h"
#include "fast_fp32.h"

namespace my_ops::fast_fp32 {

template <typename Backend>
class Attention {
 public:
  using Result = std::tuple<std::optional<Tensor>, std::optional<Tensor>>;
  using Gradients = std::tuple<std::optional<Tensor>, std::optional<Tensor>, std::optional<Tensor>,
                               std::optional<Tensor>>;

  static constexpr int64_t kMinWork = cuda::kAttentionMinWork;

  static constexpr const char* kForward =
      "fast_fp32_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, float dropout_p, bool "
      "is_causal, float? scale) -> (Tensor?, Tensor?)";
  static constexpr const char* kBackward =
      "fast_fp32_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor? bias, "
      "Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, float? scale, bool "
      "needs_bias) -> (Tensor?, Tensor?, Tensor?, Tensor?)";

  // The output and its log-sum-exp, or nothing.
  static Result forward(const Tensor& q, const Tensor& k, const Tensor& v,
                        const std::optional<Tensor>& bias, double dropout_p, bool causal,
                        std::optional<double> scale) {
    Result result;
    taken("attention", q, k, [&](cuda::AttentionArgs& args) -> std::optional<Left> {
      if (const auto left = problem(q, k, v, bias, dropout_p, causal, scale, false, &args))
        return left;
      const Device device(q);
      const Attended attended = attend(args, q, k, v, device.stream());
      result = {attended.out, attended.logsumexp};
      return std::nullopt;
    });
    return result;
  }

  // The gradients of q, k, v and, if it is asked for, of bias, or nothing.
  static Gradients backward(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                            const std::optional<Tensor>& bias, const Tensor& out,
                            const Tensor& logsumexp, double dropout_p, bool causal,
                            std::optional<double> scale, bool needs_bias) {
    Gradients result;
    taken("attention_backward", q, k, [&](cuda::AttentionArgs& args) -> std::optional<Left> {
      if (const auto left = problem(q, k, v, bias, dropout_p, causal, scale, true, &args))
        return left;
      if (!is_ours<Backend>(grad, q) || !is_ours<Backend>(out, q) ||
          !is_ours<Backend>(logsumexp, q) || sizes_of(grad) != sizes_of(q) ||
          sizes_of(out) != sizes_of(q) || !logsumexp.is_contiguous() ||
          sizes_of(logsumexp) != Sizes{q.size(0), q.size(1), logsumexp_stride(q.size(2))}) {
        return Left::kOther;
      }
      const Device device(q);
      const AttentionGrads grads =
          attend_backward(args, grad, q, k, v, out, logsumexp, needs_bias, device.stream());
      result = {grads.q, grads.k, grads.v, grads.bias};
      return std::nullopt;
    });
    return result;
  }

  // For the kernels in C++: the output, its log-sum-exp, and a seed and an offset of random
  // numbers.
  static bool run(const AttentionCall& call, bool needs_logsumexp, AtenTensorHandle* results) {
    return or_torchs([&] {
      const Tensor q = tensor(call.q);
      auto [out, logsumexp] = forward(q, tensor(call.k), tensor(call.v), optional_tensor(call.bias),
                                      call.dropout, call.causal, call.scale);
      if (!out) return false;
      if (!needs_logsumexp) logsumexp = empty(q, {q.size(0), q.size(1), 0});
      const std::optional<Tensor> seed = no_random_state(q), offset = no_random_state(q);
      const std::optional<Tensor>* const found[] = {&out, &logsumexp, &seed, &offset};
      put(found, results);
      return true;
    });
  }

  // And the gradients of q, k, v and, if it is asked for, of bias.
  static bool run_backward(const AttentionCall& call, const AttentionSaved& saved,
                           AtenTensorHandle* results) {
    return or_torchs([&] {
      const auto [q, k, v, bias] =
          backward(tensor(saved.grad), tensor(call.q), tensor(call.k), tensor(call.v),
                   optional_tensor(call.bias), tensor(saved.out), tensor(saved.logsumexp),
                   call.dropout, call.causal, call.scale, saved.needs_bias);
      const std::optional<Tensor>* const found[] = {&q, &k, &v, &bias};
      put(found, results);
      return q.has_value();
    });
  }

 private:
  // No exception leaves the module: it is torch's then, as where ours does not serve.
  template <typename F>
  static bool or_torchs(const F& compute) {
    try {
      return compute();
    } catch (const std::exception&) {
      count(Left::kFailed);
      return false;
    }
  }

  static void put(const std::optional<Tensor>* const (&found)[4], AtenTensorHandle* results) {
    for (int i = 0; i < 4; ++i) {
      if (*found[i]) results[i] = new_handle((*found[i])->get());
    }
  }

  // Without dropout no numbers are drawn: empty, where torch's op has its own.
  static Tensor no_random_state(const Tensor& q) {
    const Device device(q);
    auto status = cudaStreamCaptureStatusNone;
    check_launch(cudaStreamIsCapturing(device.stream(), &status), "attention");
    const bool captured = status != cudaStreamCaptureStatusNone;
    AtenTensorHandle result = nullptr;
    check_torch(aoti_torch_empty_strided(
                    0, nullptr, nullptr, aoti_torch_dtype_int64(),
                    captured ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
                    captured ? q.get_device_index() : 0, &result),
                "attention");
    return Tensor(result);
  }

  template <typename F>
  static void taken(const char* op, const Tensor& q, const Tensor& k, const F& compute) {
    Left left;
    try {
      cuda::AttentionArgs args{};
      const std::optional<Left> why = compute(args);
      if (!why) {
        count(Shape(op, q.size(0) * q.size(1), q.size(2), k.size(2), q.size(3)));
        return;
      }
      left = *why;
    } catch (const std::exception&) {  // torch's needs less memory, or raises its own error
      left = Left::kFailed;
    }
    count(left);
  }

  // Sets args, but for the pointers. Returns why this attention stays torch's.
  static std::optional<Left> problem(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const std::optional<Tensor>& bias, double dropout_p,
                                     bool causal, std::optional<double> scale, bool backward,
                                     cuda::AttentionArgs* args) {
    for (const Tensor* t : {&q, &k, &v}) {
      if (!is_ours<Backend>(*t, q) || t->dim() != 4) return Left::kOther;
    }
    const Sizes n = sizes_of(q), keys = sizes_of(k);
    if (keys[0] != n[0] || keys[1] != n[1] || keys[3] != n[3]) return Left::kOther;
    if (bias &&
        (!is_ours<Backend>(*bias, q) || sizes_of(*bias) != Sizes{n[0], n[1], n[2], keys[2]})) {
      return Left::kOther;
    }
    if (dropout_p != 0) return Left::kDropout;
    if (sizes_of(v) != keys) return Left::kHeads;
    const auto made = attention_args(q, k, bias, causal, scale);
    if (!made) return Left::kOther;
    cuda::AttentionPlan plan;
    {
      const Device current(q);
      check_launch(cuda::plan_attention(*made, backward, &plan), "attention");
    }
    if (plan == cuda::AttentionPlan::kTorchs) return Left::kPlan;
    if (plan == cuda::AttentionPlan::kOtherSizes) return Left::kHeads;
    *args = *made;
    return std::nullopt;
  }
};

}  // namespace my_ops::fast_fp32
