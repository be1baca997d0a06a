"""Bounds in a ball of maps applied one after another, by the norms of all intervals of them.

With J_k the derivative of the k-th map at the measure that enters it and J′_k in the ball,

    J′_l ⋯ J′_1 − J_l ⋯ J_1 = Σ_k (J_l ⋯ J_{k+1}) (J′_k − J_k) (J′_{k−1} ⋯ J′_1):

on the left of a change stand only derivatives at the input, whose product is known and far below
the product of their norms. Not in the papers; the proof is on the page "Sharp constants" of the
documentation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meanfield.linalg import NormSolver
from meanfield.linalg.solvers import as_solver
from meanfield.linalg.vectors import lengths
from meanfield.maps.autodiff import Linearisation
from meanfield.maps.map import (
    BallBounds,
    Map,
    ball_bounds,
    derivative_if_any,
    expanded_radii,
    is_small,
    known,
    norm_upper,
)
from meanfield.measures import ParticleMeasure


@dataclass(frozen=True, eq=False)
class Intervals:
    """Maps applied one after another, at μ.

    Attributes:
        maps: F_1, …, F_L.
        measures: what enters each of them, μ first.
        norms: B[l, k] ≥ ‖J_l ⋯ J_{k+1}‖, the larger component, ``(L + 1, L + 1, *batch)``: 1 for
            l = k, and ∞ where nothing is known.
    """

    maps: Sequence[Map]
    measures: Sequence[ParticleMeasure]
    norms: Tensor

    @classmethod
    def of(
        cls, maps: Sequence[Map], mu: ParticleMeasure, solver: NormSolver | None = None
    ) -> Intervals:
        """With L(L + 1)/2 norms; of fewer than three maps if a solver is given.

        Args:
            maps: F_1, …, F_L.
            mu: μ.
            solver: of the norms; without one they are factored, and left out of large maps.
        """
        solver = None if solver is None else as_solver(solver, solver)  # asked or not
        measures = [mu]
        for each in maps[:-1]:
            measures.append(each(measures[-1]))
        size = len(maps) + 1
        norms = mu.points.new_full((size, size, *mu.batch_shape), math.inf)
        norms.diagonal().fill_(1.0)
        if solver is not None or (len(maps) > 2 and all(map(is_small, measures))):
            _measure(norms, maps, measures, solver)
        return cls(maps, measures, norms)

    def within(
        self, radii: Tensor | float, length: Tensor | None = None, *, splitting: bool
    ) -> tuple[BallBounds, list[Tensor]]:
        """The bounds of the whole, and of each map what its change adds to the whole's.

        The k-th of these is δ_k(r_k) · ‖J′_{k−1} ⋯ J′_1‖ at most. Where atoms do not split, the
        displacement of all, in L²(μ), is at most that last norm times the length, and that of an
        atom of weight a at most 1/√a of it. A light part of an atom that splits has no such bound.

        Args:
            radii: of the ball, as for `Map.ball_bounds`.
            length: (Σ aᵢ|displacement i|²)^½ at most; that of the radii if None.
            splitting: whether atoms may split.

        Raises:
            NotImplementedError: one of the maps declares nothing in a ball.
        """
        mu, whole, parts = self.measures[0], None, []
        each = expanded_radii(mu, radii)
        if length is None:
            length = lengths((0.5 * mu.log_weights).exp() * each)
        per_atom = length[..., None] * (-0.5 * mu.log_weights).exp()
        grown = torch.ones_like(length)
        for k, (F, nu) in enumerate(zip(self.maps, self.measures, strict=True)):
            if not splitting:
                each = expanded_radii(mu, each.minimum(known(grown[..., None] * per_atom)))
            found = ball_bounds(F, nu, each, splitting=splitting)
            parts.append(known(found.change * grown))
            whole = found if whole is None else found.after(whole)
            steps = [self.norms[k + 1, j + 1] * part for j, part in enumerate(parts)]
            whole = BallBounds.of(
                whole.constant.minimum(self.norms[k + 1, 0]),
                whole.change.minimum(known(torch.stack(steps).sum(0))),
                whole.upper,
                whole.displacement,
            )
            grown, each = whole.upper, whole.displacement
        assert whole is not None
        if not splitting:
            moved = each.minimum(known(grown[..., None] * per_atom))
            whole = whole._replace(displacement=expanded_radii(mu, moved))
        return whole, parts


def _measure(
    norms: Tensor,
    maps: Sequence[Map],
    measures: Sequence[ParticleMeasure],
    solver: NormSolver | None,
) -> None:
    """Puts in the norms; of an interval with a map that has no derivative they stay ∞."""
    found = [derivative_if_any(F, nu) for F, nu in zip(maps, measures, strict=True)]
    if solver is None:
        found = [at and at.assembled() for at in found]
    for k in range(len(maps)):
        whole: Linearisation | None = None
        for place, each in enumerate(found[k:], k + 1):
            if each is None:
                break
            whole = each if whole is None else each @ whole
            if solver is None:
                whole = whole.assembled()
            with contextlib.suppress(OverflowError):  # of matrices out of range nothing is known
                norms[place, k] = norm_upper(whole, solver)
