// A C++ program without Python: runs models made of my_ops operators, and an operator by itself.
#include <my_ops/ops.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <iostream>
#include <string>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: " << argv[0] << " FOLDER, which make_models.py has filled\n";
    return 2;
  }
  const std::string folder = argv[1];
  const torch::NoGradGuard no_grad;

  const auto expected = torch::jit::load(folder + "/expected.pt");
  const at::Tensor x = expected.attr("x").toTensor(), y = expected.attr("y").toTensor();
  const auto report = [&](const char* what, const at::Tensor& got) {
    const bool same = at::allclose(got, y, 1e-5, 1e-6);
    std::cout << what << ": " << (same ? "as in Python" : "DIFFERENT") << '\n';
    return same;
  };

  auto scripted = torch::jit::load(folder + "/model.pt");
  bool same = report("TorchScript", scripted.forward({x}).toTensor());

  torch::inductor::AOTIModelPackageLoader compiled(folder + "/model.pt2");
  same &= report("AOTInductor", compiled.run({x}).at(0));

  std::cout << "d_sigmoid(0) = " << my_ops::d_sigmoid(at::zeros({})).item<float>() << '\n';
  return same ? 0 : 1;
}
