"""Data of many kinds for float32 products, and their errors compared with torch.mm's.

An error is |got - a @ b| / (|a| @ |b|), element by element, with a @ b in float64. Its mean is at
most that of torch.mm in float32 (1.5 times for short k), and its maximum at most 1.5 times.
"""

import torch

import my_ops

MEAN_SHARE = 1.0
SHORT_K, SHORT_K_MEAN_SHARE = 64, 1.5  # below this k, sums have few roundings to average out
WORST_SHARE = 1.5


def normal(rows, k, device):
    return torch.randn(rows, k, device=device)


def one_hot(rows, k, device):
    places = torch.randint(k, (rows, 1), device=device)
    return (torch.arange(k, device=device) == places).float()


def scaled_rows(rows, k, device):
    exponents = torch.randint(-60, 61, (rows, 1), device=device)
    return torch.ldexp(normal(rows, k, device), exponents)


def scaled_elements(rows, k, device):
    """Magnitudes too far apart for scaling a row: they need the path for the full range."""
    exponents = torch.randint(-30, 31, (rows, k), device=device)
    return torch.ldexp(normal(rows, k, device), exponents)


# Data for a, and for b transposed, except that one-hot rows pick from normal data.
FAMILIES = {
    "normal": normal,
    "uniform": lambda rows, k, device: torch.rand(rows, k, device=device),
    "exp2": lambda rows, k, device: normal(rows, k, device).exp2(),
    "exp4": lambda rows, k, device: (4 * normal(rows, k, device)).exp(),
    "one-hot": one_hot,
    "scaled-rows": scaled_rows,
    "scaled-elements": scaled_elements,
}
CONTRACT = [family for family in FAMILIES if family != "scaled-elements"]


def in_layout(rows_of_k, letter):
    """(rows, k): row-major for N, column-major for T."""
    return rows_of_k.contiguous() if letter == "N" else rows_of_k.mT.contiguous().mT


def operands(family, size, device, layout="NN"):
    m, k, n = size
    right = "normal" if family == "one-hot" else family
    a = in_layout(FAMILIES[family](m, k, device), layout[0])
    return a, in_layout(FAMILIES[right](n, k, device).mT, layout[1])


def opposed(a, b, bits):
    """Along k, a in different units and b in the inverse ones: powers of two up to 2^bits."""
    units = torch.randint(-bits, bits + 1, (b.shape[0],), device=b.device)
    return torch.ldexp(a.mT, units[:, None]).mT, torch.ldexp(b, -units[:, None])


def errors(got, a, b):
    """Mean and maximum. An element whose products are all 0 must be 0."""
    assert got.dtype == torch.float32
    a, b = a.double(), b.double()
    error = (got.double() - a @ b).abs() / (a.abs() @ b.abs()).clamp(min=1e-300)
    return error.mean().item(), error.max().item()


def check(got, a, b, what, mean_share, worst_share):
    """Compares with torch.mm's errors. ``what`` is for the message."""
    assert got.shape == (a.shape[0], b.shape[1])
    ours, theirs = errors(got, a, b), errors(torch.mm(a, b), a, b)
    message = f"{what}: ours {ours}, torch.mm's {theirs} (mean, maximum)"
    assert ours[0] <= mean_share * theirs[0], f"mean, {message}"
    assert ours[1] <= worst_share * theirs[1], f"maximum, {message}"


def mean_share(k):
    return SHORT_K_MEAN_SHARE if k < SHORT_K else MEAN_SHARE


def label(family, size, layout="NN"):
    m, k, n = size
    return f"{family}, {m} x {n} outputs, k = {k}, {layout}"


def check_repeated(a, b, what):
    first = my_ops.gemm(a, b)
    check(first, a, b, what, MEAN_SHARE, WORST_SHARE)
    for _ in range(3):
        assert torch.equal(my_ops.gemm(a, b), first), f"{what}: not the same bits again"
