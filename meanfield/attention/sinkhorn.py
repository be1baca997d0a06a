"""Sinkhorn attention: the potentials of a plan with both marginals, and their linearisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from meanfield.attention.rows import Normalization, softmax
from meanfield.attention.tangent import AttentionTangent
from meanfield.attention.weights import Weights
from meanfield.checks import as_bool, carries_derivative, count, is_traced, number
from meanfield.errors import ConvergenceError
from meanfield.habits import with_hints
from meanfield.linalg import LinearMap

# Sinkhorn iterations before Newton's method takes over, which is fast only near the solution: on
# logarithms, and on the kernel matrix, where they go on as long as a look, one in eight, finds the
# residual at a fifth of what it was. With 256 atoms and scores up to 1, 4 and 16 those converge in
# 7, 15 and some 70 iterations, in a fifth to a ninth of the time of logarithms; with normal scores
# of standard deviation 16 neither is faster.
_WARM_UP, _KERNEL_STEPS, _LOOK, _FALL = 30, 200, 8, 5
# Newton's step times 1, ½, …, ½⁶ is tried. Of 300 hard cases (scores up to 150, weights down to
# e^−20) 282 converge within 200 iterations; if only the whole step may be accepted or rejected
# 265, if it is always taken 252.
_HALVINGS = 7


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan with both marginals, as far as it has converged.

    Attributes:
        weights: P, ``(*batch, H, n, n)``; rows sum to one.
        potentials: g, ``(*batch, H, n)``: Pᵢⱼ ∝ aⱼ e^{sᵢⱼ + gⱼ}; determined up to a constant.
        residual: maxⱼ |Σᵢ aᵢPᵢⱼ/aⱼ − 1| over the atoms that have mass, ``(*batch, H)``.
        n_iterations: iterations of Sinkhorn's and Newton's methods together.
        converged: whether the residual is at most the rtol asked for, ``(*batch, H)``.
    """

    weights: Tensor
    potentials: Tensor
    residual: Tensor
    n_iterations: int
    converged: Tensor


@final
@dataclass(frozen=True)
class Sinkhorn(Normalization):
    """Both marginals of the plan (aᵢPᵢⱼ) are μ; made by `sinkhorn`."""

    rtol: float
    max_iterations: int
    strict: bool
    rows = softmax
    takes_masks = False

    def plan(self, weights: Weights) -> Plan:
        """The plan, in the order of the weights; see `_solve_plan`.

        Raises:
            ValueError: under `torch.func.vmap`.
            ConvergenceError: a marginal is off by more than rtol, if strict.
        """
        try:
            return _solve_plan(weights, self)
        except RuntimeError as error:
            if not str(error).startswith("vmap"):
                raise
            raise ValueError(
                "sinkhorn: expected a batch of measures in place of vmap, which hides the "
                "residuals that say when an iteration ends"
            ) from error

    def linear_map(self, tangent: AttentionTangent) -> LinearMap:
        """The derivative, that of the potentials included (they act as biases of the keys)."""
        return tangent.as_linear_map() + _PotentialTangent(tangent).as_linear_map()


@with_hints
def sinkhorn(*, rtol: float = 1e-12, max_iterations: int = 1000, strict: bool = True) -> Sinkhorn:
    """Doubly stochastic attention [SABP22], for weighted measures.

    Pᵢⱼ = aⱼ e^{sᵢⱼ + fᵢ + gⱼ} with potentials such that Σⱼ Pᵢⱼ = 1 and Σᵢ aᵢPᵢⱼ = aⱼ; computed in
    logarithms where the numbers themselves could leave their range. `SelfAttention.plan` says how
    well the marginals are met. The softmax is the first half-iteration: ``max_iterations=0,
    strict=False``. With a mask the only plan is the identity, so masked layers are refused.

    Args:
        rtol: largest relative error of a column's marginal, maxⱼ |Σᵢ aᵢPᵢⱼ/aⱼ − 1|.
        max_iterations: most iterations.
        strict: whether a plan that has not converged raises `ConvergenceError`.
    """
    return Sinkhorn(
        number(rtol, "rtol", above=0, below=1),
        count(max_iterations, "max_iterations", least=0),
        as_bool(strict, "strict"),
    )


