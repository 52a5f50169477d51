"""The cell against a loop in float64: values and gradients."""

import pytest
import torch
from my_cells import minimal

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-14, torch.bfloat16: 0.03}


def loop(x, h, w_ih, w_hh, b_ih, b_hh):
    output = []
    for row in x:
        (f_x, g_x), (f_h, g_h) = (
            (row @ w_ih.T + b_ih).chunk(2, -1),
            (h @ w_hh.T + b_hh).chunk(2, -1),
        )
        f = torch.sigmoid(f_x + f_h)
        h = (1 - f) * h + f * torch.tanh(g_x + f * g_h)
        output.append(h)
    return torch.stack(output)


@pytest.mark.parametrize("device", ["cpu", "cuda"][: 1 + torch.cuda.is_available()])
@pytest.mark.parametrize("dtype", LIMIT, ids=str)
def test_as_a_loop(dtype, device):
    torch.manual_seed(0)
    layer = minimal.layer(8, 64, dtype=dtype, device=device)
    x, h = torch.randn(20, 5, 8), torch.randn(5, 64)
    given = [t.to(device, dtype).requires_grad_() for t in (x, h)]
    output, _ = layer(given[0], given[1].unsqueeze(0))
    asked = [*given, *layer.parameters()]
    got = [output, *torch.autograd.grad(output.sum(), asked)]

    exact = [t.detach().double().requires_grad_() for t in asked]
    want = loop(*exact)
    for ours, right in zip(got, [want, *torch.autograd.grad(want.sum(), exact)], strict=True):
        error = (ours.double() - right).abs().max() / right.abs().max().clamp(min=1)
        assert error.item() < LIMIT[dtype]
