"""Loads a repository of hub_kernel.py with the package kernels: try_hub_kernel.py FOLDER

It must pass the Hub's checks of the ABI (kernel-abi-check), and its layers must give the results
and gradients of torch.nn's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

CASES = (
    ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}, (3, 5, 8)),
    ("GRU", {"num_layers": 2, "dropout": 0.0}, (5, 3, 8)),
    ("LSTMCell", {}, (3, 8)),
    ("GRUCell", {"bias": False}, (3, 8)),
    ("Linear", {}, (3, 8)),
)


def results(layer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, the states and the gradients of the parameters."""
    found = layer(x)
    output, *states = found if isinstance(found, tuple) else (found,)
    grads = torch.autograd.grad((output * output.detach()).sum(), list(layer.parameters()))
    flat = [s for state in states for s in (state if isinstance(state, tuple) else (state,))]
    return [output, *flat, *grads]


def compare(kernel: ModuleType, replace: Callable[[torch.nn.Module, str], None]) -> None:
    """``replace(layer, name)`` gives a layer of torch.nn the forward of that name."""
    for name, options, size in CASES:
        layer, x = getattr(torch.nn, name)(8, 16, **options), torch.randn(size)
        want = results(layer, x)
        replace(layer, name)
        assert layer.forward.__func__ is getattr(kernel.layers, name).forward
        torch.testing.assert_close(results(layer, x), want)
        if getattr(kernel.layers, name).__dict__.get("can_torch_compile"):
            whole = torch.compile(layer, backend="aot_eager", fullgraph=True)
            torch.testing.assert_close(results(whole, x), want)
    a, b = torch.randn(4, 8), torch.randn(8, 5)
    torch.testing.assert_close(kernel.gemm(a, b), a @ b)


def main() -> None:
    import kernel_abi_check

    import kernels
    from kernels import LocalLayerRepository, Mode

    folder = Path(sys.argv[1]).resolve()
    kernel = kernels.get_local_kernel(folder)
    (loaded,) = kernels.get_loaded_kernels()
    library = kernel_abi_check.ObjectFile(Path(kernel.__file__).with_name("_C.so"))
    found = [*library.check_manylinux("manylinux_2_28"), *library.check_python_abi("3.9")]
    assert not found, found
    for name, *_ in CASES:
        kernels.replace_kernel_forward_from_hub(getattr(torch.nn, name), name)
        repository = LocalLayerRepository(folder, layer_name=name)
        kernels.register_kernel_mapping({name: {"cpu": repository}})

    def replace(layer: torch.nn.Module, name: str) -> None:
        kernels.kernelize(layer, mode=Mode.TRAINING, use_fallback=False)

    compare(kernel, replace)
    print(f"{loaded.metadata.name} {loaded.metadata.id}: {Path(kernel.__file__).parent.name}")


if __name__ == "__main__":
    main()
