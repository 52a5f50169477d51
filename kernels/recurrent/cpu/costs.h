// What was timed about recurrent layers on the CPU: the numbers that csrc/recurrent_cpu.h and
// csrc/recurrent_weights_backward_cpu.cpp compare sizes with.
#pragma once

#include <cstdint>

namespace my_ops::cpu {

struct RecurrentCosts {
  int64_t grain = 2048;              // units per thread: each costs four exps
  int64_t grain_products = 1 << 20;  // multiplications per thread: 10 us or more
  int64_t grain_pack = 1 << 15;      // weights packed per thread: 10 us or more
  int64_t rows_of_a_read = 16;       // reading a weight takes as long as multiplying it so often
  int64_t cache = 1 << 20;           // bytes of the smallest common second-level cache
  // Where ATen's products are faster, as packing the weights costs more than it saves: up to so
  // many steps, up to so many passes over all weights that a thread saves, beyond so many weights a
  // step.
  int64_t few_steps = 3;             // by_units
  int64_t few_passes = 8;            // by_units
  int64_t weights_a_step = 1 << 15;  // by_rows, unless there are
  int64_t many_rows = 64;            // so many rows, for which packing takes little
  // Of a matrix: below so many ATen's products are faster, with several threads and with one; and
  // so many are multiplied at a time, which the third-level cache holds.
  int64_t few_rows = 16;
  int64_t few_rows_of_a_thread = 64;
  int64_t rows_together = 512;
  // Products of gradients up to which ATen's take longer to begin.
  int64_t few_products = 1 << 13;  // multiplications: about 1 us
  int64_t few_terms = 256;         // of a sum, which is as long as it is inaccurate
};

}  // namespace my_ops::cpu
