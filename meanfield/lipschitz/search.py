"""Worst-case inputs: measures in a ball that make the local constant as large as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meanfield import sampling
from meanfield.checks import as_bool, as_generator, check_dim, count, number, to_host
from meanfield.linalg.vectors import normalised
from meanfield.lipschitz.local import LocalLipschitz, local_lipschitz
from meanfield.maps import Map, as_map
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure

# Log-weights below this are as good as absent at any radius whose constant fits in float64.
_LIGHTEST = -1300.0


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
    generator: torch.Generator | None = None,
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

    A lower bound of the supremum over the ball: nothing says that it is attained.

    Args:
        F: a map of measures that keeps weights.
        radius: R > 0.
        n_atoms: number of atoms n.
        dim: d; by default as F declares (its ``dim``).
        positioned: whether the atoms have positions i/n; by default for maps that declare
            themselves causal (their ``causal``).
        starts: number of random starts, besides the structured ones.
        steps: steps of ascent.
        candidates: measures to start from as well; those with fewer than n atoms are padded,
            those with more are refused.
        generator: of the random starts; a fixed seed if None.

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
    if F.causal if positioned is None else as_bool(positioned, "positioned"):
        positions = torch.arange(1, n_atoms + 1, dtype=torch.float64) / n_atoms
    points, logs = _random_starts(starts, n_atoms, dim, radius, generator)
    given = [*_constructions(F, radius), *candidates]
    for mu in given:
        check_measure(mu, "candidates")
        more_points, more_logs = _fit(mu, n_atoms, dim, radius)
        points, logs = torch.cat([points, more_points]), torch.cat([logs, more_logs])
    best = _Best()
    step = torch.full((len(points), 1, 1), 0.1, dtype=torch.float64)
    moments = [torch.zeros_like(t) for t in (points, points, logs, logs)]
    for done in range(1, steps + 1):
        mu = ParticleMeasure(points, log_weights=logs, positions=positions)
        constant = _constants(F, mu)
        best.offer(mu, constant.value)
        gradients = _gradients(F, mu, constant)
        points, logs = _ascend(points, logs, gradients, moments, step, done, steps, radius)
    assert best.measure is not None
    return best.measure, local_lipschitz(F, best.measure)


class _Best:
    """The best measure seen."""

    def __init__(self) -> None:
        self.value, self.measure = -math.inf, None

    measure: ParticleMeasure | None

    def offer(self, mu: ParticleMeasure, values: Tensor) -> None:
        k = int(values.argmax())
        if float(values[k]) > self.value:
            self.value, self.measure = float(values[k]), mu[k]


def _random_starts(
    starts: int, n: int, dim: int, radius: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Atoms in the ball or on the sphere, and log-weights, uniform to extremely unbalanced.

    The first measure has all its atoms in one place.
    """
    inside = sampling.ball(n, dim, radius=radius, batch_shape=(starts,), generator=generator)
    outside = sampling.sphere(n, dim, radius=radius, batch_shape=(starts,), generator=generator)
    share = torch.rand(starts, 1, 1, generator=generator, dtype=torch.float64)
    depth = 4.0 * radius**2 * torch.rand(starts, 1, generator=generator, dtype=torch.float64)
    logits = -depth * torch.rand(starts, n, generator=generator, dtype=torch.float64)
    # Slightly inside, so that rounding does not leave the ball.
    points = (1 - 1e-15) * torch.where(share < 0.5, inside, outside)
    logs = logits.log_softmax(-1)
    points[0], logs[0] = points[0, :1], -math.log(n)
    return points, logs


def _constructions(F: Map, radius: float) -> list[ParticleMeasure]:
    """Two Diracs along the critical eigenvectors of each head, at weights about the best."""
    found = []
    for A in F.score_matrices:
        for branch in ("negative", "positive"):
            try:
                pair = sampling.critical_pair(A.detach().double(), branch=branch)
            except ValueError:
                continue
            centre = -2 * pair.scaling * radius**2 - math.log(3)
            offsets = torch.linspace(-3, 3, 13, dtype=torch.float64)
            found.append(
                sampling.two_diracs(
                    radius, centre + offsets, to_host(pair.direction), heavy_at=pair.heavy_at
                )
            )
    return found


def dim_of(F: Map, dim: int | None) -> int:
    """The dimension of the points: what F says of it, or the argument where it says nothing."""
    known, given = F.dim, None if dim is None else count(dim, "dim")
    if given is None and known is None:
        raise ValueError("dim: expected the dimension of the points, as F says none, got None")
    if None not in (known, given) and known != given:
        raise ValueError(f"dim: expected {known}, as F says, or None, got {given}")
    return int(known or given or 0)


