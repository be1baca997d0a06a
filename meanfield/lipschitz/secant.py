"""Secant ratios: how far apart a map sends two inputs, over how far apart they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meanfield.checks import as_bool, as_float_tensor, check_finite, check_same_kind
from meanfield.images import check_map, image_of
from meanfield.linalg.vectors import lengths
from meanfield.maps.derivative_checks import check_repeats
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure, pushforward
from meanfield.results.answers import Answer, labelled
from meanfield.transport import TransportResult, solve_conditional_w2, solve_w2


class SecantRatio(Answer, noun="secant", title="Secant ratio"):
    """W₂(F(μ), F(ν)) / W₂(μ, ν) with what is certain about it.

    Attributes:
        value: quotient of the two values.
        lower: lower end of the numerator, less the rounding of images (8 eps of the size of
            each), over upper end of the denominator: a certified lower bound of the Lipschitz
            constant of F on any set that holds μ and ν, if F rounds its images by no more.
        upper: upper end of the numerator, and that rounding, over lower end of the denominator;
            bounds this ratio, not the Lipschitz constant.
        numerator: W₂(F(μ), F(ν)) with its coupling and method.
        denominator: W₂(μ, ν) with its coupling and method.
        conditional: whether the distances are conditional ones (positioned measures).
    """

    value: Tensor = labelled("secant ratio")
    lower: Tensor = labelled("certified lower bound of the Lipschitz constant", beside=True)
    upper: Tensor = labelled("upper end of the ratio", beside=True)
    numerator: TransportResult = labelled("distance of the images", name="image_distance")
    denominator: TransportResult = labelled("distance of the measures", name="distance")
    conditional: bool = labelled("whether the distances are conditional", attribute=True)


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
        nu: ν; positioned exactly when μ is. Batch axes of the two broadcast.
        conditional: whether to measure with d₂; by default when the measures are positioned.
        **settings: for `meanfield.transport.solve_w2` or `solve_conditional_w2`.

    Raises:
        ValueError: if the two are at distance 0 (or not provably apart), if only one is
            positioned, or if their position marginals differ (d₂ = +∞); or if F gives another
            image of μ when called again, as a module in training mode does, or none in finite
            numbers.
    """
    check_map(F)
    is_positioned = check_measure(mu, "mu").is_positioned
    if is_positioned != check_measure(nu, "nu").is_positioned:
        raise ValueError(
            "expected both measures with positions or both without, got one of each; "
            "ParticleMeasure(mu.points, log_weights=mu.log_weights) drops positions"
        )
    conditional = as_bool(is_positioned if conditional is None else conditional, "conditional")
    solve = solve_conditional_w2 if conditional else solve_w2
    denominator = solve(mu, nu, **settings)
    if not bool((denominator.lower > 0).all()):
        raise ValueError("expected two measures provably apart, got a distance of 0 from below")
    if not bool(torch.isfinite(denominator.upper).all()):
        raise ValueError(
            "the conditional distance is infinite: the measures have different laws of positions"
        )
    images = image_of(F, mu), image_of(F, nu)
    check_repeats(F, mu, images[0])
    numerator, off = solve(*images, **settings), _rounding_of(*images)
    return SecantRatio(
        value=numerator.value / denominator.value,
        lower=_outward((numerator.lower - off).clamp_min(0.0) / denominator.upper, 0.0),
        upper=_outward((numerator.upper + off) / denominator.lower, math.inf),
        numerator=numerator,
        denominator=denominator,
        conditional=conditional,
    )


def _rounding_of(*images: ParticleMeasure) -> Tensor:
    """What rounding of images can change between them: 8 eps of (Σ aᵢ|yᵢ|²)^½, summed."""
    sizes = []
    for one in images:
        root = one.weights.detach().sqrt()[..., None]
        sizes.append(lengths(torch.where(root > 0, root * one.points.detach(), 0.0).flatten(-2)))
    return 8 * torch.finfo(images[0].dtype).eps * sum(sizes[1:], sizes[0])


def _outward(quotient: Tensor, direction: float) -> Tensor:
    """A rounded quotient of certified ends, on the certain side."""
    return torch.nextafter(quotient, torch.full_like(quotient, direction))


def euclidean_secant_ratio(f: Callable[[Tensor], Tensor], X: Tensor, Y: Tensor) -> Tensor:
    """‖f(X) − f(Y)‖ / ‖X − Y‖ in the Frobenius norm: the discrete map on token sequences.

    Args:
        f: from points (..., n, d) to points (..., n, d').
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
