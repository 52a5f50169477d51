// Interface between the module and what the machine's C++ compiler makes of a cell that a program
// defines (kernels/recurrent/cpu/own.h). Each gives the other functions of recurrent.h by address.
// Acc is float or double; a table for float has the 16-bit types too.
#pragma once

#include <cstdint>

#include "convert.h"
#include "recurrent.h"

namespace my_ops::cpu {

// c[m, n] = a[m, k] @ packed, with strides in elements.
template <typename T>
using ProductFunction = void (*)(const T* a, int64_t a_row, const T* packed, T* c, int64_t c_row,
                                 int64_t m, int64_t n, int64_t k);
template <typename From, typename To>
using ConvertFunction = void (*)(const From* from, int64_t n, To* to);

// What the module has for every cell.
struct EngineFunctions {
  ProductFunction<float> product_of_float;
  ProductFunction<double> product_of_double;
  ConvertFunction<Half, float> widen_half;
  ConvertFunction<BFloat16, float> widen_bfloat16;
  ConvertFunction<float, Half> narrow_half;
  ConvertFunction<float, BFloat16> narrow_bfloat16;
};

template <typename Acc>
struct StepFunctions {
  CellSizes sizes;
  void (*step)(const RecurrentStep<Acc, Acc>& args, Range rows, Range units);
  void (*units)(const RecurrentStep<Acc, Acc>& args, const Acc* weights_h, Range units);
  void (*step_backward)(const RecurrentStepBackward<Acc, Acc>& args, int64_t begin, int64_t end);
};

template <typename T, typename Acc>
struct SequenceFunctions {
  void (*sequence)(const RecurrentSequence<T, Acc>& args, int64_t begin, int64_t end,
                   Acc* workspace);
  void (*sequence_backward)(const RecurrentSequenceBackward<T, Acc>& args, int64_t begin,
                            int64_t end, Acc* workspace);
};

// A 16-bit type's.
template <typename T>
struct EdgeFunctions : SequenceFunctions<T, float> {
  void (*step_backward)(const RecurrentStepBackward<T, float>& args, int64_t begin, int64_t end,
                        float* workspace);
};

// What a cell has.
template <typename Acc>
struct CellFunctions : StepFunctions<Acc>, SequenceFunctions<Acc, Acc> {};
template <>
struct CellFunctions<float> : StepFunctions<float>,
                              SequenceFunctions<float, float>,
                              EdgeFunctions<Half>,
                              EdgeFunctions<BFloat16> {};

// The function that the cell's library exports as my_ops_own_cell. It returns CellFunctions<Acc>,
// and keeps the functions given.
using OwnCellEntry = const void* (*)(const EngineFunctions* engine);

}  // namespace my_ops::cpu
