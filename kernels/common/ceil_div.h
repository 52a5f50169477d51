// Division that rounds up, for plans and grids.
#pragma once

#include <cstdint>

namespace my_ops::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace my_ops::cuda
