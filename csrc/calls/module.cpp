// What my_ops/_plain.py calls.
#include <torch/version.h>

#include <string_view>

#include "calls.h"

#define MY_OPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const std::vector<my_ops::calls::Function>& functions() {
  static const auto found = [] {
    std::vector<my_ops::calls::Function> all;
    using namespace my_ops::calls;
    for (const auto& list : {elementwise(), products(), recurrent()}) {
      all.insert(all.end(), list.begin(), list.end());
    }
    return all;
  }();
  return found;
}

}  // namespace

// The release of torch whose headers it was compiled against: 210 for 2.10.
MY_OPS_EXPORT int my_ops_calls_torch() { return 100 * TORCH_VERSION_MAJOR + TORCH_VERSION_MINOR; }

// Looks where a tensor of Python, an object of this size, has the address of its data in C++, and
// whether torch.float64 and torch.device("cuda", 3) have their values after what every object has,
// which takes this many bytes. Returns whether they were found.
MY_OPS_EXPORT int my_ops_calls_start(PyObject* tensor, const void* data, int64_t size,
                                     PyObject* float64, PyObject* cuda3, int64_t object_size) {
  using namespace my_ops::calls;
  value_offset = object_size;
  if (dtype(float64) != at::kDouble || device(cuda3) != at::Device(at::kCUDA, 3)) return false;
  const auto* const begin = reinterpret_cast<const char*>(tensor);
  for (int64_t at = 0; at + static_cast<int64_t>(sizeof(void*)) <= size; at += sizeof(void*)) {
    if (std::memcmp(begin + at, &data, sizeof(void*)) != 0) continue;
    tensor_offset = at;
    return true;
  }
  return false;
}

// A function of Python, or null if there is none of this name.
MY_OPS_EXPORT PyObject* my_ops_calls_function(const char* name) {
  constexpr int kFastCall = 0x80;  // METH_FASTCALL
  for (const auto& [known, function] : functions()) {
    if (std::string_view(name) != known) continue;
    // Never freed, like the module.
    return PyCFunction_NewEx(new PyMethodDef{known, function, kFastCall, nullptr}, nullptr,
                             nullptr);
  }
  return nullptr;
}
