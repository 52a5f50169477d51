"""How accurate results and gradients of the recurrent ops must be: bounds, sizes, the
comparison."""

import contextlib
import math

import torch

# Relative to the largest result, times the root of the number of terms in a sum over all steps.
FLOAT64_LIMIT = 2.0**-51

# The error in float32 may be at most this many times that of the reference run in float32, plus the
# rounding of a sum over the rows of all steps. That rounding grows with the root of their number;
# the reference has one such sum per step.
FLOAT32_SHARE = 2.0
FLOAT32_FLOOR = 2.0**-22
# The 16-bit types are not worse than the reference run in the same type, up to chance. Chance
# decides which of the two has the worst single element, and decides all in a problem of a few
# elements.
SIXTEEN_BIT_MEAN = 1.1
SIXTEEN_BIT_WORST = 1.5
# LSTM and GRU round more often on the way than LLTM, for which the bounds above are. Their excess
# over the reference may be this many times as large: at most twice the largest for 60 seeds and
# small sizes.
MORE_ROUNDINGS = {torch.float64: 4.0, torch.float32: 6.0, torch.float16: 15.0, torch.bfloat16: 15.0}

CELL_SIZES = [  # batch, inputs, hidden
    (1, 1, 1),
    (3, 5, 4),
    (31, 7, 33),
    (64, 128, 64),
    (5, 1000, 129),
    (257, 3, 31),
]
SEQUENCE_SIZES = [
    (1, 1, 1, 1),
    (5, 3, 4, 7),
    (17, 31, 33, 9),
    (40, 8, 64, 128),
    (3, 5, 40, 300),  # weights above 1 MiB, up to which each thread of the CPU has rows of its own
    (5, 6, 40, 300),  # so many steps that its threads share the units
    # rows from which CUDA runs 16-bit types one step at a time: in backward, and in forward too
    (2, 200, 8, 600),
    (2, 260, 8, 600),
]


def errors(got, want):
    """Elementwise errors of each result: absolute for values below 1, relative above."""
    found = []
    for ours, exact in zip(got, want, strict=True):
        assert ours.shape == exact.shape
        error = (ours.double() - exact).abs() / exact.abs().clamp(min=1)
        assert not error.isnan().any()
        found.append(error if error.numel() else torch.zeros(1, dtype=torch.float64))
    return found


def root_mean_square(error):
    return error.square().mean().sqrt().item()


def with_gradients(function, tensors, grads):
    tensors = [t.detach().requires_grad_() for t in tensors]
    results = function(*tensors)
    used = [
        (r, grad.to(r.dtype)) for r, grad in zip(results, grads, strict=True) if r.requires_grad
    ]
    results_used, grads_used = zip(*used, strict=True)
    got = torch.autograd.grad(results_used, tensors, grads_used, materialize_grads=True)
    return [*(r.detach() for r in results), *got]


@contextlib.contextmanager
def yardstick_threads():
    """torch's products round differently with other numbers of threads; here the number is
    fixed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def float64_limit(terms, exact, more=1.0):
    """For results that differ only in the order of sums of ``terms``: relative to the largest or
    1."""
    size = exact.abs().max().clamp(min=1).item() if exact.numel() else 1.0
    return more * FLOAT64_LIMIT * math.sqrt(1 + terms) * size


def terms_of(tensors):
    """How many terms an op sums for a result, over all steps."""
    input = tensors[0]
    hidden = tensors[-1 if input.dim() == 2 else 1].shape[1]
    return input.shape[:-2].numel() * (input.shape[-1] + hidden)


def assert_float64_close(got, want, tensors, more=1.0):
    for ours, exact in zip(got, want, strict=True):
        limit = float64_limit(terms_of(tensors), exact, more)
        torch.testing.assert_close(ours, exact, rtol=0, atol=limit)


def _share(error, allowed):
    return error / allowed if error else 0.0


def shares(ours, plain, dtype, rows, more=1.0):
    """The errors of every result as a share of what is allowed. ``plain`` are the results of the
    reference run in ``dtype``; ``rows`` is the number of rows of all steps."""
    floor = more * FLOAT32_FLOOR * math.sqrt(rows)
    for error, theirs in zip(ours, plain, strict=True):
        if dtype == torch.float32:
            yield _share(error.max().item(), FLOAT32_SHARE * theirs.max().item() + floor)
            continue
        rounding = more * torch.finfo(dtype).eps / 2  # the result's; the reference's may be 0
        yield _share(error.max().item(), SIXTEEN_BIT_WORST * theirs.max().item() + rounding)
        mean, their_mean = root_mean_square(error), root_mean_square(theirs)
        yield _share(mean, SIXTEEN_BIT_MEAN * their_mean + rounding / math.sqrt(error.numel()))


def check_precision(function, oracle, tensors, name="lltm"):
    """Compares results and gradients of ``function``, of the cell ``name``, with ``oracle`` in
    float64."""
    dtype = tensors[0].dtype
    more = 1.0 if name == "lltm" else MORE_ROUNDINGS[dtype]
    double = [t.double() for t in tensors]
    grads = [torch.randn(r.shape, dtype=torch.float64).to(r.device) for r in oracle(*double)]
    grads = [grad.to(dtype).double() for grad in grads]
    want = with_gradients(oracle, double, grads)
    got = with_gradients(function, tensors, grads)
    assert all(t.dtype == dtype for t in got)
    if dtype == torch.float64:
        assert_float64_close(got, want, tensors, more)
        return
    with yardstick_threads():
        plain = errors(with_gradients(oracle, tensors, grads), want)
    rows = tensors[0].shape[:-1].numel()
    assert all(share <= 1 for share in shares(errors(got, want), plain, dtype, rows, more))
