"""The two local constants of cross-attention, by name."""

from __future__ import annotations

from typing import Any

from meanfield.attention import CrossAttention
from meanfield.checks import describe, without_autocast
from meanfield.habits import with_hints
from meanfield.linalg import NormEstimate, NormSolver, operator_norm
from meanfield.linalg.evidence import RTOL, UPPER_RTOL
from meanfield.lipschitz.constant import LocalLipschitz
from meanfield.lipschitz.local import local_lipschitz
from meanfield.measures import ParticleMeasure
from meanfield.results.answers import Answer, labelled


class CrossLipschitz(Answer, noun="cross_constant", title="Local constants of cross-attention"):
    """What (μ, η) ↦ Γ_μ♯η does to small changes of either measure.

    Attributes:
        queries: the constant in η at fixed μ: maxᵢ ‖DΓ_μ(xᵢ)‖ over the atoms of η.
        context: the constant in μ at fixed η: ‖E^½ T D^−½‖, T the derivative of the images in the
            atoms of μ, D and E the weights of μ and of η.
    """

    queries: LocalLipschitz = labelled("local constant in the measure of the queries")
    context: NormEstimate = labelled("local constant in the measure of the context")


@with_hints
@without_autocast
def cross_lipschitz(
    cross: CrossAttention,
    mu: ParticleMeasure,
    eta: ParticleMeasure,
    *,
    rtol: float = RTOL,
    upper_rtol: float = UPPER_RTOL,
    solver: NormSolver | None = None,
    strict: bool = True,
) -> CrossLipschitz:
    """Both local constants of (μ, η) ↦ Γ_μ♯η in W₂, at μ and η.

    To first order W₂(Γ_μ'♯η', Γ_μ♯η) ≤ queries · W₂(η', η) + context · W₂(μ', μ), and either
    constant is attained as the other measure stays. Atoms may split: those of η move one by one
    anyway, and of the parts of an atom of μ only the mean displacement counts. Self-attention
    sums the two derivatives, so that its constant is at most queries + context at η = μ. Derived
    here, tested numerically.

    Args:
        cross: `meanfield.attention.CrossAttention`.
        mu: the context μ.
        eta: the queries η.
        rtol: as of `local_lipschitz`.
        upper_rtol: as of `local_lipschitz`.
        solver: as of `local_lipschitz`.
        strict: as of `local_lipschitz`.

    Raises:
        ConvergenceError: not converged, if strict.

    Example:
        >>> from meanfield.attention import AttentionParameters, SelfAttention
        >>> layer = SelfAttention(AttentionParameters.from_bilinear([[1.0]], [[2.0]]))
        >>> context = ParticleMeasure([[1.0], [-1.0]])
        >>> found = cross_lipschitz(CrossAttention(layer), context, ParticleMeasure([[0.0]]))
        >>> float(found.queries), float(found.context)
        (2.0, 2.0)
    """
    if not isinstance(cross, CrossAttention):
        raise TypeError(
            f"cross: expected meanfield.attention.CrossAttention, got {describe(cross)}; "
            "CrossAttention(F) makes one of self-attention F"
        )
    how: dict[str, Any] = {
        "rtol": rtol,
        "upper_rtol": upper_rtol,
        "solver": solver,
        "strict": strict,
    }
    return CrossLipschitz(
        queries=local_lipschitz(cross.at(mu), eta, **how),
        context=operator_norm(cross.context_derivative(mu, eta), **how),
    )
