// What was timed about recurrent layers: the numbers that their plans compare. Rows are those of
// the batch. The values are an H200's, with LSTM and GRU for cells of four gates and of three;
// other devices use them too.
#pragma once

#include <cstdint>

namespace my_ops::cuda {

struct RecurrentCosts {
  // Index of cells: 0 up to three gates, 1 with more. Index of widths: 0 in 16 bits, 1 in float.
  struct Warp {
    // Rows of an SM up to which warps are faster than blocks, [width][cell][up to 32, 64 units].
    int64_t rows_beside_blocks[2][2][2] = {{{4, 0}, {4, 1}}, {{8, 4}, {8, 4}}};
    // With more than 64 units: rows of an SM beyond which warpgroups are faster, and rows of a
    // cluster from which on warps are faster than clusters.
    int64_t rows_beside_warpgroups = 16;
    int rows_of_clusters = 4;
  } warp;
  struct Block {
    int64_t short_step = 192;             // gates * units up to which blocks beat clusters
    double rows_beside_clusters = 0.5;    // else the rows of an SM up to which clusters are faster
    int64_t rows_beside_warpgroups = 16;  // of an SM, beyond `units_beside_warpgroups` units
    int64_t units_beside_warpgroups = 64;
    int64_t rows_beside_grids = 2;  // of an SM, in float where there are no clusters
  } block;
  struct Grid {
    // Rows of a group up to which one launch for all steps is faster than a product and a cell for
    // each step, [backward][width][cell][up to 256, 512, 1024, more units].
    int64_t rows[2][2][2][4] = {
        {{{96, 64, 64, 40}, {96, 56, 48, 32}}, {{128, 104, 88, 0}, {112, 96, 64, 0}}},
        {{{56, 36, 40, 24}, {48, 28, 36, 16}}, {{88, 72, 44, 0}, {72, 56, 26, 0}}},
    };
    int64_t rows_of_wide_blocks = 8;  // of a group, beyond which a block takes 32 units
  } grid;
  struct Warpgroup {
    int64_t fewest_units = 72, most_units = 1024;
    // Beyond so many units, the waves up to which it is faster than a product per step, [width].
    int64_t units_of_any_wave = 512;
    int64_t waves[2] = {4, 8};
    // Rows of a grid's block of 16 units beyond which warpgroups are faster in float; backward up
    // to 128, 256 and 512 units they are others.
    int64_t rows_beside_grids = 16;
    int64_t backward_rows_beside_grids[3] = {80, 40, 24};
    // Rows times units of an SM from which on they are faster in 16 bits; the first forward up to
    // three gates.
    int64_t units_beside_grids[2] = {500, 310};
    // Backward: the waves up to which it is faster than a product per step, of clusters of eight
    // blocks and then of four; in float beyond 512 units of eight, up to 256 and 512 units of four.
    int64_t backward_waves_of_eight = 1, backward_waves_of_four = 2;
    int64_t backward_waves_float = 5;
    int64_t backward_waves_middle[2] = {3, 2};  // [cell], in float from 257 to 512 units
  } warpgroup;
  // A product in TF32 and a kernel for each step are faster than warpgroups in float beyond so many
  // rows: forward beyond so many gates * units, backward up to and beyond so many units.
  struct Tf32 {
    int64_t rows = 256, gate_units = 2560;
    int64_t backward_units = 384, backward_rows_of_few_units = 1023;
  } tf32;
  // The gradients of the input and the parameters: one launch is faster on the host up to so many
  // rows of all steps and multiply-adds of all products, and up to 17 us slower on the GPU.
  struct WeightsBackward {
    int64_t rows = 256, work = int64_t{1} << 28;
  } weights_backward;
};

inline constexpr RecurrentCosts kRecurrentCosts{};

}  // namespace my_ops::cuda
