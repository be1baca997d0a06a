"""The gradient of a local constant in the points, the log-weights and the parameters of the map.

σ = ‖Jv‖ for the top right singular vector v, and its first variation is ⟨u, dJ v⟩ with u = Jv/σ:
those of u and v contribute nothing, since σ is stationary in them. So the gradient of σ is that of
⟨u, Jv⟩ at fixed u and v, one derivative of F along v that is recorded. It exists where σ is a
simple singular value of the linearisation. Where it is double, each top vector has a gradient of
its own, and only if they agree is it that of σ: a linear layer does the same to all atoms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meanfield.linalg import Lanczos, LinearMap, operator_norm
from meanfield.linalg.evidence import ROUNDINGS
from meanfield.linalg.norms import largest_block_norm
from meanfield.linalg.vectors import normalised
from meanfield.lipschitz.constant import AGREES, LocalLipschitz, moves_each_alone
from meanfield.maps import Linearisation, Map
from meanfield.maps.autodiff import derivative_along, derivative_paired
from meanfield.measures import ParticleMeasure

# Largest angle, by residual over gap, between the vector found and the singular vector.
_ANGLE = 0.1


def differentiable_value(
    F: Map,
    mu: ParticleMeasure,
    at: Linearisation,
    found: LocalLipschitz,
    *,
    rtol: float,
    strict: bool,
) -> Tensor:
    """The constant, with its gradient in whatever asks for one: μ, or parameters of F.

    The backward pass raises ValueError where the largest singular value is not simple, or where
    the derivative that F declares is another than that by automatic differentiation.

    Args:
        F: the map.
        mu: μ.
        at: the linearisation of F at μ, in the geometry of the constant.
        found: the constant, without a gradient.
        rtol: as of the constant, for the second singular value.
        strict: whether the second singular value is looked for; without it the gradient at a
            double one is that along the vector found, one of the generalised gradients.
    """
    asks = mu.points.requires_grad or mu.log_weights.requires_grad
    if not torch.is_grad_enabled() or not (asks or F.asks_for_gradient(mu)):
        return found.value
    recorded = recorded_value(F, mu, found)
    slope = recorded.detach()

    def check(wanted: Tensor) -> None:
        _check_agreement(slope, found.value, wanted)
        if strict:
            _check_simple(at, found, wanted, rtol=rtol)

    value: Tensor = _Recorded.apply(recorded, found.value, check)
    return value


class _Recorded(torch.autograd.Function):
    """The value found, with the gradient of another expression for it."""

    @staticmethod
    def forward(ctx: Any, recorded: Tensor, value: Tensor, check: Callable[[Tensor], None]) -> Any:
        ctx.check = check
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        (cotangent,) = cotangents
        if torch.is_grad_enabled():
            # At a fixed vector it would be another one, without a sign.
            raise NotImplementedError(
                "gradient of a local constant: expected a backward pass without create_graph; "
                "there is no second derivative"
            )
        ctx.check(cotangent != 0)
        return cotangent, None, None


# --- ⟨u, Jv⟩ at fixed u and v ---


def recorded_value(F: Map, mu: ParticleMeasure, found: LocalLipschitz) -> Tensor:
    """⟨u, Jv⟩ of the larger component, with a gradient in μ and in parameters of F."""
    splits = _splits(found)
    # 0, so that what the derivative of a linear map does not depend on has the gradient 0.
    value = mu.points[..., :0, :].sum((-2, -1)) + mu.log_weights[..., :0].sum(-1)
    if not bool(splits.all()):
        value = value + torch.where(splits, 0.0, _moved(F, mu, found))
    if bool(splits.any()):
        value = value + torch.where(splits, _split(F, mu, found), 0.0)
    return value


def _splits(found: LocalLipschitz) -> Tensor:
    """Where the splitting component is the larger one, ``(*batch,)``."""
    if found.splitting is None:
        return torch.zeros_like(found.particle, dtype=torch.bool)
    return found.splitting > found.particle


def _direction(image: Tensor) -> Tensor:
    """u of an image: no square leaves the number range."""
    return normalised(image.flatten(-2))[0].reshape(image.shape)


def _moved(F: Map, mu: ParticleMeasure, found: LocalLipschitz) -> Tensor:
    """⟨u, Jv⟩ as atoms move as a whole."""
    present = (mu.log_weights > -math.inf)[..., None]
    root = torch.ones_like(mu.points[..., :1])
    if found.splitting is not None:
        root = torch.where(present, 0.5 * mu.log_weights[..., None], 0.0).exp()
    along = torch.where(present, found.direction / root, 0.0)
    image = derivative_along(F, mu, along)
    u = _direction(torch.where(present, root.detach() * image, 0.0))
    return derivative_paired(F, mu, along, torch.where(present, root * u, 0.0))


def _split(F: Map, mu: ParticleMeasure, found: LocalLipschitz) -> Tensor:
    """⟨u, D_xΓ_μ(xᵢ) w⟩: atom i is stored twice, and its copies move apart."""
    atom, step, own = _splitting(found)
    apart, halves = torch.cat([own, -step], -2), _divided(mu, atom)
    image, at = derivative_along(F, halves, apart), atom[..., None, None]
    # The images of the copies move oppositely, up to rounding.
    u = _direction(image.take_along_dim(at, -2) - image[..., -1:, :])
    others = torch.zeros_like(image[..., :-1, :]).scatter(-2, at.expand_as(u), u)
    return derivative_paired(F, halves, apart, 0.5 * torch.cat([others, -u], -2))


def _splitting(found: LocalLipschitz) -> tuple[Tensor, Tensor, Tensor]:
    """The atom that splits, its direction ``(*batch, 1, d)``, and that with 0 at the others."""
    assert found.splitting_atom is not None and found.splitting_direction is not None
    atom, step = found.splitting_atom, found.splitting_direction[..., None, :]
    at = atom[..., None, None].expand_as(step)
    return atom, step, torch.zeros_like(found.direction).scatter(-2, at, step)


# --- whether it is differentiable ---


def _check_agreement(slope: Tensor, value: Tensor, wanted: Tensor) -> None:
    off = (slope - value).abs()
    if bool((wanted & ~(off <= AGREES[value.dtype] * value)).any()):
        raise ValueError(
            "gradient of a local constant: expected ‖Jv‖ by automatic differentiation to be the "
            f"constant {_span(value[wanted])}, got {_span(slope[wanted])}; check the "
            "linearisation that the map declares; weights whose ratios leave the number range do "
            "this too"
        )


def _divided(mu: ParticleMeasure, atom: Tensor) -> ParticleMeasure:
    """The same measure with one atom of each stored twice, the copy behind all others.

    Args:
        mu: μ.
        atom: its number, ``(*batch,)``.
    """
    numbers = torch.arange(mu.n_particles, device=mu.device).expand(*atom.shape, -1)
    stored = torch.cat([numbers, atom[..., None]], -1)
    logs = mu.log_weights.take_along_dim(stored, -1)
    return ParticleMeasure(
        mu.points.take_along_dim(stored[..., None], -2),
        log_weights=torch.where(stored == atom[..., None], logs - math.log(2), logs),
        positions=None if mu.positions is None else mu.positions.take_along_dim(stored, -1),
    )


def _check_simple(
    at: Linearisation,
    found: LocalLipschitz,
    wanted: Tensor,
    *,
    rtol: float,
) -> None:
    value, splits = found.value, _splits(found)
    second = torch.zeros_like(value)
    with torch.no_grad():
        # The value alone: a larger one that it misses would make σ itself wrong.
        how: dict[str, Any] = {
            "rtol": rtol,
            "upper_rtol": math.inf,
            "solver": Lanczos(),
            "strict": False,
        }
        if moves_each_alone(at):  # both components are one
            rest, _ = largest_block_norm(_deflated(at.field, found.direction[..., None, :]), **how)
            second = rest.value * (1 + rest.error)
        else:
            if bool((wanted & ~splits).any()):
                rest = operator_norm(_deflated(at.atoms, found.direction), **how)
                second = torch.where(splits, second, rest.value * (1 + rest.error))
            if bool((wanted & splits).any()):
                v = _splitting(found)[-1][..., None, :]
                rest, _ = largest_block_norm(_deflated(at.field, v), **how)
                second = torch.where(splits, rest.value * (1 + rest.error), second)
            if found.splitting is not None:
                second = torch.maximum(second, torch.minimum(found.particle, found.splitting))
    room = found.residual + ROUNDINGS * torch.finfo(value.dtype).eps
    double = wanted & ~(room * value <= _ANGLE * (value - second))
    if bool(double.any()):
        raise ValueError(
            "gradient of a local constant: expected a largest singular value that is simple, got "
            f"{_span(value[double])} with the next one at {_span(second[double])}: where it is "
            "double the constant need not have a derivative; move the points a little, or, if the "
            "two differ, ask for a smaller rtol; strict=False gives the gradient along one of the "
            "worst directions, which is the gradient where all have the same, as in a linear layer"
        )


def _deflated(J: LinearMap, v: Tensor) -> LinearMap:
    """J(I − vvᵀ), v a unit vector of each map of the batch, or 0."""

    def along(vectors: Tensor) -> Tensor:
        return (v * vectors).sum((-2, -1), keepdim=True)

    return replace(
        J,
        matvec=lambda eps: J.matvec(eps - along(eps) * v),
        rmatvec=lambda zeta: (back := J.rmatvec(zeta)) - along(back) * v,
        dense=None,
    )


def _span(values: Tensor) -> str:
    least, most = (float(end) for end in values.aminmax())
    return f"{least:.9g}" if least == most else f"{least:.9g} to {most:.9g}"
