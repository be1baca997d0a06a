"""Norms whose upper end is certain, at any size: weights for the blocks of a map's rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meanfield.checks import count, is_host
from meanfield.habits import with_hints
from meanfield.linalg.blocks import TokenBlocks
from meanfield.linalg.dense import Dense
from meanfield.linalg.evidence import Candidate
from meanfield.linalg.krylov import Lanczos
from meanfield.linalg.linear_map import LinearMap
from meanfield.linalg.solvers import NormSolver

# Power steps for the top direction of each row, each round and in the first.
_STEPS, _FIRST_STEPS = 2, 8
# Length of the noise that is added to the top eigenvectors before each round.
_NOISE = 0.1
# It ends when so many rounds together have gained less than this.
_PATIENCE, _GAIN = 3, 0.02
# So many rounds between two looks at a device: it makes up to three in vain.
_UNSEEN = 4
# Weights are at least this much of the mean of their row, so that no column is forgotten.
_LEAST = 1e-6


@with_hints
@dataclass(frozen=True)
class Certified(NormSolver):
    """An upper end that is certain, from the blocks of J's rows; the value is that of `Lanczos`.

    Weights w of the bound ‖J‖² ≤ maxⱼ Σᵢ cᵢwᵢⱼ, cᵢ = λ_max(Σⱼ JᵢⱼJᵢⱼᵀ/wᵢⱼ), are improved round by
    round. `certify` computes the bound itself, for the best of them: a round less costs tightness,
    never truth. The upper end is 1 to 1.8 times the norm: it is not within 1 %, so that the call
    must say what it asks for, as ``upper_rtol=1.0``. It ends early when rounds gain under 2 %.

    Args:
        rounds: at most; the first few gain most.
        max_steps: of the iteration for the value, see `Lanczos`.

    Raises:
        ValueError: numbers below 1.

    Example:
        >>> from meanfield import AttentionParameters, ParticleMeasure, SelfAttention
        >>> from meanfield.lipschitz import local_lipschitz
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> found = local_lipschitz(F, mu, solver=Certified(), upper_rtol=0.2)
        >>> float(found.value), found.miss, bool(found.upper < 1.2 * found.value)
        (3.0, 0.0, True)
    """

    rounds: int = 16
    max_steps: int = 300

    def __post_init__(self) -> None:
        for name in ("rounds", "max_steps"):
            object.__setattr__(self, name, count(getattr(self, name), name))

    @torch.no_grad()
    def candidate(self, linear_map: LinearMap, rtol: float, upper_rtol: float) -> Candidate:
        """The vector of a Krylov iteration, and weights for the rows of each map.

        Raises:
            NotImplementedError: a map offers no blocks.
        """
        found = Lanczos(max_steps=self.max_steps).candidate(linear_map, rtol, math.inf)
        return Candidate(
            found.direction,
            upper=torch.full_like(found.upper, math.inf),
            miss=0.0,
            gap=found.gap,
            n_matvecs=found.n_matvecs,
            weights=self.weights(linear_map),
        )

    @torch.no_grad()
    def largest(
        self, linear_map: LinearMap, rtol: float, upper_rtol: float
    ) -> tuple[Candidate, None]:
        """The vectors of a Krylov iteration, under the largest of the norms by `Dense`."""
        found, _ = Lanczos(max_steps=self.max_steps).largest(linear_map, rtol, math.inf)
        # Of all blocks: products with one that is 0 but for rounding may exceed its own.
        upper = Dense().largest(linear_map, rtol, math.inf)[0].upper[..., None]
        upper = upper.expand_as(found.upper)
        return Candidate(found.direction, upper, 0.0, found.gap, found.n_matvecs), None

    @torch.no_grad()
    def weights(self, linear_map: LinearMap) -> list[Tensor]:
        """The certificate for each map of the flattened batch, without a value.

        Raises:
            NotImplementedError: a map offers no blocks.
        """
        weights = []
        for index in range(math.prod(linear_map.batch_shape)):
            if linear_map.blocks is None:
                raise NotImplementedError(
                    "Certified: expected a map that offers the blocks of its rows (attention, "
                    "maps of particles, sums and products with one attention among them), got "
                    "one that does not; take Dense() if it is small, or Lanczos()"
                )
            blocks = linear_map.blocks(index)
            if blocks is None:
                raise NotImplementedError(
                    "Certified: expected one attention in a map, with a kernel that says how its "
                    "keys move, got several in a row or in a sum, or a kernel without "
                    "feature_slopes; give it these, or take Dense() for a small map, or Lanczos()"
                )
            inside, _ = blocks.in_range()
            weights.append(self._improved(inside))
        return weights

    def _improved(self, blocks: TokenBlocks) -> Tensor:
        """The best weights found, (n, n)."""
        search, best, since = _Search(blocks), math.inf, list[float]()
        kept = search.weights
        for estimate, weights in search.rounds(self.rounds):
            if estimate < best:
                best, kept = estimate, weights
            since.append(best)
            if len(since) > _PATIENCE and best > (1 - _GAIN) * since[-1 - _PATIENCE]:
                break
        return kept


class _Search:
    """Weights that are improved by turns with multipliers θ of the columns.

    For fixed θ the best w minimises Σᵢ cᵢ(wᵢ) Σⱼ θⱼwᵢⱼ, at wᵢⱼ ∝ |Jᵢⱼᵀxᵢ|/√θⱼ with xᵢ the top
    eigenvector of row i; θ grows where a column of Σᵢ cᵢwᵢⱼ is large. Squares are averaged over
    the rounds, which keeps near-ties from flipping to and fro.

    Attributes:
        weights: w, (n, n).
    """

    def __init__(self, blocks: TokenBlocks) -> None:
        n, e, _ = blocks.shape
        self.blocks, self.parts = blocks, blocks.portions()
        self.seen = torch.cat([blocks.seen(rows) for rows in self.parts])
        self.weights = self.seen.double()
        self.theta = torch.ones_like(self.weights[0])
        self.generator = torch.Generator().manual_seed(0)
        self.x = self.weights.new_zeros(n, e)
        self.squares = torch.zeros_like(self.weights)
        self.done = 0

    def rounds(self, most: int) -> Iterator[tuple[float, Tensor]]:
        """Estimates and weights of each round; on a device a few are made before one is seen."""
        step = 1 if is_host(self.x.device) else _UNSEEN
        for start in range(0, most, step):
            yield from self._few_rounds(min(step, most - start))

    def _few_rounds(self, count: int) -> Iterator[tuple[float, Tensor]]:
        settings: Any = {"generator": self.generator, "dtype": torch.float64}
        draws = torch.stack([torch.randn(self.x.shape, **settings) for _ in range(count)])
        tried = [(self._round(draw), self.weights) for draw in draws.to(self.x)]
        estimates = torch.stack([estimate for estimate, _ in tried]).tolist()
        return zip(estimates, (weights for _, weights in tried), strict=True)

    def _round(self, draw: Tensor) -> Tensor:
        """An estimate of the bound for the next weights: from below, by power steps."""
        if self.done:
            self._update()
        s = torch.where(self.weights > 0, 1 / self.weights, 0.0)
        # A tenth of noise: under new weights another eigenvector may be the largest.
        length = torch.linalg.vector_norm(self.x, dim=-1, keepdim=True)
        self.x = self.x / torch.where(length > 0, length, 1.0)
        self.x = self.x + _NOISE * (draw / draw.shape[-1] ** 0.5)
        for _ in range(_STEPS if self.done else _FIRST_STEPS):
            squares = torch.cat([self._step(s, rows) for rows in self.parts])
        self.columns = ((s * squares).sum(-1, keepdim=True) * self.weights).sum(0)
        self.done += 1
        self.squares = self.squares + (squares - self.squares) / self.done
        return self.columns.max().clamp_min(0).sqrt()

    def _step(self, s: Tensor, rows: slice) -> Tensor:
        """|Jᵢⱼᵀxᵢ|², and the next xᵢ: a step of the power method with Σⱼ sᵢⱼ JᵢⱼJᵢⱼᵀ."""
        x = self.x[rows]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit = x / torch.where(length > 0, length, 1.0)
        squares, self.x[rows] = self.blocks.step(unit, s[rows], rows)
        return squares

    def _update(self) -> None:
        """Multipliers and weights for the next round; none where the bound is 0 or no number."""
        largest = self.columns.max()
        theta = self.theta * self.columns / largest
        theta = theta / theta.max()
        w = self.squares.sqrt() / (theta.sqrt() + 1e-3)
        w = w / w.sum(-1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
        w = torch.where(self.seen, w * self.seen.sum(-1, keepdim=True) + _LEAST, 0.0)
        good = (largest > 0) & (largest < math.inf)
        self.theta = torch.where(good, theta, self.theta)
        self.weights = torch.where(good, w, self.weights)
