"""Every op refuses a tensor whose storage was freed or shortened, before it reads any memory. (FSDP
frees the storage of weights.) And tensors without elements, of any size, take no time."""

import pytest
import torch
from wrong_arguments import RIGHT, T, overload

import my_ops

CASES = [
    (op, name)
    for op, arguments in RIGHT.items()
    for name, value in arguments.items()
    if isinstance(value, T) and 0 not in value.shape
]


def right(op, device):
    return {
        name: value.make(device, device) if isinstance(value, T) else value
        for name, value in RIGHT[op].items()
    }


@pytest.mark.parametrize("left", ["nothing", "all but a byte"])
@pytest.mark.parametrize("op, name", CASES)
def test_refused(op, name, left, device):
    arguments = right(op, device)
    short = arguments[name]
    size = short.nbytes
    held = 0 if left == "nothing" else size - 1
    short.untyped_storage().resize_(held)
    said = op.split(".")[0].removesuffix("_forward")
    rule = f"{said}: {name} must have a storage that holds its {size} bytes, got one of {held}"
    with pytest.raises(RuntimeError) as caught:
        overload(op)(**arguments)
    assert str(caught.value) == rule


def test_a_view_needs_its_last_element(device):
    base = torch.ones(4, 5, device=device)
    view = base[1:, :4].t()  # the last element is the 19th of 20
    base.untyped_storage().resize_(18 * 4)
    rule = "storage that holds its 76 bytes, got one of 72"
    with pytest.raises(RuntimeError, match=rule):
        my_ops.add_one(view)
    base.untyped_storage().resize_(19 * 4)
    assert my_ops.add_one(view).shape == (4, 3)
    base.untyped_storage().resize_(0)
    assert my_ops.add_one(base[:, :0]).shape == (4, 0)


LAYERS = {"LSTM": (5, 2, 3), "GRU": (5, 2, 3), "LLTM": (5, 2, 3)}
LAYERS |= {"LSTMCell": (2, 3), "GRUCell": (2, 3), "LLTMCell": (2, 3), "Linear": (2, 3)}


@pytest.mark.parametrize("name, shape", LAYERS.items())
def test_layers_refuse_freed_parameters(name, shape, device):
    layer = getattr(my_ops.nn, name)(3, 4).to(device)
    next(layer.parameters()).untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        layer(torch.ones(shape, device=device))


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "LLTM"])
def test_backward_refuses_what_was_freed_since(cell, device):
    layer = getattr(my_ops.nn, cell)(3, 4).to(device)
    output = layer(torch.ones(5, 2, 3, device=device))[0]
    for parameter in layer.parameters():
        parameter.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        output.sum().backward()


EMPTY = """
import torch, my_ops

huge = 1 << 61

def expanded(*shape, **options):
    return torch.empty(1, **options).expand(shape)

for layer in my_ops.nn.LSTM(3, 4), my_ops.nn.GRU(3, 40), my_ops.nn.LLTM(3, 4, num_layers=2):
    layer.to(DEVICE)
    for bias in layer.parameters():
        bias.requires_grad_()
    for masks in {}, {"lengths": torch.ones(0, dtype=torch.int64, device=DEVICE)}:
        x = expanded(huge, 0, 3, device=DEVICE)
        output, _ = layer(x, **masks)
        assert output.shape[:2] == (huge, 0)
        output.sum().backward()
for name, rows in ("lstm", 0), ("gru", 0):
    weights = torch.ones(0, 3, device=DEVICE), torch.ones(0, 0, device=DEVICE)
    states = [expanded(1, 0, device=DEVICE)] * (2 if name == "lstm" else 1)
    for masks in {}, {"lengths": torch.ones(1, dtype=torch.int64, device=DEVICE)}:
        call = getattr(my_ops, name)
        assert call(expanded(huge, 1, 3, device=DEVICE), *states, *weights, **masks)[0].numel() == 0
    states = [expanded(huge, 0, device=DEVICE)] * len(states)
    getattr(my_ops, name + "_cell")(expanded(huge, 3, device=DEVICE), *weights, None, None, *states)
my_ops.add_one(expanded(huge, 0, device=DEVICE))
my_ops.custom_add(expanded(huge, 0, device=DEVICE), expanded(1, device=DEVICE))
assert my_ops.fill_index(huge, 0, device=DEVICE).shape == (huge, 0)
"""


@pytest.mark.slow
def test_empty_tensors_take_no_time(device, run_python):
    """However many steps or rows they have."""
    run_python(f"DEVICE = {device!r}\n{EMPTY}")
