"""What only a GPU shows: graphs captured from layers, forward and backward."""

import copy

import pytest
import torch

import my_ops

SIZE = 2048  # rows of state


@pytest.mark.parametrize("name", ["lltm", "lltm_cell", "linear"])
def test_out_of_memory_in_backward(name, cuda):
    """Forward took all the memory there is; afterwards there is enough again."""
    steps = (64, SIZE, 8) if name == "lltm" else (64 * SIZE, 8)
    layers = {
        "lltm": lambda: my_ops.nn.LLTM(8, 64),
        "lltm_cell": lambda: my_ops.nn.LLTMCell(8, 64),
        "linear": lambda: my_ops.nn.LinearActivation(8, 64, activation="gelu"),
    }
    layer = layers[name]().to(cuda)
    input = torch.randn(steps, device=cuda, requires_grad=True)
    loss = first(layer(input)).sum()
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = []
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        size = 1 << 30
        while size >= 1 << 20:  # memory that the allocator keeps for reuse
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device=cuda))
            except torch.OutOfMemoryError:
                size //= 2
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            loss.backward()
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    first(layer(input)).sum().backward()
    assert input.grad.isfinite().all()


GRAPHS = {
    "Linear": (lambda: my_ops.nn.LinearActivation(16, 16, activation="gelu"), (8, 16)),
    "LLTM": (lambda: my_ops.nn.LLTM(16, 16), (5, 8, 16)),
    "LLTMCell": (lambda: my_ops.nn.LLTMCell(16, 16), (8, 16)),
}


def first(result):
    return result if isinstance(result, torch.Tensor) else result[0]


class First(torch.nn.Module):
    """A layer that returns only its first result."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return first(self.layer(x))


# The warning is torch's: make_graphed_callables warms up on one stream and captures on another.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("name", GRAPHS)
def test_graphed_layers(name, cuda, captures):
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
