// What was timed of plain calls.
#pragma once

#include <cstdint>

namespace my_ops::calls {

struct CallCosts {
  // Calls on the CPU of at most so many numbers, or multiplications, end sooner than other threads
  // of Python would gain by running meanwhile: to let them takes 0.3 us.
  int64_t brief = 32768;
  // The dispatcher takes 1 us to reach the kernel of an elementwise op; with more elements than
  // this, that is less than the kernel takes, and its threads are worth their start.
  int64_t few = 4096;
};
inline constexpr CallCosts kCosts;

}  // namespace my_ops::calls
