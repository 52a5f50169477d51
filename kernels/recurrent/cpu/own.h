// The engine on the CPU for a cell that a program defines: the machine's C++ compiler gets this,
// the cell's header and one of the macros at the end. tools/build/kernel_text.py puts this and what
// it includes into one file.
#pragma once

#include <limits>

#include "own_cell.h"
#include "recurrent/cpu/cpu.h"

namespace my_ops::cpu {

inline EngineFunctions engine;

template <>
inline void product(const float* a, int64_t a_row, const float* packed, float* c, int64_t c_row,
                    int64_t m, int64_t n, int64_t k) {
  engine.product_of_float(a, a_row, packed, c, c_row, m, n, k);
}
template <>
inline void product(const double* a, int64_t a_row, const double* packed, double* c, int64_t c_row,
                    int64_t m, int64_t n, int64_t k) {
  engine.product_of_double(a, a_row, packed, c, c_row, m, n, k);
}
inline void convert(const Half* from, int64_t n, float* to) { engine.widen_half(from, n, to); }
inline void convert(const BFloat16* from, int64_t n, float* to) {
  engine.widen_bfloat16(from, n, to);
}
inline void convert(const float* from, int64_t n, Half* to) { engine.narrow_half(from, n, to); }
inline void convert(const float* from, int64_t n, BFloat16* to) {
  engine.narrow_bfloat16(from, n, to);
}

template <typename Cell, typename Acc>
StepFunctions<Acc> step_functions() {
  return {kCellSizes<Cell>, &recurrent_step<Cell>, &recurrent_units<Cell>,
          [](const RecurrentStepBackward<Acc, Acc>& args, int64_t begin, int64_t end) {
            recurrent_step_backward<Cell>(args, begin, end);
          }};
}

template <typename Cell, typename T, typename Acc>
SequenceFunctions<T, Acc> sequence_functions() {
  return {&recurrent_sequence<Cell, T, Acc>, &recurrent_sequence_backward<Cell, T, Acc>};
}

template <typename Cell, typename T>
EdgeFunctions<T> edge_functions() {
  return {sequence_functions<Cell, T, float>(),
          [](const RecurrentStepBackward<T, float>& args, int64_t begin, int64_t end,
             float* workspace) { recurrent_step_backward<Cell>(args, begin, end, workspace); }};
}

template <typename Cell, typename Acc>
CellFunctions<Acc> cell_functions() {
  const auto of_steps = step_functions<Cell, Acc>();
  const auto of_all = sequence_functions<Cell, Acc, Acc>();
  if constexpr (sizeof(Acc) == sizeof(float)) {
    return {of_steps, of_all, edge_functions<Cell, Half>(), edge_functions<Cell, BFloat16>()};
  } else {
    return {of_steps, of_all};
  }
}

}  // namespace my_ops::cpu

#define MY_OPS_OWN_CELL_FLOAT(Cell)            \
  namespace my_ops::cpu {                      \
  MY_OPS_RECURRENT_CPU_OF(Cell, float)         \
  MY_OPS_RECURRENT_CPU_16_BITS(Cell, Half)     \
  MY_OPS_RECURRENT_CPU_16_BITS(Cell, BFloat16) \
  }                                            \
  MY_OPS_OWN_CELL_ENTRY(Cell, float)

#define MY_OPS_OWN_CELL_DOUBLE(Cell)    \
  namespace my_ops::cpu {               \
  MY_OPS_RECURRENT_CPU_OF(Cell, double) \
  }                                     \
  MY_OPS_OWN_CELL_ENTRY(Cell, double)

#define MY_OPS_OWN_CELL_ENTRY(Cell, Acc)                                            \
  extern "C" __attribute__((visibility("default"))) const void* my_ops_own_cell(    \
      const my_ops::cpu::EngineFunctions* given) {                                  \
    static const auto functions = my_ops::cpu::cell_functions<my_ops::Cell, Acc>(); \
    my_ops::cpu::engine = *given;                                                   \
    return &functions;                                                              \
  }
