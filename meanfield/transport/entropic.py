"""Entropic transport through GeomLoss: bounds from its potentials, and its divergence.

Neither Sinkhorn's value nor its potentials are bounds of W₂ as they come. One c-transform makes
the potentials feasible, and a plan rounded to its marginals is a coupling; that is an interval.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from meanfield.measures import ParticleMeasure
from meanfield.transport.answers import as_pair
from meanfield.transport.certificates import certify
from meanfield.transport.closed_forms import monotone_plan
from meanfield.transport.exact import Plan
from meanfield.transport.problems import UNIT, Answer, Problem
from meanfield.transport.streamed import streamed_divergence

__all__ = ["rounded_plan", "sinkhorn_divergence", "solve_sinkhorn"]

_TENSOR_ENTRIES = 50_000_000  # differences n m d held at once by the tensorised backend
_ANNEALED = {"p": 2, "blur": 0.02, "scaling": 0.9}  # in the problem's unit: it spans about one
_EPSILON = 2 * 0.02**2
_SINKHORN_STEPS = 200
_MARGINAL_ERROR = 1e-4
_LOOKED_AT = 25_000_000  # pairs of a plan that is rounded


def sinkhorn_divergence(
    mu: ParticleMeasure | Tensor,
    nu: ParticleMeasure | Tensor,
    *,
    blur: float = 0.05,
    scaling: float = 0.9,
) -> Tensor:
    """S_ε(μ, ν) = OT_ε(μ, ν) − ½ OT_ε(μ, μ) − ½ OT_ε(ν, ν), ε = 2 blur², cost ‖x − y‖².

    It tends to W₂² (not W₂, and twice GeomLoss's number) as blur → 0, and is smooth in points
    and weights. It is no bound: what it is off is set by `scaling` (the annealing has finitely
    many steps), 0.1 to 3 %. `solve_w2(method="sinkhorn")` gives bounds. Sinkhorn iterations run
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
    if not blur > 0:
        raise ValueError(f"blur: expected a positive length, got {blur}")
    if not 0 < scaling < 1:
        raise ValueError(f"scaling: expected a number in (0, 1), got {scaling}")
    mu, nu = as_pair(mu, nu)
    batch, n, m, d = mu.batch_shape, mu.n_particles, nu.n_particles, mu.dim
    centre = mu.mean().mean(tuple(range(len(batch))), keepdim=False) if batch else mu.mean()
    x, y = ((t.points - centre.detach()).reshape(-1, t.n_particles, d) for t in (mu, nu))
    # GeomLoss cannot take clouds of one point: an atom and a copy of weight zero are the same.
    a, x = _padded(mu.weights.reshape(-1, n), x)
    b, y = _padded(nu.weights.reshape(-1, m), y)
    settings: dict[str, Any] = {"p": 2, "blur": blur, "scaling": scaling}
    return 2 * torch.stack(
        [_divergence(*case, settings) for case in zip(a, x, b, y, strict=True)]
    ).reshape(batch)


def solve_sinkhorn(problem: Problem, *, rtol: float, device: str = "cpu") -> Answer:
    """An interval from GeomLoss: c-transformed potentials below, a rounded plan above.

    Converged only if that interval is narrower than `rtol`, which for unlike clouds takes an
    rtol of percents.
    """
    pairs = problem.n * problem.m
    if pairs > _LOOKED_AT:
        raise MemoryError(
            f"method 'sinkhorn': expected at most {_LOOKED_AT} pairs to round the plan, got "
            f"{pairs}; use method='column_generation' or 'bounds'"
        )
    x, y, a, b = (
        torch.as_tensor(t, device=device) for t in (problem.x, problem.y, problem.a, problem.b)
    )
    _, g = _loss(_ANNEALED, debias=False, potentials=True)(a, x, b, y)
    cost = _blocked_costs(x, y)
    f, g = _balanced(cost, 2 * g.reshape(-1), a, b)  # GeomLoss's cost is half a squared distance
    log_plan = (f[:, None] + g - cost) / _EPSILON + a.log()[:, None] + b.log()
    f = (cost - g).amin(1)
    g = (cost - f[:, None]).amin(0)
    plan = rounded_plan(log_plan.exp(), a, b)
    rows, cols = (t.cpu().numpy() for t in plan.nonzero(as_tuple=True))
    mass = plan[plan > 0].cpu().numpy()
    feasible = (f.cpu().numpy(), g.cpu().numpy())
    found = Plan(rows, cols, mass, *feasible)
    slack = 4 * UNIT * float(cost.max())
    return certify(problem, found, feasible, method="sinkhorn", rtol=rtol, slack=slack)


def _balanced(cost: Tensor, g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Sinkhorn steps from GeomLoss's potentials until the marginals nearly hold.

    Its annealing stops long before that, and a plan rounded from there costs up to twice W₂.
    """
    log_a, log_b = a.log(), b.log()
    f = g.new_zeros(len(a))
    for _ in range(_SINKHORN_STEPS):
        f = -_EPSILON * ((g - cost) / _EPSILON + log_b).logsumexp(1)
        new = -_EPSILON * ((f[:, None] - cost) / _EPSILON + log_a[:, None]).logsumexp(0)
        # Columns of exp((f + g − C)/ε) a b sum to b exp((g − new)/ε).
        off = float((b * torch.expm1((g - new) / _EPSILON)).abs().sum())
        g = new
        if off < _MARGINAL_ERROR:
            break
    return f, g


def rounded_plan(plan: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A coupling of a and b near `plan` [Altschuler, Weed, Rigollet 2017, Algorithm 2].

    Rows and columns that hold too much are scaled down; what is missing is put on a product, here
    on the monotone coupling of what each side misses, which keeps the plan sparse.
    """
    plan = plan * (a / plan.sum(1).clamp_min(1e-300)).clamp_max(1)[:, None]
    plan = plan * (b / plan.sum(0).clamp_min(1e-300)).clamp_max(1)
    short_a, short_b = ((t - s).clamp_min(0) for t, s in ((a, plan.sum(1)), (b, plan.sum(0))))
    total = float(short_a.sum())
    if total <= 0 or float(short_b.sum()) <= 0:
        return plan
    i, j, mass = monotone_plan(
        (short_a / short_a.sum()).cpu().numpy(), (short_b / short_b.sum()).cpu().numpy()
    )
    added = torch.as_tensor(mass * total, device=plan.device)
    index = (torch.as_tensor(i, device=plan.device), torch.as_tensor(j, device=plan.device))
    return plan.index_put(index, added, accumulate=True)


def _blocked_costs(x: Tensor, y: Tensor) -> Tensor:
    """‖xᵢ − y_j‖² by direct differences, a few million at a time."""
    step = max(1, _TENSOR_ENTRIES // (y.shape[0] * y.shape[1]))
    return torch.cat([_half_squares(part, y) * 2 for part in x.split(step)])


def _half_squares(x: Tensor, y: Tensor) -> Tensor:
    """½ ‖xᵢ − y_j‖² by direct differences: GeomLoss's own expansion cancels."""
    return (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / 2


def _padded(weights: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    if points.shape[-2] > 1:
        return weights, points
    return torch.cat([weights / 2] * 2, -1), torch.cat([points] * 2, -2)


def _divergence(a: Tensor, x: Tensor, b: Tensor, y: Tensor, settings: dict[str, Any]) -> Tensor:
    n = max(len(a), len(b))
    if n * n * x.shape[-1] <= _TENSOR_ENTRIES:
        return _loss(settings)(a, x, b, y)
    if importlib.util.find_spec("pykeops") is None:
        lengths = {name: settings[name] for name in ("blur", "scaling")}
        return streamed_divergence(a, x, b, y, **lengths, entries=_TENSOR_ENTRIES)
    from geomloss import SamplesLoss

    return SamplesLoss("sinkhorn", backend="online", **settings)(a, x, b, y)


def _loss(settings: dict[str, Any], **more: Any) -> Any:
    from geomloss import SamplesLoss

    return SamplesLoss("sinkhorn", cost=_half_squares, backend="tensorized", **settings, **more)
