"""Tokens stand at whole places of a sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from meanfield.attention.kernels import Kernel
from meanfield.attention.kernels.kernel import ModifiedKernel, Score
from meanfield.checks import is_traced, to_host
from meanfield.measures import ParticleMeasure

# How far length · position may be from a whole number: positions are i/n up to rounding, which is
# more where the last digit of the length itself is.
_ROUNDING = 1e-3


@final
@dataclass(frozen=True)
class WholePlaces(ModifiedKernel):
    """A kernel for sequences of `length` places, which token i of a text at i/length fits.

    A sequence of 32 tokens at i/32 read with length 64 would stand at the places 2, 4, …, 64,
    and with length 8 at fractions of places; both are refused.

    Attributes:
        length: of the sequence that the positions in [0, 1] stand for.
        inner: the kernel.
        all_places: whether every place has to be taken: beside a sink, tokens have to weigh
            1/length each.
    """

    length: int
    inner: Kernel
    all_places: bool = False

    @property
    def score(self) -> Score:  # type: ignore[override]
        """The inner kernel's."""
        return self.inner.score

    def check(self, mu: ParticleMeasure) -> None:
        """Refuse positions that are no multiples of 1/length, or all of them of 2/length, ….

        Raises:
            ValueError: such positions.
        """
        self.inner.check(mu)
        if mu.positions is None:
            return
        places = (self.length * mu.positions).double()
        whole = places.round()
        if is_traced(whole):
            return
        present = mu.log_weights > -math.inf
        off = float(((places - whole).abs() * present).max())
        if off > max(_ROUNDING, self.length * torch.finfo(mu.dtype).eps):
            raise ValueError(
                f"length: expected positions i/{self.length}, multiples of 1/length, got one that "
                f"is off by {off:.2g}/{self.length}; give the length that the positions were made "
                "with, length=n for n tokens at i/n"
            )
        if self.all_places:
            self._check_masses(mu, whole)
        rows = to_host(whole.reshape(-1, whole.shape[-1]).long())
        step = int(np.gcd.reduce(rows, axis=-1).max())
        if step > 1:
            raise ValueError(
                f"length: expected positions i/{self.length} with i = 1, 2, …, got multiples of "
                f"{step}/{self.length} only, as of n = {self.length / step:g} tokens at i/n; give "
                "length=n, or make the positions with embeddings(tokens, length="
                f"{self.length}). Tokens that a longer text has lost stay, with weight 0"
            )

    def _check_masses(self, mu: ParticleMeasure, places: Tensor) -> None:
        numbers = places.long().clamp(1, self.length) - 1
        masses = places.new_zeros(*mu.log_weights.shape[:-1], self.length)
        masses = masses.scatter_add(-1, numbers.expand(mu.log_weights.shape), mu.weights.double())
        off = (self.length * masses - 1).abs()
        if bool((off > _ROUNDING).any()):
            place = int(off.reshape(-1, self.length).amax(0).argmax()) + 1
            raise ValueError(
                f"length: expected tokens at all places i/{self.length}, of equal weight, since "
                "the layer has a sink, beside which tokens count, got more or less at i = "
                f"{place}; give length=n for n tokens at i/n, and texts of one length"
            )
