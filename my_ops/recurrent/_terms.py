"""The terms of a recurrent cell: how the pre-activations of its gates and their gradients lie in
tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Values = tuple[Tensor, ...]


class Terms:
    """Of a cell with so many gates, of which the last ``apart`` need the product with h apart from
    the input gates, and with so many ``vectors``: parameters with a value for each unit."""

    name: str
    gates: int
    apart: int
    vectors: int

    @property  # not cached: Dynamo's guards see what a first use adds to an object
    def terms(self) -> int:
        return self.gates + self.apart + self.vectors

    def join(self, x: Tensor, h: Tensor, vectors: Sequence[Tensor] = ()) -> Values:
        """``z`` from the input gates and the product with h, both ``(*, gates * hidden)``."""
        if not self.apart:
            z: Values = (x + h).chunk(self.gates, -1)
        else:
            input_gates, products = x.chunk(self.gates, -1), h.chunk(self.gates, -1)
            sums = self.gates - self.apart
            summed = (a + b for a, b in zip(input_gates[:sums], products[:sums], strict=True))
            z = (*summed, *products[sums:], *input_gates[sums:])
        return (*z, *(vector.unsqueeze(-2).expand_as(z[0]) for vector in vectors))

    # The gradients of the terms, (*, terms * hidden), are in another order than z: those of the
    # input gates alone first, then those of the gates, then those of the vectors.

    def store(self, grad_z: Values) -> Tensor:
        both = self.gates + self.apart
        return torch.cat((*grad_z[self.gates : both], *grad_z[: self.gates], *grad_z[both:]), -1)

    def of_vectors(self, terms: Tensor) -> tuple[Tensor, ...]:
        return terms.chunk(self.terms, -1)[self.gates + self.apart :] if self.vectors else ()

    def _of_gates(self, terms: Tensor) -> Tensor:
        """Without those of the vectors."""
        if not self.vectors:
            return terms
        return terms[..., : terms.shape[-1] // self.terms * (self.gates + self.apart)]

    def of_h(self, terms: Tensor) -> Tensor:
        """Those that belong to the product with h, by gate."""
        terms = self._of_gates(terms)
        return terms[..., self._alone(terms) :] if self.apart else terms

    def of_input(self, terms: Tensor) -> Tensor:
        """Those of the input gates."""
        terms = self._of_gates(terms)
        if not self.apart:
            return terms
        rest, alone = terms.shape[-1] - self._alone(terms), self._alone(terms)
        return torch.cat([terms[..., alone:rest], terms[..., :alone]], -1)

    def input_range(self, terms: Tensor) -> tuple[Tensor, int]:
        """The same, in 16 bits without a copy of many rows, and how many columns come before the
        first gate's: those of the last gates."""
        gates = self._of_gates(terms)
        if not self.apart:
            return gates, 0
        columns, alone = gates.shape[-1], self._alone(gates)
        rows = gates.numel() // columns if columns else 0
        # With few rows copies of the weights cost more. float32 products read a copy faster.
        if not isinstance(rows, int) or rows <= columns or gates.element_size() > 2:
            return self.of_input(terms), 0
        return gates[..., : columns - alone], alone

    def work(self, input: Tensor, h: Tensor) -> int:
        """Multiply-adds of the gradients of the input and the parameters."""
        inputs, hidden = input.shape[-1], h.shape[-1]
        rows, terms = math.prod(input.shape[:-1]), self.gates + self.apart
        return rows * terms * hidden * (2 * inputs + hidden)

    def _alone(self, terms: Tensor) -> int:
        return terms.shape[-1] // (self.gates + self.apart) * self.apart
