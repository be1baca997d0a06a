"""What column generation will cost, from what it has cost."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meanfield.transport.problem import Problem

# Seconds at 100,000 uniform atoms a side on one core of an AMD EPYC beside other work, and their
# growth: measured for d = 2 and 3 (24 and 21 s; a million 2,140 and 1,350), from 20,000 for 8, 16
# and 64 (250, 340 and 520 s), between them interpolated. Pricing in high dimension grows as n².
_DIMS = (2.0, 3.0, 8.0, 16.0, 64.0)
_SECONDS = (25.0, 25.0, 250.0, 340.0, 520.0)
_POWERS = (1.9, 1.8, 1.95, 1.95, 1.95)
_ATOMS = 100_000
_ATOM_BYTES, _COORDINATE_BYTES = 4_500, 450  # of an atom: arcs, simplex; costs of a block


class Prediction(NamedTuple):
    """Seconds of one core and bytes; within a factor of three, heavier tails up to ten."""

    seconds: float
    memory: float

    def __str__(self) -> str:
        minutes = self.seconds / 60
        time = f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.0f} hours"
        return f"about {time} of one core and {self.memory / 1e9:.1f} GB"


def predicted(problem: Problem) -> Prediction:
    """What `solve_columns` will probably take for a problem."""
    size = float(np.sqrt(problem.pairs)) / _ATOMS
    seconds = np.interp(problem.dim, _DIMS, _SECONDS) * size ** np.interp(
        problem.dim, _DIMS, _POWERS
    )
    atom = _ATOM_BYTES + _COORDINATE_BYTES * min(problem.dim, 64)
    return Prediction(float(seconds), float(atom * (problem.n + problem.m) / 2))