def _solve_plan(weights: Weights, settings: Sinkhorn) -> Plan:
    """Sinkhorn iterations, on the kernel matrix if it can be, then Newton's on the potentials.

    With c the column sums Σᵢ aᵢPᵢⱼ/aⱼ after the rows are normalised, Sinkhorn's step is
    g ← g − log c, and Newton's solves (1 − QP) δ = −log c with Qⱼᵢ = aᵢPᵢⱼ/(aⱼcⱼ); it is halved as
    long as the dual objective, which is concave, does not grow. Derivatives pass through two more
    Newton steps: each squares the distance to the potentials, so that derivatives up to the third
    order are exact. Where a plan has not converged, they pass through the iteration. Takes
    O(H n²) memory.
    """
    q, k = weights.features.q, weights.features.k
    products, places = q @ k.mT, weights.places(weights.positions)
    scores = weights.scoring.logits(products, products.new_zeros(()), places)
    logs = weights.log_weights[..., None, :]
    blind = _blind(scores, logs)
    with torch.no_grad():
        g, steps, (p, residual) = _solved(scores.detach(), logs.detach(), settings, blind)
    recorded = carries_derivative(scores) or carries_derivative(logs)
    if recorded:
        log_p, log_c = _balance(scores, logs, g, blind)
        p, residual = log_p.exp(), _residual(log_c)
    met = residual <= _tolerance(settings, scores.dtype)
    if settings.strict and not bool(met.all()):
        raise ConvergenceError(
            f"sinkhorn: a marginal is off by {float(residual.detach().max()):.2e} after {steps} "
            f"iterations, above rtol = {settings.rtol:.2e}; raise max_iterations or rtol, or pass "
            "strict=False"
        )
    if recorded:
        if not bool(met.all()):
            # Not converged: the answer is defined by the iteration, so differentiate through it.
            g, _, (p, _) = _solved(scores, logs, settings, blind)
        else:
            for _ in range(2):
                g = g + _newton_step(log_p, log_c, logs)
                log_p, log_c = _balance(scores, logs, g, blind)
            p = log_p.exp()
    return Plan(p, g, residual, steps, met)


def _blind(scores: Tensor, logs: Tensor) -> Tensor | None:
    """The rows of absent atoms that see no mass through their window, (*batch, H, n, 1)."""
    absent = logs.detach() == -math.inf
    if not is_traced(absent) and not bool(absent.any()):
        return None
    blind = (scores + logs[..., None, :]).detach().amax(-1, keepdim=True) == -math.inf
    return blind if is_traced(blind) or bool(blind.any()) else None


