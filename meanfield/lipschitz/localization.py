"""Where a local constant lives: which particles move, which respond, which heads carry it."""

from __future__ import annotations

import torch
from torch import Tensor

from meanfield.checks import describe, without_autocast
from meanfield.habits import with_hints
from meanfield.linalg.vectors import normalised
from meanfield.lipschitz.constant import AGREES, LocalLipschitz
from meanfield.maps import linearize
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure, check_measure
from meanfield.results.answers import Answer, labelled

# Heads are reported only if their responses add up to that of the map to this, relative.
_ADDS_UP = {torch.float64: 1e-8, torch.float32: 1e-3}


class Localization(Answer, noun="localization", title="Where the constant lives"):
    """Shares of a local constant; tensors have the measure's batch shape in front.

    Attributes:
        particles: share of each particle in the worst displacement v, ‖vᵢ‖², ``(*batch, n)``; ≥ 0,
            sums to 1. For "wasserstein" vᵢ = √aᵢ εᵢ, so it is the mass-weighted aᵢ‖εᵢ‖².
        responses: share of each particle in the response u = Jv/σ, ‖uᵢ‖², ``(*batch, n)``; ≥ 0,
            sums to 1 (all 0 where σ = 0).
        heads: ⟨J_h v, u⟩/σ, ``(*batch, H)``; sums to 1 since J = Σ_h J_h, but one head may have a
            negative share or one above 1: it then works against the others. None where F
            declares no heads; all 0 where σ = 0.
    """

    particles: Tensor = labelled(
        "share of a particle in the displacement",
        dims=("particle",),
        name="displacement_share",
        shown=True,
    )
    responses: Tensor = labelled(
        "share of a particle in the response",
        dims=("particle",),
        name="response_share",
        shown=True,
    )
    heads: Tensor | None = labelled(
        "share of a head", dims=("head",), name="head_share", shown=True
    )


@with_hints
@without_autocast
def localize(constant: LocalLipschitz, F: MeasureMap, mu: ParticleMeasure) -> Localization:
    """Shares of particles and heads in the worst direction v of a local constant σ = ‖Jv‖.

    σ is its component `particle`: atoms move as a whole.
    Particle i has the share ‖vᵢ‖² of the displacement and ‖uᵢ‖² of the response u = Jv/σ;
    head h has ⟨J_h v, u⟩/σ. Where the top singular value is multiple, v is one of several
    answers and so are the shares.

    Args:
        constant: of F at μ, from `local_lipschitz`; its geometry decides on J or D^½JD^−½.
        F: the map. Its `heads` have shares too, if it declares some (`meanfield.Map`), as
            `meanfield.attention.SelfAttention` does.
        mu: the measure, as it was given for the constant.

    Raises:
        ValueError: the constant of another map or measure.

    Source: not in the papers; definitions of this package.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> from meanfield.lipschitz import local_lipschitz
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[-1.0]], [[1.0]]))
        >>> mu = ParticleMeasure([[1.0], [-1.0]], weights=[0.1, 0.9])
        >>> localize(local_lipschitz(F, mu), F, mu).particles
        tensor([0.8983, 0.1017], dtype=torch.float64)
    """
    if not isinstance(constant, LocalLipschitz):
        raise TypeError(
            f"constant: expected what local_lipschitz(F, mu) returns, got {describe(constant)}"
        )
    F = as_map(F)
    check_measure(mu)
    if constant.direction.shape != mu.points.shape:
        raise ValueError(
            f"expected the constant of this measure, of points {tuple(mu.points.shape)}, got one "
            f"with a direction {tuple(constant.direction.shape)}"
        )
    v = constant.direction

    def respond(G: MeasureMap) -> Tensor:
        return linearize(G, mu, geometry=constant.geometry).atoms.matvec(v)

    image, told = respond(F), constant.particle.detach()
    unit, found = normalised(image.flatten(-2))
    if bool(((found - told).abs() > AGREES[image.dtype] * told).any()):
        raise ValueError(
            "expected the constant of this map at this measure, got one of "
            f"{float(told.max()):.6g}, where its direction moves by {float(found.max()):.6g}"
        )
    u, scale = unit.reshape(image.shape), torch.where(found > 0, found, 1.0)[..., None, None]
    return Localization(
        particles=v.square().sum(-1),
        responses=u.square().sum(-1),
        heads=_heads([respond(G) / scale for G in F.heads], u),
    )


def _heads(responses: list[Tensor], u: Tensor) -> Tensor | None:
    """⟨J_h v, u⟩/σ, from J_h v/σ of each head."""
    if not responses:
        return None
    each = torch.stack(responses, -3)
    size = each.abs().sum(-3).amax((-2, -1), keepdim=True)
    gap = (each.sum(-3) - u).abs()
    if bool((gap > _ADDS_UP[u.dtype] * size).any()):
        return None
    return (each * u.unsqueeze(-3)).sum((-2, -1))
