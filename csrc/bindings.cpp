// The ops' schemas, registered when the module is loaded. The kernels are in elementwise_*, gemm_*,
// lltm_*, lstm_* and gru_*.cpp.
#include "elementwise_checks.h"

namespace my_ops {
namespace {

int64_t add_one_int(int64_t x) { return static_cast<int64_t>(static_cast<uint64_t>(x) + 1); }

Tensor fill_index(int64_t height, int64_t width, std::optional<ScalarType> dtype_,
                  std::optional<torch::stable::Device> device) {
  const ScalarType dtype = dtype_.value_or(ScalarType::Float);
  check_fill_index(height, width, dtype);
  const Sizes sizes{height, width};
  Tensor out;
  try {
    out = aten("aten::empty", "memory_format", sizes, std::optional(dtype), std::nullopt, device,
               std::nullopt, std::nullopt);
  } catch (const std::exception& error) {
    std::string name = "cpu";
    if (device && device->is_cuda()) {
      name = device->has_index() ? "cuda:" + std::to_string(device->index()) : "cuda";
    }
    fail_allocation(error, sizes, dtype, name);
  }
  std::array<StableIValue, 1> stack{torch::stable::detail::from(out)};
  check_torch(torch_call_dispatcher("my_ops::fill_index", "out", stack.data(), TORCH_ABI_VERSION),
              "fill_index");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(my_ops, m) {
  m.def("add_one(Tensor x) -> Tensor");
  m.def("add_one.int(int x) -> int");
  m.def("custom_add(Tensor a, Tensor b) -> Tensor");
  m.def("d_sigmoid(Tensor z) -> Tensor");
  m.def("d_sigmoid_backward(Tensor grad, Tensor z) -> Tensor");
  m.def("round_ste(Tensor x) -> Tensor");
  m.def(
      "fill_index(SymInt height, SymInt width, *, ScalarType? dtype=None, Device? device=None)"
      " -> Tensor");
  m.def("fill_index.out(Tensor(a!) out) -> ()");
  m.def("gemm(Tensor a, Tensor b, str? precision=None) -> Tensor");
  m.def("gemm.out(Tensor a, Tensor b, Tensor(a!) out, str? precision=None) -> ()");
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, str activation='none',"
      " Tensor? residual=None, str? precision=None, Tensor? packed=None) -> Tensor");
  m.def("prepack(Tensor weight) -> Tensor");
  m.def(
      "lltm_cell(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) -> "
      "(Tensor new_h, Tensor new_cell)");
  m.def(
      "lltm_cell_forward(Tensor input, Tensor weights, Tensor bias, Tensor old_h, Tensor old_cell) "
      "-> (Tensor new_h, Tensor new_cell, Tensor gates)");
  m.def(
      "lltm_cell_backward(Tensor? grad_h, Tensor? grad_cell, Tensor gates, Tensor old_cell) -> "
      "(Tensor grad_gates, Tensor grad_old_cell)");
  m.def(
      "lltm(Tensor input, Tensor h0, Tensor c0, Tensor weights, Tensor bias, Tensor? lengths=None, "
      "Tensor? reset=None, Tensor? zoneout=None) -> (Tensor output, Tensor h_n, Tensor c_n)");
  m.def(
      "lltm_forward(Tensor input, Tensor h0, Tensor c0, Tensor weights, Tensor bias, Tensor? "
      "lengths=None, Tensor? reset=None, Tensor? zoneout=None) -> (Tensor output, Tensor h_n, "
      "Tensor c_n, Tensor gates, "
      "Tensor cells)");
  m.def(
      "lltm_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor gates, Tensor "
      "cells, Tensor c0, Tensor weights, Tensor? lengths=None, Tensor? reset=None, Tensor? "
      "zoneout=None) -> (Tensor "
      "grad_gates, Tensor grad_h0, Tensor grad_c0)");
  m.def(
      "lstm_cell(Tensor input, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? "
      "bias_hh, Tensor old_h, Tensor old_cell) -> (Tensor new_h, Tensor new_cell)");
  m.def(
      "lstm_cell_forward(Tensor input, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, "
      "Tensor? bias_hh, Tensor old_h, Tensor old_cell) -> (Tensor new_h, Tensor new_cell, Tensor "
      "gates)");
  m.def(
      "lstm_cell_backward(Tensor? grad_h, Tensor? grad_cell, Tensor gates, Tensor old_cell) -> "
      "(Tensor grad_gates, Tensor grad_old_cell)");
  m.def(
      "lstm(Tensor input, Tensor h0, Tensor c0, Tensor weight_ih, Tensor weight_hh, Tensor? "
      "bias_ih=None, Tensor? bias_hh=None, Tensor? lengths=None, Tensor? reset=None, Tensor? "
      "zoneout=None) -> (Tensor "
      "output, Tensor h_n, Tensor c_n)");
  m.def(
      "lstm_forward(Tensor input, Tensor h0, Tensor c0, Tensor weight_ih, Tensor weight_hh, "
      "Tensor? bias_ih=None, Tensor? bias_hh=None, Tensor? lengths=None, Tensor? reset=None, "
      "Tensor? zoneout=None) -> "
      "(Tensor output, Tensor h_n, Tensor c_n, Tensor gates, Tensor cells)");
  m.def(
      "lstm_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor? grad_c_n, Tensor gates, Tensor "
      "cells, Tensor c0, Tensor weight_hh, Tensor? lengths=None, Tensor? reset=None, Tensor? "
      "zoneout=None) -> (Tensor "
      "grad_gates, Tensor grad_h0, Tensor grad_c0)");
  m.def(
      "gru_cell(Tensor input, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? "
      "bias_hh, Tensor old_h) -> Tensor");
  m.def(
      "gru_cell_forward(Tensor input, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? "
      "bias_hh, Tensor old_h) -> (Tensor new_h, Tensor gates)");
  m.def(
      "gru_cell_backward(Tensor? grad_h, Tensor gates, Tensor old_h) -> (Tensor grad_gates, Tensor "
      "grad_old_h)");
  m.def(
      "gru(Tensor input, Tensor h0, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih=None, "
      "Tensor? bias_hh=None, Tensor? lengths=None, Tensor? reset=None, Tensor? zoneout=None) -> "
      "(Tensor output, Tensor "
      "h_n)");
  m.def(
      "gru_forward(Tensor input, Tensor h0, Tensor weight_ih, Tensor weight_hh, Tensor? "
      "bias_ih=None, Tensor? bias_hh=None, Tensor? lengths=None, Tensor? reset=None, Tensor? "
      "zoneout=None) -> (Tensor "
      "output, Tensor h_n, Tensor gates)");
  m.def(
      "gru_backward(Tensor? grad_output, Tensor? grad_h_n, Tensor gates, Tensor output, Tensor h0, "
      "Tensor weight_hh, Tensor? lengths=None, Tensor? reset=None, Tensor? zoneout=None) -> "
      "(Tensor grad_gates, Tensor "
      "grad_h0)");
  m.def(
      "recurrent_weights_backward(Tensor grad_gates, Tensor input, Tensor h0, Tensor output, "
      "Tensor? weight_x, Tensor? reset, int gates) -> (Tensor grad_input, Tensor grad_weight_x, "
      "Tensor grad_weight_h, Tensor grad_bias_x, Tensor grad_bias_h)");
  m.def(
      "recurrent_layers(str cell, Tensor input, Tensor[] states, Tensor[] parameters, int layers, "
      "bool bidirectional, bool save) -> Tensor[]");
  m.def(
      "recurrent_layers_backward(str cell, Tensor? grad_output, Tensor? grad_h_n, Tensor? "
      "grad_c_n, Tensor input, Tensor[] states, Tensor[] parameters, int layers, bool "
      "bidirectional, Tensor[] saved, bool needs_input, bool needs_states, bool needs_parameters) "
      "-> Tensor[]");
  m.def(
      "recurrent_step_backward(str cell, Tensor? grad_h, Tensor? grad_cell, Tensor gates, Tensor "
      "input, Tensor[] states, Tensor[] parameters, bool needs_input, bool needs_states, bool "
      "needs_parameters) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(my_ops, CompositeExplicitAutograd, m) {
  m.impl("add_one.int", TORCH_BOX(&add_one_int));
  m.impl("fill_index", TORCH_BOX(&fill_index));
}

}  // namespace my_ops
