import torch

import my_ops


@my_ops.cell(gates="f g")
def minimal(f, g_x, g_h, h):
    """The minimal gated unit (Zhou et al., 2016), with the reset after the product."""
    f = torch.sigmoid(f)
    return (1 - f) * h + f * torch.tanh(g_x + f * g_h)
