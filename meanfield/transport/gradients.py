"""W₂, W₁, W_p and conditional W₂ as differentiable functions, by the envelope theorem.

At an optimal plan π with potentials f, g: ∂W_p^p/∂xᵢ = p Σ_j π_ij ‖xᵢ − y_j‖^{p−2} (xᵢ − y_j) and
∂W_p^p/∂aᵢ = fᵢ up to a constant. Nothing is differentiated through a solver. Where the optimal
plan or the potentials are not unique the gradient is one of several.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from meanfield.habits import with_hints
from meanfield.linalg.vectors import normalised
from meanfield.transport.conditional import conditioned_pair, solved_by_condition
from meanfield.transport.pairs import Measure, Pair, as_pair
from meanfield.transport.result import TransportResult, double_potentials, warn_of_rounding
from meanfield.transport.solve import Settings, as_order, solved


@with_hints
def w2(
    mu: Measure,
    nu: Measure,
    *,
    weights: tuple[Any, Any] | None = None,
    method: str = "auto",
    rtol: float = 1e-9,
) -> Any:
    """W₂(μ, ν), differentiable in points and log-weights.

    Args:
        mu: μ, as for `solve_w2`.
        nu: ν, likewise.
        weights: as for `solve_w2`.
        method: as for `solve_w2`.
        rtol: as for `solve_w2`.

    Returns:
        The distance (not its square), shape of the batch; NumPy for NumPy. Its gradient is taken
        as 0 where it is 0, and is one of several where plans or potentials are not unique, as
        those of two uniform measures of n atoms: in the weights W₂ has a kink there. Its second
        derivative in the points is that at the plan found, which stays optimal nearby where it is
        the only one; in the weights it is refused.

    Raises:
        ConvergenceError: when `rtol` is not met; `solve_w2` gives the interval instead.
        TypeError, ValueError: as `solve_w2`.

    Example:
        >>> x = torch.zeros(4, 2, dtype=torch.float64)
        >>> w2(x, x + 3.0 / 2**0.5)
        tensor(3.0000, dtype=torch.float64)
    """
    settings = Settings(method=method, rtol=rtol)
    pair = as_pair(mu, nu, weights)
    return _valued(pair, solved(pair, settings))


@with_hints
def w1(
    mu: Measure,
    nu: Measure,
    *,
    weights: tuple[Any, Any] | None = None,
    rtol: float = 1e-9,
) -> Any:
    """W₁(μ, ν) = `wp` of order 1: arguments, answer and errors are described there."""
    settings = Settings(order=1, rtol=rtol)
    pair = as_pair(mu, nu, weights)
    return _valued(pair, solved(pair, settings))


@with_hints
def wp(
    mu: Measure,
    nu: Measure,
    p: float,
    *,
    weights: tuple[Any, Any] | None = None,
    rtol: float = 1e-9,
) -> Any:
    """W_p(μ, ν), the value of `solve_wp`, differentiable in points and log-weights.

    Args:
        mu: μ, as for `solve_w2`.
        nu: ν, likewise.
        p: the order, from 1 to 100. Below 2 the distance of two atoms that coincide has no second
            derivative, and for p = 1 no gradient either: 0 is taken.
        weights: as for `solve_w2`.
        rtol: as for `solve_wp`.

    Returns:
        The distance in the unit of the points, shape of the batch; NumPy for NumPy. The gradient
        is one of several where plans or potentials are not unique, see `w2`; in the weights of a
        pair of a batch whose potentials leave the number range it is NaN.

    Raises:
        ConvergenceError: when `rtol` is not met; `solve_wp` gives the interval instead.
        TypeError, ValueError: as `solve_wp`.

    Example:
        >>> x = torch.zeros(4, 2, dtype=torch.float64)
        >>> wp(x, x + 3.0 / 2**0.5, 4)
        tensor(3.0000, dtype=torch.float64)
    """
    settings = Settings(order=as_order(p), rtol=rtol)
    pair = as_pair(mu, nu, weights)
    return _valued(pair, solved(pair, settings))


@with_hints
def conditional_w2(
    mu: Measure,
    nu: Measure,
    *,
    conditions: tuple[Any, Any] | None = None,
    penalty: float | None = None,
    rtol: float = 1e-9,
) -> Any:
    """d₂(μ̄, ν̄) = (∫ W₂(μˢ, νˢ)² dθ(s))^½; +∞ where the first marginals differ.

    With a penalty λ the conditions may change at the price λ ‖s − t‖². Differentiable in points,
    with a penalty in conditions (or positions) too, and in log-weights: without a penalty along
    changes that keep both first marginals equal (others lead to +∞); one of several gradients
    where plans are not unique, see `w2`. Arguments and errors as for `solve_conditional_w2`.
    """
    settings = Settings(rtol=rtol)
    measures, s, t = conditioned_pair(mu, nu, conditions)
    result = solved_by_condition(measures, s, t, penalty, settings)
    pair = measures.pair
    if penalty is not None and penalty < math.inf and (s.requires_grad or t.requires_grad):
        # The distance of the points (x, √λ s), whose gradient reaches the conditions, in double
        # precision as they are: single precision holds no seconds of a date.
        x, y = (
            torch.cat([points.double(), math.sqrt(penalty) * each], -1)
            for points, each in ((measures.mu.points, s), (measures.nu.points, t))
        )
        pair = pair._replace(x=x, y=y)
    return _valued(pair, result)


def _valued(pair: Pair, result: TransportResult) -> Any:
    """The value, with its gradient where one is wanted, and a warning where it is hardly known."""
    warn_of_rounding(result)
    if pair.as_numpy or not torch.is_grad_enabled():
        return result.value
    if any(t.requires_grad for t in pair):
        return _Envelope.apply(*pair, result)
    return result.value


class _Envelope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, log_a: Tensor, log_b: Tensor, result: TransportResult
    ) -> Tensor:
        needs_weights = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        if needs_weights and _potentials(result) is None and bool(result.value.isfinite().any()):
            raise RuntimeError(
                "the gradient in log-weights needs optimal potentials; powers of order "
                f"{result.order:g} of lengths leave the number range here: measure the points in "
                "another unit, or take the gradient in the points only"
            )
        value = result.value.clone()
        ctx.save_for_backward(x, y, log_a, log_b, value)
        ctx.result = result
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *given, value = ctx.saved_tensors
        x, y, log_a, log_b = given
        result, order = ctx.result, ctx.result.order
        coupling = result.coupling
        there = (value > 0) & value.isfinite()
        if torch.is_grad_enabled():  # the plan stays where points move, and not where weights do
            moved = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
            if order != 2 or moved or not bool(there.all()):
                _refuse_second_derivative()
        into_x = into_y = into_a = into_b = None
        if coupling is None:  # an infinite distance
            return (*(torch.zeros_like(t) for t in given), None)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            index, index_y = (
                t[..., None].expand(*t.shape, x.shape[-1]) for t in (coupling.rows, coupling.cols)
            )
            moves = x.gather(-2, index) - y.gather(-2, index_y)
            flow = _pulled(moves, coupling.log_mass, value[..., None], order)
            # Nothing flows into a distance of 0 or ∞.
            flow = torch.where(there[..., None, None], flow * grads[0][..., None, None], 0.0)
            into_x = torch.zeros_like(x).scatter_add(-2, index, flow)
            into_y = torch.zeros_like(y).scatter_add(-2, index_y, -flow)
        both = _potentials(result) if any(ctx.needs_input_grad[2:4]) else None
        if both is not None:
            # dW = W^{1−p} dW^p / p: powers in double precision.
            wanted = there & (grads[0] != 0)  # a power may be ∞
            scale = torch.where(wanted, value.double() ** (1 - order) / order * grads[0], 0.0)
            into_a, into_b = map(_into_weights, (log_a, log_b), both, (scale[..., None],) * 2)
        return into_x, into_y, into_a, into_b, None


def _pulled(moves: Tensor, log_mass: Tensor, value: Tensor, order: float) -> Tensor:
    """π_ij ∂(‖xᵢ − y_j‖^p / p)/∂xᵢ · W^{1−p}, (..., k, d), without powers of lengths."""
    if order == 2:  # may be differentiated once more
        return log_mass.exp()[..., None] * moves / value[..., None]
    unit, size = normalised(moves)
    # Of atoms that coincide the unit vector is 0, and so is the logarithm: not 0 · ∞.
    share = torch.log(torch.where(size > 0, size, value) / value) * (order - 1)
    return (log_mass + share).exp()[..., None] * unit


def _into_weights(logs: Tensor, potential: Tensor, scale: Tensor) -> Tensor:
    """aᵢfᵢ times a scale, (..., n); 0 where that is 0, whatever the potential."""
    slope = logs.double().exp() * potential.to(logs.device) * scale
    return torch.where(scale == 0, 0.0, slope).to(logs)


def _potentials(result: TransportResult) -> tuple[Tensor, Tensor] | None:
    """(f, g) in double precision, in the shape of the batch."""
    both = double_potentials(result.found[1])
    if both is None:
        return None
    f, g = (torch.as_tensor(t).reshape(*result.value.shape, t.shape[-1]) for t in both)
    return f, g


def _refuse_second_derivative() -> NoReturn:
    """Where the plan moves, which the gradient does not know, or two atoms may coincide."""
    raise NotImplementedError(
        "gradient of a transport distance: expected a backward pass without create_graph: only "
        "W₂ has a second derivative here, where it is above 0, in the points alone"
    )


class OneDerivative(torch.autograd.Function):
    """A value that has a gradient, and refuses a second derivative."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """The value."""
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient that comes in."""
        if torch.is_grad_enabled():
            _refuse_second_derivative()
        return grads[0]
