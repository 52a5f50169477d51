// fast_fp32 on CUDA: the two ops in which torch's float32 attention ends. What it does not take
// goes to torch's own; either may serve the backward of the other's forward.
#pragma once

#include "attention_cuda.h"
#include "fast_fp32.h"

namespace my_ops::fast_fp32 {

template <typename Backend>
class Attention {
 public:
  static constexpr int64_t kMinWork = cuda::kAttentionMinWork;

  // Puts the output, its log-sum-exp, and a seed and an offset of random numbers into results.
  static bool forward(const AttentionCall& call, bool needs_logsumexp, AtenTensorHandle* results) {
    return taken("attention", call, [&](const Inputs& in) -> std::optional<Left> {
      cuda::AttentionArgs args;
      if (const auto left = problem(in, call, false, &args)) return left;
      const Device device(in.q);
      Attended attended = attend(args, in.q, in.k, in.v, device.stream());
      if (!needs_logsumexp) attended.logsumexp = empty(in.q, {in.q.size(0), in.q.size(1), 0});
      const Tensor seed = no_random_state(in.q, device.stream());
      const Tensor offset = no_random_state(in.q, device.stream());
      const Tensor* const found[] = {&attended.out, &attended.logsumexp, &seed, &offset};
      for (int i = 0; i < 4; ++i) results[i] = new_handle(found[i]->get());
      return std::nullopt;
    });
  }

  // Puts the gradients of q, k, v and, if it is asked for, of bias into results.
  static bool backward(const AttentionCall& call, const AttentionSaved& saved,
                       AtenTensorHandle* results) {
    return taken("attention_backward", call, [&](const Inputs& in) -> std::optional<Left> {
      cuda::AttentionArgs args;
      if (const auto left = problem(in, call, true, &args)) return left;
      const Tensor& q = in.q;
      const Tensor grad = tensor(saved.grad), out = tensor(saved.out);
      const Tensor logsumexp = tensor(saved.logsumexp);
      if (!is_ours<Backend>(grad, q) || !is_ours<Backend>(out, q) ||
          !is_ours<Backend>(logsumexp, q) || sizes_of(grad) != sizes_of(q) ||
          sizes_of(out) != sizes_of(q) || !logsumexp.is_contiguous() ||
          sizes_of(logsumexp) != Sizes{q.size(0), q.size(1), logsumexp_stride(q.size(2))}) {
        return Left::kOther;
      }
      const Device device(q);
      const AttentionGrads grads = attend_backward(args, grad, q, in.k, in.v, out, logsumexp,
                                                   saved.needs_bias, device.stream());
      const Tensor* const found[] = {&grads.q, &grads.k, &grads.v};
      for (int i = 0; i < 3; ++i) results[i] = new_handle(found[i]->get());
      if (grads.bias) results[3] = new_handle(grads.bias->get());
      return std::nullopt;
    });
  }

 private:
  struct Inputs {
    Tensor q, k, v;
    std::optional<Tensor> bias;
  };

  // Whether compute had no reason to leave the call to torch. Counts that.
  template <typename F>
  static bool taken(const char* op, const AttentionCall& call, const F& compute) {
    Left left;
    try {
      const Inputs in{tensor(call.q), tensor(call.k), tensor(call.v), optional_tensor(call.bias)};
      const std::optional<Left> why = compute(in);
      if (!why) {
        count(Shape(op, in.q.size(0) * in.q.size(1), in.q.size(2), in.k.size(2), in.q.size(3)));
        return true;
      }
      left = *why;
    } catch (const std::exception&) {  // torch's needs less memory, or raises its own error
      left = Left::kFailed;
    }
    count(left);
    return false;
  }

  // Of attention without dropout, which draws no numbers: empty, where torch's op has its own.
  static Tensor no_random_state(const Tensor& q, cudaStream_t stream) {
    auto status = cudaStreamCaptureStatusNone;
    check_launch(cudaStreamIsCapturing(stream, &status), "attention");
    const bool captured = status != cudaStreamCaptureStatusNone;
    AtenTensorHandle result = nullptr;
    check_torch(aoti_torch_empty_strided(
                    0, nullptr, nullptr, aoti_torch_dtype_int64(),
                    captured ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu(),
                    captured ? q.get_device_index() : 0, &result),
                "attention");
    return Tensor(result);
  }

  // Sets args, but for the pointers. Returns why this attention stays torch's.
  static std::optional<Left> problem(const Inputs& in, const AttentionCall& call, bool backward,
                                     cuda::AttentionArgs* args) {
    const auto& [q, k, v, bias] = in;
    for (const Tensor* t : {&q, &k, &v}) {
      if (!is_ours<Backend>(*t, q) || t->dim() != 4) return Left::kOther;
    }
    const Sizes n = sizes_of(q), keys = sizes_of(k);
    if (keys[0] != n[0] || keys[1] != n[1] || keys[3] != n[3]) return Left::kOther;
    if (bias &&
        (!is_ours<Backend>(*bias, q) || sizes_of(*bias) != Sizes{n[0], n[1], n[2], keys[2]})) {
      return Left::kOther;
    }
    if (call.dropout != 0) return Left::kDropout;
    if (sizes_of(v) != keys) return Left::kHeads;
    const auto made = attention_args(q, k, bias, call.causal, call.scale);
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