def _balance(
    scores: Tensor, logs: Tensor, g: Tensor, blind: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log P with rows that sum to one, but for blind ones, and log c; 0 without mass."""
    log_p = softmax.log_p(scores + (logs + g)[..., None, :], blind)
    alive = logs > -math.inf
    safe = torch.where(alive, logs, 0.0)
    log_q = log_p + logs[..., :, None] - safe[..., None, :]
    # Mask before logsumexp: its gradient at an all −∞ column is NaN.
    return log_p, torch.where(alive[..., None, :], log_q, 0.0).logsumexp(-2) * alive


def _residual(log_c: Tensor) -> Tensor:
    return log_c.expm1().abs().amax(-1)


def _solved(
    scores: Tensor, logs: Tensor, settings: Sinkhorn, blind: Tensor | None = None
) -> tuple[Tensor, int, tuple[Tensor, Tensor]]:
    """Potentials that meet the tolerance if they can, their iterations, P and its residual."""
    tolerance = _tolerance(settings, scores.dtype)
    g, done, found = _on_kernel(scores, logs, settings, blind)
    if found is not None:
        return g, done, found
    for step in range(done, settings.max_iterations + 1):
        log_p, log_c = _balance(scores, logs, g, blind)
        residual = _residual(log_c)
        if step == settings.max_iterations or bool((residual <= tolerance).all()):
            return g, step, (log_p.exp(), residual)
        after = g - log_c
        if step >= (done or _WARM_UP):
            after = _longest(scores, logs, g, _newton_step(log_p, log_c, logs), after)
        g = after
    raise AssertionError("unreachable")


def _on_kernel(
    scores: Tensor, logs: Tensor, settings: Sinkhorn, blind: Tensor | None
) -> tuple[Tensor, int, tuple[Tensor, Tensor] | None]:
    """Sinkhorn's steps on the matrix P of the softmax, as long as they fall fast.

    With t = e^g, the rows of Pᵢⱼtⱼ are divided by their sums (Pt)ᵢ; their columns have the sums
    aⱼcⱼ with cⱼ = tⱼ Σᵢ aᵢPᵢⱼ/(aⱼ(Pt)ᵢ), and the next t is t/c.

    Returns:
        g, (*batch, H, n), and how many steps, 0 and 0 where a number leaves its range; the
        normalised Pᵢⱼtⱼ and its residual where they are the answer, else None.
    """
    if not scores.numel():
        return torch.zeros_like(logs.expand(scores.shape[:-1])), 0, None
    softmax_p = softmax.p(scores + logs[..., None, :], blind)
    masses = logs.exp()
    seen = masses > 0
    a = torch.where(seen, masses, 1.0)[..., None]
    p, whole = softmax_p, bool(seen.all())
    if not whole:  # what has no mass, or one that underflows, is balanced by itself
        both = seen[..., :, None] & seen[..., None, :]
        p = torch.where(both, p, torch.eye(p.shape[-1], dtype=p.dtype, device=p.device))
    most, tolerance = min(settings.max_iterations, _KERNEL_STEPS), _tolerance(settings, p.dtype)
    columns, t, last = p.mT, torch.ones_like(p[..., :1]), math.inf
    for step in range(most + 1):
        rows = p @ t
        after = a / (columns @ (a / rows))
        if step == most or step % _LOOK == _LOOK - 1:
            residual = (t / after - 1).abs().amax((-2, -1))
            off = float(residual.detach().amax())
            if step == most or not tolerance < off <= last / _FALL:
                break
            last = off
        t = after
    g = t.log()[..., 0]
    # An entry of P that is rounded to 0 or has lost digits is off by the smallest normal number;
    # in c this is at most max a max t / (min a min t) times as much.
    ranges = [x.detach().amax((-2, -1)) / x.detach().amin((-2, -1)) for x in (a, t)]
    limits = torch.finfo(p.dtype)
    if not float((ranges[0] * ranges[1]).amax()) <= limits.eps / limits.tiny:
        return (g, step, None) if bool(g.isfinite().all()) else (torch.zeros_like(g), 0, None)
    if off > tolerance and step < settings.max_iterations:
        return g, step, None
    if not whole:
        if not bool((seen == (logs > -math.inf)).all()):
            return g, step, None
        rows = softmax_p @ t if blind is None else (softmax_p @ t).masked_fill(blind, 1.0)
    return g, step, (softmax_p * t.mT / rows, residual)


def _longest(scores: Tensor, logs: Tensor, g: Tensor, newton: Tensor, after: Tensor) -> Tensor:
    """The longest part of Newton's step that ascends as far as Sinkhorn's and shorter parts."""
    best, room = _dual(scores, logs, after)
    for halvings in reversed(range(_HALVINGS)):
        part = g + newton * 0.5**halvings
        value, _ = _dual(scores, logs, part)
        # Near the maximum the ascent is below rounding; the whole step is right there.
        further = value >= (best if halvings else best - room)
        # For decoupled clusters the Newton system is singular; such steps are rejected.
        after, best = (
            torch.where(further[..., None], part, after),
            torch.where(further, value, best),
        )
    return after


def _dual(scores: Tensor, logs: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Σⱼ aⱼgⱼ − Σᵢ aᵢ log Σⱼ aⱼ e^{sᵢⱼ + gⱼ}, and a bound of its rounding; (*batch, H).

    Concave in g, and largest where the column sums are right: a(1 − c) is its gradient.
    """
    weights = logs.exp()
    rows = (scores + (logs + g)[..., None, :]).logsumexp(-1)
    rows = torch.where(weights > 0, rows, 0.0)  # of absent atoms it may be −∞
    room = 64 * torch.finfo(g.dtype).eps * (weights * (rows.abs() + g.abs())).sum(-1)
    return (weights * (g - rows)).sum(-1), room


def _newton_step(log_p: Tensor, log_c: Tensor, logs: Tensor) -> Tensor:
    """δ with (1 − QP) δ = −log c up to a constant per component, each 0 on average under μ."""
    alive = logs > -math.inf
    safe = torch.where(alive, logs, 0.0)
    log_q = log_p + logs[..., :, None] - (safe + log_c)[..., None, :]
    q = torch.where(alive[..., None, :], log_q, -math.inf).exp().mT
    ones = alive.to(q.dtype).expand_as(log_c)
    system = _regularised(q @ log_p.exp(), ones, logs.exp())
    # Singular where clusters are nearly decoupled: the caller rejects steps that are not finite.
    return torch.linalg.solve_ex(system, -log_c[..., None])[0][..., 0]


def _regularised(kernel: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """1 − kernel + left ⊗ right within each component: the kernel maps its constants to such."""
    eye = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    constants = left[..., :, None] * right[..., None, :]
    return eye - kernel + torch.where(_connected(kernel, constants), constants, 0.0)


def _connected(kernel: Tensor, constants: Tensor) -> Tensor:
    """Which columns are connected by entries of the kernel, bool (..., n, n).

    A window, or scores so far apart that weights underflow, leave several components.
    """
    linked = (kernel > 0) | (kernel.mT > 0)
    if not is_traced(kernel) and bool((linked | (constants == 0)).all()):
        return linked
    reach = linked.float() + torch.eye(kernel.shape[-1], device=kernel.device)
    for _ in range(max(1, kernel.shape[-1] - 1).bit_length()):
        reach = (reach @ reach > 0).float()
    return reach > 0


def _tolerance(settings: Sinkhorn, dtype: torch.dtype) -> float:
    """The tolerance asked for, or the rounding level if that is larger."""
    return max(settings.rtol, 64 * torch.finfo(dtype).eps)


# --- the linearisation ---


class _PotentialTangent:
    """ε ↦ the change of the outputs through the potentials, with whole (B, n, n) matrices.

    J is the derivative at fixed potentials plus this change, which their tangent ġ makes. With ṡ
    the tangent of the scores, differentiating the marginals gives

        (1 − QP) ġ = −Σᵢ Qⱼᵢ ṡᵢⱼ + Q (Σⱼ Pᵢⱼ ṡᵢⱼ),   Qⱼᵢ = aᵢPᵢⱼ/aⱼ,

    a singular system (what is constant on every component of P is in its kernel) that is factored
    once, in O(H n³) time.
    (Derived here; tested against finite differences.)
    """

    def __init__(self, tangent: AttentionTangent) -> None:
        weighted = tangent.geometry == "wasserstein"
        whole = tangent.whole
        ((_, self.p),) = whole.matrices()
        tilted = self.p
        if not weighted:
            ((_, tilted),) = replace(whole, geometry="wasserstein").matrices()
        self.tangent, at = whole, whole.weights
        heads = at.parameters.n_heads
        logs = at.log_weights.detach()[..., None, :].expand(*whole.batch_shape, heads, at.n)
        logs = logs.reshape(-1, at.n)
        alive = logs > -math.inf
        safe = torch.where(alive, logs, 0.0)
        # Q from √(aᵢ/aⱼ) Pᵢⱼ, which is at most √(aⱼ/aᵢ): where aᵢ/aⱼ overflows, Pᵢⱼ itself may
        # underflow.
        half = torch.where(
            alive[:, :, None] & alive[:, None, :], 0.5 * (safe[:, :, None] - safe[:, None, :]), 0.0
        )
        # One exponential: either factor alone may leave the number range.
        q = (tilted.values.log() + half).exp()
        # K is Q in the geometry asked for: with √(aᵢ/aⱼ) for aᵢ/aⱼ if it is weighted.
        self.k = tilted.values if weighted else q
        gain: Tensor | float = 1.0
        p = self.p
        if not (p.queries is p.keys and p.keys is p.values):
            positive = torch.where(p.values > 0, p.values, 1.0)
            gain = torch.where(p.values > 0, p.keys / positive, 0.0)
        self.k_gain, self.q_gain = self.k * gain, q * gain
        left = torch.where(alive, (0.5 * safe).exp(), 0.0) if weighted else alive.to(safe.dtype)
        right = left if weighted else torch.where(alive, safe.exp(), 0.0)
        self.system = torch.linalg.lu_factor(_regularised(self.k.mT @ self.p.values, left, right))

    def as_linear_map(self) -> LinearMap:
        """As a map between displacements."""
        return replace(
            self.tangent.as_linear_map(), matvec=self.matvec, rmatvec=self.rmatvec, dense=None
        )

    @torch.no_grad()
    def matvec(self, displacement: Tensor) -> Tensor:
        """``(*batch, n, d) → (*batch, n, d_out)``."""
        t, p = self.tangent, self.p
        q_dot, k_dot, _ = t.pushed(displacement)
        y, x = q_dot @ t.k.mT, t.q @ k_dot.mT
        row_means = (p.queries * y + p.keys * x).sum(-1, keepdim=True)
        column_means = (self.k_gain * y + self.q_gain * x).sum(-2)[..., None]
        g = torch.linalg.lu_solve(*self.system, self.k.mT @ row_means - column_means)
        return t.joined((p.values * g.mT) @ t.v - (p.values @ g) * t.rows.means)

    @torch.no_grad()
    def rmatvec(self, covector: Tensor) -> Tensor:
        """The transpose."""
        t, p = self.tangent, self.p
        zeta = t.split(covector)
        deviations = zeta @ t.v.mT - (zeta * t.rows.means).sum(-1, keepdim=True)
        g_bar = (p.values * deviations).sum(-2)[..., None]
        column = torch.linalg.lu_solve(*self.system, g_bar, adjoint=True)
        row = self.k @ column
        y_bar = p.queries * row - self.k_gain * column.mT
        x_bar = p.keys * row - self.q_gain * column.mT
        return t.pulled(y_bar @ t.k, x_bar.mT @ t.q, torch.zeros_like(t.v))
