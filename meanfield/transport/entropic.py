"""The Sinkhorn divergence, through GeomLoss; in blocks of rows where clouds are large.

The algorithm in blocks is GeomLoss's own (symmetric, annealed: [Feydy 2020] Algorithm 3.5), so the
answer is the one of its tensorised backend up to rounding.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meanfield.checks import number, to_host
from meanfield.measures import MASS_TOLERANCE, ParticleMeasure
from meanfield.transport.conditional import conditioned_pair, grouped_conditions
from meanfield.transport.pairs import Measure, as_measures

_TENSOR_ENTRIES = 50_000_000  # held at once by the tensorised backend: differences n m d, and
_PAIR_ENTRIES = 50  # so many for a pair at least; from n = 1,000 on blocks of rows are as fast
# Scores of a block of rows: 1 MB of float32 stays in the cache, which is 2 to 3.5 times as fast.
_BLOCK = 2**18


def sinkhorn_divergence(
    mu: Measure,
    nu: Measure,
    *,
    blur: float = 0.05,
    scaling: float = 0.9,
) -> Any:
    """S_ε(μ, ν) = OT_ε(μ, ν) − ½ OT_ε(μ, μ) − ½ OT_ε(ν, ν), ε = 2 blur², cost ‖x − y‖².

    It tends to W₂² (not W₂, and twice GeomLoss's number) as blur → 0, and is smooth in points
    and weights. It is no bound: its error is set by `scaling` (the annealing has finitely
    many steps), 0.1 to 3 %; `solve_w2` gives W₂ itself. Sinkhorn iterations run
    on the device of the points. Clouds too large for a matrix of costs go through KeOps where it
    is installed, and otherwise through blocks of rows: slower, in memory O(n).

    Args:
        mu: μ, or points (..., n, d) of a uniform measure.
        nu: ν, or points (..., m, d).
        blur: √(ε/2), in the unit of the points.
        scaling: ratio of successive annealing lengths, in (0, 1); nearer 1 is more accurate.

    Returns:
        Shape of the batch, unit of the points squared. Differentiable.

    Raises:
        ValueError: settings out of range, and what `solve_w2` refuses.
    """
    blur = number(blur, "blur", above=0)
    scaling = number(scaling, "scaling", above=0, below=1)
    mu, nu, as_numpy = as_measures(mu, nu)
    batch, n, m, d = mu.batch_shape, mu.n_particles, nu.n_particles, mu.dim
    centre = mu.mean().mean(tuple(range(len(batch))), keepdim=False) if batch else mu.mean()
    x, y = ((t.points - centre.detach()).reshape(-1, t.n_particles, d) for t in (mu, nu))
    # GeomLoss cannot take clouds of one point: an atom and a copy of weight zero are the same.
    a, x = _padded(mu.weights.reshape(-1, n), x)
    b, y = _padded(nu.weights.reshape(-1, m), y)
    cases = zip(a, x, b, y, strict=True)
    each = [_divergence(*case, blur=blur, scaling=scaling) for case in cases]
    found = 2 * torch.stack(each).reshape(batch)
    return to_host(found)[()] if as_numpy else found


def conditional_sinkhorn_divergence(
    mu: Measure,
    nu: Measure,
    *,
    conditions: tuple[Any, Any] | None = None,
    penalty: float | None = None,
    blur: float = 0.05,
    scaling: float = 0.9,
) -> Any:
    """∫ S_ε(μˢ, νˢ) dθ(s), or with a penalty λ the divergence S_ε of the points (x, √λ s).

    It tends to the square of `conditional_w2` as blur → 0; +∞ where nothing may change its
    condition and the first marginals differ.

    Args:
        mu: μ̄, as for `solve_conditional_w2`.
        nu: ν̄, likewise.
        conditions: (s, t) in the place of positions, likewise.
        penalty: λ, likewise.
        blur: as for `sinkhorn_divergence`.
        scaling: as for `sinkhorn_divergence`.

    Returns:
        Shape of the batch, unit of the points squared. Differentiable in the points, and with a
        penalty in the weights.

    Raises:
        ValueError: settings out of range, and what `solve_conditional_w2` refuses.

    Example:
        >>> from meanfield import ParticleMeasure
        >>> mu = ParticleMeasure([[0.0], [1.0]], positions=[0.5, 1.0])
        >>> nu = ParticleMeasure([[1.0], [0.0]], positions=[0.5, 1.0])
        >>> conditional_sinkhorn_divergence(mu, nu)
        tensor(1., dtype=torch.float64)
    """
    settings = {
        "blur": number(blur, "blur", above=0),
        "scaling": number(scaling, "scaling", above=0, below=1),
    }
    price = math.inf if penalty is None else number(penalty, "penalty", least=0, finite=False)
    measures, s, t = conditioned_pair(mu, nu, conditions)
    if price < math.inf:
        both = (_priced(*each, price) for each in zip(measures[:2], (s, t), strict=True))
        found = sinkhorn_divergence(*both, **settings)
    else:
        flat = [
            (t.weights.reshape(-1, t.n_particles), t.points.reshape(-1, t.n_particles, t.dim))
            for t in measures[:2]
        ]
        sides = (zip(*measure, c, strict=True) for measure, c in zip(flat, (s, t), strict=True))
        each = [_conditional(one, other, settings) for one, other in zip(*sides, strict=True)]
        found = torch.stack(each).reshape(measures.mu.batch_shape)
    return to_host(found)[()] if measures.as_numpy else found


def _priced(measure: ParticleMeasure, conditions: np.ndarray, penalty: float) -> ParticleMeasure:
    """The measure of the points (x, √λ s)."""
    points = measure.points
    places = torch.as_tensor(math.sqrt(penalty) * conditions).to(points)
    return measure.replace(torch.cat([points, places.reshape(*points.shape[:-1], -1)], -1))


def _conditional(
    one: tuple[Tensor, Tensor, np.ndarray],
    other: tuple[Tensor, Tensor, np.ndarray],
    settings: dict[str, float],
) -> Tensor:
    """Σ θ(s) S_ε(μˢ, νˢ) of weights, points and conditions; atoms of weight 0 are nowhere."""
    (a, x, s), (b, y, t) = ((w[w > 0], p[w > 0], c[to_host(w > 0)]) for w, p, c in (one, other))
    of_x, of_y = grouped_conditions(s, t)
    groups = [
        (torch.as_tensor(of_x == k), torch.as_tensor(of_y == k))
        for k in np.unique(np.r_[of_x, of_y])
    ]
    masses = [(a[i].sum(), b[j].sum()) for i, j in groups]
    tolerance = MASS_TOLERANCE[x.dtype]
    if any(abs(float(p - q)) > tolerance or not p * q > 0 for p, q in masses):
        return x.new_tensor(math.inf)
    total = x.new_zeros(())
    for (i, j), (p, q) in zip(groups, masses, strict=True):
        first, second = _padded(a[i] / p, x[i]), _padded(b[j] / q, y[j])
        total = total + 2 * p.detach() * _divergence(
            *first, *second, blur=settings["blur"], scaling=settings["scaling"]
        )
    return total


def _half_squares(x: Tensor, y: Tensor) -> Tensor:
    """½ ‖xᵢ − y_j‖² by direct differences: GeomLoss's own expansion cancels."""
    return (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / 2


def _padded(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    if points.shape[-2] > 1:
        return weights, points
    return torch.cat([weights / 2] * 2, -1), torch.cat([points] * 2, -2)


def _divergence(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, *, blur: float, scaling: float
) -> Tensor:
    from geomloss import SamplesLoss

    # Its schedule of ε begins at the diameter, which must not be 0.
    diameter = max(_diameter(x, y), blur)
    settings: dict[str, Any] = {"p": 2, "blur": blur, "scaling": scaling, "diameter": diameter}
    if max(len(a), len(b)) ** 2 * max(x.shape[-1], _PAIR_ENTRIES) <= _TENSOR_ENTRIES:
        settings |= {"cost": _half_squares, "backend": "tensorized"}
    elif importlib.util.find_spec("pykeops") is not None:
        settings |= {"backend": "online"}
    else:
        return _streamed_divergence(a, x, b, y, blur=blur, scaling=scaling)
    return SamplesLoss("sinkhorn", **settings)(a, x, b, y)


def _streamed_divergence(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, *, blur: float, scaling: float
) -> Tensor:
    """S_ε of the cost ½‖x − y‖² at ε = blur², as ``geomloss.SamplesLoss("sinkhorn", p=2)``.

    Differentiable in points and weights by the envelope theorem: the potentials are held fixed
    but for one last step.
    """
    with torch.no_grad():
        potentials, epsilons = None, _schedule(x, y, blur, scaling)
        logs = a.log(), b.log()
        for epsilon in [epsilons[0], *epsilons]:
            new = _step((x, y), logs, potentials, epsilon)
            # The first step starts the potentials; later ones are averaged, for stability.
            potentials = new if potentials is None else [
                (old + moved) / 2 for old, moved in zip(potentials, new, strict=True)
            ]  # fmt: skip
    f_ba, g_ab, f_aa, g_bb = _step((x, y), logs, potentials, epsilons[-1])
    return (a * (f_ba - f_aa)).sum() + (b * (g_ab - g_bb)).sum()


def _step(
    points: tuple[Tensor, Tensor],
    logs: tuple[Tensor, Tensor],
    potentials: list[Tensor] | None,
    epsilon: float,
) -> list[Tensor]:
    """The potentials f of μ against ν, g of ν against μ, and of each against itself."""
    (x, y), (log_a, log_b) = points, logs
    f_ba, g_ab, f_aa, g_bb = potentials or [x.new_zeros(())] * 4
    sides = ((x, y, log_b, g_ab), (y, x, log_a, f_ba), (x, x, log_a, f_aa), (y, y, log_b, g_bb))
    return [
        _Softmin.apply(rows, columns.detach(), (log + h / epsilon).detach(), epsilon)
        for rows, columns, log, h in sides
    ]


class _Softmin(torch.autograd.Function):
    """−ε log Σ_j exp(h_j − ½‖xᵢ − y_j‖²/ε) for every i; its gradient in x is xᵢ − Σ_j Pᵢⱼ y_j."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, h: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, y, h)
        ctx.epsilon = epsilon
        return torch.cat([-epsilon * block.logsumexp(1) for block in _scores(x, y, h, epsilon)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, y, h = ctx.saved_tensors
        means = torch.cat([block.softmax(1) @ y for block in _scores(x, y, h, ctx.epsilon)])
        return grad[:, None] * (x - means), None, None, None


def _scores(x: Tensor, y: Tensor, h: Tensor, epsilon: float) -> Iterator[Tensor]:
    """h_j − ½‖xᵢ − y_j‖²/ε by direct differences, a block of rows at a time."""
    direct = "donot_use_mm_for_euclid_dist"  # products would cancel; and no difference is kept
    for rows in x.split(max(1, _BLOCK // len(y))):
        yield h - torch.cdist(rows, y, compute_mode=direct).square_().div_(2 * epsilon)


def _diameter(x: Tensor, y: Tensor) -> float:
    """Of the bounding box of both clouds."""
    both = torch.cat([x, y]).detach()
    return float(torch.linalg.vector_norm(both.amax(0) - both.amin(0)))


def _schedule(x: Tensor, y: Tensor, blur: float, scaling: float) -> list[float]:
    """ε from the squared diameter of the bounding box down to blur², a ratio of scaling²."""
    diameter = max(_diameter(x, y), blur)
    steps = math.ceil((math.log(blur) - math.log(diameter)) / math.log(scaling))
    lengths = [diameter * scaling**k for k in range(max(0, steps))]
    return [diameter**2, *(length**2 for length in lengths), blur**2]
