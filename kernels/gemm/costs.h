// What the choice among the kernels of a product has been measured to cost and to save. All tuned
// numbers of the plans stand here and nowhere else; docs/notes/gemm.md says how they were found.
#pragma once

#include <cstdint>

#include "device.h"

namespace my_ops::cuda {

// Sizes are in elements, work in multiply-adds.
struct GemmCosts {
  struct Fp32Skinny {
    int64_t few_min_columns, few_min_k, few_min_weight;  // few rows: n, k, n * k
    int64_t min_k, max_columns;                          // more rows: k, n
    int64_t max_columns_n_fast;  // of n, where more than 32 rows meet a b with contiguous n
  } fp32_skinny;

  struct Fp32Sm90 {
    int64_t min_side, min_k;                     // of m and n; of k
    int64_t packed_min_rows, packed_min_weight;  // with a packed b: of m; of n and of k
    // In multiply-adds of a library: launches, a second pass over k above long_k, and the split of
    // an element whose k is contiguous or not.
    double launches, second_pass, element, strided_element;
    int64_t long_k;
    // One product per element at TF32's precision: from this much work on; and beside a library of
    // that precision, launches, an element, and the gain where k is contiguous in neither operand.
    double single_min_work, tf32_launches, tf32_element, tf32_strided_gain;
    double bf16_min_work;  // from here on the bf16 split is launched
    // Of tiles, per unit of area, against the large one.
    double wide_slowdown, medium_slowdown, small_slowdown, pieces_slowdown;
    // Of a sum in pieces of k, in elements of a large tile's output times blocks of k.
    double reduce, reduce_element;
  } fp32_sm90;

  struct HalfSm90 {
    // Microseconds of 64 of k in a tile, and of a tile's end.
    double large_us, wide_us, medium_us, small_us, end_us;
    // Finishers: the share of the last wave that is busy, and k, the second for slow epilogues.
    double finishers_min_share;
    int64_t finishers_min_k, finishers_min_k_slow;
    // Rows that are not whole vectors, operands copied or read in place: m, n and k; tiles; k.
    struct Odd {
      int64_t min_size, min_tiles, max_k_per_tile;
    } copied, in_place;
    int64_t epilogue_min_side, epilogue_max_k, epilogue_max_outputs;  // small layers
  } half_sm90;

  struct Small {
    int64_t max_outputs, many_outputs, max_work_of_many;
    int64_t max_work_8_bytes, max_work_4_bytes, max_work_2_bytes;  // by the size of an element
    int64_t long_k, max_work_of_long_k;                            // 16 bits in whole vectors
    int64_t tile_min_side, tile_min_k;  // from here on tiles serve better, where one has to serve
  } small;
};

inline constexpr GemmCosts kH200Costs{
    .fp32_skinny = {.few_min_columns = 256,
                    .few_min_k = 1024,
                    .few_min_weight = int64_t{1} << 21,
                    .min_k = 4096,
                    .max_columns = 8192,
                    .max_columns_n_fast = 128},
    .fp32_sm90 = {.min_side = 96,
                  .min_k = 192,
                  .packed_min_rows = 9,
                  .packed_min_weight = 2048,
                  .launches = 1.5e8,
                  .second_pass = 1.2e8,
                  .element = 100,
                  .strided_element = 150,
                  .long_k = 2048,
                  .single_min_work = 4e9,
                  .tf32_launches = 8e9,
                  .tf32_element = 1100,
                  .tf32_strided_gain = 2.3,
                  .bf16_min_work = 5e8,
                  .wide_slowdown = 1.38,
                  .medium_slowdown = 1.55,
                  .small_slowdown = 2.05,
                  .pieces_slowdown = 1.04,
                  .reduce = 60e3,
                  .reduce_element = 0.04},
    .half_sm90 = {.large_us = 0.70,
                  .wide_us = 0.53,
                  .medium_us = 0.37,
                  .small_us = 0.26,
                  .end_us = 1.5,
                  .finishers_min_share = 0.92,
                  .finishers_min_k = 1024,
                  .finishers_min_k_slow = 2048,
                  .copied = {.min_size = 128, .min_tiles = 32, .max_k_per_tile = 64},
                  .in_place = {.min_size = 64, .min_tiles = 16, .max_k_per_tile = 128},
                  .epilogue_min_side = 16,
                  .epilogue_max_k = 1024,
                  .epilogue_max_outputs = int64_t{1} << 20},
    .small = {.max_outputs = int64_t{1} << 17,
              .many_outputs = int64_t{1} << 15,
              .max_work_of_many = int64_t{1} << 21,
              .max_work_8_bytes = int64_t{1} << 20,
              .max_work_4_bytes = int64_t{1} << 22,
              .max_work_2_bytes = int64_t{1} << 21,
              .long_k = 256,
              .max_work_of_long_k = int64_t{1} << 20,
              .tile_min_side = 16,
              .tile_min_k = 96},
};

// Those of the H200 serve everywhere until another GPU has its own.
constexpr const GemmCosts& costs_of(const DeviceFacts&) { return kH200Costs; }

}  // namespace my_ops::cuda
