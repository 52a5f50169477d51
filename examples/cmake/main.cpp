// A C++ program beside the library: linking it is what registers the operators.
#include <my_ops/ops.h>

#include <iostream>

int main() {
  const at::Tensor a = at::ones({2, 3}), b = at::ones({3, 2});
  std::cout << "gemm: " << my_ops::gemm(a, b).sum().item<float>() << '\n';
}
