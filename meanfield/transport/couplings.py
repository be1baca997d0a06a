"""Couplings: who sends how much mass to whom."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from meanfield.measures import ParticleMeasure

__all__ = ["Coupling"]


@dataclass(frozen=True, eq=False, repr=False)
class Coupling:
    """A coupling π = Σ_k π_k δ_{(x_{i_k}, y_{j_k})} of two particle measures, stored sparsely.

    An exact plan has at most n + m − 1 entries; nothing of size n × m is kept. Masses live as
    logarithms, as the weights do: the pair of two atoms of weight e^{−900} is not lost.

    Attributes:
        source: points xᵢ, shape (..., n, d).
        target: points y_j, shape (..., m, d).
        rows: i_k, shape (..., k).
        cols: j_k, shape (..., k).
        log_mass: log π_k, shape (..., k); −inf pads batches whose plans differ in length.
    """

    source: Tensor
    target: Tensor
    rows: Tensor
    cols: Tensor
    log_mass: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m): how many atoms the two measures have."""
        return self.source.shape[-2], self.target.shape[-2]

    @property
    def mass(self) -> Tensor:
        """π_k, shape (..., k)."""
        return self.log_mass.exp()

    def marginals(self) -> tuple[Tensor, Tensor]:
        """(Σ_j π_ij, Σ_i π_ij), shapes (..., n) and (..., m)."""
        n, m = self.shape
        return _summed(self.mass, self.rows, n), _summed(self.mass, self.cols, m)

    def dense(self) -> Tensor:
        """The matrix π, shape (..., n, m)."""
        n, m = self.shape
        flat = _summed(self.mass, self.rows * m + self.cols, n * m)
        return flat.reshape(*flat.shape[:-1], n, m)

    def cost(self) -> Tensor:
        """Σ_k π_k ‖x_{i_k} − y_{j_k}‖², shape (...); the square of a distance."""
        return (self.mass * self._displacements().square().sum(-1)).sum(-1)

    def barycentric_map(self) -> Tensor:
        """T(xᵢ) = Σ_j π_ij y_j / Σ_j π_ij, shape (..., n, d); xᵢ itself where xᵢ has no mass.

        At an optimal coupling without splitting this is the optimal map; where atoms split it
        is the conditional mean of the target given the source.
        """
        log_row = _log_summed(self.log_mass, self.rows, self.shape[0])
        share = (self.log_mass - log_row.gather(-1, self.rows)).nan_to_num(nan=-math.inf).exp()
        moves = share[..., None] * self._displacements()  # differences first: no cancellation
        index = self.rows[..., None].expand(moves.shape)
        return self.source.scatter_add(-2, index, moves)

    def interpolate(self, t: float) -> ParticleMeasure:
        """Displacement interpolation μ_t = Σ_k π_k δ_{(1−t) x_{i_k} + t y_{j_k}}.

        At an optimal coupling this is a constant-speed geodesic, W₂(μ_s, μ_t) = |t − s| W₂(μ, ν)
        [CAP24, Lemma A.8].

        Args:
            t: time in [0, 1].

        Raises:
            ValueError: if t is outside [0, 1].
        """
        if not 0 <= t <= 1:
            raise ValueError(f"t: expected a time in [0, 1], got {t}")
        starts = _taken(self.source, self.rows)
        points = starts + t * (_taken(self.target, self.cols) - starts)
        logs = self.log_mass - self.log_mass.logsumexp(-1, keepdim=True)
        return ParticleMeasure(points, log_weights=logs)

    def _displacements(self) -> Tensor:
        return _taken(self.target, self.cols) - _taken(self.source, self.rows)

    def __repr__(self) -> str:
        n, m = self.shape
        batch = tuple(self.rows.shape[:-1])
        parts = [f"n={n}", f"m={m}", f"entries={self.rows.shape[-1]}"]
        return f"Coupling({', '.join(parts + [f'batch_shape={batch}'] * bool(batch))})"


def _taken(points: Tensor, index: Tensor) -> Tensor:
    return points.gather(-2, index[..., None].expand(*index.shape, points.shape[-1]))


def _summed(mass: Tensor, index: Tensor, size: int) -> Tensor:
    return mass.new_zeros(*mass.shape[:-1], size).scatter_add(-1, index, mass)


def _log_summed(log_mass: Tensor, index: Tensor, size: int) -> Tensor:
    peak = log_mass.new_full((*log_mass.shape[:-1], size), -math.inf)
    peak = peak.scatter_reduce(-1, index, log_mass, "amax")
    scaled = (log_mass - peak.gather(-1, index)).nan_to_num(nan=-math.inf).exp()
    return peak + _summed(scaled, index, size).log()
