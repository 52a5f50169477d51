"""What was timed about calls that Python routes: the numbers that other modules compare sizes with.

They are an H200's, and hold for other GPUs too. The plans' own are in ``kernels/gemm/costs.h`` and
``kernels/recurrent/costs.h``. ``tests/package/test_costs.py`` finds such numbers elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

import torch


class Cudnn(NamedTuple):
    """Which calls of a converted layer are faster in cuDNN."""

    # From how many rows on TF32 is faster, for hidden sizes up to the key. A row is a sequence of
    # the batch in one direction. By mode and whether there is a gradient.
    least_rows: Mapping[tuple[str, bool], Mapping[float, float]] = {
        ("LSTM", False): {256: 16384, 384: 4096, 512: 2048, 640: 1024, 768: 256, 1024: 512, inf: 4},
        ("LSTM", True): {192: inf, 384: 1024, 512: 512, 1024: 256, inf: 16},
        ("GRU", False): {256: 16384, 384: 4096, 512: 2048, 768: 1024, 1024: 512, inf: 4},
        ("GRU", True): {384: inf, 640: 512, 1024: 256, inf: 16},
    }
    both_directions_hidden: int = 1024  # beyond, two directions are faster with any rows
    # Small sizes for which it is faster with batches of 64 to 128 sequences, or 256 if it runs two
    # directions at a time. Forward only where launches no longer count: in so many steps, or half
    # as many of two directions.
    some_hidden: Mapping[tuple[str, bool], range] = {
        ("LSTM", False): range(65, 97),
        ("LSTM", True): range(65, 97),
        ("GRU", False): range(65, 129),
        ("GRU", True): range(97, 129),
    }
    some_rows: range = range(64, 129)  # of a direction
    many_steps: int = 128
    # In training from so many rows on, for larger sizes, if the next layer reads two directions.
    wide_input: int = 192
    many_rows: int = 2048
    # In 16 bits two directions at a time are faster from so many rows on, for sizes from the key
    # on. In float16 they are forward in small LSTMs with many sequences; in bfloat16 torch copies
    # the weights.
    rows_together: Mapping[int, int] = {1025: 64, 1024: 2048}
    small_lstm: int = 128
    many_sequences: int = 1024
    # Several layers or directions are bound by the host up to so many steps times units, and so
    # many elements of an output; cuDNN's are a single op.
    short: int = 1 << 13
    few_elements: int = 1 << 19


class RnnCpu(NamedTuple):
    """From where nn.RNN is faster in its cell's kernels than in torch's op, on a CPU: an EPYC with
    AVX-512 and its bfloat16 products."""

    # With fewer steps Python bounds a call, unless there are many elements of an output.
    steps: int = 24
    fewer_steps: int = 12
    many_elements: int = 1 << 14
    units: int = 4
    # Up to where in bfloat16, in which torch's products are faster: multiply-adds of h in a step.
    bfloat16_work: int = 1 << 20
    bfloat16_units: int = 512


class RnnCuda(NamedTuple):
    """From where nn.RNN is faster in its cell's kernels than in cuDNN, the time of the host
    included. Except in bfloat16 cuDNN too has small layers in one launch."""

    least: Mapping[torch.dtype, tuple[int, int]] = {  # steps and units
        torch.float32: (64, 512),
        torch.float16: (256, 512),
        torch.bfloat16: (32, 1),
    }


class Onednn(NamedTuple):
    """Up to where LSTM in bfloat16 is faster in ours than in oneDNN, on a CPU that multiplies
    bfloat16: an EPYC with AVX-512."""

    work: int = 1 << 16  # multiply-adds of h in a step, without a gradient
    training_work: int = 1 << 17
    training_batch: int = 32


class WeightsBackward(NamedTuple):
    """Up to where one op for a layer's gradients is the faster call: one launch on CUDA, where it
    uses the same numbers (``RecurrentCosts::WeightsBackward``)."""

    rows: int = 256
    work: Mapping[str, float] = {"cuda": 1 << 28, "cpu": inf}  # multiply-adds of all products


class Linear(NamedTuple):
    # From so many multiply-adds on, 16-bit products of unaligned rows are Inductor's, which pads.
    padded_by_inductor: int = 1 << 35


class Gradients(NamedTuple):
    # Multiply-adds of all gradients that make it worth asking which of them backward is for.
    work_to_ask: int = 1 << 26


class Attention(NamedTuple):
    # Calls with fewer multiply-adds in a product are torch's, which is as fast: kAttentionMinWork.
    least_work: int = 1 << 22
    largest_head: int = 128  # of the kernels


CUDNN, ONEDNN, WEIGHTS_BACKWARD = Cudnn(), Onednn(), WeightsBackward()
LINEAR, GRADIENTS = Linear(), Gradients()
ATTENTION, RNN_CPU, RNN_CUDA = Attention(), RnnCpu(), RnnCuda()
