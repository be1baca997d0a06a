"""Upper bounds of a layer at points that are given, statement by statement."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from meanfield.bounds.layer import raised
from meanfield.bounds.sharp import mean_field
from meanfield.bounds.spheres import sphere_mean_field
from meanfield.bounds.statements import OURS, BoundRow, Question, statement
from meanfield.bounds.theorems import local_upper
from meanfield.checks import as_floats

_TOKENS, _HERE = "Euclidean, at the points", "W₂ or d₂, at the points"


def point_rows(question: Question) -> Iterator[BoundRow]:
    """[CAP24] Theorem C.3, what the map itself declares, and along the sphere behind a norm."""
    kernel, placed = question.kernel, question.placed
    yield question.upper(
        ("Thm C.3", "upper", _TOKENS, "these tokens", "[CAP24], as its scripts; |Aᵀx|: " + OURS),
        lambda: _theorem_c_3(question),
        kernel or placed,
    )
    declared, reason = _declared(question)
    yield statement(
        ("at the points", "upper", _HERE, "these points", OURS),
        lambda: declared,
        reason,
    )
    yield from _sphere_rows(question)


def _sphere_rows(question: Question) -> Iterator[BoundRow]:
    reason = question.kernel or question.normalised or question.plain
    yield statement(
        ("sphere", "upper", "W₂, times 1/σ, behind a norm", "atoms move along a sphere", OURS),
        lambda: _along_sphere(question, apart=0.0),
        reason,
    )
    yield statement(
        ("sphere, at the points", "upper", "W₂, at the points", "their least spread σ", OURS),
        lambda: question.slope * _along_sphere(question, apart=question.slope**2),
        reason or question.placed,
    )


def _along_sphere(question: Question, *, apart: float) -> float:
    """Along the sphere, and ε · apart of what `mean_field` allows across it."""
    layer = question.layer
    assert layer.norm is not None
    radius = math.sqrt(layer.parameters.dim)
    along = sphere_mean_field(layer.norm_A, 1.0, radius, shift=layer.shift)
    across = mean_field(layer.norm_A, 1.0, radius, shift=layer.shift)
    # An atom moves by less than 1/σ in all, so never more than the bound for all directions.
    share = min(layer.norm.eps * apart, 1.0)
    return layer.joined(np.minimum(along + share * across, across))


def _theorem_c_3(question: Question) -> float:
    """Σ_h √3 ‖V_h‖ (n(1 + U²r²) + W²r²)^½ with r the diameter, U = max|uᵢ|, W = max|Aᵀxᵢ|.

    Of the three parts of the derivative: (Σⱼ Pᵢⱼεⱼ)ᵢ is at most √n|ε|, Σⱼ Pᵢⱼ(xⱼ−mᵢ)⟨uᵢ, εⱼ⟩ at
    most √n·r·U|ε|, and Covᵢ A εᵢ = Σⱼ Pᵢⱼ(xⱼ−mᵢ)⟨Aᵀxⱼ, εᵢ⟩ at most r·W|εᵢ|. The scripts of [CAP24]
    evaluate the form with W = U and without √3.
    """
    layer, points = question.layer, question.points
    assert points is not None
    if layer.norm is not None:
        points = layer.norm.unit(points)
    x, n = as_floats(points.points), points.n_particles
    square = (x**2).sum(1)
    spread = max(float((square[:, None] + square - 2 * x @ x.T).max()), 0.0)
    ahead = np.linalg.norm(np.einsum("hij,nj->hni", layer.A, x) + layer.pull[:, None], axis=-1)
    back = np.linalg.norm(np.einsum("hji,nj->hni", layer.A, x), axis=-1)
    inside = n * (1 + ahead.max(1) ** 2 * spread) + back.max(1) ** 2 * spread
    return float(raised(np.sum(math.sqrt(3) * layer.norm_V * np.sqrt(inside))))


def _declared(question: Question) -> tuple[float, str | None]:
    """What `local_upper` of the map gives, and why there is nothing."""
    whole = question.layer.map
    if whole is None or question.points is None:
        return math.nan, question.placed or "bare matrices are no map"
    try:
        return float(local_upper(whole, question.points)), None
    except NotImplementedError:
        return math.nan, "the map declares no bound at an input"
