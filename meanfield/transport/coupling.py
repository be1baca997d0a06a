"""Couplings of two particle measures, stored sparsely."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import as_tensor, count, number, to_host
from meanfield.habits import Hinted, NoNumber, with_hints
from meanfield.html import html_table, span
from meanfield.measure_arguments import drawn
from meanfield.measures import ParticleMeasure, log_sums

if TYPE_CHECKING:
    from scipy.sparse import coo_array


class Draws(NamedTuple):
    """Draws (x, y) from a coupling, shapes (..., size, d), and where their atoms stand."""

    source: Any
    target: Any
    rows: Any
    cols: Any


@dataclass(frozen=True, eq=False, repr=False)
class Coupling(NoNumber, Hinted):
    """A coupling π = Σ_k π_k δ_{(x_{i_k}, y_{j_k})} of two particle measures, stored sparsely.

    An exact plan has at most n + m − 1 entries; nothing of size n × m is kept. Masses live as
    logarithms, as the weights do. Formulas keep the pair of two atoms of weight e^{−900}; plans of
    the simplex lose atoms lighter than about 1e-16 of all mass, which then have none here (the
    interval does not). Where the clouds were NumPy arrays, so is everything here.

    Attributes:
        source: points xᵢ, shape (..., n, d).
        target: points y_j, shape (..., m, d).
        rows: i_k, shape (..., k).
        cols: j_k, shape (..., k).
        log_mass: log π_k, shape (..., k); −inf pads batches whose plans differ in length.
    """

    _instead = "take .dense() or .to_scipy()"
    source: Any
    target: Any
    rows: Any
    cols: Any
    log_mass: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m): how many atoms the two measures have."""
        return self.source.shape[-2], self.target.shape[-2]

    @property
    def mass(self) -> Any:
        """π_k, shape (..., k)."""
        return np.exp(self.log_mass) if _is_numpy(self.log_mass) else self.log_mass.exp()

    def marginals(self) -> tuple[Any, Any]:
        """(Σ_j π_ij, Σ_i π_ij), shapes (..., n) and (..., m)."""
        (n, m), held = self.shape, self._tensors()
        sums = (_summed(held.mass, t, k) for t, k in ((held.rows, n), (held.cols, m)))
        first, second = (alike(self.log_mass, t) for t in sums)
        return first, second

    def dense(self) -> Any:
        """The matrix π, shape (..., n, m)."""
        (n, m), held = self.shape, self._tensors()
        flat = _summed(held.mass, held.rows * m + held.cols, n * m)
        return alike(self.log_mass, flat.reshape(*flat.shape[:-1], n, m))

    def to_scipy(self) -> coo_array:
        """The matrix π as a sparse array of SciPy (n, m).

        Raises:
            ValueError: for a batch; index it first.
        """
        from scipy.sparse import coo_array

        held = self._tensors()
        if held.rows.ndim > 1:
            raise ValueError(
                f"expected one coupling, got a batch of shape {tuple(held.rows.shape[:-1])}; "
                "solve each pair by itself, or use dense()"
            )
        mass, rows, cols = (to_host(t) for t in (held.mass, held.rows, held.cols))
        kept = mass > 0
        return coo_array((mass[kept], (rows[kept], cols[kept])), shape=self.shape)

    @with_hints
    def sample(self, size: int, *, generator: torch.Generator | int | None = None) -> Draws:
        """Independent draws (x, y) ~ π, for example to train flows on.

        Of a conditional coupling both atoms of a pair have the same position.

        Args:
            size: how many draws (of each entry of a batch).
            generator: where the randomness comes from, or a seed; torch's own if None.

        Returns:
            The tuple (source, target, rows, cols): x and y, (..., size, d), and their numbers.

        Raises:
            ValueError: a pair has an infinite distance.
        """
        held = self._tensors()._with_mass("sample")
        chosen = drawn(held.mass, count(size, "size"), generator)
        rows, cols = held.rows.gather(-1, chosen), held.cols.gather(-1, chosen)
        points = _taken(held.source, rows), _taken(held.target, cols)
        return Draws(*(alike(self.log_mass, t) for t in (*points, rows, cols)))

    def cost(self) -> Any:
        """Σ_k π_k ‖x_{i_k} − y_{j_k}‖², shape (...), the square of a distance; ∞ without mass."""
        held = self._tensors()
        costs = (held.mass * held._moves.square().sum(-1)).sum(-1)
        return alike(self.log_mass, torch.where(held._has_mass, costs, math.inf))

    def barycentric_map(self) -> Any:
        """T(xᵢ) = Σ_j π_ij y_j / Σ_j π_ij, shape (..., n, d); xᵢ itself where π has no mass.

        At an optimal coupling without splitting this is the optimal map; where atoms split it
        is the conditional mean of the target given the source.
        """
        held = self._tensors()
        log_row = log_sums(held.log_mass, held.rows, self.shape[0])
        share = (held.log_mass - log_row.gather(-1, held.rows)).nan_to_num(nan=-math.inf).exp()
        moves = share[..., None] * held._moves  # differences first: no cancellation
        index = held.rows[..., None].expand(moves.shape)
        return alike(self.log_mass, held.source.scatter_add(-2, index, moves))

    @with_hints
    def interpolate(self, t: float) -> ParticleMeasure:
        """Displacement interpolation μ_t = Σ_k π_k δ_{(1−t) x_{i_k} + t y_{j_k}}.

        At an optimal coupling this is a constant-speed geodesic, W₂(μ_s, μ_t) = |t − s| W₂(μ, ν)
        (Santambrogio, Optimal Transport for Applied Mathematicians, Theorem 5.27; [CAP24] Lemma
        A.8 says that there are such). It has no positions: a coupling that keeps them, as of
        `conditional_w2`, has those of its first atoms, ``mu.positions[coupling.rows]``.

        Args:
            t: time in [0, 1].

        Raises:
            ValueError: if t is outside [0, 1], or a pair has an infinite distance.
        """
        number(t, "t", least=0, most=1)
        held = self._tensors()._with_mass("interpolate")
        points = _taken(held.source, held.rows) + t * held._moves
        logs = held.log_mass - held.log_mass.logsumexp(-1, keepdim=True)
        return ParticleMeasure(points, log_weights=logs)

    def _tensors(self) -> Coupling:
        return Coupling(*(as_tensor(getattr(self, f.name)) for f in fields(self)))

    @property
    def _has_mass(self) -> Tensor:
        """Whether there is a plan: none of an infinite distance between others."""
        found: Tensor = (self.log_mass > -math.inf).any(-1)
        return found

    def _with_mass(self, name: str) -> Coupling:
        if not bool(self._has_mass.all()):
            first = tuple(map(int, (~self._has_mass).nonzero()[0]))
            raise ValueError(
                f"{name}: expected a plan of each pair, got none of pair {first}, whose distance "
                "is infinite; leave it out, or give a penalty"
            )
        return self

    @property
    def _moves(self) -> Tensor:
        return _taken(self.target, self.cols) - _taken(self.source, self.rows)

    def _repr_html_(self) -> str:
        n, m = self.shape
        held = self._tensors()
        rows = [
            ("atoms of the source", n),
            ("atoms of the target", m),
            ("batch", " × ".join(map(str, self.rows.shape[:-1])) or None),
            ("entries", self.rows.shape[-1]),
            ("log-mass of an entry", span(held.log_mass)),
            ("mean squared displacement", span(as_tensor(self.cost()))),
        ]
        return html_table("Coupling", rows)

    def __repr__(self) -> str:
        n, m = self.shape
        batch = tuple(self.rows.shape[:-1])
        parts = [f"n={n}", f"m={m}", f"entries={self.rows.shape[-1]}"]
        return f"Coupling({', '.join(parts + [f'batch_shape={batch}'] * bool(batch))})"


def alike(kind: Any, tensor: Tensor) -> Any:
    """The tensor as what `kind` is: a NumPy array where that is one."""
    return to_host(tensor) if _is_numpy(kind) else tensor


def _is_numpy(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _taken(points: Tensor, index: Tensor) -> Tensor:
    return points.gather(-2, index[..., None].expand(*index.shape, points.shape[-1]))


def _summed(mass: Tensor, index: Tensor, size: int) -> Tensor:
    return mass.new_zeros(*mass.shape[:-1], size).scatter_add(-1, index, mass)
