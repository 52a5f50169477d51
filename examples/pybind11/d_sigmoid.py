"""A pybind11 module over the package's kernels, and the gradient that Python gives it."""

from pathlib import Path

import torch
from torch.utils import cpp_extension

here = Path(__file__).resolve().parent
root = here.parents[1]
with_cuda = torch.cuda.is_available() and cpp_extension.CUDA_HOME is not None
flags = ["-O3", "-std=c++20", *["-DMY_OPS_WITH_CUDA"] * with_cuda]

module = cpp_extension.load(
    name="d_sigmoid_pybind11",
    sources=[
        str(here / "module.cpp"),
        str(root / "kernels/elementwise/elementwise_cpu.cpp"),
        *[str(root / "kernels/elementwise/elementwise.cu")] * with_cuda,
    ],
    extra_include_paths=[str(root / "include"), str(root / "kernels")],
    extra_cflags=[*flags, "-fno-trapping-math"],
    extra_cuda_cflags=flags,
    with_cuda=with_cuda,
)


class DSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(z):
        return module.forward(z)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return module.backward(grad, *ctx.saved_tensors)


if __name__ == "__main__":
    device = "cuda" if with_cuda else "cpu"
    z = torch.tensor([-1.0, 0.0, 2.0], device=device, requires_grad=True)
    y = DSigmoid.apply(z)
    y.sum().backward()
    print("forward:", [round(value, 4) for value in y.tolist()])
    print("backward:", [round(value, 4) + 0.0 for value in z.grad.tolist()])
    print("doc:", module.forward.__doc__.strip().splitlines()[-1])
    try:
        module.forward(torch.tensor([1]))
    except TypeError as error:
        print("error:", error)
