"""Worst-case inputs: measures in a ball that make the local constant as large as possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meanfield import sampling
from meanfield.checks import (
    as_bool,
    as_generator,
    check_dim,
    count,
    length_rounding,
    number,
    to_host,
)
from meanfield.habits import with_hints
from meanfield.lipschitz.constant import LocalLipschitz
from meanfield.lipschitz.differentiable import recorded_value
from meanfield.lipschitz.local import local_lipschitz
from meanfield.maps import Map
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure

# Log-weights below this are as good as absent at any radius whose constant fits in float64.
_LIGHTEST = -1300.0


@with_hints
@torch.inference_mode(False)  # it needs gradients wherever it is called
def worst_case(
    F: MeasureMap,
    radius: float,
    *,
    n_atoms: int = 2,
    dim: int | None = None,
    positioned: bool | None = None,
    starts: int = 64,
    steps: int = 200,
    candidates: Sequence[ParticleMeasure] = (),
    generator: torch.Generator | int = 0,
) -> tuple[ParticleMeasure, LocalLipschitz]:
    """A measure of n atoms in B_R whose local Wasserstein constant is large, and the constant.

    Ascent of log max(‖D^½JD^−½‖, maxᵢ‖D_xΓ_μ(xᵢ)‖) over atoms (projected on the ball) and
    log-weights, from many starts at once: the two Diracs of the proofs where F declares
    ``score_matrices`` (along the critical eigenvectors of each head, at weights about the best),
    random measures, one with all its atoms in one place, and the caller's candidates. With the
    singular vectors u, v held fixed, the gradient of the top singular value is that of
    ⟨u, D^½JD^−½ v⟩. Plain ascent from random starts does poorly here (the best weights are
    e^{−2γR²}), hence weights in log space and structured starts; the result is never below the
    best start.

    A lower bound of the supremum over the ball: nothing says that it is attained. It works on the
    device of the map's ``score_matrices`` or of the candidates.

    Args:
        F: a map of measures that keeps weights.
        radius: R > 0.
        n_atoms: number of atoms n.
        dim: d; by default as F declares (its ``dim``).
        positioned: whether the atoms have positions i/n; by default for maps that declare
            themselves causal (their ``causal``). Say True for others that look at positions, as
            the rotary kernel does.
        starts: number of random starts, besides the structured ones.
        steps: steps of ascent.
        candidates: measures to start from as well; those with fewer than n atoms are padded,
            those with more are refused. Their positions, if any, are not kept.
        generator: of the random starts, or their seed.

    Returns:
        The measure (without batch axes) and its `LocalLipschitz`.

    Raises:
        ValueError: a radius that is not positive, no dimension, no starts or steps, candidates
            that do not fit.
    """
    F = as_map(F)
    radius, n_atoms = number(radius, "radius", above=0), count(n_atoms, "n_atoms")
    starts, steps = count(starts, "starts"), count(steps, "steps")
    generator = as_generator(generator)
    dim, positions = dim_of(F, dim), None
    candidates = [check_measure(mu, "candidates") for mu in candidates]
    there = [*F.score_matrices, *(mu.points for mu in candidates)]
    device = there[0].device if there else torch.device("cpu")
    if any(A.dtype != torch.float64 for A in F.score_matrices):
        raise TypeError(
            "F: expected parameters of float64, in which measures are searched, got "
            f"{F.score_matrices[0].dtype}; take SelfAttention(F.parameters.to(torch.float64))"
        )
    if F.causal if positioned is None else as_bool(positioned, "positioned"):
        positions = torch.arange(1, n_atoms + 1, dtype=torch.float64, device=device) / n_atoms
    given = [*(_constructions(F, radius) if n_atoms > 1 else ()), *candidates]
    begun = [_random_starts(starts, n_atoms, dim, radius, generator)]
    begun += [_fit(mu, n_atoms, dim, radius) for mu in given]
    points, logs = (torch.cat([t.to(device) for t in part]) for part in zip(*begun, strict=True))
    highest, best = -math.inf, None
    moments = [(torch.zeros_like(t), torch.zeros_like(t)) for t in (points, logs)]
    for done in range(1, steps + 1):
        mu = ParticleMeasure(points, log_weights=logs, positions=positions)
        constant = local_lipschitz(F, mu, rtol=1e-3, strict=False)
        value, k = constant.value.detach().max(0)
        if (found := float(value)) > highest:
            highest, best = found, mu[int(k)]
        gradients = _gradients(F, mu, constant)
        points, logs = _ascend(points, logs, gradients, moments, done, steps, radius)
    assert best is not None
    return best, local_lipschitz(F, best)


def _random_starts(
    starts: int, n: int, dim: int, radius: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Atoms in the ball or on the sphere, and log-weights, uniform to extremely unbalanced.

    The first measure has all its atoms in one place.
    """
    inside = sampling.ball(n, dim, radius=radius, batch_shape=(starts,), generator=generator)
    outside = sampling.sphere(n, dim, radius=radius, batch_shape=(starts,), generator=generator)
    how: Any = {"generator": generator, "dtype": torch.float64, "device": generator.device}
    share = torch.rand(starts, 1, 1, **how)
    depth = 4.0 * radius**2 * torch.rand(starts, 1, **how)
    logits = -depth * torch.rand(starts, n, **how)
    # Slightly inside, so that rounding does not leave the ball.
    points = (1 - 1e-15) * torch.where(share < 0.5, inside, outside)
    logs = logits.log_softmax(-1)
    points[0], logs[0] = points[0, :1], -math.log(n)
    return points, logs


