"""Loads the library that CMake built; no Python package of my_ops is involved."""

import sys

import torch

torch.ops.load_library(sys.argv[1])
x = torch.tensor([-1.0, 0.0, 2.0])
print("d_sigmoid:", [round(value, 4) for value in torch.ops.my_ops.d_sigmoid(x).tolist()])
if torch.cuda.is_available():
    try:
        y = torch.ops.my_ops.d_sigmoid(x.cuda())
        print("CUDA:", [round(value, 4) for value in y.tolist()])
    except NotImplementedError:
        print("CUDA: no kernels in this library")
