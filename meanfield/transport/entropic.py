"""The Sinkhorn divergence, through GeomLoss (symmetric, annealed: [FEY20] Algorithm 3.5)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meanfield.checks import number, to_host
from meanfield.errors import MissingExtraError
from meanfield.habits import with_hints
from meanfield.measure_arguments import MASS_TOLERANCE
from meanfield.measures import ParticleMeasure
from meanfield.transport.conditional import conditioned_pair, grouped_conditions
from meanfield.transport.pairs import Measure, as_measures

_MEMORY = 2e9  # bytes that GeomLoss's tensorised backend may hold
_MATRICES = 28  # of n × n numbers: so many it holds at once, gradients included


@with_hints
def sinkhorn_divergence(
    mu: Measure,
    nu: Measure,
    *,
    blur: float = 0.05,
    scaling: float = 0.9,
) -> Any:
    """S_ε(μ, ν) = OT_ε(μ, ν) − ½ OT_ε(μ, μ) − ½ OT_ε(ν, ν), ε = 2 blur², cost ‖x − y‖².

    It tends to W₂² (not W₂, and twice GeomLoss's number) as blur → 0 and scaling → 1, and is
    smooth in points and weights. It is no bound: the annealing ends before the marginals agree,
    which `scaling` decides and no blur mends. Below W₂² at small blurs by at most, in time that
    grows as 1/(1 − scaling):

    ==============================  =============  =====  =====
    `scaling`                       0.9 (default)  0.97   0.99
    ==============================  =============  =====  =====
    60 pairs of up to 8 points      13 %           4 %    1 %
    half of these by less than      0.5 %          0.1 %  0.1 %
    8 pairs of 100 points           1.1 %          0.5 %  --
    ==============================  =============  =====  =====

    `solve_w2` gives W₂ itself, in less time up to some thousand points. Sinkhorn iterations run
    on the device of the points: with matrices of all pairs up to 2 GB (2,988 points, or 4,225 in
    single precision), beyond by GeomLoss's online backend, in memory O(n), which needs pykeops.

    Args:
        mu: μ, or points (..., n, d) of a uniform measure.
        nu: ν, or points (..., m, d).
        blur: √(ε/2), in the unit of the points.
        scaling: ratio of successive annealing lengths, in (0, 1); nearer 1 is more accurate.

    Returns:
        Shape of the batch, unit of the points squared. Differentiable.

    Raises:
        ValueError: settings out of range, and what `solve_w2` refuses.
        MissingExtraError: more points than matrices are made for, and no pykeops.
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


@with_hints
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

    It tends to the square of `conditional_w2` as blur → 0 and scaling → 1; +∞ where nothing may
    change its condition and the first marginals differ. Errors are those of `sinkhorn_divergence`
    relative to the costs (x, √λ s): a penalty that makes changes of condition dear beside what
    points move hides the latter (λ = 2²⁰: 69 % of 30 small distances at worst, at scaling = 0.99
    still 20 %). There `conditional_w2` is the number.

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


class _HalfSquares(torch.autograd.Function):
    """½ ‖xᵢ − y_j‖², (..., n, m): GeomLoss's own expansion cancels.

    Differences are taken axis by axis, forth and back, so that nothing of size n m d is held.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        squares = x.new_zeros(*x.shape[:-1], y.shape[-2])
        for move in _moves(x, y):
            squares += move.square_()
        return squares / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        flows = [
            (t.sum(-1), -t.sum(-2)) for t in (grad * move for move in _moves(*ctx.saved_tensors))
        ]
        into_x, into_y = (torch.stack(t, -1) for t in zip(*flows, strict=True))
        return into_x, into_y


def _moves(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    """The differences of all pairs along each axis in turn, (..., n, m)."""
    for k in range(x.shape[-1]):
        yield x[..., :, None, k] - y[..., None, :, k]


def _padded(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    if points.shape[-2] > 1:
        return weights, points
    return torch.cat([weights / 2] * 2, -1), torch.cat([points] * 2, -2)


def _divergence(
    a: Tensor, x: Tensor, b: Tensor, y: Tensor, *, blur: float, scaling: float
) -> Tensor:
    from geomloss import SamplesLoss

    # Its schedule of ε begins at the diameter, which must not be 0.
    both = torch.cat([x, y]).detach()
    diameter = float(torch.linalg.vector_norm(both.amax(0) - both.amin(0)))
    settings = {"p": 2, "blur": blur, "scaling": scaling, "diameter": max(diameter, blur)}
    most = max(len(a), len(b))
    if _MATRICES * most**2 * x.element_size() <= _MEMORY:
        loss = SamplesLoss("sinkhorn", **settings, cost=_HalfSquares.apply, backend="tensorized")
    elif importlib.util.find_spec("pykeops") is None:
        what = f"sinkhorn_divergence of {most:,} points, with costs beyond {_MEMORY / 1e9:g} GB,"
        raise MissingExtraError("pykeops", "keops", what)
    else:
        loss = SamplesLoss("sinkhorn", **settings, backend="online")
    return loss(a, x, b, y)
