"""Host time of one call on tensors of eight elements, of native ops and of other registrations.

    python benchmarks/host_cost.py [--device cpu|cuda]

Microseconds, the least of many runs. This is the time of Python, the dispatcher and autograd
without the kernel; on CUDA it includes the launch, but does not wait for its end.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable
from typing import Any

import torch

import my_ops

CALLS, REPEATS = 1000, 40


def cost(call: Callable[[], Any], device: str) -> float:
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(timeit.timeit(call, number=CALLS))
    return min(times) / CALLS * 1e6


def registered() -> Any:
    """The usual Python operator: torch.library.custom_op with register_autograd."""

    @torch.library.custom_op("host_cost::d_sigmoid", mutates_args=())
    def op(z: torch.Tensor) -> torch.Tensor:
        return torch.ops.my_ops.d_sigmoid.default(z)

    op.register_fake(torch.empty_like)
    op.register_autograd(
        lambda ctx, grad: torch.ops.my_ops.d_sigmoid_backward.default(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of a call, in microseconds.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    x, leaf = torch.randn(8, device=device), torch.randn(8, device=device, requires_grad=True)
    square = torch.randn(2, 2, device=device)
    square_leaf = square.clone().requires_grad_()
    calls: dict[str, tuple[Callable[..., Any], Any, Any]] = {
        "torch.round": (torch.round, x, leaf),
        "torch.sigmoid": (torch.sigmoid, x, leaf),
        "my_ops.round_ste": (my_ops.round_ste, x, leaf),
        "my_ops.d_sigmoid": (my_ops.d_sigmoid, x, leaf),
        "torch.ops.my_ops.d_sigmoid": (torch.ops.my_ops.d_sigmoid, x, leaf),
        "custom_op, register_autograd": (registered(), x, leaf),
        "torch.mm": (lambda t: torch.mm(t, t), square, square_leaf),
        "my_ops.gemm": (lambda t: my_ops.gemm(t, t), square, square_leaf),
        "compiled torch.sigmoid": (torch.compile(torch.sigmoid), x, leaf),
        "compiled my_ops.d_sigmoid": (torch.compile(my_ops.d_sigmoid), x, leaf),
        "compiled custom_op": (torch.compile(lambda t: torch.ops.host_cost.d_sigmoid(t)), x, leaf),
    }
    print(f"torch {torch.__version__}, my_ops {my_ops.__version__}, {device}: us a call")
    print(f"{'':<30}{'no gradient':>12}{'inference':>12}{'gradient':>12}{'backward':>12}")
    for name, (function, plain, needs) in calls.items():
        row = [cost(lambda f=function, t=plain: f(t), device)]
        with torch.inference_mode():
            row.append(cost(lambda f=function, t=plain: f(t), device))
        row.append(cost(lambda f=function, t=needs: f(t), device))
        result = function(needs)
        ones = torch.ones_like(result)
        row.append(
            cost(
                lambda r=result, g=ones, t=needs: torch.autograd.grad(r, t, g, retain_graph=True),
                device,
            )
        )
        print(f"{name:<30}" + "".join(f"{us:>12.2f}" for us in row), flush=True)


if __name__ == "__main__":
    main()
