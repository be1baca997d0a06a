"""Every formula in a figure is the function that its legend names, at three abscissae."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import lambertw

from meanfield import bounds, sampling
from meanfield.experiments import get, kernel_growth, quadratic_growth
from meanfield.figures import curves
from meanfield.figures.canvas import FORMULA
from meanfield.lipschitz import worst_case
from tests.experiments.test_columns import random_dataset

Function = Callable[[float], float]


@pytest.fixture(autouse=True)
def _few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them are looked at, and some formulas are optima at each."""
    monkeypatch.setattr(curves, "_FINE", 7)


def along_r(bound: Callable[..., Any], *sizes: float) -> Function:
    return lambda square: float(bound(*sizes, math.sqrt(square)))


def of_sizes() -> Sequence[Function]:
    at = quadratic_growth.EXPERIMENT.plan(quadratic_growth.EXPERIMENT.quick)["attrs"]

    def lower(radius: float) -> float:
        return 2 / 3 * radius**2 * at["reached"] - at["norm_V"] / 3

    return [lower, lambda R: float(bounds.theorem_3_3(at["norm_A"], at["norm_V"], R, 3))]


def over_two_diracs(upper: Callable[..., Any], lower: Callable[..., Any]) -> Function:
    return lambda c: float(upper(1.0, 1.0, math.sqrt(c)) / lower(1.0, math.sqrt(c)))


RADII = get("two-dirac").quick.radii
# By experiment and figure, in the order in which they are drawn.
NAMED: dict[tuple[str, str], Sequence[Function]] = {
    ("two-dirac", "growth-in-n"): [
        *(partial(bounds.proposition_3_4, 1.0, R) for R in RADII),
        math.sqrt,
    ],
    ("two-dirac", "growth-in-radius"): [
        along_r(bounds.theorem_3_5, 1.0, 1.0),
        along_r(bounds.mean_field, 1.0, 1.0),
        along_r(bounds.two_dirac_lower, 1.0),
    ],
    ("two-dirac", "growth-in-radius-masked"): [
        along_r(bounds.masked_mean_field, 1.0, 1.0),
        along_r(bounds.masked_two_dirac_lower, 1.0),
    ],
    ("sharpness", "gap"): [
        over_two_diracs(bounds.mean_field, bounds.two_dirac_lower),
        lambda _: 1.0,
    ],
    ("sharpness", "gap-masked"): [
        over_two_diracs(bounds.masked_mean_field, bounds.masked_two_dirac_lower),
        lambda _: 1.0,
    ],
    ("scaling-factor", "heads"): [lambda _: math.log(get("scaling-factor").quick.n_tokens) / 2],
    ("quadratic-growth", "growth"): of_sizes(),
    ("kernel-growth", "growth"): [
        lambda R: float(bounds.mean_field(1.0, 1.0, R)),
        lambda R: float(bounds.l2_mean_field(1.0, 1.0, R, 2)),
        lambda R: float(bounds.capped_mean_field(1.0, 1.0, R, 2.0)),
        lambda R: 2 * R**2,
    ],
    ("l2-tightness", "tightness"): [
        lambda n: 1 + 4 * float(lambertw((n - 1) * math.exp(-1.0)).real),
        lambda n: 1 + 4 * float(lambertw((n - 1) * math.exp(-1.5)).real),
    ],
    ("inversion", "error"): [lambda k, c=c: c**k for c in (0.5, 0.7, 0.9)],
    ("masked-bound", "hardy"): [
        lambda c, f=f: float(f(c, 1.0, 1.0))
        for f in (bounds.masked_mean_field, bounds.theorem_3_5)
    ],
}


def formulas(name: str, figure: str) -> list[Any]:
    ds = random_dataset(name)
    lines = get(name).figures[figure](ds, legend=False).get_lines()
    return [line for line in lines if line.get_gid() == FORMULA and len(line.get_xdata())]


@pytest.mark.parametrize(("name", "figure"), NAMED)
def test_a_formula_is_what_the_legend_says(name, figure):
    drawn = formulas(name, figure)
    assert len(drawn) == len(NAMED[name, figure])
    for line, expected in zip(drawn, NAMED[name, figure], strict=True):
        x, y = (np.asarray(of, float) for of in line.get_data())
        for k in (0, len(x) // 2, -1):
            assert y[k] == pytest.approx(expected(float(x[k])), rel=1e-8)


def test_of_both_signs_of_dot_products_the_larger_constant_is_kept():
    s = kernel_growth.Settings(starts=1, steps=1)
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    found = kernel_growth.largest_constant(s, "dot product", 2.0, 2, one)
    pairs = [sampling.two_diracs(2.0, -4.0 * k, [1.0, 0.0]) for k in (0.5, 2.0)]
    each = [
        float(
            worst_case(F, 2.0, n_atoms=2, starts=1, steps=1, candidates=pairs, generator=other)[1]
        )
        for F in kernel_growth._layers("dot product")
    ]
    assert each[0] != pytest.approx(each[1]) and found["constant"] == max(each)
