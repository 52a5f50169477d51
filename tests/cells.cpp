// Runs a recurrent cell over some steps, forward and backward, in float64 on the CPU:
// test_cells.py. Reads int64 numbers, cell, steps, batch, inputs and hidden, then doubles: the
// arrays of cpu::RecurrentSequence and RecurrentSequenceBackward that are read, in the order of
// main(). Writes those that are written.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "recurrent/cells/gru.h"
#include "recurrent/cells/lltm.h"
#include "recurrent/cells/lstm.h"
#include "recurrent/cpu.h"

namespace my_ops::cpu {

MY_OPS_RECURRENT_CPU(LltmCell, double)
MY_OPS_RECURRENT_CPU(LstmCell, double)
MY_OPS_RECURRENT_CPU(GruCell, double)

}  // namespace my_ops::cpu

using namespace my_ops;

namespace {

using Array = std::vector<double>;

template <typename T>
std::vector<T> read(int64_t count) {
  std::vector<T> values(count);
  if (std::fread(values.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) {
    std::exit(1);
  }
  return values;
}

void write(const Array& values) {
  std::fwrite(values.data(), sizeof(double), values.size(), stdout);
}

Array packed(const Array& b, int64_t row, int64_t col, int64_t k, int64_t n) {
  Array result(cpu::packed_size<double>(k, n));
  cpu::pack(b.data(), row, col, k, n, result.data());
  return result;
}

template <typename Cell>
void run(int64_t steps, int64_t batch, int64_t inputs, int64_t hidden) {
  const int64_t gates = Cell::kGates * hidden, terms = kTerms<Cell> * hidden;
  const int64_t state = batch * hidden, carried_size = Cell::kCarried * state;
  const Array input = read<double>(steps * batch * inputs);
  const Array weights_x = read<double>(gates * inputs);
  const Array weights_h = read<double>(gates * hidden);
  const Array bias = read<double>(terms);
  const Array h0 = read<double>(state), carried0 = read<double>(carried_size);
  const Array grad_output = read<double>(steps * state), grad_h_n = read<double>(state);
  const Array grad_carried_n = read<double>(carried_size);

  Array output(steps * state), carried_n(carried_size);
  Array saved(steps * batch * Cell::kSaved * hidden), carried(steps * carried_size);
  {
    const Array packed_x = packed(weights_x, 1, inputs, inputs, gates);
    const Array packed_h = packed(weights_h, 1, hidden, hidden, gates);
    Array workspace(2 * batch * gates);
    cpu::recurrent_sequence<Cell, double>({.input = input.data(),
                                           .bias = bias.data(),
                                           .weights_x = packed_x.data(),
                                           .weights_h = packed_h.data(),
                                           .h0 = h0.data(),
                                           .carried0 = carried0.data(),
                                           .lengths = nullptr,
                                           .output = output.data(),
                                           .carried_n = carried_n.data(),
                                           .saved = saved.data(),
                                           .carried = carried.data(),
                                           .workspace = workspace.data(),
                                           .steps = steps,
                                           .batch = batch,
                                           .inputs = inputs,
                                           .hidden = hidden},
                                          0, batch);
  }
  Array grad_terms(steps * batch * terms), grad_h0(state), grad_carried0(carried_size);
  const Array packed_h = packed(weights_h, hidden, 1, gates, hidden);
  Array workspace(state);
  cpu::recurrent_sequence_backward<Cell, double>({.grad_output = grad_output.data(),
                                                  .grad_h_n = grad_h_n.data(),
                                                  .grad_carried_n = grad_carried_n.data(),
                                                  .saved = saved.data(),
                                                  .carried = carried.data(),
                                                  .output = output.data(),
                                                  .h0 = h0.data(),
                                                  .carried0 = carried0.data(),
                                                  .weights_h = packed_h.data(),
                                                  .grad_terms = grad_terms.data(),
                                                  .grad_h0 = grad_h0.data(),
                                                  .grad_carried0 = grad_carried0.data(),
                                                  .workspace = workspace.data(),
                                                  .steps = steps,
                                                  .batch = batch,
                                                  .hidden = hidden},
                                                 0, batch);
  write(output);
  write(carried_n);
  write(grad_terms);
  write(grad_h0);
  write(grad_carried0);
}

}  // namespace

int main() {
  const auto problem = read<int64_t>(5);
  constexpr decltype(&run<LltmCell>) kRuns[] = {run<LltmCell>, run<LstmCell>, run<GruCell>};
  kRuns[problem[0]](problem[1], problem[2], problem[3], problem[4]);
}
