"""Example measures: the configurations of the proofs, and random points."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from meanfield.checks import (
    as_bool,
    as_dtype,
    as_float_tensor,
    as_generator,
    check_finite,
    choice,
    count,
    number,
)
from meanfield.habits import hint_names, with_hints
from meanfield.linalg.vectors import normalised
from meanfield.measures import ParticleMeasure

__all__ = [
    "adversarial",
    "ball",
    "interleaved_diracs",
    "sphere",
    "two_diracs",
]
hint_names(__name__, __all__)


class CriticalPair(NamedTuple):
    """The real eigenpair (λ, u) of A that Proposition 3.4 uses, and where it puts its two atoms.

    The light atom goes to R u and the heavy one to heavy_at · R u, with heavy_at = −1 for λ < 0
    and ½ for λ > 0; scaling is γ = −λ or λ/8.
    """

    eigenvalue: float
    direction: Tensor
    heavy_at: float
    scaling: float

    def tokens(self, radius: float, n: int) -> ParticleMeasure:
        """One token at R u and n − 1 at heavy_at · R u, see `adversarial`."""
        radius, n = number(radius, "radius", least=0), count(n, "n", least=2)
        points = radius * self.heavy_at * self.direction.expand(n, -1).clone()
        points[0] = radius * self.direction
        return ParticleMeasure.from_sequence(points)


def critical_pair(A: Any, *, branch: str = "best") -> CriticalPair:
    """The eigenpair of A that makes attention most sensitive.

    Args:
        A: scores ⟨A x, y⟩, shape (d, d); for a multi-head layer one head's, `parameters.A[h]`.
        branch: "negative" takes the smallest real eigenvalue, "positive" the largest, "best"
            the one with the larger scaling factor max(−λ_min, λ_max/8).

    Raises:
        ValueError: if A has no real eigenvalue of the sign asked for.

    Source: [CAP24] Proposition 3.4.
    """
    choice(branch, "branch", ("best", "negative", "positive"))
    matrix = as_float_tensor(A, "A")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"A: expected one square matrix, got shape {tuple(matrix.shape)}; "
            "for a multi-head layer take one head, parameters.A[h]"
        )
    check_finite(matrix, "A")
    eigenvalues, vectors = torch.linalg.eig(matrix)
    real = eigenvalues.imag == 0  # LAPACK returns real eigenvalues with imaginary part exactly 0
    pairs = []
    for sign, heavy_at, factor in ((-1.0, -1.0, 1.0), (1.0, 0.5, 0.125)):
        name = "negative" if sign < 0 else "positive"
        gains = torch.where(real, sign * eigenvalues.real, -torch.inf)
        k = int(gains.argmax())
        if branch in ("best", name) and float(gains[k]) > 0:
            u = vectors[:, k].real
            u = u / torch.linalg.vector_norm(u)
            u = u * torch.where(u[u.abs().argmax()] < 0, -1.0, 1.0)
            value = float(eigenvalues[k].real)
            pairs.append(CriticalPair(value, u, heavy_at, factor * float(gains[k])))
    if not pairs:
        wanted = "non-zero" if branch == "best" else branch
        raise ValueError(
            f"A: expected a {wanted} real eigenvalue, got {eigenvalues.tolist()} only"
        )
    return max(pairs, key=lambda pair: pair.scaling)


@with_hints
def two_diracs(
    radius: Any,
    log_ratio: Any,
    direction: Any,
    *,
    heavy_at: float = -1.0,
    positioned: bool = False,
) -> ParticleMeasure:
    """A light atom at R u and a heavy one at heavy_at · R u.

    Args:
        radius: R ≥ 0, a number or a batch (...).
        log_ratio: log(light weight / heavy weight), a number or a batch (...), of any
            size: −900 loses no digits.
        direction: u, shape (d,), normalised here.
        heavy_at: where the heavy atom stands on the line through u, in units of R.
        positioned: whether to place the light atom at position ½ and the heavy one at 1, so that
            in masked attention the heavy atom sees the light one.

    Returns:
        The measure, atoms ordered (light, heavy).
    """
    u = as_float_tensor(direction, "direction")
    heavy_at, positioned = number(heavy_at, "heavy_at"), as_bool(positioned, "positioned")
    check_finite(u, "direction")
    if u.ndim != 1 or not bool((u != 0).any()):
        raise ValueError(f"direction: expected a non-zero vector (d,), got {tuple(u.shape)}")
    u = normalised(u)[0]
    r = as_float_tensor(radius, "radius", like=u)
    check_finite(r, "radius")
    if bool((r < 0).any()):
        raise ValueError(f"radius: expected numbers ≥ 0, got a smallest of {float(r.min())}")
    z = as_float_tensor(log_ratio, "log_ratio", like=u)
    check_finite(z, "log_ratio")
    r, z = torch.broadcast_tensors(r, z)
    places = torch.stack([u, heavy_at * u])
    logs = logsigmoid(torch.stack([z, -z], -1))  # of a and 1 − a: accurate at both ends
    positions = u.new_tensor([0.5, 1.0]) if positioned else None
    return ParticleMeasure(r[..., None, None] * places, log_weights=logs, positions=positions)


@with_hints
def interleaved_diracs(
    radius: Any,
    log_ratio: Any,
    direction: Any,
    *,
    scales: int = 20,
    growth: float = 2.0,
) -> ParticleMeasure:
    """Two Diracs, at R u and −R u, at each of m positions, of geometrically growing mass.

    Masked attention averages over the past. On the product of a law of positions with two Diracs
    its derivative is a running mean of the plain one. The norm of this mean tends to Hardy's
    factor 2 (p/(p−1) in d_p) as the number of scales grows and the growth tends to 1: the local
    constant rises to `meanfield.bounds.masked_two_dirac_lower`, and for small ‖A‖R² above it, as
    that is of one entry of the derivative (1.64 at ‖A‖R² = 1/4, where 300 scales of growth 1.1
    have 1.81). For ‖A‖R² = 9, where it is 101,795: 82,619 with 20 scales and growth 2, 94,995
    with 200 scales and growth 1.3.

    Args:
        radius: R ≥ 0, a number or a batch (...).
        log_ratio: log(light weight / heavy weight) at each position, a number or a batch (...).
        direction: u, shape (d,), normalised here.
        scales: number of positions m.
        growth: mass of a position over that of the one before, above 1.

    Returns:
        A measure of 2m atoms at positions 1/m, …, 1, the light one first at each.

    Raises:
        ValueError: no scales, or a growth that is not above 1.
    """
    scales, growth = count(scales, "scales"), number(growth, "growth", above=1)
    pair = two_diracs(radius, log_ratio, direction)
    step = torch.arange(scales, dtype=pair.points.dtype, device=pair.points.device)
    mass = (step * math.log(growth)).log_softmax(-1)
    return ParticleMeasure(
        pair.points.repeat(*[1] * len(pair.batch_shape), scales, 1),
        log_weights=(mass[:, None] + pair.log_weights[..., None, :]).flatten(-2),
        positions=((step + 1) / scales).repeat_interleave(2),
    )


@with_hints
def adversarial(A: Any, radius: float, n: int, *, branch: str = "best") -> ParticleMeasure:
    """The token sequence of Proposition 3.4: one token at R u, n − 1 at −R u or at R u/2.

    The single token comes first, so that the others attend to it in masked attention too. As a
    measure it is `two_diracs` with ratio 1/(n−1).

    Args:
        A: scores ⟨A x, y⟩ of one head, shape (d, d).
        radius: R.
        n: number of tokens, at least 2.
        branch: which real eigenpair to use, see `critical_pair`.

    Returns:
        A positioned uniform measure of n atoms.
    """
    return critical_pair(A, branch=branch).tokens(radius, n)


@with_hints
def sphere(
    n: int,
    dim: int,
    *,
    radius: float = 1.0,
    batch_shape: tuple[int, ...] = (),
    generator: torch.Generator | int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Independent uniform points on the sphere of the given radius, ``(*batch_shape, n, dim)``.

    The generator may be a seed; without one torch's own is used, see `torch.manual_seed`.
    """
    generator, radius = as_generator(generator), number(radius, "radius", least=0)
    shape = (*batch_shape, count(n, "n"), count(dim, "dim"))
    dtype, device = as_dtype(dtype), generator.device
    points = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    return radius * points / torch.linalg.vector_norm(points, dim=-1, keepdim=True)


@with_hints
def ball(
    n: int,
    dim: int,
    *,
    radius: float = 1.0,
    batch_shape: tuple[int, ...] = (),
    generator: torch.Generator | int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Independent uniform points in the ball B_R, ``(*batch_shape, n, dim)``; see `sphere`."""
    generator, radius = as_generator(generator), number(radius, "radius", least=0)
    points = sphere(n, dim, batch_shape=batch_shape, generator=generator, dtype=dtype)
    shape = (*points.shape[:-1], 1)
    share = torch.rand(shape, generator=generator, dtype=dtype, device=points.device)
    return radius * share ** (1 / points.shape[-1]) * points
