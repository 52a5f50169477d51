// What was timed about elementwise ops and conversions on the CPU: how many elements a thread gets.
// For fewer, waking a thread costs more than it saves.
#pragma once

#include <cstdint>

namespace my_ops::cpu {

struct ElementwiseCosts {
  int64_t grain = 32768;
  int64_t grain_exp = 4096;  // if an element costs an exp
};

inline constexpr ElementwiseCosts kElementwiseCosts{};

}  // namespace my_ops::cpu
