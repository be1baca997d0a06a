"""W₂ and W₂² as differentiable functions of points and weights, by the envelope theorem.

At an optimal plan π with potentials f, g: ∂W₂²/∂xᵢ = 2 Σ_j π_ij (xᵢ − y_j), ∂W₂²/∂aᵢ = fᵢ up to
a constant. Nothing is differentiated through a solver. Where the optimal plan is not unique
the gradient is one of several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meanfield.measures import ParticleMeasure
from meanfield.transport.answers import as_pair
from meanfield.transport.distances import solve_w2

__all__ = ["w2", "w2_squared"]


def w2(
    mu: ParticleMeasure | Tensor,
    nu: ParticleMeasure | Tensor,
    *,
    method: str = "auto",
    rtol: float = 1e-9,
) -> Tensor:
    """W₂(μ, ν), differentiable in points and log-weights.

    Args:
        mu: μ, or points (..., n, d) of a uniform measure.
        nu: ν, or points (..., m, d).
        method: as for `solve_w2`.
        rtol: as for `solve_w2`.

    Returns:
        The distance (not its square), shape of the batch. Its gradient is taken as 0 where it
        is 0.

    Raises:
        ConvergenceError: when `rtol` is not met; `solve_w2` gives the interval instead.
        TypeError, ValueError: as `solve_w2`.

    Example:
        >>> x = torch.zeros(4, 2, dtype=torch.float64)
        >>> w2(x, x + 3.0 / 2**0.5)
        tensor(3.0000, dtype=torch.float64)
    """
    mu, nu = as_pair(mu, nu)
    inputs = (mu.points, nu.points, mu.log_weights, nu.log_weights)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in inputs)):
        return solve_w2(mu, nu, method=method, rtol=rtol).value
    return _Wasserstein.apply(*inputs, method, rtol)


def w2_squared(
    mu: ParticleMeasure | Tensor,
    nu: ParticleMeasure | Tensor,
    *,
    method: str = "auto",
    rtol: float = 1e-9,
) -> Tensor:
    """W₂²(μ, ν) = min Σ π_ij ‖xᵢ − y_j‖², differentiable in points and log-weights.

    Arguments and errors as for `w2`. The square of a distance below 1e-154 underflows: `w2`
    does not.
    """
    return w2(mu, nu, method=method, rtol=rtol).square()


class _Wasserstein(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor,
        log_a: Tensor,
        log_b: Tensor,
        method: str,
        rtol: float,
    ) -> Tensor:
        mu = ParticleMeasure(x.detach(), log_weights=log_a.detach())
        nu = ParticleMeasure(y.detach(), log_weights=log_b.detach())
        result = solve_w2(mu, nu, method=method, rtol=rtol)
        coupling = result.coupling
        assert coupling is not None  # every exact method makes one
        needs_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        potentials = result.potentials
        if needs_weights and potentials is None:
            potentials = potentials_from_plan(coupling)
        f, g = potentials if needs_weights and potentials is not None else (x.new_zeros(()),) * 2
        ctx.save_for_backward(
            x, y, log_a, log_b, result.value, coupling.rows, coupling.cols, coupling.log_mass, f, g
        )
        return result.value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y, log_a, log_b, value, rows, cols, log_mass, f, g = ctx.saved_tensors
        scale = torch.where(value > 0, grads[0] / value, 0.0)[..., None]  # dW₂ = dW₂² / 2 W₂
        into_x = into_y = into_a = into_b = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            index = rows[..., None].expand(*rows.shape, x.shape[-1])
            index_y = cols[..., None].expand(*cols.shape, x.shape[-1])
            flow = log_mass.exp()[..., None] * (x.gather(-2, index) - y.gather(-2, index_y))
            into_x = torch.zeros_like(x).scatter_add(-2, index, flow) * scale[..., None]
            into_y = torch.zeros_like(y).scatter_add(-2, index_y, -flow) * scale[..., None]
        if ctx.needs_input_grad[2]:
            into_a = log_a.exp() * f * scale / 2
        if ctx.needs_input_grad[3]:
            into_b = log_b.exp() * g * scale / 2
        return into_x, into_y, into_a, into_b, None, None


def potentials_from_plan(coupling: Any) -> tuple[Tensor, Tensor]:
    """Potentials of an optimal plan, for methods that make none (closed forms).

    fᵢ + g_j = ‖xᵢ − y_j‖² on the support and ≤ off it: shortest paths in the residual graph, by
    repeated c-transforms. Dense, so for the small problems and the line only.
    """
    from meanfield.transport.problems import squared_distances

    source, target = coupling.source, coupling.target
    n, m = coupling.shape
    plans = coupling.dense().reshape(-1, n, m)
    parts = []
    for x, y, plan in zip(
        source.reshape(-1, n, source.shape[-1]),
        target.reshape(-1, m, target.shape[-1]),
        plans,
        strict=True,
    ):
        pairwise = squared_distances(x.double().cpu().numpy(), y.double().cpu().numpy())
        cost = torch.as_tensor(pairwise, device=x.device)
        # Residual arcs: i → j at C_ij always, j → i at −C_ij where the plan has mass.
        back = torch.where(plan > 0, cost, -torch.inf)
        f, g = cost.new_zeros(n), cost.new_zeros(m)
        for _ in range(n + m):
            g_new = (cost - f[:, None]).amin(0)
            f_new = torch.maximum((back - g_new).amax(1), f)
            settled = torch.equal(f_new, f) and torch.equal(g_new, g)
            f, g = f_new, g_new
            if settled:
                break
        parts.append((f.to(x.dtype), g.to(x.dtype)))
    shape = source.shape[:-2]
    f_all, g_all = (torch.stack(t).reshape(*shape, -1) for t in zip(*parts, strict=True))
    return f_all, g_all
