// Finds an activation by its name.
#pragma once

#include <iterator>
#include <stdexcept>
#include <string>

#include "../include/gemm.h"

namespace my_ops {

// Throws if there is no activation of this name.
inline Activation activation_of(const std::string& name) {
  struct Named {
    const char* name;
    Activation activation;
  };
#define MY_OPS_NAMED(activation, name) Named{name, Activation::activation},
  constexpr Named kKnown[] = {MY_OPS_ACTIVATIONS(MY_OPS_NAMED)};
#undef MY_OPS_NAMED
  for (const Named& known : kKnown) {
    if (name == known.name) return known.activation;
  }
  std::string names = kKnown[0].name;
  for (size_t i = 1; i < std::size(kKnown); ++i) {
    names += std::string(i + 1 < std::size(kKnown) ? ", " : " or ") + kKnown[i].name;
  }
  throw std::runtime_error("linear: activation must be " + names + ", got '" + name + "'");
}

}  // namespace my_ops
