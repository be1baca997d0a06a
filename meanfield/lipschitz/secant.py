"""Secant ratios: how far apart a map sends two inputs, over how far apart they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meanfield.checks import as_bool, as_float_tensor, check_finite, check_same_kind, one_number
from meanfield.html import span, table
from meanfield.linalg.vectors import lengths
from meanfield.measures import (
    MeasureMap,
    ParticleMeasure,
    check_map,
    check_measure,
    image_of,
    pushforward,
)
from meanfield.results import Variable
from meanfield.results.labels import batched
from meanfield.transport import TransportResult, solve_conditional_w2, solve_w2

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["SecantRatio", "euclidean_secant_ratio", "secant_ratio", "sequence_map"]


_ENDS = {"value": "", "lower": "_lower", "upper": "_upper"}
_VARIABLES = tuple(
    Variable(f"{name}{end}", f"{words}{which}", units)
    for name, words, units in (
        ("secant", "secant ratio", "1"),
        ("image_distance", "distance of the images", "length"),
        ("distance", "distance of the measures", "length"),
    )
    for end, which in (("", ""), ("_lower", ", certified lower end"), ("_upper", ", upper end"))
)


@dataclass(frozen=True, eq=False)
class SecantRatio:
    """W₂(F(μ), F(ν)) / W₂(μ, ν) with what is certain about it.

    Attributes:
        value: quotient of the two values.
        lower: lower end of the numerator over upper end of the denominator: a certified lower
            bound of the Lipschitz constant of F on any set that holds μ and ν.
        upper: upper end of the numerator over lower end of the denominator; bounds this ratio,
            not the Lipschitz constant.
        numerator: W₂(F(μ), F(ν)) with its coupling and method.
        denominator: W₂(μ, ν) with its coupling and method.
        conditional: whether the distances are conditional ones (positioned measures).
    """

    value: Tensor
    lower: Tensor
    upper: Tensor
    numerator: TransportResult
    denominator: TransportResult
    conditional: bool

    def __float__(self) -> float:
        return one_number(self.value, "a ratio")

    def to_dataset(self) -> xr.Dataset:
        """The ratio with its certified ends, and both distances with theirs."""
        parts = {"secant": self, "image_distance": self.numerator, "distance": self.denominator}
        ends = ((part, name, end) for name, part in parts.items() for end in _ENDS)
        values = {f"{name}{_ENDS[end]}": getattr(part, end) for part, name, end in ends}
        found = batched(_VARIABLES, values, self.value.shape)
        return found.assign_attrs(metric="conditional W2" if self.conditional else "W2")

    def __repr__(self) -> str:
        ends = f"lower={span(self.lower)}, upper={span(self.upper)}"
        return f"SecantRatio(value={span(self.value)}, {ends}, conditional={self.conditional})"

    def _repr_html_(self) -> str:
        rows = [
            ("value", span(self.value)),
            ("certified lower bound of the Lipschitz constant", span(self.lower)),
            ("upper end of the ratio", span(self.upper)),
            ("distance of the images", span(self.numerator.value)),
            ("distance of the measures", span(self.denominator.value)),
        ]
        return table(f"Secant ratio, {'conditional W₂' if self.conditional else 'W₂'}", rows)


def secant_ratio(
    F: MeasureMap,
    mu: ParticleMeasure,
    nu: ParticleMeasure,
    *,
    conditional: bool | None = None,
    **settings: Any,
) -> SecantRatio:
    """W₂(F(μ), F(ν)) / W₂(μ, ν), or with the conditional distance d₂ for positioned measures.

    Args:
        F: a map of measures.
        mu: μ.
        nu: ν; positioned exactly when μ is.
        conditional: whether to measure with d₂; by default when the measures are positioned.
        **settings: for `meanfield.transport.solve_w2` or `solve_conditional_w2`.

    Raises:
        ValueError: if the two are at distance 0 (or not provably apart), if only one is
            positioned, or if their position marginals differ (d₂ = +∞).
    """
    check_map(F)
    if check_measure(mu, "mu").is_positioned != check_measure(nu, "nu").is_positioned:
        raise ValueError(
            "expected both measures with positions or both without, got one of each; "
            "ParticleMeasure(mu.points, log_weights=mu.log_weights) drops positions"
        )
    if conditional is None:
        conditional = mu.is_positioned
    conditional = as_bool(conditional, "conditional")
    solve = solve_conditional_w2 if conditional else solve_w2
    denominator = solve(mu, nu, **settings)
    if not bool((denominator.lower > 0).all()):
        raise ValueError("expected two measures provably apart, got a distance of 0 from below")
    if not bool(torch.isfinite(denominator.upper).all()):
        raise ValueError(
            "the conditional distance is infinite: the measures have different laws of positions"
        )
    numerator = solve(image_of(F, mu), image_of(F, nu), **settings)
    return SecantRatio(
        value=numerator.value / denominator.value,
        lower=_outward(numerator.lower / denominator.upper, 0.0),
        upper=_outward(numerator.upper / denominator.lower, math.inf),
        numerator=numerator,
        denominator=denominator,
        conditional=conditional,
    )


def _outward(quotient: Tensor, direction: float) -> Tensor:
    """A rounded quotient of certified ends, on the certain side."""
    return torch.nextafter(quotient, torch.full_like(quotient, direction))


def euclidean_secant_ratio(f: Callable[[Tensor], Tensor], X: Tensor, Y: Tensor) -> Tensor:
    """‖f(X) − f(Y)‖ / ‖X − Y‖ in the Frobenius norm: the discrete map on token sequences.

    Args:
        f: from points (..., n, d) to points (..., n, d'); `sequence_map` makes one of a map of
            measures.
        X: sequence, shape (..., n, d).
        Y: sequence, same shape.

    Returns:
        The ratio, shape (...).

    Raises:
        ValueError: if the shapes differ or X = Y.
    """
    X, Y = as_float_tensor(X, "X"), as_float_tensor(Y, "Y")
    check_same_kind(X, "X", Y, "Y")
    if X.shape != Y.shape or X.ndim < 2:
        raise ValueError(
            f"expected X and Y of one shape (..., n, d), got {tuple(X.shape)} and {tuple(Y.shape)}"
        )
    check_finite(X, "X")
    check_finite(Y, "Y")
    # The squares of steps below 1e-162 would underflow: lengths of whole sequences, scaled.
    apart = lengths((X - Y).flatten(-2))
    if not bool((apart > 0).all()):
        raise ValueError("expected X ≠ Y, got equal sequences")
    images = [pushforward(f, ParticleMeasure(points)).points for points in (X, Y)]
    return lengths((images[0] - images[1]).flatten(-2)) / apart


def sequence_map(F: MeasureMap) -> Callable[[Tensor], Tensor]:
    """The discrete map f of a map of measures: F(m(X)) = m(f(X)), token i at position i/n."""
    check_map(F)

    def f(points: Tensor) -> Tensor:
        return F(ParticleMeasure.from_sequence(points)).points

    return f