def _constructions(F: Map, radius: float) -> Iterator[ParticleMeasure]:
    """Two Diracs along the critical eigenvectors of each head, at weights about the best."""
    for A in F.score_matrices:
        for branch in ("negative", "positive"):
            try:
                pair = sampling.critical_pair(A.detach().double(), branch=branch)
            except ValueError:
                continue
            centre = -2 * pair.scaling * radius**2 - math.log(3)
            offsets = torch.linspace(-3, 3, 13, dtype=torch.float64)
            yield sampling.two_diracs(
                radius, centre + offsets, to_host(pair.direction), heavy_at=pair.heavy_at
            )


def dim_of(F: Map, dim: int | None) -> int:
    """The dimension of the points: what F says of it, or the argument where it says nothing."""
    known, given = F.dim, None if dim is None else count(dim, "dim")
    if given is None and known is None:
        raise ValueError("dim: expected the points' dimension, which F does not say, got None")
    if None not in (known, given) and known != given:
        raise ValueError(f"dim: expected {known}, as F says, or None, got {given}")
    return int(known or given or 0)


def _fit(mu: ParticleMeasure, n: int, dim: int, radius: float) -> tuple[Tensor, Tensor]:
    """A candidate as a batch of n atoms: the last one is split where atoms are missing."""
    check_dim(mu, dim, "candidates")
    if mu.n_particles > n:
        raise ValueError(f"candidates: expected at most {n} atoms, got {mu.n_particles}")
    points = torch.from_numpy(to_host(mu.points.double())).reshape(-1, mu.n_particles, dim)
    logs = torch.from_numpy(to_host(mu.log_weights.double())).reshape(-1, mu.n_particles)
    # Atoms without mass, which get a little, come to the heaviest one.
    heaviest = points.take_along_dim(logs.argmax(-1)[:, None, None], 1)
    points = torch.where(logs[..., None] > -math.inf, points, heaviest)
    lengths = torch.linalg.vector_norm(points, dim=-1, keepdim=True)
    largest = float(lengths.amax()) if len(points) else 0.0
    if largest > radius * (1 + length_rounding(mu.points)):
        raise ValueError(f"candidates: expected atoms in the ball of radius {radius}: {largest}")
    points = points * (radius / lengths).clamp_max(1.0)
    last = mu.n_particles - 1
    stored = torch.arange(n, device=points.device).clamp_max(last)
    logs = torch.where(stored == last, logs[:, stored] - math.log(n - last), logs[:, stored])
    return points[:, stored], logs.clamp_min(_LIGHTEST).log_softmax(-1)


@torch.enable_grad()
def _gradients(F: Map, mu: ParticleMeasure, constant: LocalLipschitz) -> tuple[Tensor, Tensor]:
    """Gradients of log σ in points and log-weights, for whichever component is larger."""
    points = mu.points.detach().requires_grad_()
    logs = mu.log_weights.detach().requires_grad_()
    at = ParticleMeasure(points, log_weights=logs, positions=mu.positions)
    objective = recorded_value(F, at, constant).clamp_min(1e-300).log().sum()
    # The derivative of a linear map does not look at the points.
    gradients = torch.autograd.grad(objective, (points, logs), materialize_grads=True)
    clean = [torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) for g in gradients]
    return clean[0], clean[1]


def _ascend(
    points: Tensor,
    logs: Tensor,
    gradients: tuple[Tensor, Tensor],
    moments: list[tuple[Tensor, Tensor]],
    count: int,
    total: int,
    radius: float,
) -> tuple[Tensor, Tensor]:
    """One step of Adam from each start, then back into the ball; steps shrink to a thousandth."""
    rate = 0.001 ** (count / total)
    moved = []
    parts = zip((points, logs), gradients, moments, (0.1 * radius, 0.5), strict=True)
    for value, gradient, (first, second), size in parts:
        first.mul_(0.9).add_(gradient, alpha=0.1)
        # One scale per measure: per coordinate, those where symmetry leaves only rounding for a
        # gradient would take steps as long as the others.
        dims = tuple(range(1, gradient.ndim))
        second.mul_(0.99).add_((gradient**2).mean(dims, keepdim=True), alpha=0.01)
        scaled = first / (1 - 0.9**count) / ((second / (1 - 0.99**count)).sqrt() + 1e-12)
        moved.append(value + rate * size * scaled)
    length = torch.linalg.vector_norm(moved[0], dim=-1, keepdim=True)
    # Slightly inside, so that rounding does not leave the ball.
    inside = moved[0] * (radius * (1 - 1e-15) / length.clamp_min(radius))
    return inside, moved[1].clamp_min(_LIGHTEST).log_softmax(-1)
