"""The one-sided Lipschitz constant of a velocity: how fast its flow can pull measures apart."""

from __future__ import annotations

from dataclasses import replace

import torch

from meanfield.checks import without_autocast
from meanfield.habits import with_hints
from meanfield.linalg import LinearMap, NormSolver
from meanfield.linalg.evidence import RTOL, UPPER_RTOL
from meanfield.lipschitz.constant import LocalLipschitz, constant_of
from meanfield.maps import Linearisation, linearize
from meanfield.maps.map import as_map
from meanfield.measures import MeasureMap, ParticleMeasure


@with_hints
@torch.no_grad()
@without_autocast
def one_sided(
    F: MeasureMap,
    mu: ParticleMeasure,
    *,
    rtol: float = RTOL,
    upper_rtol: float = UPPER_RTOL,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> LocalLipschitz:
    """ω = sup ⟨f, Jf⟩/‖f‖², J the derivative of F at μ in L²(μ), atoms that split included.

    Along the flow x′ = Γ_{μ_t}(x) distances grow as e^{∫ω} at most: ω is never above the local
    constant, 0.2 to 0.9 of it on random layers of attention, and may be negative: then the flow
    contracts. It is the larger of λ_max of the symmetric parts of D^½JD^−½ and of D_xΓ_μ(xᵢ), for
    the means of the parts of split atoms and what is left of them are orthogonal.

    Found as λ_max + τ = ‖(J + Jᵀ)/2 + τI‖, less τ, with 1¼ times the local constant for τ, so that
    nothing cancels where J is near −cI: rtol and upper_rtol are relative to τ + ω, and so are
    `residual` and `error`. With ``Certified()`` the upper end comes from the rows of J + τI, since
    ω ≤ ‖J + τI‖ − τ, and is certain. No gradient is recorded.

    Args:
        F: a map of measures, read as a velocity: in the dimension of its points.
        mu: where; batch axes give a batch.
        rtol: as for `local_lipschitz`, relative to τ + ω, and so are the others.
        upper_rtol: as there.
        solver: as there.
        strict: as there.

    Raises:
        ValueError: F goes to another dimension.
        ConvergenceError: not converged, if strict.

    Source: this package; proved on the page "Sharp constants" of the documentation.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> F = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[-1.0]]))
        >>> mu = ParticleMeasure([[0.5], [-0.5]])
        >>> float(one_sided(F, mu).value)
        -0.2350
    """
    F = as_map(F)
    at = linearize(F, mu, geometry="wasserstein")
    if at.atoms.in_shape != at.atoms.out_shape:
        raise ValueError(
            f"F: expected a velocity in R^{mu.dim}, where the points are, got one in "
            f"R^{at.atoms.out_shape[-1]}"
        )
    # Not the solver of the caller: an upper end is asked for, and none that is near.
    shift = 1.25 * constant_of(at, strict=strict, particlewise=F.particlewise).upper
    # Absent atoms are not moved, so that their 0 is no eigenvalue.
    each = torch.where(mu.log_weights > -torch.inf, shift[..., None], 0.0)[..., None]
    found = constant_of(
        Linearisation(_shifted(at.atoms, each), _shifted(at.field, each[..., None])),
        rtol=rtol,
        upper_rtol=upper_rtol,
        solver=solver,
        strict=strict,
        particlewise=F.particlewise,
    )
    assert found.splitting is not None
    return replace(
        found,
        value=found.value - shift,
        particle=found.particle - shift,
        splitting=found.splitting - shift,
        upper=found.upper - shift,
    )


def _shifted(J: LinearMap, shift: torch.Tensor) -> LinearMap:
    """(J + Jᵀ)/2 + τI, with the blocks of J + τI, whose norm is no smaller."""
    identity = LinearMap.diagonal(shift.expand(*J.batch_shape, *J.in_shape))
    symmetric = 0.5 * (J + J.T) + identity
    return replace(symmetric, blocks=(J + identity).blocks)
