// The engine on the CPU: the instantiations for a cell.
#pragma once

#include "recurrent/cpu/walk.h"

// For use in namespace my_ops::cpu. These are specializations, because only functions, not
// templates, can have clones per instruction set.
#define MY_OPS_RECURRENT_CPU_OF(Cell, T)                                                         \
  template <>                                                                                    \
  MY_OPS_CLONES void recurrent_step<Cell>(const RecurrentStep<T, T>& args, Range rows,           \
                                          Range units) {                                         \
    step_rows<Cell>(args, rows, units);                                                          \
  }                                                                                              \
  template <>                                                                                    \
  void recurrent_units<Cell>(const RecurrentStep<T, T>& args, const T* weights_h, Range units) { \
    step_of_units<Cell>(args, weights_h, units);                                                 \
  }                                                                                              \
  template <>                                                                                    \
  MY_OPS_CLONES void recurrent_step_backward<Cell>(const RecurrentStepBackward<T, T>& args,      \
                                                   int64_t begin, int64_t end) {                 \
    const FlushDenormals flush;                                                                  \
    step_backward_rows<Cell, T>(args, {begin, end});                                             \
  }                                                                                              \
  MY_OPS_RECURRENT_CPU_WALKS(Cell, T, T)

#define MY_OPS_RECURRENT_CPU_16_BITS(Cell, T)                                                    \
  template <>                                                                                    \
  void recurrent_step_backward<Cell>(const RecurrentStepBackward<T, float>& args, int64_t begin, \
                                     int64_t end, float* workspace) {                            \
    step_backward_of_edges<Cell>(args, begin, end, workspace);                                   \
  }                                                                                              \
  MY_OPS_RECURRENT_CPU_WALKS(Cell, T, float)

#define MY_OPS_RECURRENT_CPU_WALKS(Cell, T, Acc)                                                   \
  template <>                                                                                      \
  void recurrent_sequence<Cell>(const RecurrentSequence<T, Acc>& args, int64_t begin, int64_t end, \
                                Acc* workspace) {                                                  \
    walk<Cell>(args, begin, end, workspace);                                                       \
  }                                                                                                \
  template <>                                                                                      \
  void recurrent_sequence_backward<Cell>(const RecurrentSequenceBackward<T, Acc>& args,            \
                                         int64_t begin, int64_t end, Acc* workspace) {             \
    const FlushDenormals flush;                                                                    \
    walk_backward<Cell>(args, begin, end, workspace);                                              \
  }

// All of them.
#define MY_OPS_RECURRENT_CPU(Cell)         \
  MY_OPS_RECURRENT_CPU_OF(Cell, float)     \
  MY_OPS_RECURRENT_CPU_OF(Cell, double)    \
  MY_OPS_RECURRENT_CPU_16_BITS(Cell, Half) \
  MY_OPS_RECURRENT_CPU_16_BITS(Cell, BFloat16)
