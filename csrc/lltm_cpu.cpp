// LLTM on the CPU. The 16-bit types are computed in float from end to end.
#include "binding_cpu.h"
#include "gemm_checks.h"
#include "lltm_ops.h"

namespace my_ops {
namespace {

constexpr int64_t kGrain = 2048;  // units a thread: each costs four exps

struct Cpu {
  explicit Cpu(const Tensor&) {}

  static ScalarType storage(ScalarType dtype) { return compute_dtype(dtype); }

  void matmul(const Tensor& a, const Tensor& b, const Tensor& out) const {
    aten_gemm(product(a, b, out));
  }
  void cell(const CellTensors& step) const {
    rows(step.new_h, [&]<typename T>(int64_t begin, int64_t end) {
      cpu::lltm_cell(step.args<T, T>(), begin, end);
    });
  }
  void cell_backward(const CellBackwardTensors& step) const {
    rows(step.old_cell, [&]<typename T>(int64_t begin, int64_t end) {
      cpu::lltm_cell_backward(step.args<T, T>(), begin, end);
    });
  }
  template <typename F>
  static void dispatch(ScalarType dtype, const F& f) {
    if (dtype == ScalarType::Double) {
      f.template operator()<double>();
    } else {
      f.template operator()<float>();
    }
  }
  template <typename Ragged>
  void ragged(const Ragged& args) const {
    cpu::lltm_ragged(args);
  }

  bool sequence(const SequenceTensors&) const { return false; }
  bool sequence_backward(const SequenceBackwardTensors&) const { return false; }

 private:
  template <typename F>
  static void rows(const Tensor& like, const F& f) {
    parallel(like.size(0), kGrain / (like.size(1) + 1) + 1, [&](int64_t begin, int64_t end) {
      dispatch(like.scalar_type(), [&]<typename T>() { f.template operator()<T>(begin, end); });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(my_ops, CPU, m) {
  m.impl("lltm_cell", TORCH_BOX(&lltm_cell<Cpu>));
  m.impl("lltm_cell_forward", TORCH_BOX(&lltm_cell_forward<Cpu>));
  m.impl("lltm_cell_backward", TORCH_BOX(&lltm_cell_backward<Cpu>));
  m.impl("lltm", TORCH_BOX(&lltm<Cpu>));
  m.impl("lltm_forward", TORCH_BOX(&lltm_forward<Cpu>));
  m.impl("lltm_backward", TORCH_BOX(&lltm_backward<Cpu>));
}

}  // namespace my_ops
