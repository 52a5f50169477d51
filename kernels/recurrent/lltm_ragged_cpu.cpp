// What surrounds the steps of a ragged batch, on the CPU.
#include "recurrent/lltm_ragged.h"

namespace my_ops::cpu {

template <typename Ragged>
void lltm_ragged(const Ragged& args) {
  for (int64_t line = 0; line < lines_of(args); ++line) ragged_line(args, line, 0, 1);
}

#define MY_OPS_LLTM_RAGGED(T)                    \
  template void lltm_ragged(const LltmRows<T>&); \
  template void lltm_ragged(const LltmShut<T>&); \
  template void lltm_ragged(const LltmEnds<T>&); \
  template void lltm_ragged(const LltmEndsBackward<T>&);
MY_OPS_LLTM_RAGGED(double)
MY_OPS_LLTM_RAGGED(float)

}  // namespace my_ops::cpu
