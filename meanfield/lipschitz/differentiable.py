"""The gradient of a local constant in the points, the log-weights and the parameters of the map.

σ = ‖Jv‖ for the top right singular vector v, and its first variation is ⟨u, dJ v⟩ with u = Jv/σ:
that of v contributes nothing, since σ is stationary in it. So the gradient of σ is that of ‖Jv‖
at fixed v, one derivative of F along v that is recorded. It exists where σ is a simple singular
value of the linearisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meanfield.autodiff import derivative_along
from meanfield.linalg import Lanczos, LinearMap, operator_norm
from meanfield.linalg.norms import largest_block_norm
from meanfield.maps import Linearisation, Map
from meanfield.measures import ParticleMeasure, divided

# Largest angle, by residual over gap, between the vector found and the singular vector.
_ANGLE = 0.1
# Rounding of a factorisation, in units of eps.
_ROUNDINGS = 1e3
# Relative difference between ‖Jv‖ by the declared linearisation and by automatic differentiation.
_AGREES = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(frozen=True, eq=False)
class Components:
    """The two components of a local constant, without a record of gradients.

    Attributes:
        particle: ‖J‖, ``(*batch,)``.
        direction: its unit vector, ``(*batch, n, d)``.
        splitting: of the field, ``(*batch,)``, or None for the Euclidean constant.
        atom: the atom that splits, ``(*batch,)``, or None.
        splitting_direction: the unit vector along which it does, ``(*batch, d)``, or None.
        residual: relative residual of the singular triples, ``(*batch,)``.
    """

    particle: Tensor
    direction: Tensor
    splitting: Tensor | None
    atom: Tensor | None
    splitting_direction: Tensor | None
    residual: Tensor

    @property
    def splits(self) -> Tensor:
        """Where the splitting component is the larger one, ``(*batch,)``."""
        if self.splitting is None:
            return torch.zeros_like(self.particle, dtype=torch.bool)
        return self.splitting > self.particle

    @property
    def value(self) -> Tensor:
        """The larger component."""
        splitting = self.particle if self.splitting is None else self.splitting
        return torch.maximum(self.particle, splitting)


def differentiable_value(
    F: Map,
    mu: ParticleMeasure,
    at: Linearisation,
    found: Components,
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
        found: its components.
        rtol: as of the constant, for the second singular value.
        strict: whether the second singular value is looked for; without it the gradient at a
            double one is that along the vector found, one of the generalised gradients.
    """
    asks = mu.points.requires_grad or mu.log_weights.requires_grad
    if not torch.is_grad_enabled() or not (asks or F.asks_for_gradient(mu)):
        return found.value
    splits = found.splits
    slopes = []
    if not bool(splits.all()):
        slopes.append((~splits, _moved(F, mu, found)))
    if bool(splits.any()):
        slopes.append((splits, _split(F, mu, found)))
    recorded = sum(torch.where(chosen, slope, 0.0) for chosen, slope in slopes)
    assert isinstance(recorded, Tensor)
    slope = recorded.detach()

    def check(wanted: Tensor) -> None:
        _check_agreement(slope, found.value, wanted)
        if strict:
            _check_simple(F.particlewise, at, found, wanted, rtol=rtol)

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


# --- ‖Jv‖ at fixed v ---


def _moved(F: Map, mu: ParticleMeasure, found: Components) -> Tensor:
    """‖Jv‖ as atoms move as a whole."""
    present = (mu.log_weights > -math.inf)[..., None]
    root = torch.ones_like(mu.points[..., :1])
    if found.splitting is not None:
        root = torch.where(present, 0.5 * mu.log_weights[..., None], 0.0).exp()
    image = derivative_along(F, mu, torch.where(present, found.direction / root, 0.0))
    return torch.linalg.vector_norm(torch.where(present, root * image, 0.0), dim=(-2, -1))


def _split(F: Map, mu: ParticleMeasure, found: Components) -> Tensor:
    """‖D_xΓ_μ(xᵢ) w‖: atom i is stored twice, and its copies move apart."""
    assert found.atom is not None and found.splitting_direction is not None
    twice, step = divided(mu, found.atom), found.splitting_direction[..., None, :]
    first = torch.nn.functional.one_hot(found.atom, mu.n_particles).to(mu.points)[..., None] * step
    image = derivative_along(F, twice, torch.cat([first, -step], -2))
    index = found.atom[..., None, None].expand(*found.atom.shape, 1, image.shape[-1])
    # The images of the copies move oppositely, up to rounding.
    apart = 0.5 * (image.gather(-2, index) - image[..., -1:, :])
    return torch.linalg.vector_norm(apart, dim=(-2, -1))


# --- whether it is differentiable ---


def _check_agreement(slope: Tensor, value: Tensor, wanted: Tensor) -> None:
    off = (slope - value).abs()
    if bool((wanted & ~(off <= _AGREES[value.dtype] * value)).any()):
        raise ValueError(
            "gradient of a local constant: expected ‖Jv‖ by automatic differentiation to be the "
            f"constant {_span(value[wanted])}, got {_span(slope[wanted])}; check the "
            "linearisation that the map declares; weights whose ratios leave the number range do "
            "this too"
        )


def _check_simple(
    particlewise: bool,
    at: Linearisation,
    found: Components,
    wanted: Tensor,
    *,
    rtol: float,
) -> None:
    value, splits = found.value, found.splits
    second = torch.zeros_like(value)
    with torch.no_grad():
        # The value alone: a larger one that it misses would make σ itself wrong.
        only_value = Lanczos(upper_rtol=math.inf)
        how: dict[str, Any] = {"rtol": rtol, "solver": only_value, "strict": False}
        if bool((wanted & ~splits).any()):
            rest = operator_norm(_deflated(at.atoms, found.direction), **how)
            second = torch.where(splits, second, rest.value * (1 + rest.error))
        if bool((wanted & splits).any()):
            assert found.atom is not None and found.splitting_direction is not None
            chosen = torch.nn.functional.one_hot(found.atom, at.field.batch_shape[-1])
            v = chosen[..., None] * found.splitting_direction[..., None, :]
            rest, _ = largest_block_norm(_deflated(at.field, v[..., None, :]), **how)
            second = torch.where(splits, rest.value * (1 + rest.error), second)
    if found.splitting is not None and not particlewise:
        # Of maps that move atoms by themselves both components are one.
        second = torch.maximum(second, torch.minimum(found.particle, found.splitting))
    room = found.residual + _ROUNDINGS * torch.finfo(value.dtype).eps
    double = wanted & ~(room * value <= _ANGLE * (value - second))
    if bool(double.any()):
        raise ValueError(
            "gradient of a local constant: expected a largest singular value that is simple, got "
            f"{_span(value[double])} with the next one at {_span(second[double])}: where it is "
            "double the constant has no derivative; move the points a little, or, if the two "
            "differ, ask for a smaller rtol"
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
