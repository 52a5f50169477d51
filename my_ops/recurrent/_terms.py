"""The terms of a recurrent cell: how the pre-activations of its gates and their gradients lie in
tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Values = tuple[Tensor, ...]


class Terms:
    """Of a cell with so many gates, of which the last ``apart`` need the product with h apart from
    the input's share."""

    name: str
    gates: int
    apart: int

    @property  # not cached: Dynamo's guards see what a first use adds to an object
    def terms(self) -> int:
        return self.gates + self.apart

    def join(self, x: Tensor, h: Tensor) -> Values:
        """``z`` from the input's share and the product with h, both ``(*, gates * hidden)``."""
        if not self.apart:
            return (x + h).chunk(self.gates, -1)
        shares, products = x.chunk(self.gates, -1), h.chunk(self.gates, -1)
        sums = self.gates - self.apart
        summed = (a + b for a, b in zip(shares[:sums], products[:sums], strict=True))
        return (*summed, *products[sums:], *shares[sums:])

    # The gradients of the terms, (*, terms * hidden), are in another order than z: those of the
    # input's shares alone first, then those of the gates.

    def store(self, grad_z: Values) -> Tensor:
        return torch.cat((*grad_z[self.gates :], *grad_z[: self.gates]), -1)

    def of_h(self, terms: Tensor) -> Tensor:
        """Those that belong to the product with h, by gate."""
        return terms[..., self._alone(terms) :] if self.apart else terms

    def of_input(self, terms: Tensor) -> Tensor:
        """Those that belong to the input's share, by gate."""
        if not self.apart:
            return terms
        rest, alone = terms.shape[-1] - self._alone(terms), self._alone(terms)
        return torch.cat([terms[..., alone:rest], terms[..., :alone]], -1)

    def input_range(self, terms: Tensor) -> tuple[Tensor, int]:
        """The same, in 16 bits without a copy of many rows, and how many columns come before the
        first gate's: those of the last gates."""
        if not self.apart:
            return terms, 0
        columns, alone = terms.shape[-1], self._alone(terms)
        rows = terms.numel() // columns if columns else 0
        # With few rows copies of the weights cost more. float32 products read a copy faster.
        if not isinstance(rows, int) or rows <= columns or terms.element_size() > 2:
            return self.of_input(terms), 0
        return terms[..., : columns - alone], alone

    def work(self, input: Tensor, h: Tensor) -> int:
        """Multiply-adds of the gradients of the input and the parameters."""
        inputs, hidden = input.shape[-1], h.shape[-1]
        return math.prod(input.shape[:-1]) * self.terms * hidden * (2 * inputs + hidden)

    def _alone(self, terms: Tensor) -> int:
        return terms.shape[-1] // self.terms * self.apart
