"""Where a transformer normalises: Pre-, Post-, Peri-LN and nGPT as velocities of one flow."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meanfield.checks import choice
from meanfield.habits import with_hints
from meanfield.images import check_map
from meanfield.layers import Chain, LayerNorm, RMSNorm
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure

PLACEMENTS = ("post", "pre", "peri", "ngpt")
NORMS = ("sphere", "rms", "layer")


class Placed(NamedTuple):
    """What `flow` is to be called with.

    Attributes:
        F: the map whose images are the velocities.
        start: μ, put onto the sphere where the flow stays on one.
        constraint: the flow's.
    """

    F: MeasureMap
    start: ParticleMeasure
    constraint: str | None


@with_hints
def placed(F: MeasureMap, mu: ParticleMeasure, placement: str, *, norm: str = "sphere") -> Placed:
    """The flow of a transformer that normalises at a given place.

    With N the norm, θ = N(x) and P_θ the projection on the tangent space of the sphere that N
    maps to: Post-LN, N(x + F(x)), flows as θ̇ = P_θ F(θ); Pre-LN, x + F(N(x)), as ẋ = F(θ);
    Peri-LN, x + N(F(N(x))), as ẋ = N(F(θ)); nGPT as θ̇ = P_θ N(F(θ)).

    Args:
        F: attention, a map of measures.
        mu: where the flow starts. For "post" and "ngpt" the norm is applied to it: each norm has
            its own sphere, and attention on it is another flow.
        placement: "post", "pre", "peri" or "ngpt".
        norm: N, without learned weights: "sphere", x/|x|; "rms", √d x/|x|; "layer",
            √d (x − x̄)/|x − x̄| with x̄ the mean of the coordinates.

    Raises:
        ValueError: an unknown placement or norm, a particle where the norm is undefined.

    Source: Karagodin, Ge, Polyanskiy, Rigollet (arXiv 2510.22026).

    Example:
        >>> from meanfield import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear(torch.eye(2), torch.eye(2)))
        >>> placed(F, ParticleMeasure([[3.0, 4.0]]), "post").start.points
        tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """
    choice(placement, "placement", PLACEMENTS)
    choice(norm, "norm", NORMS)
    check_map(F)
    N = _norm(norm, check_measure(mu))
    if placement == "post":
        velocity: MeasureMap = F
    elif placement == "ngpt":
        velocity = Chain([F, N])
    else:
        velocity = Chain([N, F, N] if placement == "peri" else [N, F])
    if placement in ("pre", "peri"):
        return Placed(velocity, mu, None)
    return Placed(velocity, N(mu), "layer_norm" if norm == "layer" else "sphere")


def _norm(name: str, mu: ParticleMeasure) -> LayerNorm | RMSNorm:
    ones = torch.ones_like(mu.points.detach().flatten(0, -2)[0])
    if name == "layer":
        return LayerNorm(ones, None, 0.0)
    return RMSNorm(ones if name == "rms" else ones / mu.dim**0.5, 0.0)
