// Whether our kernels for attention are faster than torch's: both times, from a model of what takes
// them. Its numbers are those of benchmarks/fit_attention.py, with two causal shapes more, which
// the kernels compute in less time since. Host only.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention.h"

namespace my_ops::cuda {

// Microseconds.
struct AttentionCosts {
  struct Forward {
    double launch, split, step64, step128, step_bias, wave;
  };
  struct TorchForward {
    double launch, chain64, chain128, step32, step64, step128, step_bias, wave;
  };
  struct Backward {
    double launch64, launch128, split, query_step64, key_step64, step128, step_bias, bias, wave;
  };
  struct TorchBackward {
    double launch, step32, step64, step128, step_bias, bias, wave, chain64, chain128;
  };
  Forward forward;
  TorchForward torch_forward;
  Backward backward;
  TorchBackward torch_backward;
  double margin;  // by which ours must be faster
  // The model overestimates torch's backward of fewer rows than its tiles have.
  int64_t backward_min_rows;
};

inline constexpr AttentionCosts kFittedAttentionCosts = {
    .forward = {15.41, 0.3349, 2.6462, 2.7021, 1.3766, 3.0552},
    .torch_forward = {3.63, 5.72, 9.22, 3.035, 3.572, 5.358, 0.709, 0.679},
    .backward = {24.17, 41.67, 0.5025, 4.494, 2.775, 3.663, 1.005, 1.039, 2.98},
    .torch_backward = {28.12, 7.455, 9.099, 17.538, 0.051, 1.355, 1.178, 9.978, 10.66},
    .margin = 1.15,
    .backward_min_rows = 64,
};

// The steps over tiles of columns that the tiles of rows take, of which causality leaves some out.
struct AttentionSteps {
  double all, longest, tiles;  // of all heads; of one tile; how many tiles

  AttentionSteps(int64_t heads, int64_t rows, int64_t columns, int64_t tile_rows,
                 int64_t tile_columns, bool causal, bool rows_are_keys) {
    const int64_t row_tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t steps = (columns + tile_columns - 1) / tile_columns;
    int64_t sum = 0, most = 0;
    for (int64_t i = 0; i < (causal ? row_tiles : 0); ++i) {
      const int64_t end = (i + 1) * tile_rows;
      const int64_t own = rows_are_keys ? std::max<int64_t>(0, steps - i * tile_rows / tile_columns)
                                        : std::min(steps, (end + tile_columns - 1) / tile_columns);
      sum += own;
      most = std::max(most, own);
    }
    tiles = static_cast<double>(heads * row_tiles);
    all = static_cast<double>(heads) * static_cast<double>(causal ? sum : row_tiles * steps);
    longest = static_cast<double>(causal ? most : steps);
  }

  // The steps that the SMs take one after another, if each runs one tile at a time.
  double on(double sms, bool causal) const {
    const double waves = causal ? 1 : waves_on(sms);
    return std::max(all / sms, waves * longest);
  }
  double waves_on(double sms) const {
    return static_cast<double>(static_cast<int64_t>((tiles + sms - 1) / sms));
  }
};

// The predicted time of torch's kernel over that of ours.
inline double attention_gain(const AttentionArgs& a, int sm_count, bool backward,
                             const AttentionCosts& costs = kFittedAttentionCosts) {
  const int64_t heads = int64_t{a.batch} * a.heads, q = a.q_length, k = a.k_length;
  const double sms = sm_count;
  const int width = a.dim <= 64 ? 64 : 128, keys = width == 64 ? 128 : 64;
  const auto padded = [](int64_t rows) { return static_cast<double>((rows + 127) / 128 * 128); };
  const double bytes = 4e-6 * static_cast<double>(heads) * (a.dim + width);
  const bool wide = width == 128, bias = a.bias != nullptr;
  if (!backward) {
    const int64_t seen = a.causal ? std::min(q, k) : k;
    const AttentionSteps s(heads, q, seen, 128, keys, a.causal, false);
    const double steps = s.on(sms, a.causal);
    const auto& c = costs.forward;
    const double ours = c.launch + c.split * bytes * (padded(q) + 2 * padded(seen)) +
                        (wide ? c.step128 : c.step64) * steps + (bias ? c.step_bias * steps : 0) +
                        c.wave * s.waves_on(sms);
    const AttentionSteps t(heads, q, k, wide ? 32 : 64, wide ? 128 : 64, a.causal, false);
    const auto& d = costs.torch_forward;
    const double step = a.dim <= 32 ? d.step32 : wide ? d.step128 : d.step64;
    const double torchs = d.launch + (wide ? d.chain128 : d.chain64) * t.longest +
                          (step + (bias ? d.step_bias : 0)) * t.all / sms + d.wave * t.tiles / sms;
    return torchs / ours;
  }
  const AttentionSteps over_keys(heads, q, k, 128, keys, a.causal, false);
  const AttentionSteps over_queries(heads, k, q, 128, 64, a.causal, true);
  const double by_queries = over_keys.on(sms, a.causal), by_keys = over_queries.on(sms, a.causal);
  const double scores =
      4e-6 * static_cast<double>(heads) * static_cast<double>(q) * static_cast<double>(k);
  const auto& c = costs.backward;
  double ours = (wide ? c.launch128 : c.launch64) + c.split * bytes * 2 * (padded(q) + padded(k)) +
                c.wave * (over_keys.waves_on(sms) + over_queries.waves_on(sms));
  ours += wide ? c.step128 * (by_queries + 2 * by_keys)
               : c.query_step64 * by_queries + c.key_step64 * by_keys;
  const AttentionSteps t(heads, k, q, 64, 64, a.causal, true);
  const auto& d = costs.torch_backward;
  const double step = a.dim <= 32 ? d.step32 : wide ? d.step128 : d.step64;
  double torchs = d.launch + step * t.all / sms + d.wave * t.tiles / sms +
                  (wide ? d.chain128 : d.chain64) * t.longest;
  if (bias) {
    ours += c.step_bias * (by_queries * keys / 64 + by_keys) + c.bias * scores;
    torchs += d.step_bias * t.all / sms + d.bias * scores;
  }
  return torchs / ours;
}

}  // namespace my_ops::cuda
