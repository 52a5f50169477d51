// A cell that my_ops.cell printed, in own.h, in the engine on the CPU: beside the shipped one that
// computes the same, whose header and name the compiler is given. Prints the largest difference in
// float and in double, relative to the largest value, of what a step returns, forward and backward,
// and then the largest change of what is carried if the cell is shut.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "own.h"
#include "recurrent/cpu/cpu.h"
#include SHIPPED_HEADER

namespace my_ops::cpu {

MY_OPS_RECURRENT_CPU(OwnCell)
MY_OPS_RECURRENT_CPU(SHIPPED)

}  // namespace my_ops::cpu

namespace {

using my_ops::SHIPPED, my_ops::OwnCell, my_ops::kTerms;

constexpr int64_t kBatch = 5, kHidden = 37, kAll = kBatch * kHidden;

template <typename T>
using Array = std::vector<T>;

template <typename T>
Array<T> drawn(int64_t values, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Array<T> array(values * kAll);
  for (T& value : array) value = T(normal(random));
  return array;
}

template <typename Cell, typename T>
std::vector<Array<T>> results() {
  const Array<T> x = drawn<T>(Cell::kGates, 1), p = drawn<T>(Cell::kGates, 2), h = drawn<T>(1, 3),
                 c = drawn<T>(1, 4), grad_h = drawn<T>(1, 5), grad_c = drawn<T>(1, 6);
  Array<T> new_h(kAll), new_c(kAll), saved(Cell::kSaved * kAll), terms(kTerms<Cell> * kAll),
      direct(kAll), before(kAll);
  my_ops::RecurrentStep<T, T> step{};
  step.gates_x = x.data();
  step.gates_h = p.data();
  step.h = h.data();
  step.carried = c.data();
  step.new_h = new_h.data();
  step.new_carried = new_c.data();
  step.saved = saved.data();
  step.batch = kBatch;
  step.hidden = kHidden;
  my_ops::cpu::recurrent_step<Cell>(step, {0, kBatch}, {0, kHidden});
  my_ops::RecurrentStepBackward<T, T> back{};
  back.grad_h = grad_h.data();
  back.grad_carried = grad_c.data();
  back.saved = saved.data();
  back.h = h.data();
  back.carried = c.data();
  back.grad_terms = terms.data();
  back.grad_h_direct = direct.data();
  back.grad_carried_before = before.data();
  back.batch = kBatch;
  back.hidden = kHidden;
  my_ops::cpu::recurrent_step_backward<Cell>(back, 0, kBatch);
  return {new_h, new_c, terms, direct, before};
}

template <typename T>
double difference() {
  const auto ours = results<OwnCell, T>(), theirs = results<SHIPPED, T>();
  double worst = 0;
  for (size_t k = 0; k < ours.size(); ++k) {
    double scale = 1e-30, apart = 0;
    for (size_t j = 0; j < theirs[k].size(); ++j) {
      scale = std::fmax(scale, std::fabs(double(theirs[k][j])));
      const double gap = std::fabs(double(ours[k][j]) - double(theirs[k][j]));
      apart = gap <= apart ? apart : gap;  // NaN stays
    }
    worst = apart / scale <= worst ? worst : apart / scale;
  }
  return worst;
}

double change_of_shut() {
  double z[kTerms<OwnCell>], saved[OwnCell::kSaved], carried[1] = {0.7};
  for (int gate = 0; gate < OwnCell::kGates; ++gate) {
    const double share = OwnCell::shut<double>(gate), product = 0.3 * (gate - 1);
    z[gate] = my_ops::is_sum<OwnCell>(gate) ? share + product : product;
    if (!my_ops::is_sum<OwnCell>(gate)) z[my_ops::input_term<OwnCell>(gate)] = share;
  }
  const double h = OwnCell::forward<my_ops::cpu::CellMath>(z, 0.5, carried, saved);
  return std::isfinite(h) ? std::fabs(carried[0] - 0.7) : INFINITY;
}

}  // namespace

int main() {
  std::printf("%g %g %g\n", difference<float>(), difference<double>(), change_of_shut());
}
