// The work around the steps of a ragged batch, on the CPU.
#include "recurrent/ragged.h"

namespace my_ops::cpu {

template <typename Ragged>
void ragged(const Ragged& args) {
  if (args.hidden == 0) return;
  for (int64_t line = 0; line < lines_of(args); ++line) ragged_line(args, line, 0, 1);
}

#define MY_OPS_RAGGED(T)                              \
  template void ragged(const RaggedRows<T>&);         \
  template void ragged(const RaggedEnds<T>&);         \
  template void ragged(const RaggedEndsBackward<T>&); \
  template void ragged(const RaggedStartBackward<T, T>&);
MY_OPS_RAGGED(double)
MY_OPS_RAGGED(float)
template void ragged(const RaggedReset&);

}  // namespace my_ops::cpu
