// What `python -m my_ops explain` asks of the module, through ctypes: my_ops/_explain.py has the
// same structs. No device and no CUDA is needed to answer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "../include/device.h"

#define MY_OPS_EXPLAIN extern "C" __attribute__((visibility("default"))) int64_t

namespace my_ops {

// The fields of DeviceFacts.
struct AskedDevice {
  int major, minor, sm_count, shared_bytes, l2_bytes, code, hopper_code;

  cuda::DeviceFacts facts() const {
    return {.major = major,
            .minor = minor,
            .sm_count = sm_count,
            .shared_bytes = shared_bytes,
            .l2_bytes = l2_bytes,
            .code = code,
            .hopper_code = hopper_code != 0};
  }
};

// A matrix product of dense operands.
struct AskedProduct {
  AskedDevice device;
  const char* dtype;
  const char* activation;
  int64_t batch, m, n, k;
  int a_transposed, b_transposed;  // the other index is the contiguous one
  int linear;                      // of my_ops.linear, b_transposed
  int bias, residual, packed;      // there is one
  int high;                        // precision "high"
  int library_tf32;                // torch allows TF32 in float32 products
};

// All steps of a layer.
struct AskedLayer {
  AskedDevice device;
  const char* op;
  const char* dtype;
  int64_t steps, batch, hidden;
  int backward, library_tf32;
};

// The answers are lines of English, one for each kernel that the plan tried, and then the plan.
// They are written into text, of size bytes, and end with a zero byte.
inline constexpr int64_t kCannotAnswer = -1;
inline constexpr int64_t kMostElements = int64_t{1} << 40;  // products of 2^60 can be counted

inline int64_t give_answer(const std::string& said, char* text, int64_t size) {
  if (size > 0) {
    const auto kept = std::min(static_cast<size_t>(size - 1), said.size());
    std::memcpy(text, said.data(), kept);
    text[kept] = '\0';
  }
  return static_cast<int64_t>(said.size());
}

// For tensors of these sizes.
inline bool can_answer(std::initializer_list<std::initializer_list<int64_t>> tensors,
                       const char* text, int64_t size) {
  for (const auto& sizes : tensors) {
    int64_t elements = 1;
    for (const int64_t n : sizes) {
      if (n < 0 || n > kMostElements) return false;
      if (__builtin_mul_overflow(elements, n, &elements)) return false;
    }
    if (elements > kMostElements) return false;
  }
  return size >= 0 && (size == 0 || text);
}

}  // namespace my_ops

// Return the length of the whole text, or kCannotAnswer for a size below 0, a tensor of more than
// kMostElements, or an unknown name.
MY_OPS_EXPLAIN my_ops_explain_gemm(const my_ops::AskedProduct* asked, char* text, int64_t size);
MY_OPS_EXPLAIN my_ops_explain_recurrent(const my_ops::AskedLayer* asked, char* text, int64_t size);
