// What each kernel of a product costs and saves. All tuned numbers of the plans are declared here
// and nowhere else; benchmarks/fit_gemm.py measures a GPU and writes its values into
// fitted_costs.h. Numbers that do not depend on timing, such as limits of a kernel or of accuracy,
// are constants of a plan.
#pragma once

#include <cstdint>

namespace my_ops::cuda {

// Sizes are in elements, work in multiply-adds.
struct GemmCosts {
  struct Fp32Skinny {
    int64_t few_min_columns, few_min_input, few_min_weight;  // few rows: n, m * k, n * k
    int64_t min_k, max_columns, max_columns_many;            // more rows: k, n to 32 rows, n beyond
  } fp32_skinny;

  struct Fp32Narrow {
    int64_t max_columns;  // of the smaller operand
    // In multiply-adds of a library: launches, the end of a wave of tiles, the split of an element
    // beforehand, and the conversion of a 16-bit one to float.
    double launches, end, split_element, conversion;
    // A multiply-add, here and of operands that are split beforehand, by the larger one's type.
    struct Product {
      double here, split;
    } floats, halves;
  } fp32_narrow;

  struct Fp32Short {
    // In multiply-adds of a library: launches, a byte that is read or written, and a multiply-add.
    double launches, byte, product;
  } fp32_short;

  struct Fp32Sm90 {
    int64_t min_side, min_k;                     // of m and n; of k
    int64_t packed_min_rows, packed_min_weight;  // with a packed b: of m; of n and of k
    // In multiply-adds of a library: launches, a second pass over k, and the split of an element
    // whose k is contiguous or not.
    double launches, second_pass, element, strided_element;
    // One product per element at TF32's precision: the least work; and, compared with a library of
    // that precision, launches, an element, and the gain if k is contiguous in neither operand.
    double single_min_work, tf32_launches, tf32_element, tf32_strided_gain;
    // The time of tiles for the same area, relative to the large one.
    double wide_slowdown, medium_slowdown, small_slowdown, promoted_slowdown;
    // The sum of k-slices, in elements of a large tile's output times k-blocks.
    double reduce, reduce_element;
    double more_waves_min_gain;  // the share of a tile's cost that slices in more waves must save
    double bf16_min_work;        // below, fp32 FMAs are fast enough for data of a wide range
  } fp32_sm90;

  struct Fp32Sm80 {
    double launches, product;  // in multiply-adds of a library: a launch, and a multiply-add here
  } fp32_sm80;

  struct HalfSm90 {
    // Microseconds for 64 of k in a tile, and for a tile's end.
    double large_us, wide_us, medium_us, small_us, end_us;
    // Epilogue warps: the share of the last wave that is busy, and k; the second k is for slow
    // epilogues.
    double epilogue_warps_min_share;
    int64_t epilogue_warps_min_k, epilogue_warps_min_k_slow;
    // Unaligned rows, operands copied or read in place: m, n and k; tiles; k.
    struct Unaligned {
      int64_t min_size, min_tiles, max_k_per_tile;
    } copied, in_place;
    // Small layers; with a longer k its tiles gain more than a launch costs, on the host too.
    int64_t epilogue_min_side, epilogue_max_k, epilogue_max_outputs;
  } half_sm90;

