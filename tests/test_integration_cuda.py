"""What only a GPU shows: graphs captured of layers, forward and backward."""

import copy

import pytest
import torch

import my_ops

GRAPHS = {
    "Linear": (lambda: my_ops.nn.Linear(16, 16, activation="gelu"), (8, 16)),
    "LLTM": (lambda: my_ops.nn.LLTM(16, 16), (5, 8, 16)),
    "LLTMCell": (lambda: my_ops.nn.LLTMCell(16, 16), (8, 16)),
}


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


class First(torch.nn.Module):
    """A layer whose first result is the result."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return first(self.layer(x))


# torch's own: make_graphed_callables warms up on one stream and captures on another.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("name", GRAPHS)
def test_graphed_layers(name, cuda):
    make, shape = GRAPHS[name]
    layer = First(make()).to(cuda)
    samples = [torch.randn(shape, device=cuda, requires_grad=True) for _ in range(2)]

    def run(module, parameters):
        x = samples[1].detach().requires_grad_()
        y = module(x)
        y.square().sum().backward()
        return [y.detach().clone(), x.grad, *(p.grad.clone() for p in parameters)]

    plain = copy.deepcopy(layer)
    want = run(plain, plain.parameters())
    parameters = list(layer.parameters())
    graphed = torch.cuda.make_graphed_callables(layer, (samples[0],))
    for ours, exact in zip(run(graphed, parameters), want, strict=True):
        torch.testing.assert_close(ours, exact)