def _fit(mu: ParticleMeasure, n: int, dim: int, radius: float) -> tuple[Tensor, Tensor]:
    """A candidate as a batch of n atoms: the last one is split where atoms are missing."""
    check_dim(mu, dim, "candidates")
    missing = n - mu.n_particles
    if missing < 0:
        raise ValueError(f"candidates: expected at most {n} atoms, got {mu.n_particles}")
    points = torch.from_numpy(to_host(mu.points.double())).reshape(-1, mu.n_particles, dim)
    logs = torch.from_numpy(to_host(mu.log_weights.double())).reshape(-1, mu.n_particles)
    largest = float(torch.linalg.vector_norm(points, dim=-1).max())
    if largest > radius * (1 + 1e-9):
        raise ValueError(f"candidates: expected atoms in the ball of radius {radius}: {largest}")
    if missing:
        part = logs[:, -1:] - math.log(missing + 1)
        logs = torch.cat([logs[:, :-1], part.expand(-1, missing + 1)], -1)
        points = torch.cat([points, points[:, -1:].expand(-1, missing, -1)], 1)
    return points, logs.clamp_min(_LIGHTEST)


def _constants(F: MeasureMap, mu: ParticleMeasure) -> LocalLipschitz:
    return local_lipschitz(F, mu, rtol=1e-3, strict=False)


def _gradients(
    F: MeasureMap, mu: ParticleMeasure, constant: LocalLipschitz
) -> tuple[Tensor, Tensor]:
    """Gradients of log σ in points and log-weights, for whichever component is larger."""
    assert constant.splitting is not None and constant.splitting_atom is not None
    assert constant.splitting_direction is not None
    by_splitting = constant.splitting > constant.particle
    at = constant.splitting_atom[:, None, None].expand(-1, 1, mu.dim)
    v_split = torch.zeros_like(mu.points).scatter(1, at, constant.splitting_direction[:, None, :])
    points = mu.points.detach().requires_grad_()
    logs = mu.log_weights.detach().requires_grad_()
    moved = _weighted_image(F, mu, points, logs, constant.direction)
    sigma = (_unit(moved.detach()) * moved).sum((-2, -1))
    split = _split_image(F, mu, points, logs, v_split)
    sigma_split = (_unit(split.detach()) * split).sum((-2, -1))
    chosen = torch.where(by_splitting, sigma_split, sigma)
    objective = chosen.clamp_min(1e-300).log().sum()
    gradients = torch.autograd.grad(objective, (points, logs))
    clean = [torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) for g in gradients]
    return clean[0], clean[1]


def _weighted_image(
    F: MeasureMap, mu: ParticleMeasure, points: Tensor, logs: Tensor, v: Tensor
) -> Tensor:
    """D^½ J D^−½ v, differentiable in points and log-weights."""
    half = 0.5 * logs[..., None]
    return half.exp() * _tangent(F, mu.positions, points, logs, (-half).exp() * v)


def _split_image(
    F: MeasureMap, mu: ParticleMeasure, points: Tensor, logs: Tensor, v: Tensor
) -> Tensor:
    """D_xΓ_μ(xᵢ) vᵢ by moving the halves of the atoms apart."""
    doubled = points.repeat_interleave(2, -2)
    halves = logs.repeat_interleave(2, -1) - math.log(2)
    pair = torch.stack([v, -v], -2).flatten(-3, -2)
    positions = None if mu.positions is None else mu.positions.repeat_interleave(2, -1)
    return _tangent(F, positions, doubled, halves, pair).unflatten(-2, (-1, 2))[..., 0, :]


def _tangent(
    F: MeasureMap, positions: Tensor | None, points: Tensor, logs: Tensor, direction: Tensor
) -> Tensor:
    def move(x: Tensor) -> Tensor:
        return F(ParticleMeasure(x, log_weights=logs, positions=positions)).points

    return torch.func.jvp(move, (points,), (direction,))[1]


def _ascend(
    points: Tensor,
    logs: Tensor,
    gradients: tuple[Tensor, Tensor],
    moments: list[Tensor],
    step: Tensor,
    count: int,
    total: int,
    radius: float,
) -> tuple[Tensor, Tensor]:
    """One step of Adam from each start, then back into the ball; steps shrink to a thousandth."""
    rate = 0.001 ** (count / total)
    moved = []
    for k, (value, gradient) in enumerate(zip((points, logs), gradients, strict=True)):
        first, second = moments[2 * k], moments[2 * k + 1]
        first.mul_(0.9).add_(gradient, alpha=0.1)
        # One scale per measure: per coordinate, those where symmetry leaves only rounding for a
        # gradient would take steps as long as the others.
        dims = tuple(range(1, gradient.ndim))
        second.mul_(0.99).add_((gradient**2).mean(dims, keepdim=True), alpha=0.01)
        scaled = first / (1 - 0.9**count) / ((second / (1 - 0.99**count)).sqrt() + 1e-12)
        size = step * radius if k == 0 else 5.0 * step[..., 0]
        moved.append(value + rate * size * scaled)
    length = torch.linalg.vector_norm(moved[0], dim=-1, keepdim=True)
    # Slightly inside, so that rounding does not leave the ball.
    inside = moved[0] * (radius * (1 - 1e-15) / length.clamp_min(radius))
    return inside, moved[1].clamp_min(_LIGHTEST).log_softmax(-1)


def _unit(image: Tensor) -> Tensor:
    return normalised(image.flatten(-2))[0].reshape(image.shape)