  struct Small {
    int64_t max_outputs, many_outputs, max_work_of_many;
    int64_t max_work_8_bytes, max_work_4_bytes, max_work_2_bytes;  // by the size of an element
    int64_t long_k, max_work_of_long_k;                            // 16 bits, aligned rows
    // From here on tiles are faster, if one of the two must be used; with a side below the first
    // they are almost empty.
    int64_t tile_min_side, tile_min_work;
  } small;
};

// Calls visit(name, cost) for each cost.
template <typename Costs, typename Visit>
constexpr void for_each_cost(Costs& costs, Visit visit) {
#define MY_OPS_COST(cost) visit(#cost, costs.cost)
  MY_OPS_COST(fp32_skinny.few_min_columns);
  MY_OPS_COST(fp32_skinny.few_min_input);
  MY_OPS_COST(fp32_skinny.few_min_weight);
  MY_OPS_COST(fp32_skinny.min_k);
  MY_OPS_COST(fp32_skinny.max_columns);
  MY_OPS_COST(fp32_skinny.max_columns_many);
  MY_OPS_COST(fp32_narrow.max_columns);
  MY_OPS_COST(fp32_narrow.launches);
  MY_OPS_COST(fp32_narrow.end);
  MY_OPS_COST(fp32_narrow.split_element);
  MY_OPS_COST(fp32_narrow.conversion);
  MY_OPS_COST(fp32_narrow.floats.here);
  MY_OPS_COST(fp32_narrow.floats.split);
  MY_OPS_COST(fp32_narrow.halves.here);
  MY_OPS_COST(fp32_narrow.halves.split);
  MY_OPS_COST(fp32_short.launches);
  MY_OPS_COST(fp32_short.byte);
  MY_OPS_COST(fp32_short.product);
  MY_OPS_COST(fp32_sm90.min_side);
  MY_OPS_COST(fp32_sm90.min_k);
  MY_OPS_COST(fp32_sm90.packed_min_rows);
  MY_OPS_COST(fp32_sm90.packed_min_weight);
  MY_OPS_COST(fp32_sm90.launches);
  MY_OPS_COST(fp32_sm90.second_pass);
  MY_OPS_COST(fp32_sm90.element);
  MY_OPS_COST(fp32_sm90.strided_element);
  MY_OPS_COST(fp32_sm90.single_min_work);
  MY_OPS_COST(fp32_sm90.tf32_launches);
  MY_OPS_COST(fp32_sm90.tf32_element);
  MY_OPS_COST(fp32_sm90.tf32_strided_gain);
  MY_OPS_COST(fp32_sm90.wide_slowdown);
  MY_OPS_COST(fp32_sm90.medium_slowdown);
  MY_OPS_COST(fp32_sm90.small_slowdown);
  MY_OPS_COST(fp32_sm90.promoted_slowdown);
  MY_OPS_COST(fp32_sm90.reduce);
  MY_OPS_COST(fp32_sm90.reduce_element);
  MY_OPS_COST(fp32_sm90.more_waves_min_gain);
  MY_OPS_COST(fp32_sm90.bf16_min_work);
  MY_OPS_COST(fp32_sm80.launches);
  MY_OPS_COST(fp32_sm80.product);
  MY_OPS_COST(half_sm90.large_us);
  MY_OPS_COST(half_sm90.wide_us);
  MY_OPS_COST(half_sm90.medium_us);
  MY_OPS_COST(half_sm90.small_us);
  MY_OPS_COST(half_sm90.end_us);
  MY_OPS_COST(half_sm90.epilogue_warps_min_share);
  MY_OPS_COST(half_sm90.epilogue_warps_min_k);
  MY_OPS_COST(half_sm90.epilogue_warps_min_k_slow);
  MY_OPS_COST(half_sm90.copied.min_size);
  MY_OPS_COST(half_sm90.copied.min_tiles);
  MY_OPS_COST(half_sm90.copied.max_k_per_tile);
  MY_OPS_COST(half_sm90.in_place.min_size);
  MY_OPS_COST(half_sm90.in_place.min_tiles);
  MY_OPS_COST(half_sm90.in_place.max_k_per_tile);
  MY_OPS_COST(half_sm90.epilogue_min_side);
  MY_OPS_COST(half_sm90.epilogue_max_k);
  MY_OPS_COST(half_sm90.epilogue_max_outputs);
  MY_OPS_COST(small.max_outputs);
  MY_OPS_COST(small.many_outputs);
  MY_OPS_COST(small.max_work_of_many);
  MY_OPS_COST(small.max_work_8_bytes);
  MY_OPS_COST(small.max_work_4_bytes);
  MY_OPS_COST(small.max_work_2_bytes);
  MY_OPS_COST(small.long_k);
  MY_OPS_COST(small.max_work_of_long_k);
  MY_OPS_COST(small.tile_min_side);
  MY_OPS_COST(small.tile_min_work);
#undef MY_OPS_COST
}

constexpr int64_t count_costs() {
  GemmCosts costs{};
  int64_t count = 0;
  for_each_cost(costs, [&](const char*, auto&) { ++count; });
  return count;
}
inline constexpr int64_t kCostCount = count_costs();
static_assert(kCostCount * sizeof(double) == sizeof(GemmCosts), "a cost is missing above");

// Costs of another version are not used: raise it when a plan reads a cost in another way
// (tests/ops/test_gemm_costs.py sees a change of their names).
inline constexpr int kCostsVersion = 2;

// The costs of a GPU that was measured, and the facts that identify it.
struct GpuCosts {
  int major, minor;  // compute capability
  int sm_count, l2_bytes;
  GemmCosts costs;
};

// What a complex product costs besides the real one that it becomes (complex_matrix.h), in
// multiply-adds of a library.
struct ComplexCosts {
  double launch, byte;  // a byte that is read or written
};

// 4 us, and 1.9 TB/s, of products of which a library's time is 0.3 and the rest is gained: on an
// H200 the smallest products that are taken are as fast as the library's.
inline constexpr ComplexCosts kComplexCosts = {.launch = 1.5e8, .byte = 20};

}  // namespace my_ops::cuda
