// Returns plan_recurrent's decision for a layer of given sizes, on any device.
#include "recurrent_explain.h"

#include "explain.h"
#include "recurrent/plan.h"

namespace my_ops {

std::map<std::string, cuda::CellFacts>& cells_of_ops() {
  static std::map<std::string, cuda::CellFacts> cells;
  return cells;
}

}  // namespace my_ops

MY_OPS_EXPLAIN my_ops_explain_recurrent(const my_ops::AskedLayer* asked, char* text, int64_t size) {
  using namespace my_ops;
  if (!asked || !asked->op || !asked->dtype) return kCannotAnswer;
  const int64_t steps = asked->steps, batch = asked->batch, hidden = asked->hidden;
  if (!can_answer({{steps, batch, hidden}, {hidden, hidden}}, text, size)) return kCannotAnswer;
  const auto cell = cells_of_ops().find(asked->op);
  const std::map<std::string, int> widths{
      {"float64", 8}, {"float32", 4}, {"float16", 2}, {"bfloat16", 2}};
  const auto width = widths.find(asked->dtype);
  if (cell == cells_of_ops().end() || width == widths.end()) return kCannotAnswer;
  const Pass pass = asked->backward ? Pass::kBackward : Pass::kForward;
  std::ostringstream said;
  cuda::RecurrentPlan plan = cuda::plan_recurrent(
      {cell->second, pass, width->second, steps, batch, hidden}, asked->device.facts(),
      cuda::kRecurrentCosts, [&](cuda::RecurrentKernel kernel, const char* why) {
        if (why) said << "  " << show(kernel) << ": no, " << why << '\n';
      });
  if (plan.steps_faster_in_tf32 && asked->library_tf32) {
    said << "  " << show(plan.kernel) << ": no, a product in TF32 for each step is faster\n";
    plan = {};
  }
  said << "  " << show(plan, pass) << '\n';
  return give_answer(said.str(), text, size);
}
